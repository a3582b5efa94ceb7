"""Compare kvlab with other systems: same weights, prompts and threads, in one run.

    kvlab peers
    kvlab peers --batch=1,8 --precision=float32 --peer=kvlab,llama.cpp

The systems are kvlab, transformers (PyTorch) and llama.cpp; `make peers` installs them in an
environment of their own and runs this. Outputs are compared first: a figure of a system that
predicts something else does not count.
"""

import sys

from kvlab.experiments.flags import Flag, choice, comma_list, command_flags, whole
from kvlab.experiments.main import execute
from kvlab.experiments.run_folder import run_in_folder

_SYSTEMS = ("kvlab", "kvlab-f32", "transformers", "llama.cpp", "llama.cpp-noflash")
_PRECISIONS = ("float32", "bfloat16", "int8")

FLAGS = command_flags(
    "seed",
    model="a fetched model (smollm2-135m) or a .gguf file, which all the systems can read",
    out="the run folder; runs/NAME-HASH if not given",
    peer=Flag(comma_list(choice(*_SYSTEMS)), "NAME,...", f"of {', '.join(_SYSTEMS)}", _SYSTEMS),
    precision=Flag(
        comma_list(choice(*_PRECISIONS)),
        "NAME,...",
        "of the weights: float32, bfloat16, int8 (llama.cpp's is Q8_0)",
        _PRECISIONS,
    ),
    batch=Flag(comma_list(whole(1)), "N,...", "sequences at once", (1, 8, 32)),
    prompt_tokens=Flag(whole(1), "N", "tokens of a prompt", 512),
    new_tokens=Flag(whole(1), "N", "tokens decoded after a prompt", 32),
    text_tokens=Flag(whole(1), "N", "of the text on which predictions are compared", 512),
    repeats=Flag(whole(1), "N", "timings of each system, interleaved", 5),
    threads=Flag(whole(1), "N", "of the processor; all of this process's if not given"),
)


def main(argv: list[str]) -> int:
    """Runs the comparison, prints its table and where the report is."""
    del argv
    import os

    from kvlab.research.peer_study import PeerStudy, peer_model, peer_text, run_peers

    model = peer_model(FLAGS.model or "smollm2-135m")
    study = PeerStudy(
        model=str(model),
        model_name=FLAGS.model or "smollm2-135m",
        systems=tuple(FLAGS.peer),
        precisions=tuple(FLAGS.precision),
        batches=tuple(FLAGS.batch),
        prompt_tokens=FLAGS.prompt_tokens,
        new_tokens=FLAGS.new_tokens,
        text_tokens=FLAGS.text_tokens,
        repeats=FLAGS.repeats,
        threads=FLAGS.threads or len(os.sched_getaffinity(0)),
    )
    return run_in_folder(
        lambda folder: run_peers(study, peer_text(model), FLAGS.seed, folder),
        command="peers",
        config=study.to_json(),
        seed=FLAGS.seed,
        question="How fast is kvlab beside the systems that people use?",
        out=FLAGS.out,
        points=len(list(study.points())),
    )


if __name__ == "__main__":
    sys.exit(execute(sys.modules[__name__]))
