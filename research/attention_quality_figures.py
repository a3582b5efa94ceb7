"""The figures of `attention_quality`, in the shape of the GQA paper's (arXiv 2305.13245).

Axes: K KV heads.
"""

import dataclasses
import math
from collections.abc import Sequence

from kvlab.research.attention_quality_scores import Scores, Variant
from kvlab.research.attention_quality_study import (
    CONTROL,
    CONVERTED,
    SPEED,
    TRAINED,
    UPTRAINED,
    kind_name,
    shown,
)
from kvlab.research.intervals import Estimate
from kvlab.research.line_chart import Line, LinePanel, draw_lines
from kvlab.research.presentation import Picture
from kvlab.research.rows import Row

_BASE_COLOUR = 6
_INTERVALS = (
    "Bars are 95 % intervals of means where several models of a kind were trained; the findings "
    "compare what was made of the same model, and may be clear where bars overlap."
)


def pictures(scores: Scores, costs: Sequence[Row]) -> list[Picture]:
    """Every figure that the rows have numbers for.

    Args:
      scores: of the rows on quality.
      costs: the finished rows on memory and speed.
    """
    drawn = [_against_bytes(scores), _ways(scores), _against_share(scores), _time(costs)]
    return [picture for picture in drawn if picture is not None]


def _line(
    label: str,
    number: int,
    points: Sequence[tuple[float, Estimate | None]],
    *,
    perplexity: bool = False,
) -> Line | None:
    """A curve of losses, or of their perplexities; None where no point is known."""
    known = [(x, found) for x, found in sorted(points, key=lambda one: one[0]) if found is not None]
    if not known:
        return None
    show = math.exp if perplexity else float
    return Line(
        label,
        number,
        tuple((x, show(found.mean)) for x, found in known),
        spans=tuple((show(found.span[0]), show(found.span[1])) for _, found in known),
    )


def _against_bytes(scores: Scores) -> Picture | None:
    """Perplexity against KV bytes a token: Table 1's trade, a curve of each kind."""
    way = scores.poolings[0] if scores.poolings else None
    share = scores.common_share
    kinds = [(TRAINED, None, None), (UPTRAINED, way, share), (CONTROL, None, share)]
    kinds.append((CONVERTED, way, None))
    lines = []
    for number, (kind, pooling, trained) in enumerate(kinds):
        of_kind = [
            one
            for one in scores.variants
            if (one.kind, one.pooling, one.share) == (kind, pooling, trained)
        ]
        points = [(_kv_bytes(scores, one), scores.mean(one)) for one in of_kind]
        line = _line(kind_name(kind, pooling, trained), number, points, perplexity=True)
        if line is not None:
            lines.append(line)
    if not lines:
        return None
    axes = "KV bytes a token", "held-out perplexity"
    closer = [line for line in lines if not line.label.startswith(CONVERTED)]
    panels = [LinePanel("Every kind", *axes, tuple(lines), marked=True, doubling=True)]
    if closer and len(closer) < len(lines):
        title = "Without what was only converted"
        panels.append(LinePanel(title, *axes, tuple(closer), marked=True, doubling=True))
    caption = (
        "Lower is better, further left is less memory; K doubles from mark to mark. "
        f"{_INTERVALS} Compare Table 1 of the GQA paper."
    )
    return Picture(
        "perplexity_against_bytes.png",
        "Held-out perplexity against KV bytes a token",
        caption,
        draw_lines(panels),
    )


def _kv_bytes(scores: Scores, variant: Variant) -> float:
    row = next(iter(scores.rows[variant].values()))
    return row["metrics"]["kv_bytes_per_token"]


def _ways(scores: Scores) -> Picture | None:
    """Losses by the way that heads were pooled, before and after uptraining: Fig. 4."""
    share = scores.common_share
    panels = []
    stages: list[tuple[str, str, Variant]] = [("Only converted", CONVERTED, scores.mha)]
    if share is not None:
        control = Variant(CONTROL, scores.num_heads, None, share)
        stages.append((f"Uptrained by {shown(share)}", UPTRAINED, control))
    for title, kind, source in stages:
        lines = [
            _line(
                f"{way} pooling",
                number,
                [
                    (heads, scores.mean(Variant(kind, heads, way, source.share)))
                    for heads in scores.fewer
                ],
            )
            for number, way in enumerate(scores.poolings)
        ]
        known = [line for line in lines if line is not None]
        base = scores.mean(source)
        if known and base is not None:
            label = f"{scores.num_heads} KV heads, not converted"
            place = min(scores.fewer), base.mean
            known.append(Line(label, _BASE_COLOUR, (place,), level=True))
        if known:
            axes = title, "KV heads", "held-out loss, nats a token"
            panels.append(LinePanel(*axes, tuple(known), marked=True, doubling=True))
    if not panels:
        return None
    caption = (
        "Lower is better; the vertical axes do not begin at 0. Dashed: the source itself, trained "
        f"on for as long where conversions are uptrained. {_INTERVALS} Compare Fig. 4 of the "
        "GQA paper: T5-Large, one KV head, uptrained by 5 %."
    )
    return Picture("pooling.png", "Ways to pool heads", caption, draw_lines(panels))


def _against_share(scores: Scores) -> Picture | None:
    """Losses by how long was uptrained, a curve of each K: Fig. 5."""
    if not scores.poolings:
        return None
    way = scores.poolings[0]
    shares = scores.shares(way)
    lines = []
    for number, heads in enumerate([scores.num_heads, *scores.fewer]):
        is_source = heads == scores.num_heads
        kind, pooling = (CONTROL, None) if is_source else (UPTRAINED, way)
        start = scores.mha if is_source else Variant(CONVERTED, heads, way)
        points = [(0.0, scores.mean(start))]
        points += [
            (100 * share, scores.mean(Variant(kind, heads, pooling, share))) for share in shares
        ]
        line = _line(f"{heads} KV heads" if heads > 1 else "1 KV head", number, points)
        if line is not None and len(line.points) > 1:
            lines.append(line)
    if not lines:
        return None
    title = f"{way.capitalize()} pooling, then uptraining"
    axes = title, "uptraining, % of the steps of training", "held-out loss, nats a token"
    caption = (
        f"Lower is better. {scores.num_heads} KV heads are the model itself, not converted, "
        f"trained on for as long. {_INTERVALS} Compare Fig. 5 of the GQA paper."
    )
    panels = [LinePanel(*axes, tuple(lines), marked=True)]
    later = [
        dataclasses.replace(line, points=line.points[1:], spans=line.spans[1:])
        for line in lines
        if line.points[0][0] == 0.0
    ]
    if later and len(shares) > 1:
        panels.append(
            LinePanel("The same from the first share on", *axes[1:], tuple(later), marked=True)
        )
    return Picture("uptraining.png", "Loss against uptraining", caption, draw_lines(panels))


def _time(costs: Sequence[Row]) -> Picture | None:
    """Milliseconds of decode a token by K, a panel of each batch: Fig. 6."""
    panels = []
    speed = [row for row in costs if row["config"]["kind"] == SPEED]
    for batch in sorted({row["config"]["batch"] for row in speed}):
        points = []
        for row in speed:
            if row["config"]["batch"] == batch:
                seconds = [1e3 * one / batch for one in row["repeats"]["tpot_s"]]
                middle = 1e3 * row["metrics"]["tpot_s"] / batch
                points.append((row["config"]["num_kv_heads"], middle, min(seconds), max(seconds)))
        points.sort()
        line = Line(
            "median, and the range of repeats",
            0,
            tuple((heads, middle) for heads, middle, _, _ in points),
            spans=tuple((low, high) for _, _, low, high in points),
        )
        axes = f"Batch {batch}", "KV heads", "decode, ms a token"
        panels.append(LinePanel(*axes, (line,), marked=True, from_zero=True, doubling=True))
    if not panels:
        return None
    caption = (
        "Lower is better. The time of a decode step of all sequences, over their number. Compare "
        "Fig. 6 of the GQA paper: from 1 to 8 KV heads little is lost, 64 take 2 s a sample."
    )
    return Picture("decode_time.png", "Decode time against KV heads", caption, draw_lines(panels))
