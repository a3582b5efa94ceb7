"""What a report shows of pages shared by samples and beams, beside the published figures."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvlab.research.line_chart import Line, LinePanel, draw_lines
from kvlab.research.presentation import Picture, Presentation, shared_settings
from kvlab.research.rows import Row
from kvlab.research.tables import Table, percent

FIG_15 = {
    "parallel": {2: 6.09, 4: 8.53, 6: 9.79},
    "beam": {2: 37.56, 4: 53.13, 6: 55.16},
}
"""Percent of pages saved, OPT-13B on Alpaca: PagedAttention (arXiv 2309.06180), Fig. 15."""

_NAMES = {"parallel": "parallel samples", "beam": "beams"}
_TERMS = {
    "parallel samples": "continuations of one prompt, each drawn on its own: they share the full "
    "pages of the prompt.",
    "beams": "the likeliest continuations of a prompt: they share all that they have in common.",
    "pages saved": "1 - pages in use over the pages that the sequences would take without sharing, "
    "over all steps.",
}
_READING = (
    "Every prompt is continued by the model itself, one prompt at a time, and pages are counted "
    "after each step. Published: OPT-13B on instructions of the Alpaca set (mean 19 tokens in, 58 "
    "out), pages of 16. Here the prompts are pieces of a text, cut to lengths drawn with those "
    "means, and all samples of a prompt are as long as each other: none ends early."
)


def label(config: Mapping[str, Any]) -> str:
    """A row's config in a few words."""
    return f"{config['count']} {_NAMES[config['method']]}"


def present_sharing(rows: Sequence[Row]) -> Presentation:
    """What a report shows of the rows of `sharing`."""
    done = [row for row in rows if row["status"] == "ok"]
    cells = []
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in done:
        config, metrics = row["config"], row["metrics"]
        published = FIG_15[config["method"]].get(config["count"])
        low, high = percent(metrics["saved_least"]), percent(metrics["saved_most"])
        cells.append(
            {
                "sequences": label(config),
                "pages saved %": percent(metrics["saved"]),
                "of single prompts %": f"{low} to {high}",
            }
            | ({} if published is None else {"published %": f"{published:.1f}"})
        )
        curves.setdefault(config["method"], []).append((config["count"], 100 * metrics["saved"]))
    columns = ("sequences", "pages saved %", "of single prompts %", "published %")
    tables = [Table("Pages saved by sharing", columns, tuple(cells))] if cells else []
    lines = []
    for number, (method, points) in enumerate(curves.items()):
        lines.append(Line(f"{_NAMES[method]}, measured", number, tuple(sorted(points))))
        known = tuple((float(count), saved) for count, saved in FIG_15[method].items())
        lines.append(Line(f"{_NAMES[method]}, published", number, known, dash=2))
    title = "Pages saved by sharing"
    axes = title, "sequences of a prompt", "percent of pages"
    pictures = []
    if lines:
        panel = LinePanel(*axes, tuple(lines), marked=True, from_zero=True)
        caption = (
            "Higher is better. Dotted: Fig. 15 of the PagedAttention paper, on another model, with "
            "other prompts and outputs that end by themselves."
        )
        pictures = [Picture("sharing.png", title, caption, draw_lines([panel]))]
    configs = [row["config"] for row in rows]
    return Presentation(
        reading=_READING,
        terms=_TERMS,
        findings=_findings(done),
        tables=tables,
        brief_tables=tables,
        pictures=pictures,
        labels=[label(config) for config in configs],
        held_fixed=shared_settings(configs),
    )


def _findings(rows: Sequence[Row]) -> list[str]:
    found = []
    for method, name in _NAMES.items():
        parts = [
            f"{row['config']['count']}: {percent(row['metrics']['saved'])} %"
            + (f" (published {known:.1f} %)" if known is not None else "")
            for row in rows
            if row["config"]["method"] == method
            for known in [FIG_15[method].get(row["config"]["count"])]
        ]
        if parts:
            found.append(f"Pages saved by {name}, by how many there are: {', '.join(parts)}.")
    return found
