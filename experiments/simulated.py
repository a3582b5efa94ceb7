"""What the commands of simulated studies share: their flags, and how a study is run."""

import math
from collections.abc import Sequence
from typing import Any

from absl import flags as absl_flags

from kvlab.experiments.flags import Flag, choice, comma_list, number, whole
from kvlab.experiments.run_folder import run_in_folder

MOST_REQUESTS = 1_000_000
"""That a command draws or takes: more take hours to simulate, and all memory."""

_LEAST_RATE, _MOST_RATE = 1e-3, 1e6  # requests a second; times of a year still count microseconds
_MOST_MS = 1_000_000
_MOST_SLOTS = 10_000_000  # token slots of a pool, 8 TB of OPT-13B's
_ALLOCATORS = ("paged", "max", "pow2", "oracle")


def request_rate(written: str) -> float | None:
    """Parses requests a second; `inf` is None: all requests wait from the start."""
    rate = number(written)
    if not (_LEAST_RATE <= rate <= _MOST_RATE or rate == math.inf):
        raise ValueError(
            f"requests a second are wanted, from {_LEAST_RATE:g} to {_MOST_RATE:,.0f}, or inf"
        )
    return None if math.isinf(rate) else rate


def _milliseconds(written: str) -> float:
    value = number(written)
    if not 0 <= value <= _MOST_MS:
        raise ValueError(f"milliseconds are wanted, from 0 to {_MOST_MS:,}")
    return value


def _workloads(written: str) -> tuple[str, ...]:
    from kvlab.research.workloads import split_words

    return tuple(dict.fromkeys(split_words(written)))


WORKLOAD_HELP = (
    "sharegpt-like, alpaca-like, lognormal:MEAN_PROMPT/MEAN_OUTPUT/SIGMA, "
    "uniform:LOW-HIGH/LOW-HIGH (prompts/outputs), or a trace: azure:FILE, sharegpt:FILE or "
    "mooncake:FILE"
)

SIMULATION_FLAGS: dict[str, Any] = {
    "workload": Flag(_workloads, "NAME,...", WORKLOAD_HELP),
    "allocator": Flag(
        comma_list(choice(*_ALLOCATORS)), "NAME,...", f"{', '.join(_ALLOCATORS)}; all of them"
    ),
    "page_size": Flag(comma_list(whole(1)), "N,...", "tokens a page, where paged; 16"),
    "num_requests": Flag(
        whole(1, MOST_REQUESTS),
        "N",
        "requests of each workload; enough for 400,000 tokens, or up to 5,000 of a trace",
    ),
    "skip_bad_rows": Flag(bool, "", "leave malformed rows of a trace out, and count them", False),
    "kv_slots": Flag(
        whole(1, _MOST_SLOTS), "N", "tokens that the pool holds; 15,728 (12 GB) if not given"
    ),
    "max_length": Flag(
        whole(2, _MOST_SLOTS), "N", "longest sequence; longer requests are left out", 2048
    ),
    "headroom_tokens": Flag(
        whole(1), "N", "tokens by which every running request can still grow when another starts", 1
    ),
    "call_overhead_ms": Flag(_milliseconds, "X", "added to the time of every step", 0.0),
    "sequence_overhead_ms": Flag(
        _milliseconds, "X", "added to a decode step for each of its sequences", 0.0
    ),
}


RATE_FLAG = Flag(comma_list(request_rate), "X,...", "requests a second; inf has all wait at once")

Rates = tuple[float | None, ...]


def rates_of(
    flags: absl_flags.FlagValues, usual: dict[str, Rates]
) -> tuple[tuple[str, ...], tuple[Rates, ...]]:
    """The workloads that flags ask for, and the rates of each.

    Args:
      flags: workload and rate, of `RATE_FLAG`.
      usual: the workloads that run if none is given, and their rates.

    Raises:
      ValueError: no rate is given for a workload that has no usual ones.
    """
    workloads = flags["workload"].value or tuple(usual)
    rate = flags["rate"].value
    unknown = [name for name in workloads if name not in usual]
    if unknown and not rate:
        raise ValueError(f"--rate is missing: the requests a second of {', '.join(unknown)}")
    return workloads, tuple(rate or usual[name] for name in workloads)


def _require_use(flags: absl_flags.FlagValues, allocators: Sequence[str]) -> None:
    for name in ("page_size", "headroom_tokens"):
        if flags[name].present and "paged" not in allocators:
            raise ValueError(f"--{name} is given, but no point uses it; it needs --allocator=paged")


def run_study(
    flags: absl_flags.FlagValues,
    command: str,
    workloads: tuple[str, ...],
    rates: tuple[Rates, ...],
    question: str,
    **changes: Any,
) -> int:
    """Runs a study into its run folder, prints its tables and where the report is.

    Args:
      flags: those of `SIMULATION_FLAGS`, seed and out.
      command: the study's.
      workloads: to run.
      rates: of each.
      question: for the report.
      **changes: fields of the study that differ from the flags.

    Returns:
      The exit status: 1 where a point failed.
    """
    from kvlab.research.allocation_names import point_label
    from kvlab.research.allocation_study import AllocationStudy, measure_point, read_workload
    from kvlab.research.point_run import run_points
    from kvlab.research.workloads import trace_sha256

    given: dict[str, Any] = {name: flags[name].value for name in flags}
    _require_use(flags, given.get("allocator") or _ALLOCATORS)
    fields: dict[str, Any] = {
        "allocators": given.get("allocator"),
        "page_sizes": given["page_size"],
        "kv_slots": given["kv_slots"],
        **changes,
    }
    study = AllocationStudy(
        command,
        workloads,
        rates,
        num_requests=given["num_requests"],
        skip_bad_rows=given["skip_bad_rows"],
        seed=given["seed"],
        max_length=given["max_length"],
        headroom_tokens=given["headroom_tokens"],
        call_overhead_s=given["call_overhead_ms"] / 1e3,
        sequence_overhead_s=given["sequence_overhead_ms"] / 1e3,
        trace_sha256=tuple(map(trace_sha256, workloads)),
        **{name: value for name, value in fields.items() if value is not None},
    )
    points = list(study.points())
    for point in points:
        read_workload(point, study.seed)  # before anything is written
    return run_in_folder(
        lambda folder: run_points(folder, points, study.seed, measure_point, point_label),
        command=command,
        config=study.to_json(),
        seed=study.seed,
        question=question,
        out=given["out"],
        points=len(points),
    )
