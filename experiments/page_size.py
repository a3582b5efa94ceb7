"""Show what the page size costs in latency and in slots left empty.

    kvlab page_size
    kvlab page_size --page_size=8,16,32,64 --workload=alpaca-like --rate=60

Simulates OPT-13B on an A100-40GB with 12 GB for keys and values (PagedAttention, Fig. 18b), each
workload at a rate that fills the memory.
"""

import dataclasses
import sys

from kvlab.experiments.flags import command_flags
from kvlab.experiments.main import execute
from kvlab.experiments.simulated import RATE_FLAG, SIMULATION_FLAGS, Rates, rates_of, run_study

_RATES: dict[str, Rates] = {"sharegpt-like": (3.5,), "alpaca-like": (80.0,)}
_PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Of the same number of tokens whatever the page: with the headroom of a single token, small pages
# would fill the pool to its last slot, and what they cost would be preemptions.
_OWN = {
    "headroom_tokens": dataclasses.replace(SIMULATION_FLAGS["headroom_tokens"], default=16),
    "page_size": dataclasses.replace(
        SIMULATION_FLAGS["page_size"], help="tokens a page; 1, 2, 4, ... 256 if not given"
    ),
}

FLAGS = command_flags(
    "seed",
    out="the run folder; runs/NAME-HASH if not given",
    rate=RATE_FLAG,
    **{name: flag for name, flag in SIMULATION_FLAGS.items() if name != "allocator"} | _OWN,
)


def main(argv: list[str]) -> int:
    """Runs the study, prints its table and where the report is."""
    del argv
    workloads, rates = rates_of(FLAGS, _RATES)
    return run_study(
        FLAGS,
        "page_size",
        workloads,
        rates,
        "How large should a page be?",
        allocators=("paged",),
        page_sizes=FLAGS.page_size or _PAGE_SIZES,
    )


if __name__ == "__main__":
    sys.exit(execute(sys.modules[__name__]))
