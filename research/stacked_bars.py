"""Horizontal bars of parts that add up to a whole."""

import dataclasses
import textwrap
from collections.abc import Sequence

from matplotlib.patches import Patch

from kvlab.research.chart_style import (
    COLOURS,
    GRID,
    INK,
    VALUE_SIZE,
    as_png,
    new_figure,
    style,
)

_BAR_INCHES = 0.34
_TITLE_LETTERS = 72  # that fill the width


@dataclasses.dataclass(frozen=True)
class StackedBar:
    """One bar.

    Attributes:
      label: beside it.
      parts: in percent, in the order of the legend.
      faint: drawn lighter: a published bar beside a measured one.
    """

    label: str
    parts: tuple[float, ...]
    faint: bool = False


def draw_stacked_bars(title: str, parts: Sequence[str], bars: Sequence[StackedBar]) -> bytes:
    """Draws bars below each other, their parts side by side.

    Args:
      title: of the chart.
      parts: names of the parts.
      bars: from top to bottom.

    Returns:
      The chart as PNG.
    """
    figure = new_figure(1.4 + _BAR_INCHES * len(bars))
    axes = figure.subplots()
    for height, bar in enumerate(bars):
        left = 0.0
        for index, value in enumerate(bar.parts):
            alpha = 0.45 if bar.faint else 1.0
            axes.barh(height, value, left=left, height=0.72, color=COLOURS[index], alpha=alpha)
            if value >= 4:
                axes.annotate(
                    f"{value:.1f}",
                    (left + value / 2, height),
                    ha="center",
                    va="center_baseline",
                    fontsize=VALUE_SIZE,
                    color=INK if bar.faint or index in (1, 4) else "white",
                )
            left += value
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    style(axes, textwrap.fill(title, _TITLE_LETTERS), "percent of the memory for keys and values")
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    figure.legend(
        handles=[Patch(color=COLOURS[index], label=name) for index, name in enumerate(parts)],
        loc="outside lower center",
        ncols=len(parts),
        fontsize=8.5,
        frameon=False,
    )
    return as_png(figure)
