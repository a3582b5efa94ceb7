"""Two runs of one experiment side by side: what a rerun reproduces, and what it does not.

Bytes, counts and quality are functions of the config and must come out the same; times belong
to the machine and the moment, so they are shown as ratios and never make a row differ.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable
from typing import Any

from kvlab.research.rows import Row

_TIMINGS = frozenset({"mfu", "mbu"})  # shares of a peak, computed from times


@dataclasses.dataclass(frozen=True)
class RowComparison:
    """One point of two runs.

    Attributes:
        config: the point.
        config_hash: its hash.
        seed: its seed.
        problem: why the rows cannot be compared (a point that one run lacks, or that failed in
            one of them), otherwise empty.
        differences: metric name to (old, new); None where a run did not measure it.
        timing_ratios: timing name to new / old, for times and rates that both runs measured.
    """

    config: dict[str, Any]
    config_hash: str
    seed: int
    problem: str
    differences: dict[str, tuple[float | None, float | None]]
    timing_ratios: dict[str, float]

    @property
    def differs(self) -> bool:
        """Whether something that should be reproducible was not."""
        return bool(self.problem or self.differences)

    def describe(self) -> str:
        """Says in one line what differs; empty where nothing does."""
        if self.problem:
            return self.problem
        return "; ".join(
            f"{name} was {_shown(old)}, is {_shown(new)}"
            for name, (old, new) in self.differences.items()
        )


def timing_ratios(comparisons: Iterable[RowComparison]) -> str:
    """The timings of the second run over those of the first: median over points, and the range."""
    ratios: dict[str, list[float]] = {}
    for comparison in comparisons:
        for name, ratio in comparison.timing_ratios.items():
            ratios.setdefault(name, []).append(ratio)
    told = (
        f"{name} x{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
        for name, values in ratios.items()
    )
    return ", ".join(told)


def is_timing(metric: str) -> bool:
    """Whether a metric depends on the moment it was measured: times, rates, shares of a peak."""
    return metric.endswith("_s") or metric in _TIMINGS


def compare_rows(
    old_rows: Iterable[Row], new_rows: Iterable[Row], tolerance: float = 1e-6
) -> list[RowComparison]:
    """Compares two runs point by point.

    Args:
        old_rows: the newest rows of the first run.
        new_rows: the newest rows of the second.
        tolerance: what two values that are not whole numbers may differ by, relative to the
            larger of them or to 1; whole numbers (bytes, counts) must be equal.

    Returns:
        One comparison per point of either run; those with `differs` are the news.
    """
    old = {(row["config_hash"], row["seed"]): row for row in old_rows}
    new = {(row["config_hash"], row["seed"]): row for row in new_rows}
    return [_compare(old.get(key), new.get(key), tolerance) for key in {**old, **new}]


def _compare(old: Row | None, new: Row | None, tolerance: float) -> RowComparison:
    row = old or new
    assert row is not None
    differences: dict[str, tuple[float | None, float | None]] = {}
    ratios: dict[str, float] = {}
    problem = _problem(old, new)
    if old and new and not problem:
        for name in {**old["metrics"], **new["metrics"]}:
            before, after = old["metrics"].get(name), new["metrics"].get(name)
            if is_timing(name):
                if before and after is not None:
                    ratios[name] = after / before
            elif before is None or after is None or not _same(before, after, tolerance):
                differences[name] = (before, after)
    return RowComparison(
        row["config"], row["config_hash"], row["seed"], problem, differences, ratios
    )


def _problem(old: Row | None, new: Row | None) -> str:
    if old is None:
        return "only the new run has this point"
    if new is None:
        return "only the old run has this point"
    if old["status"] == new["status"]:
        return ""
    failed, which = (old, "old") if old["status"] == "failed" else (new, "new")
    return f"failed in the {which} run only: {failed.get('error', 'no error recorded')}"


def _same(before: float, after: float, tolerance: float) -> bool:
    if isinstance(before, int) and isinstance(after, int):
        return before == after
    scale = max(1.0, abs(before), abs(after))
    return math.isclose(before, after, rel_tol=0.0, abs_tol=tolerance * scale)


def _shown(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.9g}"
