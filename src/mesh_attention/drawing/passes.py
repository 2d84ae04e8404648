"""Forward and backward against time, forecast above measured: one time scale for all, so that lengths compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mesh_attention.drawing.canvas import EDGE_IN, FADED, INK, TEXT_SIZE, WIDTH_IN, new_figure, set_scale, write_titles
from mesh_attention.drawing.lanes import LANE_IN, draw_ranks, names_in, rows_of, shown_ranks, totals
from mesh_attention.drawing.scales import Scale
from mesh_attention.drawing.ticks import linear_ticks
from mesh_attention.drawing.tracks import rank_tracks
from mesh_attention.errors import UsageError
from mesh_attention.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEADING_IN, GAP_IN, BOTTOM_IN, RIGHT_IN = 0.42, 0.22, 0.52, 0.3
TOP_IN = 0.66


def passes_chart(
    timelines: Mapping[str, Timeline], *, ranks: Sequence[int], title: str = "", below: str = ""
) -> Figure:
    """Timelines one below the other, each under its key, such as "forward, forecast"; the same ranks of each."""
    if not timelines:
        raise UsageError("no timelines came; expected at least one to draw")
    shown = {name: shown_ranks(tuple(rank_tracks(t)), ranks, t.name) for name, t in timelines.items()}
    lanes_in = rows_of(ranks) * LANE_IN
    height_in = TOP_IN + len(timelines) * (HEADING_IN + lanes_in) + GAP_IN * (len(timelines) - 1) + BOTTOM_IN
    figure = new_figure(height_in=height_in)
    stop_s = max(max(t.time_s, *(span.stop_s for span in t.spans)) for t in timelines.values()) or 1e-6
    left_in, above_in = names_in(ranks), TOP_IN
    for number, (name, timeline) in enumerate(timelines.items(), 1):
        above_in += HEADING_IN
        axes = _panel(figure, left_in=left_in, above_in=above_in, lanes_in=lanes_in)
        _set_time(axes, stop_s, is_last=number == len(timelines))
        draw_ranks(axes, rank_tracks(timeline), shown[name], left_in=left_in)
        _head(figure, name, totals(timeline), above_in=above_in - HEADING_IN)
        above_in += lanes_in + GAP_IN
    write_titles(figure, title, below)
    return figure


def _panel(figure: Figure, *, left_in: float, above_in: float, lanes_in: float) -> Axes:
    height_in = figure.get_size_inches()[1]
    wide = (WIDTH_IN - left_in - RIGHT_IN) / WIDTH_IN
    place = (left_in / WIDTH_IN, 1 - (above_in + lanes_in) / height_in, wide, lanes_in / height_in)
    axes = figure.add_axes(place, facecolor="white")
    axes.tick_params(labelsize=TEXT_SIZE, length=0, pad=7, colors=FADED, which="both")
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(FADED)
    return axes


def _set_time(axes: Axes, stop_s: float, *, is_last: bool) -> None:
    """The same scale in every panel; said at the last one."""
    unit, ticks = linear_ticks(stop_s)
    ticks = ticks if is_last else [(at, "") for at, _ in ticks]
    label = f"time, {unit}" if is_last else ""
    set_scale(axes, "x", Scale(kind="linear", low=0.0, high=1.005 * stop_s, ticks=ticks, label=label))


def _head(figure: Figure, name: str, words: str, *, above_in: float) -> None:
    y = 1 - (above_in + 0.1) / figure.get_size_inches()[1]
    heading = figure.text(
        EDGE_IN / WIDTH_IN, y, name, va="top", fontsize=TEXT_SIZE, weight="bold", color=INK, parse_math=False
    )
    after = heading.get_window_extent().x1 / figure.dpi / WIDTH_IN + 0.02
    figure.text(after, y, words, va="top", fontsize=TEXT_SIZE, color=FADED, parse_math=False)
