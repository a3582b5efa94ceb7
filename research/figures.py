"""The figures of a sweep: speed, memory, quality against cost, and latency, by variant.

Colour is the attention variant; a shape is the placement, or what varies in its stead.
"""

from collections.abc import Sequence

from kvlab.research.bar_chart import Bar, BarPanel, draw_bars, is_logarithmic
from kvlab.research.chart_style import COLOURS
from kvlab.research.grouping import Points, Variant, Workload, attention_rank, placement_rank
from kvlab.research.memory_figures import memory_over_length, quality_by_policy
from kvlab.research.presentation import Picture
from kvlab.research.scatter_chart import Mark, ScatterPanel, draw_scatter
from kvlab.research.tables import (
    divergence,
    language_name,
    quality_metrics,
    quality_parts,
    significant,
)

_BYTES_PER_KIB = 1024
_LEAST_KL_NATS = 1e-8  # below it a divergence is rounding
_SHAPE_AXES = ("placement", "storage", "retention")
_FIRST_COLOURS = ("mha", "gqa", "mqa")


def draw_figures(points: Points) -> list[Picture]:
    """Draws every figure that the points have the metrics for.

    Args:
        points: the points of one or more runs; any may be missing.

    Returns:
        The figures, in the order to show them.
    """
    drawn = [
        _decode_speed(points),
        _bytes_per_token(points),
        _quality_against_cost(points, "perplexity"),
        _quality_against_cost(points, "kl_vs_oracle"),
        _picture(
            "quality_by_policy.png", "Quality by policy of retention", quality_by_policy(points)
        ),
        _picture("memory_over_length.png", "Memory over a text", memory_over_length(points)),
        _latency(points),
    ]
    return [picture for picture in drawn if picture is not None]


def _picture(name: str, title: str, drawn: tuple[str, bytes] | None) -> Picture | None:
    return None if drawn is None else Picture(name, title, *drawn)


def attention_colours(points: Points) -> dict[str, str]:
    """Gives each attention variant its colour; mha, gqa and mqa have the same one everywhere."""
    others = {_attention(variant) for variant in points.variants} - {*_FIRST_COLOURS}
    names = [*_FIRST_COLOURS, *sorted(others, key=attention_rank)]
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}


def _decode_speed(points: Points) -> Picture | None:
    panels = _panels(points, "decode_tokens_per_s", "Decode speed", "tokens per second")
    if not panels:
        return None
    return Picture(
        "decode_speed.png",
        "Decode speed",
        "New tokens per second after the prompt, all sequences of the batch together. Longer is "
        f"better. {_how_to_read([panels])}",
        draw_bars([panels], _labels(points)),
    )


def _bytes_per_token(points: Points) -> Picture | None:
    bars = _bars(points, "kv_bytes_per_token", None, 1 / _BYTES_PER_KIB)
    if not bars:
        return None
    panel = BarPanel("KV cache per token", "KiB per token (1 KiB = 1,024 bytes)", bars)
    nothing = [bar for bar in bars if bar.value == 0]
    return Picture(
        "kv_bytes_per_token.png",
        "KV cache per token",
        "Bytes of every array of the cache, over the tokens that it can hold. Shorter is better."
        + (" A variant at 0 stores nothing and pays for it in speed." if nothing else ""),
        draw_bars([[panel]], _labels(points)),
    )


def _latency(points: Points) -> Picture | None:
    groups = [
        _panels(points, "ttft_s", "TTFT", "milliseconds", 1e3),
        _panels(points, "tpot_s", "TPOT", "milliseconds per token", 1e3),
    ]
    if not any(groups):
        return None
    return Picture(
        "latency.png",
        "Time to first token (TTFT) and time per output token (TPOT)",
        "How long a user waits for the first token, which is the prefill of the prompt, and then "
        f"for each further one. Shorter is better. {_how_to_read(groups)}",
        draw_bars(groups, _labels(points)),
    )


def _quality_against_cost(points: Points, base: str) -> Picture | None:
    is_kl = base == "kl_vs_oracle"
    panels = []
    for metric in quality_metrics(points):
        measured, language = quality_parts(metric)
        marks = _marks(points, metric) if measured == base else ()
        if marks:
            panels.append(
                ScatterPanel(
                    f"{language_name(language)} text" if language else "All texts",
                    "KV cache, KiB per token",
                    "KL from the oracle, nats per token" if is_kl else "perplexity",
                    marks,
                    divergence if is_kl else significant,
                    _LEAST_KL_NATS if is_kl else 0.0,
                )
            )
    if not panels:
        return None
    axis = _shape_axis(points)
    kinds = list(dict.fromkeys(_setting(v, axis) for v in points.variants))
    if axis == "placement":
        kinds.sort(key=placement_rank)
    title = "KL divergence" if is_kl else "Perplexity"
    meaning = (
        "How far a variant's predictions are from those of the unmodified model without a cache; "
        "at the bottom they are the same up to rounding."
        if is_kl
        else "How many tokens the model hesitates between at each position of the text, on average."
    )
    return Picture(
        f"quality_{'kl' if is_kl else 'perplexity'}.png",
        f"{title} against memory",
        f"{meaning} One mark per variant; lower is better output and further left is less memory, "
        "so the best corner is at the bottom left. Marks side by side share one place.",
        draw_scatter(panels, attention_colours(points), kinds),
    )


def _marks(points: Points, metric: str) -> tuple[Mark, ...]:
    axis = _shape_axis(points)
    marks = []
    for variant in points.variants:
        quality = points.measured(variant, metric)
        cost = points.measured(variant, "kv_bytes_per_token")
        if quality and cost:
            kib = cost.value / _BYTES_PER_KIB
            marks.append(
                Mark(variant, _attention(variant), _setting(variant, axis), kib, quality.value)
            )
    return tuple(marks)


def _panels(
    points: Points, metric: str, title: str, unit: str, scale: float = 1.0
) -> list[BarPanel]:
    panels = []
    for workload in points.workloads:
        bars = _bars(points, metric, workload, scale)
        if bars:
            full_title = f"{title}, {workload.label}" if workload.label else title
            panels.append(BarPanel(full_title, unit, bars))
    return panels


def _bars(points: Points, metric: str, workload: Workload | None, scale: float) -> tuple[Bar, ...]:
    colours = attention_colours(points)
    return tuple(
        Bar(
            variant.label,
            colours[_attention(variant)],
            found.value * scale,
            found.low * scale,
            found.high * scale,
        )
        for variant in points.variants
        if (found := points.measured(variant, metric, workload))
    )


def _how_to_read(groups: Sequence[Sequence[BarPanel]]) -> str:
    sentences = []
    if any(bar.low < bar.high for group in groups for panel in group for bar in panel.bars):
        sentences.append("A bar is the median of the repeats, its thin line their full range.")
    if any(is_logarithmic(group) for group in groups):
        sentences.append(
            "On a log scale equal steps are equal ratios: compare the numbers, not the lengths."
        )
    return " ".join(sentences)


def _labels(points: Points) -> list[str]:
    return [variant.label for variant in points.variants]


def _attention(variant: Variant) -> str:
    return _setting(variant, "attention")


def _shape_axis(points: Points) -> str:
    """The setting that shapes stand for: the placement, or else the first one that varies."""
    return next((name for name in _SHAPE_AXES if name in points.varying), _SHAPE_AXES[0])


def _setting(variant: Variant, name: str) -> str:
    return str(variant.settings.get(name, ""))
