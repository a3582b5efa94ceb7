"""Serve a trace of requests with a real model, by cache variant, on the same memory.

    kvlab serve_trace
    kvlab serve_trace --workload=azure:conv.csv --length_scale=0.06 --rate_scale=0.3 --check=200
    kvlab serve_trace --placement=paged --page_size=8,16 --storage=float32,int8 --rate=4

Requests arrive in the time of the trace (or at --rate, drawn anew) and are batched continuously;
each cache gets as many pages, or whole rows, as fit --kv_mib. Prompts are drawn token ids, and each
request makes as many tokens as its trace says. Every request that ends is a row at once: a run that
was stopped goes on with the others when the same command runs again.
"""

import sys
from typing import Any

from kvlab.experiments.flags import CACHE_AXES, MANY, Flag, command_flags, number, text, whole
from kvlab.experiments.main import execute
from kvlab.experiments.run_folder import run_in_folder


def _positive(written: str) -> float:
    value = number(written)
    if not 0 < value < float("inf"):
        raise ValueError("a number above 0 is wanted")
    return value


FLAGS = command_flags(
    "model",
    "seed",
    "weights",
    axes=MANY,
    out="the run folder; runs/NAME-HASH if not given",
    workload=Flag(
        text,
        "NAME",
        "sharegpt-like, alpaca-like, lognormal, uniform, or a trace: azure:FILE, sharegpt:FILE or "
        "mooncake:FILE",
        "sharegpt-like",
    ),
    num_requests=Flag(whole(1), "N", "requests to serve", 64),
    length_scale=Flag(_positive, "X", "factor of all lengths, for small models", 0.125),
    rate_scale=Flag(_positive, "X", "factor of a trace's arrival rate", 1.0),
    rate=Flag(_positive, "X", "requests a second, drawn anew; 2 where a workload has no times"),
    kv_mib=Flag(_positive, "X", "memory for keys and values, MiB", 96.0),
    slots=Flag(whole(1), "N", "most sequences at once", 16),
    max_length=Flag(whole(2), "N", "longest sequence; longer requests are left out", 512),
    rows=Flag(whole(1), "N", "rows of one prefill call", 2),
    chunk=Flag(whole(1), "N", "tokens of such a row", 64),
    decode_steps=Flag(whole(1), "N", "most tokens of a sequence in one decode call", 8),
    reuse_prefixes=Flag(bool, "", "start on pages that hold a prompt's first tokens", True),
    ttft_target_ms=Flag(_positive, "X", "a request within both targets counts as goodput", 2000.0),
    tpot_target_ms=Flag(_positive, "X", "the target for the time per output token", 200.0),
    skip_bad_rows=Flag(bool, "", "leave malformed rows of a trace out, and count them", False),
    check=Flag(whole(), "N", "answers to generate again alone and compare", 0),
)


def main(argv: list[str]) -> int:
    """Serves the trace, prints the table and where the report is."""
    del argv
    from kvlab.models.load import load_model
    from kvlab.research.cache_axes import cache_specs
    from kvlab.research.serve_study import ServeStudy, run_serve_study

    axes: dict[str, Any] = {name: FLAGS[name].value for name in CACHE_AXES if FLAGS[name].present}
    caches = cache_specs({"placement": ("contiguous", "paged"), **axes})
    if FLAGS.attention or FLAGS.implementation:
        raise ValueError("serve_trace runs the model's own attention; leave --attention out")
    timeless = not FLAGS.workload.startswith(("azure:", "mooncake:"))
    study = ServeStudy(
        model=FLAGS.model,
        workload=FLAGS.workload,
        caches=tuple(caches),
        num_requests=FLAGS.num_requests,
        length_scale=FLAGS.length_scale,
        rate_scale=FLAGS.rate_scale,
        rate=FLAGS.rate or (2.0 if timeless else None),
        kv_mib=FLAGS.kv_mib,
        slots=FLAGS.slots,
        max_length=FLAGS.max_length,
        rows=FLAGS.rows,
        chunk=FLAGS.chunk,
        decode_steps=FLAGS.decode_steps,
        reuse_prefixes=FLAGS.reuse_prefixes,
        ttft_target_s=FLAGS.ttft_target_ms / 1e3,
        tpot_target_s=FLAGS.tpot_target_ms / 1e3,
        skip_bad_rows=FLAGS.skip_bad_rows,
        check=FLAGS.check,
        seed=FLAGS.seed,
        weights=FLAGS.weights,
    )
    study.workload_in_time()  # before the model is loaded and anything is written
    model = load_model(study.model)
    return run_in_folder(
        lambda folder: run_serve_study(study, model, folder),
        command="serve_trace",
        config=study.to_json(),
        seed=study.seed,
        question="How do caches serve the same requests on the same memory?",
        out=FLAGS.out,
    )


if __name__ == "__main__":
    sys.exit(execute(sys.modules[__name__]))
