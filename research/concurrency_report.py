"""What a report shows of how many requests fit at once, beside the published figures.

Published: "Efficient Memory Management for Large Language Model Serving with PagedAttention" (arXiv
2309.06180), Fig. 13 (batched requests); OPT-13B on one A100-40GB.
"""

import collections
from collections.abc import Callable, Sequence

from kvlab.research.allocation_names import RowsByAllocator, rows_by_allocator
from kvlab.research.allocation_report import presented
from kvlab.research.allocation_study import sustained_rate
from kvlab.research.bar_chart import Bar, BarPanel, draw_bars
from kvlab.research.chart_style import COLOURS
from kvlab.research.line_chart import Line, LinePanel, draw_lines
from kvlab.research.presentation import Picture, Presentation
from kvlab.research.rows import Row
from kvlab.research.tables import Table, milliseconds, percent, significant, whole

FIG_13 = {
    ("sharegpt-like", 2.0): {"max": 7.00, "pow2": 9.81, "oracle": 13.62, "paged-16": 30.42},
    ("alpaca-like", 30.0): {"max": 7.00, "pow2": 43.24, "oracle": 72.75, "paged-16": 132.44},
}
"""Mean number of batched requests, by workload and requests a second."""

LATENCY_LIMIT_S = 0.1
"""Seconds a token up to which a rate counts as sustained: ten tokens a second."""

_CONCURRENCY: dict[str, tuple[str, Callable[[float], str]]] = {
    "running_mean": ("batched", significant),
    "running_mean_waiting": ("batched, while waiting", significant),
    "waiting_share": ("time with waiting %", percent),
    "normalized_latency_mean_s": ("ms a token, mean", milliseconds),
    "preemptions": ("preemptions", whole),
}


def present_concurrency(rows: Sequence[Row]) -> Presentation:
    """Batched requests beside Fig. 13, and normalised latency against the request rate."""
    found = rows_by_allocator(rows)
    cells = []
    for (workload, name), of_one in found.items():
        for row in of_one:
            rate = row["config"]["rate"]
            published = FIG_13.get((row["config"]["workload"], rate), {}).get(name)
            shown = {
                heading: show(row["metrics"][metric])
                for metric, (heading, show) in _CONCURRENCY.items()
                if metric in row["metrics"]
            }
            shown |= {} if published is None else {"batched, published": f"{published:.2f}"}
            asked = "all waiting" if rate is None else f"{rate:g}"
            cells.append({"workload": workload, "allocator": name, "requests/s": asked, **shown})
    headings = ("batched", "batched, published", "batched, while waiting", "time with waiting %")
    table = Table(
        "Requests served at once, and how long a token takes",
        ("workload", "allocator", "requests/s", *headings, "ms a token, mean", "preemptions"),
        tuple(cells),
    )
    pictures = [_batched_picture(found), _latency_picture(found)]
    return presented(
        rows,
        [table] if cells else [],
        _concurrency_findings(found),
        [picture for picture in pictures if picture is not None],
    )


def _waiting_rows(found: RowsByAllocator) -> dict[str, dict[str, float]]:
    """Requests at once while others waited, by workload and allocator: the backlog's if it ran."""
    best: dict[str, dict[str, float]] = collections.defaultdict(dict)
    for (workload, name), rows in found.items():
        backlog = [row for row in rows if row["config"]["rate"] is None]
        for row in backlog:
            if "running_mean_waiting" in row["metrics"]:
                best[workload][name] = row["metrics"]["running_mean_waiting"]
    return best


def _published(found: RowsByAllocator, workload: str) -> dict[str, float]:
    """The published requests at once of a workload, by the name that the rows give it."""
    words = {
        row["config"]["workload"] for (of, _), r in found.items() for row in r if of == workload
    }
    return next((known for (word, _), known in FIG_13.items() if word in words), {})


def _batched_picture(found: RowsByAllocator) -> Picture | None:
    panels: list[BarPanel] = []
    labels: dict[str, None] = {}
    for workload, allocators in _waiting_rows(found).items():
        bars = []
        for name, value in allocators.items():
            published = _published(found, workload).get(name)
            for kind, number, colour in (
                ("measured", value, COLOURS[0]),
                ("published", published, COLOURS[6]),
            ):
                label = f"{name}, {kind}"
                labels[label] = None
                if number is not None:
                    bars.append(Bar(label, colour, number, number, number))
        panels.append(BarPanel(workload, "requests at once", tuple(bars)))
    if not panels:
        return None
    title = "Requests at once, while others wait"
    caption = (
        "How many requests have memory on average while others wait for it. The grey bars are Fig. "
        "13 of the PagedAttention paper, at 2 (ShareGPT) and 30 (Alpaca) requests a second."
    )
    return Picture("batched.png", title, caption, draw_bars([[p] for p in panels], list(labels)))


def _curves(found: RowsByAllocator, workload: str) -> dict[str, list[tuple[float, float]]]:
    """(requests a second, seconds a token) of each allocator."""
    return {
        name: sorted(
            (row["config"]["rate"], row["metrics"]["normalized_latency_mean_s"])
            for row in rows
            if row["config"]["rate"] is not None and "normalized_latency_mean_s" in row["metrics"]
        )
        for (of, name), rows in found.items()
        if of == workload
    }


def _latency_picture(found: RowsByAllocator) -> Picture | None:
    panels = []
    for workload in dict.fromkeys(workload for workload, _ in found):
        curves = {n: c for n, c in _curves(found, workload).items() if len(c) > 1}
        lines = tuple(
            Line(name, index, tuple((rate, 1e3 * latency) for rate, latency in curve))
            for index, (name, curve) in enumerate(curves.items())
        )
        if lines:
            panels.append(
                LinePanel(workload, "requests a second", "ms a token, mean", lines, marked=True)
            )
    if not panels:
        return None
    title = "Normalised latency against the request rate"
    caption = (
        "End-to-end latency of a request over its output tokens, mean of all requests. Where a "
        "curve turns up, requests arrive faster than they are served, and the longer the run the "
        "higher it gets. Compare Fig. 12 of the PagedAttention paper."
    )
    return Picture("latency_against_rate.png", title, caption, draw_lines(panels))


def _concurrency_findings(found: RowsByAllocator) -> list[str]:
    sentences = []
    for workload, allocators in _waiting_rows(found).items():
        paged = {n: value for n, value in allocators.items() if n.startswith("paged")}
        for name, value in paged.items():
            parts = []
            for other in ("max", "pow2", "oracle"):
                if other in allocators:
                    ratio = f"x{value / allocators[other]:.1f} of {other}"
                    known = _published(found, workload)
                    if other in known and name in known:
                        ratio += f" (published x{known[name] / known[other]:.1f})"
                    parts.append(ratio)
            if parts:
                sentences.append(
                    f"{workload}: on the same memory {name} serves {value:.1f} requests at once, "
                    f"{', '.join(parts)}."
                )
    sentences += _why_fewer(found)
    if any(workload == "alpaca-like" and name in ("pow2", "oracle") for workload, name in found):
        sentences.append(
            "alpaca-like: what pow2 and oracle reserve depends on how prompt plus output falls "
            "between powers of two, and only the means of Alpaca's lengths are published; their "
            "spread here is assumed, so these two differ from the published ones also while "
            "requests wait."
        )
    for workload in dict.fromkeys(workload for workload, _ in found):
        rates = {
            name: sustained_rate(curve, LATENCY_LIMIT_S)
            for name, curve in _curves(found, workload).items()
            if len(curve) > 1
        }
        known = {name: rate for name, rate in rates.items() if rate}
        if len(known) > 1:
            listed = ", ".join(f"{name} {rate:.2g}" for name, rate in known.items())
            sentences.append(
                f"{workload}: requests a second sustained within {1e3 * LATENCY_LIMIT_S:.0f} ms a "
                f"token: {listed} (at most the highest rate that was run)."
            )
    return sentences


def _why_fewer(found: RowsByAllocator) -> list[str]:
    """Explains rows with far fewer requests at once than published, by Little's law."""
    sentences = []
    for (workload, name), rows in found.items():
        for row in rows:
            rate, metrics = row["config"]["rate"], row["metrics"]
            published = FIG_13.get((row["config"]["workload"], rate), {}).get(name)
            here = metrics.get("running_mean")
            if published is None or here is None or here > 0.7 * published:
                continue
            waited = percent(metrics.get("waiting_share", 0.0))
            sentences.append(
                f"{workload} at {rate:g} requests/s: {here:.1f} at once with {name}, published "
                f"{published:.1f}. Requests at once are the rate times the seconds that each "
                f"takes: {here / rate:.1f} here, on an ideal device (requests wait {waited} % of "
                f"the time), {published / rate:.1f} there. While requests wait, memory decides, "
                "and the figures compare."
            )
    return sentences
