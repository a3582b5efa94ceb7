"""Panels of horizontal bars with error bars, each bar with its value written beside it."""

import dataclasses
import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from kvlab.research.chart_style import (
    GRID,
    INK,
    MUTED,
    VALUE_SIZE,
    as_png,
    new_figure,
    spans_decades,
    style,
)
from kvlab.research.tables import significant

_BAR_INCHES = 0.25
_SPACE_BETWEEN_COLOURS = 0.45


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar: its label, colour, value, and the ends of its error bar, in the panel's unit."""

    label: str
    colour: str
    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class BarPanel:
    """Bars under one title, and the unit of their values."""

    title: str
    unit: str
    bars: tuple[Bar, ...]


def is_logarithmic(group: Sequence[BarPanel]) -> bool:
    """Whether panels that share an axis need a logarithmic one."""
    return spans_decades([bar.value for panel in group for bar in panel.bars])


def draw_bars(groups: Sequence[Sequence[BarPanel]], labels: Sequence[str]) -> bytes:
    """Draws groups of panels; the panels of a group share their axis, so lengths compare.

    Args:
        groups: at least one panel in all; a group begins on a line of its own.
        labels: every label, from top to bottom; one that a panel has no bar for is shown there
            as "not measured".

    Returns:
        The chart as PNG.
    """
    groups = [group for group in groups if group]
    columns = min(2, max(map(len, groups)))
    lines = sum(math.ceil(len(group) / columns) for group in groups)
    colours = {bar.label: bar.colour for group in groups for panel in group for bar in panel.bars}
    heights = _heights([label for label in labels if label in colours], colours)
    figure = new_figure(lines * (0.95 + _BAR_INCHES * (max(heights.values()) + 1)))
    grid = figure.subplots(lines, columns, squeeze=False)
    line = 0
    for group in groups:
        places = [*grid[line : line + math.ceil(len(group) / columns)].flat]
        line += len(places) // columns
        for index, axes in enumerate(places):
            if index >= len(group):
                axes.set_axis_off()
                continue
            _draw_panel(axes, group[index], heights, group)
            if index % columns:
                axes.tick_params(labelleft=False)
    return as_png(figure)


def _heights(labels: Sequence[str], colours: dict[str, str]) -> dict[str, float]:
    heights: dict[str, float] = {}
    height, last = 0.0, None
    for label in labels:
        if last is not None:
            height += 1 + (_SPACE_BETWEEN_COLOURS if colours[label] != last else 0)
        heights[label], last = height, colours[label]
    return heights


def _draw_panel(
    axes: Axes, panel: BarPanel, heights: dict[str, float], group: Sequence[BarPanel]
) -> None:
    start = _prepare_axis(axes, group)
    bars = {bar.label: bar for bar in panel.bars}
    for label, height in heights.items():
        bar = bars.get(label)
        if bar is None:
            _write(axes, "not measured", start, height, MUTED)
            continue
        length = max(bar.value - start, 0.0)
        axes.barh(height, length, left=start, height=0.76, color=bar.colour, linewidth=0, zorder=2)
        if bar.low < bar.high:
            axes.plot(
                [bar.low, bar.high],
                [height, height],
                color=INK,
                linewidth=1.1,
                marker="|",
                markersize=5,
                zorder=3,
            )
        _write(axes, significant(bar.value), max(bar.high, start), height, INK)
    axes.set_yticks(list(heights.values()), list(heights))
    axes.set_ylim(max(heights.values()) + 0.65, -0.65)
    style(axes, panel.title, f"{panel.unit} (log scale)" if is_logarithmic(group) else panel.unit)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.spines["left"].set_visible(False)


def _prepare_axis(axes: Axes, group: Sequence[BarPanel]) -> float:
    """Sets the scale with room for the written values; returns where bars start."""
    bars = [bar for panel in group for bar in panel.bars]
    highest = max(bar.high for bar in bars) or 1.0
    if not is_logarithmic(group):
        axes.set_xlim(0, highest * (1.22 if len(group) > 1 else 1.1))
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        return 0.0
    start = min(bar.value for bar in bars if bar.value > 0) / 2.5
    axes.set_xscale("log")
    axes.set_xlim(start, highest * (highest / start) ** 0.24)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    return start


def _write(axes: Axes, text: str, x: float, y: float, colour: str) -> None:
    axes.annotate(
        text,
        (x, y),
        xytext=(5, 0),
        textcoords="offset points",
        va="center_baseline",
        fontsize=VALUE_SIZE,
        color=colour,
        zorder=4,
    )
