"""Line panels with one legend: curves over a common axis, each named once."""

import dataclasses
from collections.abc import Sequence

from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import ScaledTranslation

from kvlab.research.chart_style import (
    COLOURS,
    GRID,
    MARKERS,
    MUTED,
    as_png,
    new_figure,
    spans_decades,
    style,
)

_PANEL_INCHES = 3.6
_LEGEND_LINE_INCHES = 0.19
_LEGEND_COLUMNS = 2
_FEW = 9
_LONG_LABEL = 55  # characters: two of them fill the width
_BARS_APART_INCHES = 0.07
_DASHES = ("-", "--", ":", "-.")


@dataclasses.dataclass(frozen=True)
class Line:
    """One curve; where it has one point, that point alone.

    Attributes:
      label: its name in the legend.
      colour: index of its colour and mark, any number.
      points: (x, y), in the order to join them.
      dash: index of its kind of line, any number.
      level: only drawn across the panel, at its first y: a baseline.
      spans: (lowest, highest) y of each point; empty, or where both are alike, none is drawn.
    """

    label: str
    colour: int
    points: tuple[tuple[float, float], ...]
    dash: int = 0
    level: bool = False
    spans: tuple[tuple[float, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class LinePanel:
    """Curves on one pair of axes, labels with their units."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    marked: bool = False  # every point has a mark
    stepped: bool = False  # a value holds until the next
    from_zero: bool = False  # the vertical axis begins at 0
    doubling: bool = False  # the horizontal axis counts doublings


def draw_lines(panels: Sequence[LinePanel]) -> bytes:
    """Draws panels below each other, with one legend under them.

    Args:
      panels: at least one, each with a line.

    Returns:
      The chart as PNG.
    """
    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    columns = _LEGEND_COLUMNS if max(map(len, labels)) <= _LONG_LABEL else 1
    rows = -(-len(labels) // columns)
    figure = new_figure(_PANEL_INCHES * len(panels) + _LEGEND_LINE_INCHES * rows + 0.3)
    handles: dict[str, Line2D] = {}
    for axes, panel in zip(
        figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True
    ):
        style(axes, panel.title, panel.x_label)
        axes.set_ylabel(panel.y_label, fontsize=9, color=MUTED)
        axes.grid(color=GRID, linewidth=0.8)
        heights = [y for line in panel.lines for _, y in line.points]
        heights += [end for line in panel.lines for span in line.spans for end in span]
        if panel.from_zero:
            axes.set_ylim(bottom=0.0, top=1.08 * max(heights) or 1.0)
        elif spans_decades(heights):
            axes.set_yscale("log")
            axes.set_ylabel(f"{panel.y_label} (log scale)", fontsize=9, color=MUTED)
        if panel.doubling:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        with_spans = [line for line in panel.lines if line.spans]
        for line in panel.lines:
            colour = COLOURS[line.colour % len(COLOURS)]
            xs, ys = zip(*line.points, strict=True)
            if line.level:
                level = axes.axhline(ys[0], color=colour, linestyle="--", linewidth=1.2)
                handles.setdefault(line.label, level)
                continue
            (drawn,) = axes.plot(
                xs,
                ys,
                color=colour,
                linestyle=_DASHES[line.dash % len(_DASHES)],
                linewidth=1.8,
                marker=MARKERS[line.colour % len(MARKERS)] if panel.marked else None,
                markersize=6,
                drawstyle="steps-post" if panel.stepped else "default",
            )
            handles.setdefault(line.label, drawn)
            if not line.spans:
                continue
            # Bars of one x stand beside each other.
            place = with_spans.index(line) - (len(with_spans) - 1) / 2
            aside = ScaledTranslation(place * _BARS_APART_INCHES, 0, figure.dpi_scale_trans)
            for x, (low, high) in zip(xs, line.spans, strict=True):
                if low < high:
                    (bar,) = axes.plot([x, x], [low, high], color=colour, linewidth=1.1, marker="_")
                    bar.set_transform(axes.transData + aside)
        counted = sorted({x for line in panel.lines for x, _ in line.points})
        few = panel.marked and not panel.doubling and len(counted) <= _FEW
        if few and all(float(x).is_integer() for x in counted):
            axes.set_xticks(counted)  # there is nothing between whole numbers of something
    figure.legend(
        handles=[handles[label] for label in labels],
        labels=labels,
        loc="outside lower center",
        ncols=columns,
        fontsize=8.5,
        frameon=False,
    )
    return as_png(figure)
