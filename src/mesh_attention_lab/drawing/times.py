"""Time and exposed communication of several methods, against ranks, tokens or tiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from typing_extensions import assert_never

from mesh_attention.errors import UsageError
from mesh_attention.units import format_size
from mesh_attention_lab.drawing import canvas
from mesh_attention_lab.drawing.canvas import Scale, number_scale, text_scale, time_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, float]
ChartX = Literal["ranks", "sequence length", "tile"]

MARKERS = "os^DvPX"
TIME_LOOK: dict[str, Any] = {"linewidth": 2.0, "markersize": 5.0}
EXPOSED_LOOK: dict[str, Any] = TIME_LOOK | {"linewidth": 1.3, "linestyle": (0, (4, 2)), "markerfacecolor": "white"}
LABELS_IN_HEIGHT = 16
BESIDE = tuple((12.0, dy) for dy in (0.0, 8.0, -8.0, 11.0, -11.0, 22.0, -22.0, 33.0, -33.0))
"""Places for the label of a line that ends early, in points from its end."""


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
    labels = [canvas.shorten(method, most=canvas.LONGEST_LABEL) for method in lines]
    figure, axes = _comparison_axes(across, up, labels, has_title=bool(title))
    for number, (method, line) in enumerate(lines.items()):
        _draw_line(axes, method, [(places[p.x], p.time_s, p.exposed_s) for p in line], number)
    _label_ends(axes, labels, [(places[line[-1].x], line[-1].time_s) for line in lines.values()])
    _explain(axes)
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
    """Axes with room for ticks, labels on the right and a title; ticks of x are slanted if they would overlap."""
    left = canvas.EDGE_IN + 0.35 + canvas.text_width_in(up.tick_texts, size=canvas.TEXT_SIZE)
    right = 0.4 + canvas.text_width_in(labels, size=canvas.TEXT_SIZE)
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


def _label_ends(axes: Axes, labels: Sequence[str], ends: Sequence[Point]) -> None:
    """Write each method beside its last point, with a line to it."""
    from matplotlib.patheffects import withStroke

    for number, offset in _label_offsets(axes, labels, ends).items():
        colour = canvas.COLOURS[number % len(canvas.COLOURS)]
        stroke = {"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 4, "relpos": (0, 0.5)}
        axes.annotate(
            labels[number],
            ends[number],
            xytext=offset,
            textcoords="offset points",
            va="center_baseline",
            fontsize=canvas.TEXT_SIZE,
            color=canvas.darker(colour),
            parse_math=False,
            annotation_clip=False,
            path_effects=[withStroke(linewidth=3, foreground="white")],
            arrowprops=stroke,
            zorder=4,
        )


def _label_offsets(axes: Axes, labels: Sequence[str], ends: Sequence[Point]) -> dict[int, Point]:
    """Offsets in points. Labels at the last x make room for each other; earlier ones stand where they cover least."""
    spots = _in_points(axes, ends)
    widths = [72 * canvas.text_width_in([label], size=canvas.TEXT_SIZE) for label in labels]
    lasts = [number for number, end in enumerate(ends) if end[0] == max(x for x, _ in ends)]
    low, high = (edge * 72 / axes.figure.dpi for edge in (axes.bbox.y0, axes.bbox.y1))
    rooms = spread([spots[number][1] for number in lasts], gap=1.25 * canvas.TEXT_SIZE, low=low, high=high)
    offsets = {number: (20.0, room - spots[number][1]) for number, room in zip(lasts, rooms, strict=True)}
    taken = [Box(-inf, high, inf, inf), Box(-inf, -inf, inf, low)]
    taken += [_label_box(widths[number], spots[number], offset) for number, offset in offsets.items()]
    points = [point for line in axes.lines for point in along(_in_points(axes, line.get_xydata()), every=4.0)]
    rules = [y for _, y in _in_points(axes, [(ends[0][0], tick) for tick in axes.get_yticks()])]
    for number in sorted(set(range(len(ends))) - set(lasts)):
        choices = [_label_box(widths[number], spots[number], offset) for offset in BESIDE]
        best = clearest(choices, taken=taken, points=points, rules=rules)
        offsets[number] = BESIDE[best]
        taken.append(choices[best])
    return offsets


def _in_points(axes: Axes, places: Any) -> list[Point]:
    """Places in the data, measured from the lower left corner of the sheet."""
    return [
        (float(x) * 72 / axes.figure.dpi, float(y) * 72 / axes.figure.dpi) for x, y in axes.transData.transform(places)
    ]


def _label_box(width: float, spot: Point, offset: Point) -> Box:
    left, middle = spot[0] + offset[0], spot[1] + offset[1]
    return Box(left, middle - 0.6 * canvas.TEXT_SIZE, left + width, middle + 0.6 * canvas.TEXT_SIZE)


def _explain(axes: Axes) -> None:
    """Solid is time, dashed is exposed communication; once for all methods."""
    from matplotlib.lines import Line2D

    solid = Line2D([], [], color=canvas.FADED, marker="o", label="time", **TIME_LOOK)
    dashed = Line2D([], [], color=canvas.FADED, marker="o", label="exposed communication", **EXPOSED_LOOK)
    canvas.explain(axes, [solid, dashed], columns=2, handle_length=3.0)


# Labels beside the ends of lines, where they cover neither each other nor, if possible, a line


class Box(NamedTuple):
    left: float
    bottom: float
    right: float
    top: float

    def covers(self, point: Point) -> bool:
        return self.left <= point[0] <= self.right and self.bottom <= point[1] <= self.top

    def meets(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.bottom < other.top and other.bottom < self.top
        )


def spread(wanted: Sequence[float], *, gap: float, low: float, high: float) -> list[float]:
    """The places nearest to those wanted, in their order, at least `gap` apart and from `low` to `high`.

    If there is not room for all, they begin at `low` and continue above `high`.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    # Less the gaps below each, labels that push each other meet at one place: the mean of what they wanted.
    groups: list[list[float]] = []
    for number, i in enumerate(order):
        groups.append([wanted[i] - number * gap])
        while len(groups) > 1 and _mean(groups[-2]) > _mean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    highest = high - gap * (len(wanted) - 1)
    met = [max(low, min(highest, _mean(group))) for group in groups for _ in group]
    places = [0.0] * len(wanted)
    for number, i in enumerate(order):
        places[i] = met[number] + number * gap
    return places


def clearest(
    boxes: Sequence[Box], *, taken: Sequence[Box], points: Sequence[Point], rules: Sequence[float] = ()
) -> int:
    """Index of the box that overlaps the fewest taken ones, then covers the fewest points, then is crossed by the
    fewest `rules`, which are horizontal; the first if several do."""
    return min(
        range(len(boxes)),
        key=lambda i: (
            sum(boxes[i].meets(other) for other in taken),
            sum(boxes[i].covers(point) for point in points),
            sum(boxes[i].bottom <= rule <= boxes[i].top for rule in rules),
        ),
    )


def along(corners: Sequence[Point], *, every: float) -> list[Point]:
    """Points of the line through the corners, no farther apart than `every` either way."""
    found = list(corners[:1])
    for (x0, y0), (x1, y1) in pairwise(corners):
        steps = int(max(abs(x1 - x0), abs(y1 - y0)) / every) + 1
        found += [(x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps) for i in range(1, steps + 1)]
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
