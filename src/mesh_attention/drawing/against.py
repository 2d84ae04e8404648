"""Methods beside ring, as bars: what a rank receives, and how long the passes take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from mesh_attention.drawing.canvas import (
    EDGE_IN,
    FADED,
    GRID,
    INK,
    SMALL_SIZE,
    TEXT_SIZE,
    WIDTH_IN,
    new_figure,
    shorten,
    text_width_in,
    write_titles,
)
from mesh_attention.drawing.lanes import LANE_COLOURS
from mesh_attention.drawing.ticks import linear_ticks, round_ticks
from mesh_attention.errors import UsageError
from mesh_attention.units import format_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW_IN, TOP_IN, BOTTOM_IN, GAP_IN, RIGHT_IN = 0.5, 1.0, 0.55, 0.55, 0.2
LONGEST_NAME = 24
BYTES_COLOUR, EXPOSED_COLOUR, MEASURED_COLOUR = "#66a3c7", LANE_COLOURS["wait"], "#222222"
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A method, all its passes together. Bytes are what the worst rank receives; `measured_s` where it really ran."""

    name: str
    received_nbytes: int
    time_s: float
    exposed_s: float
    measured_s: float | None = None


def against_chart(contenders: Sequence[Contender], *, passes: str, title: str = "", below: str = "") -> Figure:
    """The first is what the others are set against, so it should be ring. `passes` says what the times are of."""
    _check(contenders)
    names = [shorten(contender.name, most=LONGEST_NAME) for contender in contenders]
    left_in = EDGE_IN + text_width_in(names, size=TEXT_SIZE) + 0.12
    height_in = TOP_IN + ROW_IN * len(contenders) + BOTTOM_IN
    figure = new_figure(height_in=height_in)
    wide_in = (WIDTH_IN - left_in - GAP_IN - RIGHT_IN) / 2
    panels = [_panel(figure, left_in + n * (wide_in + GAP_IN), wide_in, len(contenders)) for n in range(2)]
    panels[0].set_yticks([row + 0.5 for row in range(len(names))], names, parse_math=False, color=INK)
    panels[1].set_yticks([])
    _draw_bytes(panels[0], contenders)
    _draw_times(panels[1], contenders, passes)
    write_titles(figure, title, below)
    return figure


def _check(contenders: Sequence[Contender]) -> None:
    if not contenders:
        raise UsageError("no contenders came; expected at least one to draw")
    for one in contenders:
        numbers = (one.received_nbytes, one.time_s, one.measured_s or 0.0)
        if not all(isfinite(number) and number >= 0 for number in numbers):
            raise UsageError(f"{one}: expected bytes and seconds, 0 or above")


def _panel(figure: Figure, left_in: float, wide_in: float, rows: int) -> Axes:
    height_in = figure.get_size_inches()[1]
    place = (left_in / WIDTH_IN, BOTTOM_IN / height_in, wide_in / WIDTH_IN, ROW_IN * rows / height_in)
    axes = figure.add_axes(place, facecolor="white")
    axes.tick_params(labelsize=TEXT_SIZE, length=0, pad=6, colors=FADED)
    axes.set_ylim(rows, 0)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "left")
        spine.set_color(FADED)
    return axes


def _draw_bytes(axes: Axes, contenders: Sequence[Contender]) -> None:
    sizes = [contender.received_nbytes / MIB for contender in contenders]
    high = _set_x(axes, max(sizes), "received by the worst rank", is_time=False)
    for row, size in enumerate(sizes):
        axes.barh(row + 0.5, size, height=0.62, color=BYTES_COLOUR, label="received")
        _label(axes, row, size, f"{size:,.1f}" if size < 100 else f"{size:,.0f}", sizes[0], high)


def _draw_times(axes: Axes, contenders: Sequence[Contender], passes: str) -> None:
    times = [contender.time_s for contender in contenders]
    measured = [contender.measured_s for contender in contenders]
    longest = max(times + [seconds for seconds in measured if seconds is not None])
    high = _set_x(axes, longest, passes, is_time=True)
    has_measured = any(seconds is not None for seconds in measured)
    for row, one in enumerate(contenders):
        middle, height = (row + 0.34, 0.34) if has_measured else (row + 0.5, 0.62)
        compute = max(0.0, one.time_s - max(0.0, one.exposed_s))
        axes.barh(middle, compute, height=height, color=LANE_COLOURS["compute"], label="compute")
        axes.barh(middle, one.time_s - compute, left=compute, height=height, color=EXPOSED_COLOUR, label="exposed")
        _label(axes, row, one.time_s, format_time(one.time_s), times[0], high, y=middle)
        if one.measured_s is not None:
            axes.barh(row + 0.74, one.measured_s, height=0.3, color=MEASURED_COLOUR, label="measured")
            _label(axes, row, one.measured_s, format_time(one.measured_s), measured[0] or 0.0, high, y=row + 0.74)
    _explain(axes, has_measured=has_measured)


def _set_x(axes: Axes, most: float, what: str, *, is_time: bool) -> float:
    """From 0, with room for a label beyond the longest bar; seconds or MiB."""
    high = 1.42 * (most or 1e-6)
    unit, ticks = linear_ticks(high, most=5) if is_time else ("MiB", round_ticks(high, most=5))
    axes.set_xlim(0, high)
    axes.set_xticks([at for at, _ in ticks], [text for _, text in ticks])
    axes.set_xlabel(f"{what}, {unit}", fontsize=TEXT_SIZE, color=FADED)
    return high


def _label(axes: Axes, row: int, value: float, text: str, ring: float, high: float, *, y: float | None = None) -> None:
    """At the end of a bar: its value, and how many times ring's it is."""
    words = text if row == 0 or not ring else f"{text}  {value / ring:.2f}×"
    at = (value + 0.012 * high, row + 0.5 if y is None else y)
    axes.text(*at, words, va="center_baseline", fontsize=SMALL_SIZE, color=INK, parse_math=False)


def _explain(axes: Axes, *, has_measured: bool) -> None:
    from matplotlib.patches import Patch

    entries = {"forecast: compute": LANE_COLOURS["compute"], "exposed": EXPOSED_COLOUR}
    if has_measured:
        entries["measured"] = MEASURED_COLOUR
    handles: list[Any] = [Patch(color=colour, label=name) for name, colour in entries.items()]
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(handles),
        frameon=False,
        fontsize=SMALL_SIZE,
        labelcolor=FADED,
        borderaxespad=0.3,
        handlelength=1.2,
        columnspacing=1.2,
    )
