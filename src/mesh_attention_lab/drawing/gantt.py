"""Gantt charts: the lanes of ranks against time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mesh_attention.timeline import LANES, Lane, Timeline
from mesh_attention.units import format_time
from mesh_attention_lab.drawing import canvas
from mesh_attention_lab.drawing.trace import Track, rank_tracks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LANE_COLOURS: dict[Lane, str] = {"compute": "#4477aa", "wait": "#ee6677", "send": "#228833", "recv": "#ccbb44"}
LANE_IN, RANK_GAP = 0.24, 0.6
"""A lane's height in inches, and the gap between ranks in lanes."""
NAMES_PAD = 68
"""Points between the axes and the names of ranks, with room for the names of lanes."""


def gantt(timeline: Timeline, *, ranks: Sequence[int] | None = None, why: str = "") -> Figure:
    """The spans of a timeline, lane by lane; all ranks that have spans unless `ranks` names some, and `why` says why
    these."""
    tracks = rank_tracks(timeline)
    shown = tuple(tracks) if ranks is None else ranks
    tops = {rank: number * (len(LANES) + RANK_GAP) for number, rank in enumerate(shown)}
    lanes = len(shown) * (len(LANES) + RANK_GAP)
    below = f"{_totals(timeline)}\n{why}".strip()
    figure, axes = canvas.new_axes(height_in=lanes * LANE_IN + 1.6, title=timeline.name, below=below)
    axes.set_xlim(0.0, 1.005 * max(timeline.time_s, *(span.stop_s for span in timeline.spans)) or 1e-6)
    axes.set_ylim(lanes - RANK_GAP / 2, -RANK_GAP / 2)
    axes.grid(axis="x", color=canvas.GRID, linewidth=0.8)
    canvas.set_time_ticks(axes.xaxis)
    _name_rows(axes, tops)
    figure.draw_without_rendering()  # so that the axes have the size they will be drawn with
    for rank, top in tops.items():
        for row, lane in enumerate(LANES):
            _draw_lane(axes, lane, tracks[rank][lane], top=top + row)
    return figure


def _totals(timeline: Timeline) -> str:
    share = timeline.exposed_s / timeline.time_s if timeline.time_s else 0.0
    return (
        f"time {format_time(timeline.time_s)} · exposed communication {format_time(timeline.exposed_s)} ({share:.1%})"
        f" · utilisation {timeline.utilisation:.1%}"
    )


def _name_rows(axes: Axes, tops: dict[int, float]) -> None:
    """Lanes as ticks, and ranks as ticks to the left of them."""
    names: dict[str, Any] = {"fontsize": canvas.TEXT_SIZE, "weight": "bold", "color": canvas.INK}
    lanes = [(top + row + 0.5, lane) for top in tops.values() for row, lane in enumerate(LANES)]
    axes.set_yticks([at for at, _ in lanes], [lane for _, lane in lanes])
    middles = [top + len(LANES) / 2 for top in tops.values()]
    axes.set_yticks(middles, [f"rank {rank}" for rank in tops], minor=True, **names)
    axes.tick_params(axis="y", which="minor", pad=NAMES_PAD)
    for top in list(tops.values())[1:]:
        axes.axhline(top - RANK_GAP / 2, color=canvas.GRID, linewidth=0.8)


def _draw_lane(axes: Axes, lane: Lane, tracks: Sequence[Track], *, top: float) -> None:
    """Spans that overlap share the lane's height."""
    colour = LANE_COLOURS[lane]
    height = 0.86 / max(1, len(tracks))
    for number, track in enumerate(tracks):
        y = top + 0.07 + number * height
        bars = [(span.start_s, span.stop_s - span.start_s) for span in track]
        # With a darker edge, a span that is too short to see is still a line.
        axes.broken_barh(bars, (y, height), facecolor=colour, edgecolor="#00000066", linewidth=0.5, label=lane)
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
