"""Charts: what ranks did when, and how methods compare. Each takes plain values and returns a matplotlib figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from typing_extensions import assert_never

from mesh_attention.drawing.canvas import (
    EDGE_IN,
    FADED,
    GRID,
    TEXT_SIZE,
    WIDTH_IN,
    Margins,
    darker,
    new_axes,
    set_scale,
    shorten,
    text_width_in,
    write_titles,
)
from mesh_attention.drawing.files import writing
from mesh_attention.drawing.labels import Box, Point, along, clearest, spread
from mesh_attention.drawing.lanes import LANE_IN, draw_ranks, names_in, rows_of, shown_ranks, totals
from mesh_attention.drawing.scales import Scale, number_scale, text_scale, time_scale
from mesh_attention.drawing.ticks import linear_ticks
from mesh_attention.drawing.tracks import rank_tracks
from mesh_attention.errors import UsageError
from mesh_attention.timeline import Timeline
from mesh_attention.units import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ChartX = Literal["ranks", "sequence length", "tile"]

FORMATS: dict[str, dict[str, None]] = {  # and what would tell one run's file from another's
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
DPI = 200
"""Twice what a page of 800 pixels shows."""

COLOURS = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#222222", "#882255", "#332288", "#999933"
"""Told apart by colour-blind eyes; markers help where they come round again."""
MARKERS = "os^DvPX"
TIME_LOOK: dict[str, Any] = {"linewidth": 2.0, "markersize": 5.0}
EXPOSED_LOOK: dict[str, Any] = TIME_LOOK | {"linewidth": 1.3, "linestyle": (0, (4, 2)), "markerfacecolor": "white"}
LABELS_IN_HEIGHT = 16
LONGEST_LABEL = 28
BESIDE = tuple((12.0, dy) for dy in (0.0, 11.0, -11.0, 22.0, -22.0, 33.0, -33.0))
"""Where the label of a line that ends early may stand, in points from its end."""


@dataclass(frozen=True, slots=True)
class ChartPoint:
    """A method at one number of ranks or tokens, or with one tile; `x` is that number, or the tile's text."""

    method: str
    x: float | str
    time_s: float
    exposed_s: float


def save_chart(figure: Figure, path: Path | str) -> None:
    """PNG, SVG or PDF by the name of the file. The same chart gives the same bytes."""
    from matplotlib import rc_context

    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise UsageError(f"{path}: a chart is written as {', '.join(FORMATS)}; give a file name that ends so")
    with writing(path), rc_context({"svg.hashsalt": "mesh-attention"}):
        figure.savefig(path, format=suffix[1:], dpi=DPI, metadata=FORMATS[suffix])


def gantt(timeline: Timeline, *, ranks: Sequence[int] | None = None) -> Figure:
    """What lanes were busy with, against time; of all ranks that have spans unless some are named."""
    tracks = rank_tracks(timeline)
    shown = shown_ranks(tuple(tracks), ranks, timeline.name)
    margins = Margins(left=names_in(shown), right=0.3, top=0.72, bottom=0.55)
    figure, axes = new_axes(height_in=rows_of(shown) * LANE_IN + margins.top + margins.bottom, margins=margins)
    stop_s = max(timeline.time_s, *(span.stop_s for span in timeline.spans)) or 1e-6
    unit, ticks = linear_ticks(stop_s)
    set_scale(axes, "x", Scale(kind="linear", low=0.0, high=1.005 * stop_s, ticks=ticks, label=f"time, {unit}"))
    draw_ranks(axes, tracks, shown, left_in=margins.left)
    write_titles(figure, timeline.name, totals(timeline))
    return figure


def time_chart(points: Iterable[ChartPoint], *, x: ChartX, title: str = "") -> Figure:
    """Time (solid) and exposed communication (dashed) of several methods.

    Numbers stand on a log2 axis, tiles in the order in which they come first. Data stay in seconds; ticks say the unit.
    """
    points = tuple(points)
    lines = _lines(points, x)
    places = _places(points, x)
    across = _x_scale(places, x)
    up = time_scale([point.time_s for point in points], [point.exposed_s for point in points])
    labels = [shorten(method, most=LONGEST_LABEL) for method in lines]
    figure, axes = _comparison_axes(across, up, labels, has_title=bool(title))
    for number, (method, line) in enumerate(lines.items()):
        _draw_line(axes, method, [(places[p.x], p.time_s, p.exposed_s) for p in line], number)
    _label_ends(axes, labels, [(places[line[-1].x], line[-1].time_s) for line in lines.values()])
    _explain(axes)
    write_titles(figure, title)
    return figure


def _lines(points: Sequence[ChartPoint], x: ChartX) -> dict[str, list[ChartPoint]]:
    """By method, in order of x; refuses what cannot be drawn."""
    if x not in get_args(ChartX):
        raise UsageError(f"x={x!r}: expected one of {', '.join(get_args(ChartX))}")
    if not points:
        raise UsageError("no points came; expected at least one to draw")
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
    """Where on the axis each x stands."""
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
    """With room for the ticks on the left, the labels on the right and a title; ticks below aslant if need be."""
    left = EDGE_IN + 0.35 + text_width_in(up.tick_texts, size=TEXT_SIZE)
    right = 0.4 + text_width_in(labels, size=TEXT_SIZE)
    tick_in = text_width_in(across.tick_texts, size=TEXT_SIZE)
    is_slanted = len(across.ticks) > 1 and tick_in + 0.05 > (WIDTH_IN - left - right) / len(across.ticks)
    bottom = 0.6 + 0.7 * tick_in if is_slanted else 0.65
    height_in = 4.0 + bottom + 0.2 * max(0, len(labels) - LABELS_IN_HEIGHT)
    margins = Margins(left=left, right=right, top=0.72 if has_title else 0.42, bottom=bottom)
    figure, axes = new_axes(height_in=height_in, margins=margins)
    set_scale(axes, "x", across, is_slanted=is_slanted)
    set_scale(axes, "y", up)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    return figure, axes


def _draw_line(axes: Axes, method: str, line: Sequence[tuple[float, float, float]], number: int) -> None:
    xs, times, exposed = zip(*line, strict=True)
    colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
    look: dict[str, Any] = {"color": colour, "marker": marker, "clip_on": False}
    axes.plot(xs, times, label=f"{method}: time", zorder=3, **look, **TIME_LOOK)
    axes.plot(xs, exposed, label=f"{method}: exposed communication", zorder=2.5, **look, **EXPOSED_LOOK)


def _label_ends(axes: Axes, labels: Sequence[str], ends: Sequence[Point]) -> None:
    """Beside the last point of each method, with a stroke to it."""
    from matplotlib.patheffects import withStroke

    for number, offset in _label_offsets(axes, labels, ends).items():
        colour = COLOURS[number % len(COLOURS)]
        stroke = {"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 4, "relpos": (0, 0.5)}
        axes.annotate(
            labels[number],
            ends[number],
            xytext=offset,
            textcoords="offset points",
            va="center_baseline",
            fontsize=TEXT_SIZE,
            color=darker(colour),
            parse_math=False,
            annotation_clip=False,
            path_effects=[withStroke(linewidth=3, foreground="white")],
            arrowprops=stroke,
            zorder=4,
        )


def _label_offsets(axes: Axes, labels: Sequence[str], ends: Sequence[Point]) -> dict[int, Point]:
    """In points. At the last x, labels make room for each other; earlier ones stand where they cover the least."""
    spots = _in_points(axes, ends)
    widths = [72 * text_width_in([label], size=TEXT_SIZE) for label in labels]
    lasts = [number for number, end in enumerate(ends) if end[0] == max(x for x, _ in ends)]
    low, high = (edge * 72 / axes.figure.dpi for edge in (axes.bbox.y0, axes.bbox.y1))
    rooms = spread([spots[number][1] for number in lasts], gap=1.25 * TEXT_SIZE, low=low, high=high)
    offsets = {number: (20.0, room - spots[number][1]) for number, room in zip(lasts, rooms, strict=True)}
    taken = [Box(-inf, high, inf, inf), Box(-inf, -inf, inf, low)]
    taken += [_label_box(widths[number], spots[number], offset) for number, offset in offsets.items()]
    points = [point for line in axes.lines for point in along(_in_points(axes, line.get_xydata()), every=4.0)]
    for number in sorted(set(range(len(ends))) - set(lasts)):
        choices = [_label_box(widths[number], spots[number], offset) for offset in BESIDE]
        best = clearest(choices, taken=taken, points=points)
        offsets[number] = BESIDE[best]
        taken.append(choices[best])
    return offsets


def _in_points(axes: Axes, places: Any) -> list[Point]:
    """Of places in the data; from the lower left corner of the sheet."""
    return [
        (float(x) * 72 / axes.figure.dpi, float(y) * 72 / axes.figure.dpi) for x, y in axes.transData.transform(places)
    ]


def _label_box(width: float, spot: Point, offset: Point) -> Box:
    left, middle = spot[0] + offset[0], spot[1] + offset[1]
    return Box(left, middle - 0.6 * TEXT_SIZE, left + width, middle + 0.6 * TEXT_SIZE)


def _explain(axes: Axes) -> None:
    """What solid and dashed stand for, once for all methods."""
    from matplotlib.lines import Line2D

    solid = Line2D([], [], color=FADED, marker="o", label="time", **TIME_LOOK)
    dashed = Line2D([], [], color=FADED, marker="o", label="exposed communication", **EXPOSED_LOOK)
    axes.legend(
        handles=[solid, dashed],
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=2,
        frameon=False,
        fontsize=TEXT_SIZE,
        labelcolor=FADED,
        borderaxespad=0.3,
        borderpad=0.2,
        handlelength=3,
    )
