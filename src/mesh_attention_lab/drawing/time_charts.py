"""Time and exposed communication of several methods, against ranks, tokens or tiles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10
from typing import TYPE_CHECKING, Any, Literal

from mesh_attention.errors import UsageError
from mesh_attention.units import format_size
from mesh_attention_lab.drawing import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ChartX = Literal["ranks", "sequence length", "tile"]

MARKERS = "os^DvPX"
TIME_LOOK: dict[str, Any] = {"linewidth": 2.0, "markersize": 5.0}
EXPOSED_LOOK: dict[str, Any] = TIME_LOOK | {"linewidth": 1.3, "linestyle": (0, (4, 2)), "markerfacecolor": "white"}
LABELS_IN_HEIGHT = 16
MOST_LEVEL = 10
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
    figure, axes = canvas.new_axes(height_in=height_in, title=title)
    for number, (method, line) in enumerate(lines.items()):
        _draw_line(axes, method, line, [places[point.x] for point in line], number)
    _set_times(axes, points)
    if tiles:
        axes.set_xticks(range(len(tiles)), tiles, rotation=45 if len(tiles) > MOST_LEVEL else 0)
        axes.set_xlabel("tile", fontsize=canvas.TEXT_SIZE, color=canvas.FADED)
    else:
        _set_numbers(axes, x)
    _explain(axes, lines)
    return figure


def _draw_line(axes: Axes, method: str, line: Sequence[ChartPoint], places: Sequence[float], number: int) -> None:
    colour, marker = canvas.COLOURS[number % len(canvas.COLOURS)], MARKERS[number % len(MARKERS)]
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
    canvas.set_time_ticks(axes.yaxis)
    axes.grid(axis="y", color=canvas.GRID, linewidth=0.8)


def _set_numbers(axes: Axes, x: ChartX) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    is_length = x == "sequence length"
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda at, _: format_size(at) if is_length else f"{at:g}")
    label = "sequence length, tokens" if is_length else x
    axes.set_xlabel(label, fontsize=canvas.TEXT_SIZE, color=canvas.FADED)


def _explain(axes: Axes, lines: Mapping[str, Sequence[ChartPoint]]) -> None:
    """Solid is time and dashed exposed communication; below them, methods as their lines end."""
    from matplotlib.lines import Line2D

    solid = Line2D([], [], color=canvas.FADED, marker="o", **TIME_LOOK)
    dashed = Line2D([], [], color=canvas.FADED, marker="o", **EXPOSED_LOOK)
    handles: dict[str, Any] = {str(line.get_label()).removesuffix(": time"): line for line in axes.lines}
    methods = sorted(lines, key=lambda method: lines[method][-1].time_s, reverse=True)
    entries = [solid, dashed, *(handles[method] for method in methods)]
    canvas.explain(axes, entries, ["time", "exposed communication", *methods])
