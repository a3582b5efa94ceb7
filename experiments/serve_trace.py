"""Serve a trace of requests with a real model, by cache variant, on equal memory.

    kvlab serve_trace
    kvlab serve_trace --workload=azure:conv.csv --length_scale=0.06 --rate_scale=0.3 --check=200
    kvlab serve_trace --placement=paged --page_size=8,16 --storage=float32,int8 --rate=4
    kvlab serve_trace --workload=uniform:64-192/32-64 --num_requests=32

Requests arrive in the time of the trace (or at --rate, drawn anew) and are batched continuously;
each cache gets as many pages, or whole rows, as fit --kv_mib. Prompts are drawn token ids, and each
request makes as many tokens as its trace says. Every request that ends is a row at once: a run that
was stopped goes on with the others when the same command runs again. A cache that served its trace
in parts has answers and checks of all requests, and no times: those of one run need a new --out.
"""

import sys
from typing import TYPE_CHECKING, Any

from kvlab.experiments.flags import CACHE_AXES, MANY, Flag, command_flags, positive, text, whole
from kvlab.experiments.main import execute
from kvlab.experiments.run_folder import run_in_folder
from kvlab.experiments.simulated import MOST_REQUESTS, WORKLOAD_HELP

if TYPE_CHECKING:
    from kvlab.research.serve_study import ServeStudy

_REQUESTS, _CHUNK, _ROWS, _DECODE_STEPS = 64, 64, 2, 8  # where a trace and sequences allow it

FLAGS = command_flags(
    "model",
    "seed",
    "weights",
    axes=MANY,
    out="the run folder; runs/NAME-HASH if not given",
    workload=Flag(text, "NAME", WORKLOAD_HELP, "sharegpt-like"),
    num_requests=Flag(
        whole(1, MOST_REQUESTS), "N", "requests to serve; 64, or all of a trace that has fewer"
    ),
    length_scale=Flag(
        positive(1e6),
        "X",
        "factor of all lengths, for small models; 0.125, or 1 where lengths are written out",
    ),
    rate_scale=Flag(positive(1e9), "X", "factor of a trace's arrival rate", 1.0),
    rate=Flag(positive(1e6), "X", "requests a second, drawn anew; 2 where a workload has no times"),
    kv_mib=Flag(positive(1e9), "X", "memory for keys and values, MiB", 96.0),
    slots=Flag(whole(1, 65_536), "N", "most sequences at once", 16),
    max_length=Flag(
        whole(2, 2**31 - 1), "N", "longest sequence; longer requests are left out", 512
    ),
    rows=Flag(whole(1), "N", "rows of one prefill call; 2, or all that can be filled"),
    chunk=Flag(whole(1), "N", "tokens of such a row; 64, or max_length if that is less"),
    decode_steps=Flag(
        whole(1), "N", "most tokens of a sequence in one decode call; 8, or max_length if less"
    ),
    reuse_prefixes=Flag(bool, "", "start on pages that hold a prompt's first tokens", True),
    ttft_target_ms=Flag(
        positive(1e9), "X", "a request within both targets counts as goodput", 2000.0
    ),
    tpot_target_ms=Flag(positive(1e9), "X", "the target for the time per output token", 200.0),
    skip_bad_rows=Flag(bool, "", "leave malformed rows of a trace out, and count them", False),
    check=Flag(whole(), "N", "answers to generate again alone and compare", 0),
)


def main(argv: list[str]) -> int:
    """Serves the trace, prints the table and where the report is."""
    del argv
    from kvlab.models.load import load_model
    from kvlab.research.serve_study import check_variants, run_serve_study, time_to_serve

    study = _study()
    said = time_to_serve(study.workload_in_time())
    model = load_model(study.model)
    check_variants(study, model)  # and all the above before anything is written
    if said:
        print(f"serve_trace: {said}", file=sys.stderr)
    return run_in_folder(
        lambda folder: run_serve_study(study, model, folder),
        command="serve_trace",
        config=study.to_json(),
        seed=study.seed,
        question="How do caches serve the same requests on the same memory?",
        out=FLAGS.out,
    )


def _study() -> "ServeStudy":
    """The study that the flags describe."""
    from kvlab.research.cache_axes import cache_specs
    from kvlab.research.serve_study import ServeStudy
    from kvlab.research.workloads import is_trace, trace_sha256

    axes: dict[str, Any] = {name: FLAGS[name].value for name in CACHE_AXES if FLAGS[name].present}
    caches = cache_specs({"placement": ("contiguous", "paged"), **axes})
    if FLAGS.attention or FLAGS.implementation:
        raise ValueError("serve_trace runs the model's own attention; leave --attention out")
    timeless = not FLAGS.workload.startswith(("azure:", "mooncake:"))
    written = FLAGS.workload.startswith(("uniform:", "lognormal:"))
    rate = FLAGS.rate or (2.0 if timeless else None)
    if FLAGS["rate_scale"].present and rate is not None:
        raise ValueError(
            "--rate_scale is given, but arrivals are drawn anew and do not use it; give --rate "
            "alone, or a trace with times (azure:FILE, mooncake:FILE) without --rate"
        )
    longest = FLAGS.max_length
    chunk = FLAGS.chunk or min(_CHUNK, longest)
    return ServeStudy(
        model=FLAGS.model,
        workload=FLAGS.workload,
        caches=tuple(caches),
        num_requests=FLAGS.num_requests or (None if is_trace(FLAGS.workload) else _REQUESTS),
        length_scale=FLAGS.length_scale or (1.0 if written else 0.125),
        rate_scale=FLAGS.rate_scale,
        rate=rate,
        kv_mib=FLAGS.kv_mib,
        slots=FLAGS.slots,
        max_length=longest,
        rows=FLAGS.rows or min(_ROWS, FLAGS.slots * -(-longest // chunk)),
        chunk=chunk,
        decode_steps=FLAGS.decode_steps or min(_DECODE_STEPS, longest),
        reuse_prefixes=FLAGS.reuse_prefixes,
        ttft_target_s=FLAGS.ttft_target_ms / 1e3,
        tpot_target_s=FLAGS.tpot_target_ms / 1e3,
        skip_bad_rows=FLAGS.skip_bad_rows,
        check=FLAGS.check,
        seed=FLAGS.seed,
        weights=FLAGS.weights,
        trace_sha256=trace_sha256(FLAGS.workload),
    )


if __name__ == "__main__":
    sys.exit(execute(sys.modules[__name__]))
