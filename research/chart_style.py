"""The one plain style of every chart: colours, type, grid, and PNG out.

Matplotlib's objects are used directly: its pyplot state is global, and a library must not touch
it.
"""

import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7A7A7A")
MARKERS = ("X", "s", "o", "D", "^", "v", "P")
INK, MUTED, GRID = "#222222", "#5a5a5a", "#e4e4e4"
WIDTH_INCHES = 8.4
VALUE_SIZE = 8.5

_DPI = 170
_LOG_FROM_RATIO = 20.0


def new_figure(height_inches: float) -> Figure:
    """Makes an empty figure of the common width, drawn by Agg."""
    figure = Figure(
        figsize=(WIDTH_INCHES, height_inches),
        dpi=_DPI,
        layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.04),
    )
    FigureCanvasAgg(figure)
    return figure


def as_png(figure: Figure) -> bytes:
    """Renders a figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor="white")
    return buffer.getvalue()


def style(axes: Axes, title: str, x_label: str) -> None:
    """Gives axes their title, label, light grid and quiet frame."""
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK, pad=8)
    axes.set_xlabel(x_label, fontsize=9, color=MUTED)
    axes.tick_params(labelsize=8.5, colors=MUTED, length=3)
    axes.tick_params(which="minor", color="#c9c9c9", length=2)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#b5b5b5")


def spans_decades(values: Sequence[float]) -> bool:
    """Whether values differ so much that a linear axis would hide the small ones."""
    positive = [value for value in values if value > 0]
    return bool(positive) and max(positive) / min(positive) > _LOG_FROM_RATIO
