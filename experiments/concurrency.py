"""Show how many requests fit at once, and latency by request rate and allocator.

    kvlab concurrency
    kvlab concurrency --workload=alpaca-like --rate=10,20,30 --allocator=oracle,paged
    kvlab concurrency --workload=azure:conv.csv --rate=1,2,4 --num_requests=2000

Simulates OPT-13B on an A100-40GB with 12 GB for keys and values (PagedAttention, Fig. 12 and 13).
Each workload runs at every rate, in requests a second, and once with all requests waiting from the
start (`inf`). Without --rate the paper's rates and some around them are run.
"""

import sys

from kvlab.experiments.flags import command_flags
from kvlab.experiments.main import execute
from kvlab.experiments.simulated import RATE_FLAG, SIMULATION_FLAGS, Rates, rates_of, run_study

_RATES: dict[str, Rates] = {
    "sharegpt-like": (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, None),
    "alpaca-like": (5.0, 15.0, 30.0, 60.0, 90.0, 120.0, None),
}

FLAGS = command_flags(
    "seed",
    out="the run folder; runs/NAME-HASH if not given",
    rate=RATE_FLAG,
    **SIMULATION_FLAGS,
)


def main(argv: list[str]) -> int:
    """Runs the study, prints its table and where the report is."""
    del argv
    workloads, rates = rates_of(FLAGS, _RATES)
    return run_study(
        FLAGS, "concurrency", workloads, rates, "How many requests fit on the same memory?"
    )


if __name__ == "__main__":
    sys.exit(execute(sys.modules[__name__]))
