"""What all charts share: the sheet with its titles, axes of times, the legend beside the axes, and the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from mesh_attention.errors import UsageError, writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

INK, FADED, GRID = "#222222", "#555555", "#e2e2e2"
TITLE_SIZE, TEXT_SIZE, SMALL_SIZE = 12.0, 10.0, 8.0
WIDTH_IN, TITLE_WIDTH, LONGEST_LABEL = 8.0, 74, 28
"""The sheet in inches; a line of the title and a label of the legend in letters."""
COLOURS = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#222222", "#882255", "#332288", "#999933"
"""Colours of methods, which colour-blind readers can tell apart."""
FORMATS: dict[str, dict[str, None]] = {  # and what would tell one run's file from another's
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
DPI = 200
"""Twice what a page of 800 pixels shows."""


def new_figure(*, height_in: float) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UsageError(
            f"charts need matplotlib, but {error.name} is not installed; pip install 'mesh-attention[charts]'"
        ) from error
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=100, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def new_axes(*, height_in: float, title: str, below: str = "") -> tuple[Figure, Axes]:
    """A sheet with its titles at the top left, and axes that fill the rest of it."""
    figure = new_figure(height_in=height_in)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)  # type: ignore[union-attr, call-arg]
    axes = figure.add_subplot(facecolor="white")
    axes.tick_params(labelsize=TEXT_SIZE, length=0, pad=7, colors=FADED, which="both")
    axes.set_axisbelow(True)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(FADED)
    look: dict[str, Any] = {"fontsize": TITLE_SIZE, "weight": "bold", "color": INK, "parse_math": False}
    figure.suptitle(fill(title, TITLE_WIDTH), x=0.12 / WIDTH_IN, ha="left", **look)
    axes.set_title(below, loc="left", fontsize=TEXT_SIZE, color=FADED, parse_math=False)
    return figure, axes


def set_time_ticks(axis: Axis) -> None:
    """Round times, each with its unit; powers of ten only where an axis has room for no more."""
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = axis.get_view_interval()
    match axis.get_scale():
        case "linear":
            axis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
        case "log":
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 1000 * low else (1.0,), numticks=10))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(EngFormatter(unit="s"))
    axis.set_label_text("time", fontsize=TEXT_SIZE, color=FADED)


def explain(axes: Axes, handles: Sequence[Any], labels: Sequence[str]) -> Legend:
    """A legend beside the axes."""
    legend = axes.legend(
        handles,
        [label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1] + "…" for label in labels],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        fontsize=TEXT_SIZE,
        labelcolor=FADED,
        borderaxespad=0.3,
        handlelength=2.6,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return legend


def save_chart(figure: Figure, path: Path | str) -> None:
    """Write PNG, SVG or PDF, depending on the file name. The same chart gives the same bytes."""
    from matplotlib import rc_context

    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise UsageError(f"{path}: expected a file name that ends in {' or '.join(FORMATS)}")
    with writing(path), rc_context({"svg.hashsalt": "mesh-attention"}):
        figure.savefig(path, format=suffix[1:], dpi=DPI, metadata=FORMATS[suffix])
