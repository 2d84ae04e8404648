"""Time and exposed communication of several methods, against ranks, tokens or tiles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, Literal, get_args

from typing_extensions import assert_never

from mesh_attention.errors import UsageError
from mesh_attention.units import format_size
from mesh_attention_lab.drawing import canvas
from mesh_attention_lab.drawing.canvas import Scale, number_scale, text_scale, time_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ChartX = Literal["ranks", "sequence length", "tile"]

MARKERS = "os^DvPX"
TIME_LOOK: dict[str, Any] = {"linewidth": 2.0, "markersize": 5.0}
EXPOSED_LOOK: dict[str, Any] = TIME_LOOK | {"linewidth": 1.3, "linestyle": (0, (4, 2)), "markerfacecolor": "white"}
LABELS_IN_HEIGHT = 16
GAP_IN, HANDLE_IN = 0.15, 0.3
"""Between the axes and the names of methods, and the piece of line before a name."""


@dataclass(frozen=True, slots=True)
class ChartPoint:
    """A method at one number of ranks or tokens, or with one tile; `x` is that number, or the tile's text."""

    method: str
    x: float | str
    time_s: float
    exposed_s: float


def time_chart(points: Iterable[ChartPoint], *, x: ChartX, title: str = "") -> Figure:
    """Time (solid) and exposed communication (dashed) of several methods.

    Numbers stand on a log2 axis, tiles in the order in which they come first. Data stay in seconds; ticks say the unit.
    """
    points = tuple(points)
    lines = _lines(points, x)
    places = _places(points, x)
    across = _x_scale(places, x)
    up = time_scale([point.time_s for point in points], [point.exposed_s for point in points])
    labels = {method: canvas.shorten(method, most=canvas.LONGEST_LABEL) for method in lines}
    figure, axes = _comparison_axes(across, up, list(labels.values()), has_title=bool(title))
    for number, (method, line) in enumerate(lines.items()):
        _draw_line(axes, method, [(places[p.x], p.time_s, p.exposed_s) for p in line], number)
    _explain(figure, axes, labels, left=axes.get_position().x1 + GAP_IN / canvas.WIDTH_IN)
    canvas.write_titles(figure, title)
    return figure


def _lines(points: Sequence[ChartPoint], x: ChartX) -> dict[str, list[ChartPoint]]:
    """The points of each method, in order of x. Refuses points that cannot be drawn."""
    if x not in get_args(ChartX):
        raise UsageError(f"x={x!r}: expected one of {', '.join(get_args(ChartX))}")
    if not points:
        raise UsageError("no points given; expected at least one to draw")
    lines: dict[str, dict[float | str, ChartPoint]] = {}
    for point in points:
        _check(point, x)
        if point.x in lines.setdefault(point.method, {}):
            raise UsageError(f"{point}: {point.method} has another point at {point.x}; give one for each {x}")
        lines[point.method][point.x] = point
    places = _places(points, x)
    return {method: sorted(line.values(), key=lambda p: places[p.x]) for method, line in lines.items()}


def _check(point: ChartPoint, x: ChartX) -> None:
    if x == "tile":
        if not isinstance(point.x, str):
            raise UsageError(f"{point}: expected the text of a tile, such as '4x8'")
    elif isinstance(point.x, str) or not (point.x > 0 and isfinite(point.x)):
        raise UsageError(f"{point}: expected {x} as a number above 0")
    # Exposed communication is a difference: where there is none, it may be 0 but for rounding.
    least_s = -1e-6 * point.time_s
    if not (0 <= point.time_s < inf and least_s <= point.exposed_s < inf):
        raise UsageError(f"{point}: expected seconds, 0 or above")


def _places(points: Sequence[ChartPoint], x: ChartX) -> dict[float | str, float]:
    """The place of each x on the axis."""
    if x == "tile":
        return {tile: float(place) for place, tile in enumerate(dict.fromkeys(point.x for point in points))}
    return {point.x: float(point.x) for point in points}


def _x_scale(places: dict[float | str, float], x: ChartX) -> Scale:
    match x:
        case "tile":
            return text_scale([str(tile) for tile in places], label="tile")
        case "ranks":
            return number_scale(list(places.values()), label="ranks", write="{:g}".format)
        case "sequence length":
            return number_scale(list(places.values()), label="sequence length, tokens", write=format_size)
        case _:
            assert_never(x)


def _comparison_axes(across: Scale, up: Scale, labels: Sequence[str], *, has_title: bool) -> tuple[Figure, Axes]:
    """Axes with room for ticks, methods on the right and a title; ticks of x are slanted if they would overlap."""
    left = canvas.EDGE_IN + 0.35 + canvas.text_width_in(up.tick_texts, size=canvas.TEXT_SIZE)
    right = 2 * GAP_IN + HANDLE_IN + 0.15 + canvas.text_width_in(labels, size=canvas.TEXT_SIZE)
    tick_in = canvas.text_width_in(across.tick_texts, size=canvas.TEXT_SIZE)
    is_slanted = len(across.ticks) > 1 and tick_in + 0.05 > (canvas.WIDTH_IN - left - right) / len(across.ticks)
    bottom = 0.6 + 0.7 * tick_in if is_slanted else 0.65
    height_in = 4.0 + bottom + 0.2 * max(0, len(labels) - LABELS_IN_HEIGHT)
    margins = canvas.Margins(left=left, right=right, top=0.72 if has_title else 0.42, bottom=bottom)
    figure, axes = canvas.new_axes(height_in=height_in, margins=margins)
    canvas.set_scale(axes, "x", across, is_slanted=is_slanted)
    canvas.set_scale(axes, "y", up)
    axes.grid(axis="y", color=canvas.GRID, linewidth=0.8)
    return figure, axes


def _draw_line(axes: Axes, method: str, line: Sequence[tuple[float, float, float]], number: int) -> None:
    xs, times, exposed = zip(*line, strict=True)
    colour, marker = canvas.COLOURS[number % len(canvas.COLOURS)], MARKERS[number % len(MARKERS)]
    look: dict[str, Any] = {"color": colour, "marker": marker, "clip_on": False}
    axes.plot(xs, times, label=f"{method}: time", zorder=3, **look, **TIME_LOOK)
    axes.plot(xs, exposed, label=f"{method}: exposed communication", zorder=2.5, **look, **EXPOSED_LOOK)


def _explain(figure: Figure, axes: Axes, labels: Mapping[str, str], *, left: float) -> None:
    """Above the axes, solid is time and dashed exposed communication; beside them, methods as their lines end."""
    from matplotlib.lines import Line2D

    solid = Line2D([], [], color=canvas.FADED, marker="o", label="time", **TIME_LOOK)
    dashed = Line2D([], [], color=canvas.FADED, marker="o", label="exposed communication", **EXPOSED_LOOK)
    canvas.explain(axes, [solid, dashed], columns=2, handle_length=3.0)
    lines: dict[object, Any] = {line.get_label(): line for line in axes.lines}
    handles = {text: lines[f"{method}: time"] for method, text in labels.items()}
    by_end = sorted(handles.items(), key=lambda entry: float(entry[1].get_ydata()[-1]), reverse=True)
    legend = figure.legend(
        [line for _, line in by_end],
        [text for text, _ in by_end],
        loc="upper left",
        bbox_to_anchor=(left, axes.get_position().y1),
        frameon=False,
        fontsize=canvas.TEXT_SIZE,
        labelcolor=canvas.FADED,
        borderaxespad=0,
        handlelength=HANDLE_IN * 72 / canvas.TEXT_SIZE,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
