"""The assignment matrix as a chart: query shards down, key/value shards across, and who computes each block."""

from __future__ import annotations

from collections.abc import Sequence
from colorsys import hls_to_rgb
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from mesh_attention.drawing.canvas import (
    EDGE_IN,
    FADED,
    INK,
    SMALL_SIZE,
    TEXT_SIZE,
    WIDTH_IN,
    Margins,
    new_axes,
    shorten,
    text_width_in,
    write_titles,
)
from mesh_attention.drawing.page.blocks import EMPTY, FULL, LOWER, UPPER, block_patterns
from mesh_attention.errors import UsageError
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.queries import rank_costs
from mesh_attention.plan.text import format_numbers
from mesh_attention.units import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PLACES = 128
SIDE_IN = 6.2
LEAST_SIDE_IN, LARGEST_CELL_IN = 3.0, 0.9
"""A few blocks do not fill the sheet."""
NUMBERED_IN = 0.19
"""Blocks from this size on have their number inside."""
GAP = 0.05
"""Between blocks, as a share of one."""
BAR, BAR_GAP = 0.09, 0.05
"""Thickness of the bars beside the groups, and their distance from the matrix, in inches."""
Q_COLOUR, KV_COLOUR = "#0072b2", "#d55e00"
MASKED = "#f0f0f0"
LETTERS_A_LINE = 112
LINE_IN = 0.185

Corner = tuple[float, float]


class Cell(NamedTuple):
    """A block, and what the mask leaves of it: polygons, in units of blocks from its upper left corner."""

    row: int
    col: int
    place: int
    shapes: tuple[tuple[Corner, ...], ...]


def matrix_chart(plan: Plan, *, rank: int = 0) -> Figure:
    """Blocks in the colour of the place that computes them; `rank`'s tile is dark, and its groups have bars."""
    places = plan.assignment.places
    if places > MOST_PLACES:
        raise UsageError(f"{plan!r} has {places} × {places} blocks; a picture holds at most {MOST_PLACES} a side")
    side_in = max(LEAST_SIDE_IN, min(SIDE_IN, places * LARGEST_CELL_IN))
    is_numbered = side_in / places >= NUMBERED_IN
    words = wrap(_caption(plan, rank, is_numbered=is_numbered), LETTERS_A_LINE)  # refuses a rank that is not there
    tick_in = text_width_in([str(places - 1)], size=TEXT_SIZE)
    left = EDGE_IN + 0.3 + tick_in + BAR + BAR_GAP
    margins = Margins(left=left, right=WIDTH_IN - left - side_in, top=1.22, bottom=0.2 + LINE_IN * len(words))
    figure, axes = new_axes(height_in=margins.top + side_in + margins.bottom, margins=margins)
    _set_axes(axes, places, side_in)
    own = plan.assignment.place(rank)
    cells = cells_of(plan)
    _draw_cells(axes, cells, own, places)
    _draw_groups(axes, plan, own, side_in)
    if is_numbered:
        _number(axes, cells, own, size=TEXT_SIZE if places <= 12 else SMALL_SIZE)
    write_titles(figure, _title(plan), problem_words(plan))
    height_in = figure.get_size_inches()[1]
    for number, line in enumerate(words):
        y = (margins.bottom - 0.12 - LINE_IN * number) / height_in
        figure.text(EDGE_IN / WIDTH_IN, y, line, va="top", fontsize=9, color=INK, parse_math=False)
    return figure


def cells_of(plan: Plan) -> list[Cell]:
    """Every block, row by row."""
    places, found = plan.assignment.places, block_patterns(plan)
    patterns: list[str] = found["patterns"]  # type: ignore[assignment]
    letters: str = found["cells"]  # type: ignore[assignment]
    shapes = dict(zip(dict.fromkeys(letters), map(_shapes, patterns), strict=True))  # both in order of appearance
    return [
        Cell(row, col, owner(plan, row, col), shapes[letters[row * places + col]])
        for row in range(places)
        for col in range(places)
    ]


def owner(plan: Plan, row: int, col: int) -> int:
    """The place whose Q group has this row and whose KV group has this column."""
    return next(p for p in plan.assignment.group("row", row) if p in plan.assignment.group("col", col))


def _shapes(pattern: str) -> tuple[tuple[Corner, ...], ...]:
    rows = pattern.split("/")
    found = []
    for number, row in enumerate(rows):
        high, wide = 1 / len(rows), 1 / len(row)
        for at, what in enumerate(row):
            if what != EMPTY:
                top, left = number * high, at * wide
                found.append(tuple((left + x * wide, top + y * high) for x, y in _outline(what)))
    return tuple(found)


def _outline(what: str) -> Sequence[Corner]:
    """Of what is left of a pair of segments; a part that is no triangle is shown as a smaller square."""
    if what == FULL:
        return (0, 0), (1, 0), (1, 1), (0, 1)
    if what == LOWER:
        return (0, 0), (1, 1), (0, 1)
    if what == UPPER:
        return (0, 0), (1, 0), (1, 1)
    return (0.2, 0.2), (0.8, 0.2), (0.8, 0.8), (0.2, 0.8)


def _set_axes(axes: Axes, places: int, side_in: float) -> None:
    axes.set_xlim(0, places)
    axes.set_ylim(places, 0)
    axes.xaxis.tick_top()
    axes.tick_params(pad=4 + 72 * (BAR + BAR_GAP), labelsize=TEXT_SIZE if side_in / places > 0.25 else SMALL_SIZE)
    axes.spines["bottom"].set_visible(False)
    # As many numbers as do not touch each other.
    step = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128) if s * side_in / places > 0.19)
    shown = range(0, places, step)
    for axis, what in ((axes.xaxis, "key/value shard"), (axes.yaxis, "query shard")):
        axis.set_ticks([at + 0.5 for at in shown], labels=[str(at) for at in shown])
        axis.set_label_text(what, fontsize=TEXT_SIZE, color=FADED)
    axes.xaxis.set_label_position("top")


def _draw_cells(axes: Axes, cells: Sequence[Cell], own: int, places: int) -> None:
    from matplotlib.collections import PolyCollection

    squares = [_placed(cell, ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0))) for cell in cells]
    backs = [_pale(cell.place, places, 0.93) if cell.place == own else MASKED for cell in cells]
    axes.add_collection(PolyCollection(squares, facecolors=backs, linewidths=0, label="blocks"))
    shapes = [_placed(cell, shape) for cell in cells for shape in cell.shapes]
    colours = [_colour(cell.place, own, places) for cell in cells for _ in cell.shapes]
    axes.add_collection(PolyCollection(shapes, facecolors=colours, linewidths=0, label="work"))


def _placed(cell: Cell, shape: Sequence[Corner]) -> list[Corner]:
    scale = 1 - GAP
    return [(cell.col + GAP / 2 + scale * x, cell.row + GAP / 2 + scale * y) for x, y in shape]


def _colour(place: int, own: int, places: int) -> tuple[float, float, float]:
    return hls_to_rgb(_hue(place, places), 0.36, 0.75) if place == own else _pale(place, places, 0.82)


def _pale(place: int, places: int, light: float) -> tuple[float, float, float]:
    return hls_to_rgb(_hue(place, places), light, 0.6)


def _hue(place: int, places: int) -> float:
    return place / places


def _number(axes: Axes, cells: Sequence[Cell], own: int, *, size: float) -> None:
    """In each block, the place that computes it."""
    from matplotlib.patheffects import withStroke

    halo = {False: [withStroke(linewidth=1.8, foreground="white")], True: [withStroke(linewidth=1.8, foreground=INK)]}
    for cell in cells:
        if not cell.shapes:
            continue
        is_own = cell.place == own
        look: dict[str, Any] = {"color": "white" if is_own else FADED, "weight": "bold" if is_own else "normal"}
        middle = (cell.col + 0.5, cell.row + 0.5)
        axes.text(
            *middle,
            str(cell.place),
            ha="center",
            va="center_baseline",
            fontsize=size,
            path_effects=halo[is_own],
            **look,
        )


def _draw_groups(axes: Axes, plan: Plan, own: int, side_in: float) -> None:
    """Bars beside the rows of the Q group and above the columns of the KV group."""
    from matplotlib.patches import Rectangle

    places = plan.assignment.places
    thick, gap = (inches * places / side_in for inches in (BAR, BAR_GAP))
    for row in plan.assignment.group("row", own):
        axes.add_patch(Rectangle((-gap - thick, row), thick, 1, color=Q_COLOUR, clip_on=False, label="Q group"))
    for col in plan.assignment.group("col", own):
        axes.add_patch(Rectangle((col, -gap - thick), 1, thick, color=KV_COLOUR, clip_on=False, label="KV group"))


def _title(plan: Plan) -> str:
    who = "rank" if plan.assignment.ulysses == 1 else "place"
    return f"{plan.method} {plan.assignment}: which {who} computes which block"


def problem_words(plan: Plan) -> str:
    problem = plan.problem
    tokens = format_size(problem.seq_q)
    if problem.seq_kv != problem.seq_q:
        tokens += f" on {format_size(problem.seq_kv)}"
    mask = shorten(str(problem.mask), most=40)
    return f"{problem.ranks} ranks, {tokens} tokens, {mask}, {plan.layout.name}, {plan.direction}"


def _caption(plan: Plan, rank: int, *, is_numbered: bool) -> str:
    costs, assignment = rank_costs(plan, rank), plan.assignment
    place, tile = assignment.place(rank), assignment.tile
    q_group, kv_group = (_listed(assignment.group(axis, place)) for axis in ("row", "col"))
    noun = "ranks" if assignment.ulysses == 1 else "places"
    who = f"Rank {rank}" if assignment.ulysses == 1 else f"Rank {rank} (place {place}, a slice of the heads)"
    number = "A number says who computes a block; c" if is_numbered else "C"
    return (
        f"{who} computes the dark blocks, a tile of {tile.rows} × {tile.cols}. Q comes from its Q group, {noun} "
        f"{q_group} (blue bars), K and V from its KV group, {noun} {kv_group} (orange bars); with partial results it "
        f"receives {costs.received_nbytes / 2**20:,.1f} MiB. {number}olour is what the mask leaves of it."
    )


def _listed(places: Sequence[int]) -> str:
    return format_numbers(places).replace(",", ", ").replace("-", "–")
