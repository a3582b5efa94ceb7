"""Show how much KV memory samples and beams of one prompt save by sharing pages.

    kvlab sharing
    kvlab sharing --method=beam --count=2,4,8 --workload=sharegpt-like --max_length=1024
    kvlab sharing --model=random:tiny-gqa --num_prompts=4

The model really decodes, since where beams part cannot be simulated. Prompts are pieces of the
project's English text (or --text), in lengths like those of the Alpaca set unless told otherwise;
published figures stand beside (PagedAttention, Fig. 15).
"""

import sys

from kvlab.experiments.flags import Flag, choice, comma_list, command_flags, text, whole
from kvlab.experiments.main import execute
from kvlab.experiments.run_folder import run_in_folder

_METHODS = ("parallel", "beam")

FLAGS = command_flags(
    "model",
    "seed",
    out="the run folder; runs/NAME-HASH if not given",
    method=Flag(comma_list(choice(*_METHODS)), "NAME,...", "parallel, beam", _METHODS),
    count=Flag(comma_list(whole(2)), "N,...", "samples or beams of a prompt", (2, 4, 6)),
    num_prompts=Flag(whole(1), "N", "prompts to continue", 12),
    workload=Flag(
        text, "NAME", "lengths of prompts and continuations, as of memory_waste", "alpaca-like"
    ),
    max_length=Flag(whole(2), "N", "longest sequence; longer ones are cut, or left out", 256),
    page_size=Flag(whole(1), "N", "tokens a page", 16),
    text=Flag(text, "FILE", "cut prompts from this text, not the project's"),
)


def main(argv: list[str]) -> int:
    """Runs the study, prints its table and where the report is."""
    del argv
    import numpy as np

    from kvlab.models.load import load_model
    from kvlab.research.evaluation_texts import read_texts, text_file
    from kvlab.research.point_run import run_points
    from kvlab.research.sharing_report import label
    from kvlab.research.sharing_study import SharingStudy, measure_sharing, read_lengths
    from kvlab.research.workloads import trace_sha256

    study = SharingStudy(
        model=FLAGS.model,
        methods=FLAGS.method,
        counts=FLAGS.count,
        num_prompts=FLAGS.num_prompts,
        workload=FLAGS.workload,
        max_length=FLAGS.max_length,
        page_size=FLAGS.page_size,
        seed=FLAGS.seed,
        trace_sha256=trace_sha256(FLAGS.workload),
    )
    points = list(study.points())
    for point in points:
        read_lengths(point, study.seed)  # before the model is loaded and anything is written
    given = text_file(FLAGS.text) if FLAGS.text else None
    written = given.read() if given else read_texts(())["en"]
    model = load_model(study.model)
    if model.tokenizer is None:
        raise ValueError(f"model {study.model} has no tokenizer to cut prompts with")
    ids = np.array(model.tokenizer.encode(written), np.int32)
    config = study.to_json() | ({"text": given.sha256} if given else {})
    return run_in_folder(
        lambda folder: run_points(
            folder,
            points,
            study.seed,
            lambda point, seed: measure_sharing(model, ids, point, seed),
            label,
        ),
        command="sharing",
        config=config,
        seed=study.seed,
        question="How much memory do samples and beams of one prompt share?",
        out=FLAGS.out,
        points=len(points),
    )


if __name__ == "__main__":
    sys.exit(execute(sys.modules[__name__]))
