"""Scatter panels whose marks are named in place; marks at one place stand side by side."""

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation, Text
from matplotlib.ticker import FuncFormatter, NullFormatter
from matplotlib.transforms import Bbox, ScaledTranslation

from kvlab.research.chart_style import (
    GRID,
    INK,
    MARKERS,
    MUTED,
    VALUE_SIZE,
    as_png,
    new_figure,
    spans_decades,
    style,
)
from kvlab.research.grouping import Variant, combined_label

_HEIGHT_INCHES = 4.4
_MOST_MARKS_BESIDE = 10
_MARKER_POINTS = 8.5
_WIDEST_CLUSTER_POINTS = 50.0
_NAME_COLUMNS = 22
# Where a name may stand, best first: the direction from the marks (right, up).
_SIDES = ((0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1))
_GAPS_POINTS = (3.5, 22.0, 40.0)  # beyond the first, a line leads to the name


@dataclasses.dataclass(frozen=True)
class Mark:
    """One mark: the variant it stands for, what gives it its colour and shape, and its place."""

    variant: Variant
    group: str
    kind: str
    x: float
    y: float


@dataclasses.dataclass(frozen=True)
class ScatterPanel:
    """Marks on one pair of axes.

    Attributes:
        title: what the panel is of.
        x_label: horizontal axis, with its unit.
        y_label: vertical axis, with its unit.
        marks: at least one.
        show: writes a vertical value.
        floor: vertical values below it are drawn at it.
    """

    title: str
    x_label: str
    y_label: str
    marks: tuple[Mark, ...]
    show: Callable[[float], str]
    floor: float = -np.inf

    def height(self, mark: Mark) -> float:
        """Where a mark is drawn."""
        return max(mark.y, self.floor)


def draw_scatter(
    panels: Sequence[ScatterPanel], colours: Mapping[str, str], kinds: Sequence[str]
) -> bytes:
    """Draws panels beside each other, or below where there is much to name, with one legend.

    Args:
        panels: at least one.
        colours: the colour of each group.
        kinds: every kind, in the order in which they are given their shapes.

    Returns:
        The chart as PNG.
    """
    markers = {kind: MARKERS[index % len(MARKERS)] for index, kind in enumerate(kinds)}
    stacked = any(len(panel.marks) > _MOST_MARKS_BESIDE for panel in panels)
    lines, columns = (len(panels), 1) if stacked else (1, len(panels))
    figure = new_figure(_HEIGHT_INCHES * lines)
    row = [*figure.subplots(lines, columns, squeeze=False).flat]
    for axes, panel in zip(row, panels, strict=True):
        _prepare_axes(axes, panel)
    _draw_legend(figure, [mark for panel in panels for mark in panel.marks], colours, markers)
    # Which marks share a place depends on the layout, so it is settled before they are drawn.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes, panel in zip(row, panels, strict=True):
        _draw_marks(figure, axes, panel, colours, markers)
    return as_png(figure)


def _prepare_axes(axes: Axes, panel: ScatterPanel) -> None:
    xs = [mark.x for mark in panel.marks]
    ys = [panel.height(mark) for mark in panel.marks]
    x_scale = y_scale = ""
    if spans_decades(xs):
        # Linear up to the least positive value: a variant without a cache has its place at 0.
        least = min(x for x in xs if x > 0)
        axes.set_xscale("symlog", linthresh=least, linscale=0.6)
        axes.set_xlim(-0.5 * least if min(xs) <= 0 else least / 2, max(xs) * 3)
        x_scale = " (log scale)"
    else:
        span = max(xs) or 1.0
        axes.set_xlim(-0.34 * span, 1.42 * span)
        axes.locator_params(axis="x", nbins=6)
    if spans_decades(ys) and min(ys) > 0:
        reach = max(ys) / min(ys)
        axes.set_yscale("log")
        axes.set_ylim(min(ys) / reach**0.2, max(ys) * reach**0.22)
        y_scale = " (log scale)"
    else:
        span = max(ys) - min(ys) or abs(max(ys)) or 1.0
        axes.set_ylim(min(ys) - 0.25 * span, max(ys) + 0.3 * span)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: "" if x < 0 else f"{x:,g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _tick(y, panel.floor)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    style(axes, panel.title, f"{panel.x_label}{x_scale}")
    axes.set_ylabel(f"{panel.y_label}{y_scale}", fontsize=9, color=MUTED)
    axes.grid(color=GRID, linewidth=0.8)


def _tick(value: float, floor: float) -> str:
    if value < floor * (1 - 1e-9):
        return ""
    if 0 < value < 1e-3:
        return f"$10^{{{math.log10(value):.0f}}}$"
    return f"{value:,g}"


def _draw_marks(
    figure: Figure,
    axes: Axes,
    panel: ScatterPanel,
    colours: Mapping[str, str],
    markers: Mapping[str, str],
) -> None:
    pixels = figure.dpi / 72
    places = axes.transData.transform([(mark.x, panel.height(mark)) for mark in panel.marks])
    clusters = _clusters(places, _MARKER_POINTS * pixels)
    boxes = []
    for members in clusters:
        step = min(_MARKER_POINTS + 1, _WIDEST_CLUSTER_POINTS / len(members))
        centre = places[members].mean(axis=0)
        for index, member in enumerate(members):
            mark = panel.marks[member]
            aside = ScaledTranslation(
                (index - (len(members) - 1) / 2) * step / 72, 0, figure.dpi_scale_trans
            )
            axes.plot(
                [mark.x],
                [panel.height(mark)],
                marker=markers[mark.kind],
                markersize=_MARKER_POINTS,
                markerfacecolor=colours[mark.group],
                markeredgecolor="white",
                markeredgewidth=0.7,
                linestyle="none",
                transform=axes.transData + aside,
                zorder=3,
            )
        reach = np.array([(len(members) - 1) * step + _MARKER_POINTS, _MARKER_POINTS]) * pixels / 2
        boxes.append(Bbox([centre - reach, centre + reach]))
    taken = list(boxes)
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    for members, box in zip(clusters, boxes, strict=True):
        marks = [panel.marks[member] for member in members]
        taken.append(_write_name(canvas.get_renderer(), axes, _name(panel, marks), box, taken))


def _clusters(places: np.ndarray, near: float) -> list[list[int]]:
    """Groups marks that would cover each other."""
    clusters: list[list[int]] = []
    for index, place in enumerate(places):
        for members in clusters:
            if np.abs(places[members[0]] - place).max() < near:
                members.append(index)
                break
        else:
            clusters.append([index])
    return clusters


def _name(panel: ScatterPanel, marks: Sequence[Mark]) -> str:
    lines = textwrap.wrap(combined_label([mark.variant for mark in marks], limit=4), _NAME_COLUMNS)
    heights = sorted((mark.y, panel.show(mark.y)) for mark in marks)
    values = dict.fromkeys((heights[0][1], heights[-1][1]))
    return "\n".join([*lines, " to ".join(values)])


def _write_name(
    renderer: RendererAgg, axes: Axes, text: str, box: Bbox, taken: Sequence[Bbox]
) -> Bbox:
    """Writes the name of the marks in `box` where it covers least; returns the place it takes."""
    inside = axes.get_window_extent(renderer)
    best: tuple[float, Annotation, Bbox] | None = None
    for gap, (right, up) in itertools.product(_GAPS_POINTS, _SIDES):
        candidate = _candidate(axes, text, box, (right, up), gap)
        # An annotation's own extent would count the line that leads to it.
        candidate.update_positions(renderer)
        extent = Text.get_window_extent(candidate, renderer)
        candidate.remove()
        hidden = sum(_shared_area(extent, other) for other in taken)
        outside = extent.width * extent.height - _shared_area(extent, inside)
        cost = hidden + 2 * outside
        if best is None or cost < best[0] - 1:
            best = (cost, candidate, extent)
        if cost < 1:
            break
    assert best is not None
    axes.add_artist(best[1])
    return best[2]


def _candidate(
    axes: Axes, text: str, box: Bbox, direction: tuple[int, int], gap: float
) -> Annotation:
    right, up = direction
    leader = {"arrowstyle": "-", "color": MUTED, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 1}
    horizontal = ("right", "center", "left")[right + 1]
    return axes.annotate(
        text,
        (box.x0 + box.width * (right + 1) / 2, box.y0 + box.height * (up + 1) / 2),
        xycoords="figure pixels",
        xytext=(gap * right, gap * up),
        textcoords="offset points",
        ha=horizontal,
        va=("top", "center", "bottom")[up + 1],
        multialignment=horizontal,
        fontsize=VALUE_SIZE,
        color=INK,
        linespacing=1.15,
        path_effects=[withStroke(linewidth=2.5, foreground="white")],
        arrowprops=leader if gap > _GAPS_POINTS[0] else None,
        zorder=4,
    )


def _shared_area(one: Bbox, other: Bbox) -> float:
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return max(width, 0.0) * max(height, 0.0)


def _draw_legend(
    figure: Figure, marks: Sequence[Mark], colours: Mapping[str, str], markers: Mapping[str, str]
) -> None:
    def swatch(label: str, marker: str, colour: str) -> Line2D:
        return Line2D(
            [], [], marker=marker, color=colour, linestyle="none", markersize=7, label=label
        )

    groups = [group for group in colours if any(mark.group == group for mark in marks)]
    kinds = [kind for kind in markers if any(mark.kind == kind for mark in marks)]
    figure.legend(
        handles=[
            *(swatch(group, "o", colours[group]) for group in groups if group),
            *(swatch(kind, markers[kind], MUTED) for kind in kinds if kind),
        ],
        loc="outside lower center",
        ncols=max(len(groups) + len(kinds), 1),
        frameon=False,
        fontsize=9,
        handletextpad=0.2,
        columnspacing=1.4,
    )
