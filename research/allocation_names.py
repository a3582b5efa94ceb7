"""How reports call the rows of simulated studies, so that no two of them share a name."""

import collections
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvlab.research.presentation import told_apart
from kvlab.research.rows import Row
from kvlab.research.workloads import is_trace

_BESIDE = ("workload", "allocator", "page_size", "rate")  # shown beside the name of a workload

RowsByAllocator = Mapping[tuple[str, str], list[Row]]
"""Finished rows by the names of workload and allocator, in the order of the run."""


def allocator_name(config: Mapping[str, Any]) -> str:
    """The allocator of a row; a paged one with its page size."""
    name = config["allocator"]
    return f"{name}-{config['page_size']}" if name == "paged" else str(name)


def rate_name(config: Mapping[str, Any]) -> str:
    """The arrivals of a row."""
    rate = config["rate"]
    return "all waiting" if rate is None else f"{rate:g} requests/s"


def point_label(config: Mapping[str, Any]) -> str:
    """A row's config in a few words."""
    return f"{config['workload']} {allocator_name(config)} {rate_name(config)}"


def row_labels(rows: Sequence[Row]) -> list[str]:
    """The name of each row, with the workload's as short as the rows allow."""
    return [
        f"{workload} {allocator_name(row['config'])} {rate_name(row['config'])}"
        for workload, row in zip(workload_names(rows), rows, strict=True)
    ]


def workload_names(rows: Sequence[Row]) -> list[str]:
    """The workload of each row; of a trace its kind and as much of its path as tells it apart.

    Rows that differ in more than workload, allocator, page size and rate have that in their names.
    """
    configs = [{**row["config"], "seed": row["seed"]} for row in rows]
    short = _short_words(dict.fromkeys(str(config["workload"]) for config in configs))
    labels = [short[str(config["workload"])] for config in configs]
    places = [tuple(str(config.get(name)) for name in _BESIDE) for config in configs]
    if len(set(places)) == len(places):
        return labels
    return told_apart(labels, configs, beside=_BESIDE)


def rows_by_allocator(rows: Sequence[Row]) -> RowsByAllocator:
    """The finished rows of each workload and allocator."""
    found: dict[tuple[str, str], list[Row]] = collections.defaultdict(list)
    for workload, row in zip(workload_names(rows), rows, strict=True):
        if row["status"] == "ok":
            found[workload, allocator_name(row["config"])].append(row)
    return found


def rows_by_workload(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The finished rows of each workload."""
    found: dict[str, list[Row]] = collections.defaultdict(list)
    for (workload, _), some in rows_by_allocator(rows).items():
        found[workload] += some
    return found


def _short_words(words: Iterable[str]) -> dict[str, str]:
    """Words of workloads, those of traces with the shortest end of the path that no other has."""
    shorter = {word: _shorter(word) for word in words}
    taken = collections.Counter(name for names in shorter.values() for name in dict.fromkeys(names))
    return {
        word: next((name for name in names if taken[name] == 1), word)
        for word, names in shorter.items()
    }


def _shorter(word: str) -> list[str]:
    """Names for a workload, from the shortest to the whole word."""
    if not is_trace(word):
        return [word]
    kind, _, written = word.partition(":")
    path = pathlib.PurePath(written)
    ends = ["/".join(path.parts[-count:]) for count in range(1, len(path.parts))]
    return [f"{kind}:{name}" for name in (path.stem, *ends)] + [word]
