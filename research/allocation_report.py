"""What reports show of the simulated studies of allocators, beside the published figures.

Published: "Efficient Memory Management for Large Language Model Serving with PagedAttention" (arXiv
2309.06180), Fig. 2 (shares of the KV memory) and Fig. 11 (mean lengths); OPT-13B on one
A100-40GB.
"""

import collections
from collections.abc import Mapping, Sequence

from kvlab.research.allocation_names import (
    row_labels,
    rows_by_allocator,
    rows_by_workload,
)
from kvlab.research.left_out import left_out_of_workload, refused_by_pool
from kvlab.research.line_chart import Line, LinePanel, draw_lines
from kvlab.research.presentation import Picture, Presentation, shared_settings
from kvlab.research.rows import Row
from kvlab.research.stacked_bars import StackedBar, draw_stacked_bars
from kvlab.research.tables import Table, milliseconds, percent, significant, whole

FIG_2 = {
    "max": (20.4, 13.3, 57.3, 8.9),
    "pow2": (26.8, 17.9, 13.6, 41.6),
    "oracle": (38.2, 25.2, 0.0, 36.6),
    "paged-16": (96.3,),
}
"""Percent of KV memory: token states, reservation, internal fragmentation, external and other."""

_PARTS = ("token states", "reserved", "internal", "external and other")
_PART_METRICS = ("kv_filled", "kv_reserved", "kv_internal", "kv_free")
_TERMS = {
    "max, pow2, oracle": "contiguous allocation as before paging, in three versions of Orca: every "
    "request reserves one run of slots, for the longest sequence (max), for its output rounded up "
    "to a power of two (pow2), or for its true length, which no real system knows (oracle).",
    "paged-N": "pages of N tokens, handed out as sequences grow.",
    "token states": "slots that hold a token's keys and values.",
    "reserved": "slots held for tokens that their request will still make.",
    "internal": "slots held for a request that it will never fill (internal fragmentation).",
    "external and other": "slots that nobody holds while requests wait: pieces too small to be "
    "given (external fragmentation), or kept back.",
    "while waiting": "averaged over the time in which at least one request waited for memory.",
    "normalised latency": "seconds from a request's arrival to its end, over its output tokens.",
    "preemptions": "times a request gave its pages back because they ran out, and started again.",
}
_READING = (
    "No model runs: the scheduler and the page table are the engine's own, and a step takes the "
    "time that its operations and bytes need on the device of the study (no overhead unless one is "
    "given). Averages are over time. Published figures stand beside measured ones where the paper "
    "has them."
)
_CONDITIONS = (
    "Published conditions: real ShareGPT and Alpaca texts (mean 161 in and 338 out, 19 in and 58 "
    "out), vLLM of 2023 and the authors' Orca on a real A100. Here: lengths drawn from lognormals "
    "with those means, of which those that fit are shorter (or the trace that was given), an ideal "
    "A100 and this project's scheduler, "
    "which prefills in chunks beside running decodes."
)


def presented(
    rows: Sequence[Row],
    tables: Sequence[Table],
    findings: Sequence[str],
    pictures: Sequence[Picture],
) -> Presentation:
    """What a report shows of simulated rows, with the words that all such studies share."""
    configs = [row["config"] for row in rows]
    return Presentation(
        reading=f"{_READING} {_CONDITIONS}",
        terms=_TERMS,
        findings=[*findings, *_left_out(rows)],
        tables=tables,
        brief_tables=tables,
        pictures=pictures,
        labels=row_labels(rows),
        held_fixed=shared_settings(configs),
    )


def _left_out(rows: Sequence[Row]) -> list[str]:
    """Requests that the rows were asked for and did not serve."""
    sentences: list[str] = []
    for (workload, name), of_one in rows_by_allocator(rows).items():
        for row in of_one:
            said = left_out_of_workload(row["metrics"], row["config"]["max_length"])
            sentences += [f"{workload}: {said}."] if said else []
            said = refused_by_pool(row["metrics"], "give more --kv_slots")
            sentences += [f"{workload}: with {name} {said}."] if said else []
    return list(dict.fromkeys(sentences))


def present_memory_waste(rows: Sequence[Row]) -> Presentation:
    """Shares of the KV memory, by allocator, beside Fig. 2 of the paper."""
    found: dict[str, dict[str, Row]] = collections.defaultdict(dict)
    for (workload, name), (row, *_) in rows_by_allocator(rows).items():
        found[workload][name] = row
    tables: list[Table] = []
    findings: list[str] = []
    pictures: list[Picture] = []
    for number, (workload, allocators) in enumerate(found.items()):
        shares = {name: _shares(row) for name, row in allocators.items() if _waited(row)}
        title = f"Where the KV memory goes while requests wait: {workload}"
        published = _fig_2(next(iter(allocators.values())))
        cells = tuple(_waste_cells(name, row, published) for name, row in allocators.items())
        kinds = ("", ", published") if published else ("",)
        headings = [f"{part}{kind} %" for part in _PARTS for kind in kinds]
        tables.append(Table(title, ("allocator", *headings, "preemptions"), cells))
        bars = []
        for name, measured in shares.items():
            bars.append(StackedBar(f"{name}, simulated", measured))
            if name in published:
                bars.append(StackedBar(f"{name}, published", published[name], faint=True))
        caption = (
            "Each bar is all memory for keys and values, averaged over the time in which requests "
            "waited."
        )
        caption += " The paler bars are Fig. 2 of the PagedAttention paper." if published else ""
        if bars:
            png = draw_stacked_bars(title, _PARTS, bars)
            pictures.append(Picture(f"memory_waste_{number}.png", title, caption, png))
        findings += _waste_findings(workload, shares)
        findings += _nobody_waited(workload, [name for name in allocators if name not in shares])
    return presented(rows, tables, findings, pictures)


def _waited(row: Row) -> bool:
    """Whether a request ever waited: the shares are of that time."""
    return f"{_PART_METRICS[0]}_waiting" in row["metrics"]


def _nobody_waited(workload: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    return [
        f"{workload}: with {', '.join(names)} no request ever waited for memory, so there is no "
        "time to average over; give more requests (--num_requests), or a smaller pool (--kv_slots)."
    ]


def _shares(row: Row) -> tuple[float, ...]:
    """Percent of the KV memory for each part, while requests waited."""
    return tuple(100 * row["metrics"][f"{part}_waiting"] for part in _PART_METRICS)


def _fig_2(row: Row) -> Mapping[str, tuple[float, ...]]:
    """The published shares, which are of ShareGPT."""
    return FIG_2 if row["config"]["workload"].startswith("sharegpt") else {}


def _waste_cells(name: str, row: Row, published: Mapping[str, tuple[float, ...]]) -> dict[str, str]:
    shares = zip(_PARTS, _shares(row), strict=True) if _waited(row) else ()
    measured = {f"{part} %": f"{value:.1f}" for part, value in shares}
    known = zip(_PARTS, published.get(name, ()), strict=False)  # of paging the first part alone
    beside = {f"{part}, published %": f"{value:.1f}" for part, value in known}
    preemptions = whole(row["metrics"]["preemptions"])
    return {"allocator": name, **measured, **beside, "preemptions": preemptions}


def _waste_findings(workload: str, allocators: Mapping[str, tuple[float, ...]]) -> list[str]:
    contiguous = {n: shares[0] for n, shares in allocators.items() if not n.startswith("paged")}
    paged = {n: shares for n, shares in allocators.items() if n.startswith("paged")}
    found = []
    if contiguous:
        low, high = 100 - max(contiguous.values()), 100 - min(contiguous.values())
        which = ", ".join(contiguous)
        found.append(
            f"{workload}: contiguous allocation ({which}) leaves {low:.0f} to {high:.0f} % of KV "
            "memory without a token (the claim: 60 to 80 %)."
        )
    for name, shares in paged.items():
        found.append(
            f"{workload}: {name} wastes {100 - shares[0]:.1f} %: {shares[1] + shares[2]:.1f} % in "
            f"pages that are not full yet and {shares[3]:.1f} % in pages that nobody holds."
        )
    return found


def present_page_size(rows: Sequence[Row]) -> Presentation:
    """Normalised latency and waste against the page size, beside Fig. 18b in words."""
    by_rate: dict[tuple[str, float | None], list[Row]] = collections.defaultdict(list)
    cells = []
    for workload, of_one in rows_by_workload(rows).items():
        for row in of_one:
            config, metrics = row["config"], row["metrics"]
            by_rate[workload, config["rate"]].append(row)
            asked = "all waiting" if config["rate"] is None else f"{config['rate']:g}"
            shown = {
                "ms a token, mean": milliseconds(metrics["normalized_latency_mean_s"]),
                "batched": significant(metrics["running_mean"]),
                "preemptions": whole(metrics["preemptions"]),
            }
            taken = sum(metrics[part] for part in _PART_METRICS[:3])
            wasted = metrics["kv_reserved"] + metrics["kv_internal"]
            shown["not filled, of pages taken %"] = percent(wasted / taken) if taken else "0"
            named = {"workload": workload, "requests/s": asked}
            cells.append({**named, "page size": str(config["page_size"]), **shown})
    headings = ("ms a token, mean", "not filled, of pages taken %", "batched", "preemptions")
    table = Table("By page size", ("workload", "requests/s", "page size", *headings), tuple(cells))
    panels, findings = [], []
    for (workload, rate), of_one in by_rate.items():
        points = sorted(
            (row["config"]["page_size"], 1e3 * row["metrics"]["normalized_latency_mean_s"])
            for row in of_one
        )
        asked = "all waiting" if rate is None else f"{rate:g} requests/s"
        if len(points) > 1:
            lines = (Line("mean", 0, tuple(points)),)
            panels.append(
                LinePanel(
                    f"{workload}, {asked}",
                    "tokens a page",
                    "ms a token, mean",
                    lines,
                    marked=True,
                    from_zero=True,
                    doubling=True,
                )
            )
            best = min(points, key=lambda point: point[1])[1]
            near = [str(size) for size, latency in points if latency <= 1.05 * best]
            findings.append(
                f"{workload}, {asked}: page sizes within 5 % of the best latency: "
                f"{', '.join(near)} of {', '.join(str(size) for size, _ in points)}. (Published, "
                "with a real kernel: 16 to 128 on ShareGPT; 16 and 32 on Alpaca.)"
            )
    pictures = []
    if panels:
        caption = (
            "A page costs what its last tokens leave empty; what small pages cost a kernel is not "
            "in the cost model, so it cannot show why very small ones are slow on a GPU. A request "
            "starts only where every running one can still grow by the headroom, the same number "
            "of tokens whatever the page. Compare Fig. 18b of the PagedAttention paper."
        )
        title = "Latency against the page size"
        pictures.append(Picture("page_size.png", title, caption, draw_lines(panels)))
    return presented(rows, [table] if cells else [], findings, pictures)
