"""Rooflines with measured and predicted points, and measured against predicted times.

Source: Williams, Waterman and Patterson, "Roofline" (CACM 52(4), 2009).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvlab.research.chart_style import (
    COLOURS,
    GRID,
    INK,
    MARKERS,
    MUTED,
    VALUE_SIZE,
    as_png,
    new_figure,
    style,
)
from kvlab.research.tables import significant

_PANEL_INCHES = 3.9
_AGAINST_INCHES = 4.6
_MARKER_POINTS = 7.0
_NEAR_DECADES = 0.22  # notes as near as this are written below each other
_OUTLINE = withStroke(linewidth=2.5, foreground="white")


@dataclasses.dataclass(frozen=True)
class RooflinePoint:
    """One phase at one workload.

    Attributes:
      variant: gives the colour.
      note: written below all points that share it.
      intensity: operations a byte.
      measured: operations a second.
      predicted: operations a second.
    """

    variant: str
    note: str
    intensity: float
    measured: float
    predicted: float


@dataclasses.dataclass(frozen=True)
class RooflinePanel:
    """A machine's roofline and points under it.

    Attributes:
      title: what the panel is of.
      bandwidth: bytes a second.
      peak: operations a second.
      points: at least one.
    """

    title: str
    bandwidth: float
    peak: float
    points: tuple[RooflinePoint, ...]


@dataclasses.dataclass(frozen=True)
class TimePair:
    """A predicted and a measured time, in seconds; kind gives the shape, variant the colour."""

    variant: str
    kind: str
    predicted_s: float
    measured_s: float


def draw_rooflines(panels: Sequence[RooflinePanel]) -> bytes:
    """Draws panels below each other, log-log, with one legend.

    Args:
      panels: at least one.

    Returns:
      The chart as PNG.
    """
    figure = new_figure(_PANEL_INCHES * len(panels) + 0.4)
    variants = list(dict.fromkeys(one.variant for panel in panels for one in panel.points))
    rows = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, panel in zip(rows, panels, strict=True):
        _draw_roof(axes, panel)
        for one in panel.points:
            index = variants.index(one.variant)
            look = _look(index)
            axes.plot(
                [one.intensity] * 2,
                [one.measured, one.predicted],
                color=look["color"],
                linewidth=0.7,
                alpha=0.5,
                zorder=2,
            )
            axes.plot([one.intensity], [one.predicted], markerfacecolor="white", zorder=3, **look)
            axes.plot([one.intensity], [one.measured], zorder=4, **look)
        _write_notes(axes, panel.points)
    handles = [Line2D([], [], label=one, **_look(index)) for index, one in enumerate(variants)]
    plain: dict[str, Any] = {
        "marker": "o",
        "linestyle": "none",
        "markersize": _MARKER_POINTS,
        "color": MUTED,
    }
    handles += [
        Line2D([], [], label="measured", **plain),
        Line2D([], [], label="predicted", markerfacecolor="white", **plain),
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 5),
        fontsize=8.5,
        frameon=False,
    )
    return as_png(figure)


def _look(index: int) -> dict[str, Any]:
    return {
        "marker": MARKERS[index % len(MARKERS)],
        "color": COLOURS[index % len(COLOURS)],
        "markersize": _MARKER_POINTS,
        "linestyle": "none",
    }


def _draw_roof(axes: Axes, panel: RooflinePanel) -> None:
    ridge = panel.peak / panel.bandwidth
    places = [ridge, *(one.intensity for one in panel.points)]
    left, right = min(places) / 4, max(places) * 5
    heights = [h for one in panel.points for h in (one.measured, one.predicted)]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(min([*heights, left * panel.bandwidth]) / 4, panel.peak * 4)
    axes.plot(
        [left, ridge, right],
        [left * panel.bandwidth, panel.peak, panel.peak],
        color=INK,
        linewidth=1.5,
        zorder=1,
    )
    axes.axvline(ridge, color=MUTED, linewidth=0.8, linestyle=":", zorder=1)
    divisor, unit = (1e12, "TFLOP/s") if panel.peak >= 1e12 else (1e9, "GFLOP/s")
    _write(axes, f"peak {significant(panel.peak / divisor)} {unit}", right, panel.peak, "right")
    _write(
        axes,
        f"ridge {significant(ridge)} FLOP/byte\n{significant(panel.bandwidth / 1e9)} GB/s",
        ridge,
        panel.peak,
        "right",
    )
    style(axes, panel.title, "arithmetic intensity, FLOP/byte (log scale)")
    axes.set_ylabel(f"{unit} (log scale)", fontsize=9, color=MUTED)
    _set_ticks(axes.xaxis, right / left, 1.0)
    _set_ticks(axes.yaxis, axes.get_ylim()[1] / axes.get_ylim()[0], divisor)
    axes.grid(color=GRID, linewidth=0.8)


def _set_ticks(axis: Axis, reach: float, divisor: float) -> None:
    """Writes powers of ten, and on a short axis 2 and 5 of each."""
    if reach < 10**2.5:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / divisor:,g}"))
    axis.set_minor_formatter(NullFormatter())


def _write(axes: Axes, text: str, x: float, y: float, side: str) -> None:
    axes.annotate(
        text,
        (x, y),
        xytext=(-4, 5),
        textcoords="offset points",
        ha=side,
        va="bottom",
        fontsize=VALUE_SIZE,
        color=INK,
        path_effects=[_OUTLINE],
        zorder=5,
    )


def _write_notes(axes: Axes, points: Sequence[RooflinePoint]) -> None:
    """Writes each note below its points, and lower where the one before is near."""
    places = []
    for note in dict.fromkeys(one.note for one in points if one.note):
        some = [math.log10(one.intensity) for one in points if one.note == note]
        middle = math.fsum(some) / len(some)
        near = [
            min(one.measured, one.predicted)
            for one in points
            if one.note == note or abs(math.log10(one.intensity) - middle) < _NEAR_DECADES
        ]
        places.append((middle, min(near), note))
    level, last = 0, -math.inf
    for middle, lowest, note in sorted(places):
        level = level + 1 if middle - last < _NEAR_DECADES else 0
        last = middle
        axes.annotate(
            note,
            (10**middle, lowest),
            xytext=(0, -9 - 11 * level),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=VALUE_SIZE,
            color=INK,
            path_effects=[_OUTLINE],
            zorder=5,
        )


def draw_against(pairs: Sequence[TimePair]) -> bytes:
    """Draws measured against predicted times, log-log, with lines of equal ratio.

    Args:
      pairs: at least one.

    Returns:
      The chart as PNG.
    """
    figure = new_figure(_AGAINST_INCHES)
    axes = figure.subplots()
    variants = list(dict.fromkeys(one.variant for one in pairs))
    kinds = list(dict.fromkeys(one.kind for one in pairs))
    low = 1e3 * min(min(one.predicted_s, one.measured_s) for one in pairs) / 1.6
    high = 1e3 * max(max(one.predicted_s, one.measured_s) for one in pairs) * 1.6
    axes.set_xscale("log")
    axes.set_yscale("log")
    for ratio, dash in ((1, "-"), (2, "--"), (4, ":")):
        label = "as predicted" if ratio == 1 else f"{ratio} times as long"
        axes.plot(
            [low, high],
            [low * ratio, high * ratio],
            color=MUTED,
            linewidth=0.9,
            linestyle=dash,
            label=label,
            zorder=1,
        )
    for one in pairs:
        axes.plot(
            [1e3 * one.predicted_s],
            [1e3 * one.measured_s],
            marker=MARKERS[1 + kinds.index(one.kind) % (len(MARKERS) - 1)],
            color=COLOURS[variants.index(one.variant) % len(COLOURS)],
            markersize=_MARKER_POINTS,
            markeredgecolor="white",
            markeredgewidth=0.6,
            linestyle="none",
            zorder=3,
        )
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    style(axes, "Measured against predicted", "predicted by the limits, ms (log scale)")
    axes.set_ylabel("measured, ms (log scale)", fontsize=9, color=MUTED)
    for axis in (axes.xaxis, axes.yaxis):
        _set_ticks(axis, high / low, 1.0)
    axes.grid(color=GRID, linewidth=0.8)
    swatches = [
        Line2D([], [], linewidth=6, color=COLOURS[i % len(COLOURS)], label=one)
        for i, one in enumerate(variants)
    ]
    swatches += [
        Line2D([], [], marker=MARKERS[1 + i % 6], linestyle="none", color=MUTED, label=one)
        for i, one in enumerate(kinds)
    ]
    lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    figure.legend(
        handles=[*swatches, *lines],
        loc="outside lower center",
        ncols=min(len(swatches) + 3, 4),
        fontsize=8.5,
        frameon=False,
    )
    return as_png(figure)
