"""Show where the time of prefill and decode goes against this machine's limits.

    kvlab roofline
    kvlab roofline --attention=gqa --batch=1,8,32 --prompt_tokens=128,1024
    kvlab roofline --weights=int8
    kvlab roofline --placement=contiguous,paged --storage=float32,int8 --dtype=bfloat16
    kvlab roofline --model=random:tiny-gqa --linear_times=A100-80GB:llama-2-7b:mlp.csv

First the bandwidth of the memory and the peak of matrix products are measured, then prefill and
decode of the model over batch and prompt length, by attention and cache. Beside them stand the
times that operations and bytes predict, here and on devices by their data sheets. A run that was
stopped goes on where it was when the same command runs again.
"""

import sys
from typing import TYPE_CHECKING, Any

from kvlab.experiments.flags import (
    CACHE_AXES,
    MANY,
    Flag,
    choice,
    comma_list,
    command_flags,
    whole,
)
from kvlab.experiments.main import execute
from kvlab.experiments.run_folder import run_in_folder

if TYPE_CHECKING:
    from kvlab.research.roofline_study import LinearTimes

_CHUNK = 128


def _device(written: str) -> str:
    from kvlab.research.devices import DEVICES

    return choice("measured", *DEVICES)(written)


def _linear_times(written: str) -> "LinearTimes":
    from kvlab.research.roofline_study import LinearTimes

    parts = written.split(":", 2)
    if len(parts) != 3:
        raise ValueError("DEVICE:MODEL:FILE is wanted, as A100-80GB:llama-2-7b:mlp.csv")
    return LinearTimes(*parts)


FLAGS = command_flags(
    "model",
    "seed",
    "chunk",
    "weights",
    axes=MANY,
    out="the run folder; runs/NAME-HASH if not given",
    batch=Flag(comma_list(whole(1)), "N,...", "sequences side by side", (1, 4, 16)),
    prompt_tokens=Flag(comma_list(whole(1)), "N,...", "lengths of the prompts", (128, 512)),
    decode_tokens=Flag(whole(1), "N", "tokens decoded after a prompt", 16),
    repeats=Flag(whole(1), "N", "timed repetitions of a point", 3),
    dtype=Flag(
        choice("float32", "bfloat16", "float16"),
        "TYPE",
        "of weights, unless --weights says otherwise, and of products",
        "float32",
    ),
    device=Flag(
        comma_list(_device),
        "NAME,...",
        "data sheets to predict for (A100-80GB, TPU-v5e), all of them if not given; measured is "
        "this machine, which is always there",
    ),
    linear_times=Flag(
        _linear_times,
        "DEVICE:MODEL:FILE",
        "compare predictions with a file of measured linear layers (Vidur's mlp.csv)",
        (),
        True,
    ),
)


def main(argv: list[str]) -> int:
    """Runs the study, prints its tables and where the report is."""
    del argv
    from kvlab.models.load import load_model
    from kvlab.ops.implementations import check_backend
    from kvlab.research.cache_axes import cache_specs
    from kvlab.research.devices import DEVICES
    from kvlab.research.experiment import cross
    from kvlab.research.roofline_run import run_roofline, study_configs
    from kvlab.research.roofline_study import RooflineStudy
    from kvlab.research.variants import own_attention

    check_backend(FLAGS.implementation)  # refused before anything is measured
    axes: dict[str, Any] = {name: FLAGS[name].value for name in CACHE_AXES if FLAGS[name].present}
    caches = tuple(cache_specs(axes))
    model = load_model(FLAGS.model, FLAGS.dtype, FLAGS.dtype)
    attentions = FLAGS.attention or dict.fromkeys((own_attention(model.config), "mha", "mqa"))
    study = RooflineStudy(
        model=FLAGS.model,
        dtype=FLAGS.dtype,
        variants=cross(tuple(attentions), caches),
        batches=FLAGS.batch,
        prompt_tokens=FLAGS.prompt_tokens,
        decode_tokens=FLAGS.decode_tokens,
        repeats=FLAGS.repeats,
        chunk=FLAGS.chunk or min(_CHUNK, *FLAGS.prompt_tokens),
        devices=tuple(one for one in FLAGS.device or DEVICES if one != "measured"),
        linear_times=tuple(FLAGS.linear_times),
        implementation=FLAGS.implementation,
        weights=FLAGS.weights,
        seed=FLAGS.seed,
    )
    points = len(study_configs(study, model))  # before anything is written
    return run_in_folder(
        lambda folder: run_roofline(study, model, folder),
        command="roofline",
        config=study.to_json(),
        seed=study.seed,
        question="Where does the time of prefill and decode go, and how far from the limit is it?",
        out=FLAGS.out,
        points=points,
    )


if __name__ == "__main__":
    sys.exit(execute(sys.modules[__name__]))
