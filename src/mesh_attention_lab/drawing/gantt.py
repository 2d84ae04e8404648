"""Gantt charts: the lanes of ranks against time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mesh_attention.errors import UsageError
from mesh_attention.timeline import LANES, Lane, Timeline
from mesh_attention.units import format_time
from mesh_attention_lab.drawing import canvas
from mesh_attention_lab.drawing.canvas import Scale, linear_ticks
from mesh_attention_lab.drawing.tracks import Track, rank_tracks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_RANKS = 16
LANE_COLOURS: dict[Lane, str] = {"compute": "#4477aa", "wait": "#ee6677", "send": "#228833", "recv": "#ccbb44"}
LANE_IN, RANK_GAP = 0.24, 0.6
"""A lane's height in inches, and the gap between ranks in lanes."""

Tracks = Mapping[int, Mapping[Lane, Sequence[Track]]]
"""Tracks by rank and lane."""


def gantt(timeline: Timeline, *, ranks: Sequence[int] | None = None, why: str = "") -> Figure:
    """The spans of a timeline, lane by lane; all ranks that have spans unless `ranks` names some, and `why` says why
    these."""
    tracks = rank_tracks(timeline)
    shown = _shown_ranks(tuple(tracks), ranks, timeline.name)
    margins = canvas.Margins(left=_names_in(shown), right=0.3, top=0.92 if why else 0.72, bottom=0.55)
    figure, axes = canvas.new_axes(height_in=_rows_of(shown) * LANE_IN + margins.top + margins.bottom, margins=margins)
    stop_s = max(timeline.time_s, *(span.stop_s for span in timeline.spans)) or 1e-6
    unit, ticks = linear_ticks(stop_s)
    canvas.set_scale(axes, "x", Scale(kind="linear", low=0.0, high=1.005 * stop_s, ticks=ticks, label=f"time, {unit}"))
    _draw_ranks(axes, tracks, shown, left_in=margins.left)
    canvas.write_titles(figure, timeline.name, f"{_totals(timeline)}\n{why}".strip())
    return figure


def _shown_ranks(there: Sequence[int], wanted: Sequence[int] | None, name: str) -> Sequence[int]:
    """The ranks that were asked for, or all; refuses ranks without spans, and more ranks than a picture holds."""
    shown = there if wanted is None else tuple(dict.fromkeys(wanted))
    missing = [rank for rank in shown if rank not in there]
    if missing or not shown:
        raise UsageError(f"timeline {name!r} has no spans of ranks {missing}; it has those of {list(there)}")
    if len(shown) > MOST_RANKS:
        raise UsageError(
            f"timeline {name!r}: {len(shown)} ranks are more than one picture holds; "
            f"name at most {MOST_RANKS}, such as ranks={tuple(shown[:4])}, or write a trace of all"
        )
    return shown


def _rows_of(ranks: Sequence[int]) -> float:
    """Total height of these ranks, in lanes."""
    return len(ranks) * (len(LANES) + RANK_GAP)


def _names_in(ranks: Iterable[int]) -> float:
    """Inches that the names of ranks and lanes take."""
    ranks_in = canvas.text_width_in(map(_name, ranks), size=canvas.TEXT_SIZE, weight="bold")
    return canvas.EDGE_IN + ranks_in + 0.15 + canvas.text_width_in(LANES, size=canvas.TEXT_SIZE) + 0.1


def _draw_ranks(axes: Axes, tracks: Tracks, ranks: Sequence[int], *, left_in: float) -> None:
    """Draw the lanes and names of these ranks, from top to bottom; the x axis is set already."""
    tops = [number * (len(LANES) + RANK_GAP) for number in range(len(ranks))]
    axes.set_ylim(_rows_of(ranks) - RANK_GAP / 2, -RANK_GAP / 2)
    axes.grid(axis="x", color=canvas.GRID, linewidth=0.8)
    for rank, top in zip(ranks, tops, strict=True):
        for row, lane in enumerate(LANES):
            _draw_lane(axes, lane, tracks[rank][lane], top=top + row)
    _name_rows(axes, dict(zip(map(_name, ranks), tops, strict=True)), left_in=left_in)


def _totals(timeline: Timeline) -> str:
    share = timeline.exposed_s / timeline.time_s if timeline.time_s else 0.0
    return (
        f"time {format_time(timeline.time_s)} · exposed communication {format_time(timeline.exposed_s)} ({share:.1%})"
        f" · utilisation {timeline.utilisation:.1%}"
    )


def _name(rank: int) -> str:
    return f"rank {rank}"


def _name_rows(axes: Axes, names: dict[str, float], *, left_in: float) -> None:
    middles = [(top + row + 0.5, lane) for top in names.values() for row, lane in enumerate(LANES)]
    axes.set_yticks([at for at, _ in middles], [lane for _, lane in middles])
    for name, top in names.items():
        axes.annotate(
            name,
            (0, top + len(LANES) / 2),
            xytext=(72 * (canvas.EDGE_IN - left_in), 0),
            textcoords="offset points",
            va="center",
            fontsize=canvas.TEXT_SIZE,
            weight="bold",
            color=canvas.INK,
            annotation_clip=False,
        )
        if top:
            axes.axhline(top - RANK_GAP / 2, color=canvas.GRID, linewidth=0.8)


def _draw_lane(axes: Axes, lane: Lane, tracks: Sequence[Track], *, top: float) -> None:
    """Spans that overlap share the lane's height."""
    colour = LANE_COLOURS[lane]
    height = 0.86 / max(1, len(tracks))
    for number, track in enumerate(tracks):
        y = top + 0.07 + number * height
        bars = [(span.start_s, span.stop_s - span.start_s) for span in track]
        # With a darker edge, a span that is too short to see is still a line.
        axes.broken_barh(
            bars, (y, height), facecolor=colour, edgecolor=canvas.darker(colour), linewidth=0.5, label=lane
        )
        if height * LANE_IN * 72 > canvas.SMALL_SIZE:
            _name_spans(axes, track, y=y + height / 2)


def _name_spans(axes: Axes, track: Track, *, y: float) -> None:
    """Write the names of spans inside the bars that are wide enough."""
    pixels_a_second = axes.bbox.width / axes.get_xlim()[1]
    for span in track:
        width = (span.stop_s - span.start_s) * pixels_a_second
        if width < 3 * len(span.name):  # no letter is narrower; measuring takes time
            continue
        look: dict[str, Any] = {"fontsize": canvas.SMALL_SIZE, "color": canvas.INK if span.lane == "recv" else "white"}
        middle = (span.start_s + span.stop_s) / 2
        name = axes.text(middle, y, span.name, ha="center", va="center_baseline", parse_math=False, **look)
        if name.get_window_extent().width > width - 2:
            name.remove()
