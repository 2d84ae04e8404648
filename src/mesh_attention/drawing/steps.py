"""One rank's program as a chart: what it receives, attends and sends, in order. Not to scale: a stop is as wide as any.

Read like a score: from left to right, and strip below strip. What is received is a bar from where it is posted to where
it is first needed; what is sent stands where it is posted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, Literal

from mesh_attention.drawing.canvas import (
    EDGE_IN,
    FADED,
    GRID,
    INK,
    TEXT_SIZE,
    WIDTH_IN,
    darker,
    new_figure,
    text_width_in,
    write_titles,
)
from mesh_attention.drawing.lanes import LANE_COLOURS
from mesh_attention.drawing.matrix import problem_words
from mesh_attention.drawing.tracks import Track, side_by_side
from mesh_attention.errors import UsageError
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import Attend, Collective, Exchange, Finish, Free, Item, Merge, Pack, Step, transfers
from mesh_attention.plan.text import format_item
from mesh_attention.plan.waits import stops
from mesh_attention.timeline import Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Look = Literal["attend", "other"]
MOST_STOPS = 400
STOPS_A_STRIP = 32
ROW_IN = 0.19
LETTER_IN = 0.062
"""A letter of a label, at its size."""
LABEL_SIZE = 7.5
STRIP_GAP_IN = 0.42
OTHER_COLOUR = "#bbbbbb"
TOP_IN, BOTTOM_IN, RIGHT_IN = 0.98, 0.18, 0.2


@dataclass(frozen=True, slots=True)
class Box:
    """What a rank does at a stop; labels have a line each for rows and columns."""

    at: int
    label: str
    look: Look


@dataclass(frozen=True, slots=True)
class Score:
    """A program as it is drawn: places are stops, counted without those that only free something."""

    length: int
    boxes: tuple[Box, ...]
    recvs: tuple[Span, ...]
    sends: tuple[Span, ...]


def steps_chart(plan: Plan, *, rank: int = 0) -> Figure:
    """One rank's program."""
    score = score_of(plan, rank)
    if not score.length:
        raise UsageError(f"rank {rank} of {plan!r} has no steps: it is home to no tokens; draw another rank's")
    if score.length > MOST_STOPS:
        raise UsageError(
            f"rank {rank} of {plan!r} has {score.length} stops, more than the {MOST_STOPS} that a picture holds; "
            "draw the timeline, or use mesh-attention plan --all-steps"
        )
    strips = ceil(score.length / STOPS_A_STRIP)
    a_strip = max(8, ceil(score.length / strips))
    left_in = EDGE_IN + text_width_in(("receives", "computes", "sends"), size=TEXT_SIZE) + 0.12
    stop_in = (WIDTH_IN - left_in - RIGHT_IN) / a_strip
    parts = [_part(score, range(n * a_strip, (n + 1) * a_strip), stop_in=stop_in) for n in range(strips)]
    heights = [_height_in(part) for part in parts]
    figure = new_figure(height_in=TOP_IN + sum(heights) + STRIP_GAP_IN * (strips - 1) + BOTTOM_IN)
    above_in = TOP_IN
    for number, (part, height_in) in enumerate(zip(parts, heights, strict=True)):
        axes = _strip_axes(figure, left_in=left_in, above_in=above_in, height_in=height_in)
        _draw_part(axes, part, first=number * a_strip, wide=a_strip, height_in=height_in)
        above_in += height_in + STRIP_GAP_IN
    write_titles(figure, f"{plan.method} {plan.assignment}: what rank {rank} does, in order", problem_words(plan))
    look: dict[str, Any] = {"fontsize": 9, "color": FADED, "va": "top", "parse_math": False}
    figure.text(EDGE_IN / WIDTH_IN, 1 - 0.64 / figure.get_size_inches()[1], _EXPLAINED, **look)
    return figure


_EXPLAINED = (
    "Not to scale. A receive lasts from where it is posted to where it is first needed; a send is where it is posted."
)


# What is drawn


def score_of(plan: Plan, rank: int) -> Score:
    steps = plan.program(rank).steps
    boxes: list[Box] = []
    recvs: list[Span] = []
    sends: list[Span] = []
    posted: dict[Item, int] = {}
    at = -1
    for stop in stops(steps):
        here = steps[stop.span.start : stop.span.stop]
        is_shown = not isinstance(here[0], Free)
        at += is_shown
        for item in stop.arrivals:
            number = posted.pop(item)
            recvs[number] = recvs[number]._replace(stop_s=max(recvs[number].stop_s, float(at if is_shown else at + 1)))
        is_held = isinstance(here[0], Collective | Exchange)
        for step in here:
            boxes += [Box(at, *box) for box in (_box(step),) if box is not None]
            for recv in transfers(step)[1]:
                if not is_held:
                    posted[recv.item] = len(recvs)
                name = f"{format_item(recv.item)} ← {recv.source}"
                recvs.append(Span(rank, "recv", float(at), float(at + 1), name))
            for send in transfers(step)[0]:
                name = f"{format_item(send.item)} → {send.dest}"
                sends.append(Span(rank, "send", float(at), float(at + 1), name))
    return Score(at + 1, tuple(boxes), tuple(recvs), tuple(sends))


def _box(step: Step) -> tuple[str, Look] | None:
    match step:
        case Attend(rows, cols):
            return f"{_items(rows)} × {_items(cols)}", "attend"
        case Merge(partial):
            return f"add {format_item(partial)}", "other"
        case Finish(item):
            return f"{'result' if item.form == 'home' else 'round'} {item.kind}{item.shard}", "other"
        case Collective(op):
            return op, "other"
        case Exchange(before, after):
            return f"trade {before.kind}{before.shard} for {after.kind}{after.shard}", "other"
        case Pack(_, after):
            return f"pack {format_item(after)}", "other"
        case _:
            return None


def _items(items: Sequence[Item]) -> str:
    """q0,q1,q2 is q0–2."""
    kind, shards = items[0].kind, [item.shard for item in items]
    if len(shards) > 2 and shards == list(range(shards[0], shards[0] + len(shards))):
        return f"{kind}{shards[0]}–{shards[-1]}"
    text = ",".join(map(str, shards[:4]))
    return f"{kind}{text}" + (f",… ({len(shards)})" if len(shards) > 4 else "")


# One strip


@dataclass(frozen=True, slots=True)
class _Part:
    boxes: tuple[Box, ...]
    recvs: tuple[Track, ...]
    sends: tuple[Track, ...]

    @property
    def label_in(self) -> float:
        return max((len(box.label) for box in self.boxes), default=0) * LETTER_IN + 0.12


def _part(score: Score, places: range, *, stop_in: float) -> _Part:
    """What is under way there. Bars are cut at its ends; a send is as wide as its name, and inside."""
    recvs = [
        span._replace(start_s=max(span.start_s, places.start), stop_s=min(span.stop_s, places.stop))
        for span in score.recvs
        if span.start_s < places.stop and span.stop_s > places.start
    ]
    sends = []
    for span in score.sends:
        if span.start_s in places:
            wide = max(1.0, (LETTER_IN * len(span.name) + 0.08) / stop_in)
            start = max(places.start, min(span.start_s, places.stop - wide))
            sends.append(span._replace(start_s=start, stop_s=start + wide))
    return _Part(tuple(box for box in score.boxes if box.at in places), side_by_side(recvs), side_by_side(sends))


def _height_in(part: _Part) -> float:
    return ROW_IN * (max(1, len(part.recvs)) + max(1, len(part.sends))) + part.label_in + 0.12


def _strip_axes(figure: Figure, *, left_in: float, above_in: float, height_in: float) -> Axes:
    whole_in = figure.get_size_inches()[1]
    wide = (WIDTH_IN - left_in - RIGHT_IN) / WIDTH_IN
    place = (left_in / WIDTH_IN, 1 - (above_in + height_in) / whole_in, wide, height_in / whole_in)
    axes = figure.add_axes(place, facecolor="white")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(labelsize=TEXT_SIZE, length=0, pad=6, colors=FADED)
    return axes


def _draw_part(axes: Axes, part: _Part, *, first: int, wide: int, height_in: float) -> None:
    """The y axis is in inches, from the top."""
    axes.set_xlim(first, first + wide)
    axes.set_ylim(height_in, 0)
    axes.set_xticks([])
    top = ROW_IN * max(1, len(part.recvs)) + 0.06
    below = top + part.label_in + 0.06
    middles = (top / 2, (top + below) / 2 - 0.03, below + ROW_IN * max(1, len(part.sends)) / 2)
    axes.set_yticks(middles, ["receives", "computes", "sends"])
    for at in range(first, first + wide + 1):
        axes.axvline(at, color=GRID, linewidth=0.5, zorder=0)
    _draw_bars(axes, part.recvs, LANE_COLOURS["recv"], top=0.0, wide=wide)
    _draw_boxes(axes, part, top=top, wide=wide)
    _draw_bars(axes, part.sends, LANE_COLOURS["send"], top=below, wide=wide)


def _draw_bars(axes: Axes, tracks: Sequence[Track], colour: str, *, top: float, wide: int) -> None:
    inch = axes.bbox.width / axes.figure.dpi / wide
    for number, track in enumerate(tracks):
        y = top + ROW_IN * number
        for span in track:
            length = span.stop_s - span.start_s
            look: dict[str, Any] = {"facecolor": colour, "edgecolor": darker(colour), "linewidth": 0.6}
            axes.broken_barh([(span.start_s + 0.04, length - 0.08)], (y + 0.01, ROW_IN - 0.03), **look)
            room = int((length * inch - 0.02) / LETTER_IN)
            name = span.name if len(span.name) <= room else span.name.split()[0]
            if len(name) <= room:
                middle = (span.start_s + span.stop_s) / 2
                ink = INK if colour == LANE_COLOURS["recv"] else "white"
                axes.text(
                    middle, y + ROW_IN / 2, name, ha="center", va="center_baseline", fontsize=LABEL_SIZE, color=ink
                )


def _draw_boxes(axes: Axes, part: _Part, *, top: float, wide: int) -> None:
    """Labels upright, so that a stop is narrow; those that share a stop stand side by side."""
    together: dict[int, list[Box]] = {}
    for box in part.boxes:
        together.setdefault(box.at, []).append(box)
    for at, boxes in together.items():
        width = 1 / len(boxes)
        for number, box in enumerate(boxes):
            is_attend = box.look == "attend"
            colour = LANE_COLOURS["compute"] if is_attend else OTHER_COLOUR
            x = at + number * width
            axes.broken_barh(
                [(x + 0.06, width - 0.12)],
                (top, part.label_in),
                facecolor=colour,
                edgecolor=darker(colour),
                linewidth=0.6,
            )
            axes.text(
                x + width / 2,
                top + part.label_in - 0.06,
                box.label,
                rotation=90,
                ha="center",
                va="bottom",
                fontsize=LABEL_SIZE,
                color="white" if is_attend else INK,
            )
