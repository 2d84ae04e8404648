"""Charts with matplotlib: `time_chart` (times by ranks, tokens or tiles) and `rate_chart` (rates as bars).

Values come in, a figure goes out, and `save_chart` writes it. matplotlib is imported when a chart is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

from mesh_attention.errors import UsageError
from mesh_attention.units import format_size, three_digits
from mesh_attention_lab.drawing import writing

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


# Times of methods


ChartX = Literal["ranks", "sequence length", "tile"]

MARKERS = "os^DvPX"
TIME_LOOK: dict[str, Any] = {"linewidth": 2.0, "markersize": 5.0}
EXPOSED_LOOK: dict[str, Any] = TIME_LOOK | {"linewidth": 1.3, "linestyle": (0, (4, 2)), "markerfacecolor": "white"}
LABELS_IN_HEIGHT = 16
MOST_LEVEL_TILES = 10
"""Tiles whose texts stand level on the axis; more of them are slanted."""
LOG_FROM = 10.0
"""Times that differ by more than this factor are drawn on a log axis."""
SHOWN_BELOW = 100.0
"""On a log axis, exposed communication this many times shorter than the shortest time is drawn as 0."""


@dataclass(frozen=True, slots=True)
class ChartPoint:
    """A method at one number of ranks or tokens, or with one tile; `x` is that number, or the tile's text."""

    method: str
    x: float | str
    time_s: float
    exposed_s: float


def time_chart(points: Iterable[ChartPoint], *, x: ChartX, title: str = "") -> Figure:
    """Time (solid) and exposed communication (dashed) of several methods.

    Numbers stand on a log2 axis, tiles side by side in the order in which they come first.
    """
    points = tuple(points)
    if not points:
        raise UsageError("no points given; expected at least one to draw")
    tiles = [str(text) for text in dict.fromkeys(point.x for point in points)] if x == "tile" else []
    places = {point.x: tiles.index(str(point.x)) if tiles else float(point.x) for point in points}
    lines = {
        method: sorted((point for point in points if point.method == method), key=lambda point: places[point.x])
        for method in dict.fromkeys(point.method for point in points)
    }
    height_in = 4.6 + 0.2 * max(0, len(lines) - LABELS_IN_HEIGHT)
    figure, axes = new_axes(height_in=height_in, title=title)
    for number, (method, line) in enumerate(lines.items()):
        _draw_line(axes, method, line, [places[point.x] for point in line], number)
    _set_times(axes, points)
    if tiles:
        axes.set_xticks(range(len(tiles)), tiles, rotation=45 if len(tiles) > MOST_LEVEL_TILES else 0)
        axes.set_xlabel("tile", fontsize=TEXT_SIZE, color=FADED)
    else:
        _set_numbers(axes, x)
    _explain_times(axes, lines)
    return figure


def _draw_line(axes: Axes, method: str, line: Sequence[ChartPoint], places: Sequence[float], number: int) -> None:
    colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
    look: dict[str, Any] = {"color": colour, "marker": marker, "clip_on": False}
    axes.plot(places, [p.time_s for p in line], label=f"{method}: time", zorder=3, **look, **TIME_LOOK)
    exposed = [p.exposed_s for p in line]
    axes.plot(places, exposed, label=f"{method}: exposed communication", zorder=2.5, **look, **EXPOSED_LOOK)


def _set_times(axes: Axes, points: Sequence[ChartPoint]) -> None:
    """A linear axis from 0 if times are similar, otherwise a log axis, with 0 below it if a time is 0."""
    times, exposed = [point.time_s for point in points], [point.exposed_s for point in points]
    shortest, longest = min(times), max(*times, *exposed)
    if not shortest or max(times) <= LOG_FROM * shortest:
        axes.set_ylim(0.0, 1.05 * longest or 1e-6)
    else:
        seen = [seconds for seconds in exposed if seconds > shortest / SHOWN_BELOW]
        low = min([shortest, *seen]) / 1.3
        if len(seen) == len(exposed):
            axes.set_yscale("log")
        else:
            low = 10.0 ** floor(log10(low))
            axes.set_yscale("symlog", linthresh=low, linscale=0.4)
        axes.set_ylim(low if len(seen) == len(exposed) else 0.0, 1.3 * longest)
    set_time_ticks(axes.yaxis)
    axes.grid(axis="y", color=GRID, linewidth=0.8)


def _set_numbers(axes: Axes, x: ChartX) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    is_length = x == "sequence length"
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda at, _: format_size(at) if is_length else f"{at:g}")
    label = "sequence length, tokens" if is_length else x
    axes.set_xlabel(label, fontsize=TEXT_SIZE, color=FADED)


def _explain_times(axes: Axes, lines: Mapping[str, Sequence[ChartPoint]]) -> None:
    """Solid is time and dashed exposed communication; below them, methods as their lines end."""
    from matplotlib.lines import Line2D

    solid = Line2D([], [], color=FADED, marker="o", **TIME_LOOK)
    dashed = Line2D([], [], color=FADED, marker="o", **EXPOSED_LOOK)
    handles: dict[str, Any] = {str(line.get_label()).removesuffix(": time"): line for line in axes.lines}
    methods = sorted(lines, key=lambda method: lines[method][-1].time_s, reverse=True)
    entries = [solid, dashed, *(handles[method] for method in methods)]
    explain(axes, entries, ["time", "exposed communication", *methods])


# Rates as bars


HEIGHT_IN = 4.6
BAR, GROUP_GAP = 0.86, 0.9
"""The part of its place that a bar fills, and the gap between groups, in bars."""
MOST_LEVEL_BARS = 14
"""Bars up to which their values stand level."""
ABOVE_GRID: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
"""The background of a value, so that no grid line goes through it."""
LINE_LOOK: dict[str, Any] = {"color": INK, "linewidth": 1.8}
EXPECTED_LOOK: dict[str, Any] = {"marker": "D", "color": "white", "markeredgecolor": INK, "linestyle": "none"}
EXPECTED_LOOK |= {"markersize": 5.5, "markeredgewidth": 1.1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    name: str
    value: float
    expected: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BarGroup:
    """Bars under one name, which may have several lines; `line` is drawn across them."""

    name: str
    bars: tuple[Bar, ...]
    line: float | None = None


def rate_chart(
    groups: Sequence[BarGroup], *, unit: str, expected: str, line: str, title: str = "", below: str = ""
) -> Figure:
    """Bars from 0, in `unit`. `expected` and `line` say what the marks and the lines across are."""
    figure, axes = new_axes(height_in=HEIGHT_IN, title=title, below=below)
    axes.set_ylim(0.0, 1.12 * max(value for group in groups for value in _values(group)) or 1.0)
    axes.set_ylabel(unit, fontsize=TEXT_SIZE, color=FADED)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    names = dict.fromkeys(bar.name for group in groups for bar in group.bars)
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    _draw_groups(axes, groups, colours)
    _explain_rates(axes, colours, line=line, expected=expected)
    return figure


def _values(group: BarGroup) -> list[float]:
    values = [group.line, *(value for bar in group.bars for value in (bar.value, bar.expected))]
    return [value for value in values if value is not None]


def _draw_groups(axes: Axes, groups: Sequence[BarGroup], colours: dict[str, str]) -> None:
    is_level = sum(len(group.bars) for group in groups) <= MOST_LEVEL_BARS
    left, middles = GROUP_GAP / 2, []
    for group in groups:
        right = left + len(group.bars)
        middles.append((left + right) / 2)
        for number, bar in enumerate(group.bars):
            _draw_bar(axes, bar, at=left + number + 0.5, colour=colours[bar.name], is_level=is_level)
        if group.line is not None:
            axes.hlines(group.line, left - 0.15, right + 0.15, zorder=3, **LINE_LOOK)
        left = right + GROUP_GAP
    axes.set_xlim(0, left - GROUP_GAP / 2)
    axes.set_xticks(middles, [group.name for group in groups], parse_math=False, color=INK)


def _draw_bar(axes: Axes, bar: Bar, *, at: float, colour: str, is_level: bool) -> None:
    """A bar with its mark, and its value above both."""
    axes.bar(at, bar.value, width=BAR, color=colour, zorder=2)
    if bar.expected is not None:
        axes.plot([at], [bar.expected], zorder=4, clip_on=False, **EXPECTED_LOOK)
    axes.annotate(
        three_digits(bar.value),
        (at, max(bar.value, bar.expected or 0.0)),
        xytext=(0, 8),
        textcoords="offset points",
        ha="center",
        va="bottom",
        rotation=0 if is_level else 90,
        fontsize=SMALL_SIZE,
        color=INK,
        bbox=ABOVE_GRID,
        zorder=5,
    )


def _explain_rates(axes: Axes, colours: dict[str, str], *, line: str, expected: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [*(Patch(color=colour) for colour in colours.values()), Line2D([], [], **LINE_LOOK)]
    explain(axes, [*handles, Line2D([], [], **EXPECTED_LOOK)], [*colours, line, expected])
