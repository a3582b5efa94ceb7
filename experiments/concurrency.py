"""Show how many requests fit at once, and latency by request rate and allocator.

    kvlab concurrency
    kvlab concurrency --workload=alpaca-like --rate=10,20,30 --allocator=oracle,paged
    kvlab concurrency --workload=azure:conv.csv --rate=1,2,4 --num_requests=2000

Simulates OPT-13B on an A100-40GB with 12 GB for keys and values (PagedAttention, Fig. 12 and 13).
Each workload runs at every rate, in requests a second, and once with all requests waiting from the
start (`inf`). Without --rate the paper's rates and some around them are run.
"""

import sys

from kvlab.experiments.flags import Flag, comma_list, command_flags
from kvlab.experiments.main import execute
from kvlab.experiments.simulated import SIMULATION_FLAGS, request_rate, run_study

_RATES = {
    "sharegpt-like": (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, None),
    "alpaca-like": (5.0, 15.0, 30.0, 60.0, 90.0, 120.0, None),
}

FLAGS = command_flags(
    "seed",
    out="the run folder; runs/NAME-HASH if not given",
    rate=Flag(comma_list(request_rate), "X,...", "requests a second; inf has all wait at once"),
    **SIMULATION_FLAGS,
)


def main(argv: list[str]) -> int:
    """Runs the study, prints its table and where the report is."""
    del argv
    workloads = FLAGS.workload or tuple(_RATES)
    unknown = [name for name in workloads if name not in _RATES]
    if unknown and not FLAGS.rate:
        raise ValueError(f"--rate is missing: the requests a second of {', '.join(unknown)}")
    rates = tuple(FLAGS.rate or _RATES[name] for name in workloads)
    return run_study(
        FLAGS, "concurrency", workloads, rates, "How many requests fit on the same memory?"
    )


if __name__ == "__main__":
    sys.exit(execute(sys.modules[__name__]))
