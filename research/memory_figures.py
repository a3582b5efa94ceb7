"""Figures of what retention costs and saves: quality against the bytes kept, memory over a text.

Both need rows whose quality was scored on windows (`kvlab.research.forced_scoring`), where the
bytes that sequences take were measured beside the scores.
"""

from kvlab.research.chart_style import COLOURS
from kvlab.research.grouping import Points, Variant, combined_label
from kvlab.research.line_chart import Line, LinePanel, draw_lines
from kvlab.research.tables import language_name, quality_metrics, quality_parts

_MIB = 2**20
_SIZE = "budget"  # the setting that a policy's curve runs along


def quality_by_policy(points: Points) -> tuple[str, bytes] | None:
    """Quality against measured bytes, one curve per policy, its points the budgets.

    Returns:
      The caption and the PNG; None where no row has both.
    """
    panels = []
    for metric in quality_metrics(points):
        measured, language = quality_parts(metric)
        if measured not in ("perplexity", "passkey_accuracy") or (
            measured == "perplexity" and not language
        ):
            continue
        lines = _curves(points, metric)
        if lines:
            is_perplexity = measured == "perplexity"
            title = f"{language_name(language)} text" if is_perplexity else "Passkey retrieval"
            if not is_perplexity and language:
                title += f", {language} tokens"
            panels.append(
                LinePanel(
                    title,
                    "KV memory that a sequence takes at the end of its window, MiB",
                    "perplexity" if is_perplexity else "share of keys found",
                    lines,
                    marked=True,
                )
            )
    if not panels:
        return None
    caption = (
        "One curve per policy of retention, one mark per budget. The dashed line is the full "
        "cache. For perplexity lower is better, for retrieval higher; further left is less memory."
    )
    return caption, draw_lines(panels)


def _curves(points: Points, metric: str) -> tuple[Line, ...]:
    """The variants of each curve: those that differ in the budget alone."""
    curves: dict[str, list[tuple[float, float]]] = {}
    labels: dict[str, str] = {}
    levels: set[str] = set()
    for variant in points.variants:
        quality = points.measured(variant, metric)
        taken = points.measured(variant, "kv_bytes_window")
        if not (quality and taken):
            continue
        key = variant.without(_SIZE)
        curves.setdefault(key, []).append((taken.value / _MIB, quality.value))
        labels.setdefault(key, _without_budget(variant))
        if variant.settings.get("retention") == "all":
            levels.add(key)
    if len(curves) == len(levels):
        return ()  # nothing evicts
    return tuple(
        Line(labels[key], index, tuple(sorted(marks)), index // len(COLOURS), key in levels)
        for index, (key, marks) in enumerate(curves.items())
    )


def _without_budget(variant: Variant) -> str:
    budget = variant.settings.get(_SIZE)
    parts = [part for part in variant.parts if part != f"{_SIZE} {budget}"]
    return " ".join(parts) or variant.label


def memory_over_length(points: Points) -> tuple[str, bytes] | None:
    """The memory that a sequence takes as its text grows, one curve per variant.

    Returns:
      The caption and the PNG; None where no row has it.
    """
    same: dict[tuple[tuple[float, float], ...], list[Variant]] = {}
    for row in points.rows:
        traced = row.get("series", {}).get("kv_bytes_taken")
        if traced:
            curve = tuple((tokens, taken / _MIB) for tokens, taken in traced)
            same.setdefault(curve, []).append(points.variant_of(row))
    if not same:
        return None
    lines = []
    for number, (curve, variants) in enumerate(same.items()):
        label = combined_label(list(dict.fromkeys(variants)))
        dash, colour = divmod(number, len(COLOURS))
        lines.append(Line(label, colour, curve, dash))
    panel = LinePanel(
        "Memory against generated length",
        "tokens of text, prompt and continuation",
        "KV memory taken by a sequence, MiB",
        tuple(lines),
        stepped=True,
        from_zero=True,
    )
    caption = (
        "Pages that a sequence has taken, in MiB over all layers (whole rows where placement is "
        "contiguous), measured step by step from the end of its prompt on. A policy that evicts in "
        "decode is level at its budget; one that evicts after prefill alone starts low and grows. "
        "Variants that take the same share a curve."
    )
    return caption, draw_lines([panel])
