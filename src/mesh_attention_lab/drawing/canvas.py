"""The sheet that every chart is drawn on: white, measured in inches, in one style, with no state outside the figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from typing_extensions import assert_never

from mesh_attention.errors import UsageError, writing
from mesh_attention_lab.drawing.scales import Scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FADED, GRID = "#222222", "#555555", "#e2e2e2"
TITLE_SIZE, TEXT_SIZE, SMALL_SIZE = 12.0, 10.0, 8.0
WIDTH_IN, EDGE_IN = 8.0, 0.16
LONGEST_TITLE, LONGEST_LABEL = 110, 28
COLOURS = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#222222", "#882255", "#332288", "#999933"
"""Colours of methods, which colour-blind readers can tell apart."""
FORMATS: dict[str, dict[str, None]] = {  # and what would tell one run's file from another's
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
DPI = 200
"""Twice what a page of 800 pixels shows."""


class Margins(NamedTuple):
    """Inches between the edges of the sheet and the axes."""

    left: float
    right: float
    top: float
    bottom: float


def new_axes(*, height_in: float, margins: Margins) -> tuple[Figure, Axes]:
    """Axes at a fixed place, so that a length in inches is known before anything is drawn."""
    figure = new_figure(height_in=height_in)
    width = WIDTH_IN - margins.left - margins.right
    height = height_in - margins.top - margins.bottom
    place = (margins.left / WIDTH_IN, margins.bottom / height_in, width / WIDTH_IN, height / height_in)
    axes = figure.add_axes(place, facecolor="white")
    axes.tick_params(labelsize=TEXT_SIZE, length=0, pad=7, colors=FADED, which="both")
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(FADED)
    return figure, axes


def set_scale(axes: Axes, which: Literal["x", "y"], scale: Scale, *, is_slanted: bool = False) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    set_kind = axes.set_xscale if which == "x" else axes.set_yscale
    set_limits = axes.set_xlim if which == "x" else axes.set_ylim
    match scale.kind:
        case "log2":
            set_kind("log", base=2)
        case "symlog":
            set_kind("symlog", linthresh=scale.linear_below, linscale=0.4)
        case "linear" | "log":
            set_kind(scale.kind)
        case _:
            assert_never(scale.kind)
    slant: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if is_slanted else {}
    axis.set_ticks([], minor=True)
    axis.set_ticks([at for at, _ in scale.ticks], labels=scale.tick_texts, parse_math=False, **slant)
    set_limits(scale.low, scale.high)
    axis.set_label_text(scale.label, fontsize=TEXT_SIZE, color=FADED)


def new_figure(*, height_in: float) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UsageError(
            f"charts need matplotlib, but {error.name} is not installed; pip install 'mesh-attention[charts]'"
        ) from error
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def text_width_in(texts: Iterable[str], *, size: float, weight: str = "normal") -> float:
    """Width of the widest text, never 0."""
    figure = new_figure(height_in=1.0)
    drawn = [figure.text(0, 0, text, fontsize=size, weight=weight, parse_math=False) for text in texts]
    return max(1.0, *(text.get_window_extent().width for text in drawn)) / figure.dpi


def shorten(words: str, *, most: int) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"


def write_titles(figure: Figure, title: str, below: str = "") -> None:
    """Write the titles at the top left of the sheet; a long title is smaller, a very long one is cut."""
    height_in = figure.get_size_inches()[1]
    title = shorten(title, most=LONGEST_TITLE)
    room_in = WIDTH_IN - 2 * EDGE_IN
    size = min(TITLE_SIZE, TITLE_SIZE * room_in / text_width_in([title], size=TITLE_SIZE, weight="bold"))
    look: dict[str, Any] = {"x": EDGE_IN / WIDTH_IN, "va": "top", "parse_math": False}
    figure.text(y=1 - 0.12 / height_in, s=title, fontsize=size, weight="bold", color=INK, **look)
    figure.text(y=1 - 0.4 / height_in, s=below, fontsize=TEXT_SIZE, color=FADED, **look)


def darker(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) * 3 // 4 for i in (1, 3, 5))
    return f"#{red:02x}{green:02x}{blue:02x}"


def save_chart(figure: Figure, path: Path | str) -> None:
    """Write PNG, SVG or PDF, depending on the file name. The same chart gives the same bytes."""
    from matplotlib import rc_context

    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise UsageError(f"{path}: expected a file name that ends in {' or '.join(FORMATS)}")
    with writing(path), rc_context({"svg.hashsalt": "mesh-attention"}):
        figure.savefig(path, format=suffix[1:], dpi=DPI, metadata=FORMATS[suffix])


def explain(axes: Axes, handles: Sequence[Any], *, columns: int, handle_length: float) -> None:
    """A legend above the axes."""
    axes.legend(
        handles=list(handles),
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=columns,
        frameon=False,
        fontsize=TEXT_SIZE,
        labelcolor=FADED,
        borderaxespad=0.3,
        borderpad=0.2,
        handlelength=handle_length,
        columnspacing=1.6,
    )
