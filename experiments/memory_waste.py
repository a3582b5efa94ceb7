"""Show where KV memory goes, contiguous and paged, beside published figures.

    kvlab memory_waste
    kvlab memory_waste --workload=sharegpt:sharegpt.csv --allocator=oracle,paged --page_size=8,16,32
    kvlab memory_waste --num_requests=20000 --allocator=paged
    kvlab memory_waste --workload=uniform:64-192/64-192,lognormal:128/256/1 --num_requests=500

Simulates OPT-13B on an A100-40GB with 12 GB for keys and values (PagedAttention, Fig. 2). All
requests wait from the start, so that memory is what limits. The scheduler and the page table are
the engine's own; only the model is replaced, by its operations and bytes over the device's peak.
"""

import sys

from kvlab.experiments.flags import command_flags
from kvlab.experiments.main import execute
from kvlab.experiments.simulated import SIMULATION_FLAGS, run_study

FLAGS = command_flags("seed", out="the run folder; runs/NAME-HASH if not given", **SIMULATION_FLAGS)


def main(argv: list[str]) -> int:
    """Runs the study, prints its table and where the report is."""
    del argv
    workloads = FLAGS.workload or ("sharegpt-like",)
    rates = tuple((None,) for _ in workloads)
    return run_study(
        FLAGS, "memory_waste", workloads, rates, "Where does the KV memory of a server go?"
    )


if __name__ == "__main__":
    sys.exit(execute(sys.modules[__name__]))
