"""Pictures on the terminal: who computes each block, and how busy the lanes of some ranks are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd

from rich.text import Text

from mesh_attention.plan.plan import Plan
from mesh_attention.timeline import LANES, Lane, Timeline
from mesh_attention_lab.drawing.scales import linear_ticks

MOST_SHARDS = 32
PALETTE = (26, 166, 28, 163, 30, 160, 134, 100, 33, 168, 64, 243)
"""Terminal colours (of 256) that are readable on black and on white."""


def draw_matrix(plan: Plan, *, width: int) -> Text:
    """One line for each query shard that fits, and a caption."""
    places = plan.assignment.places
    digits = len(str(places - 1))
    most = (width - digits - 2) // (digits + 1)
    stride = _stride(places, plan.assignment.tile.rows, most=max(1, min(MOST_SHARDS, most)))
    shown = range(0, places, stride)
    header = " " * (digits + 2) + "".join(f" {col:{digits}}" for col in shown)
    border = " " * (digits + 1) + "┌" + "─" * (len(shown) * (digits + 1))
    lines = [Text(header, style="dim"), Text(border, style="dim"), *(_line(plan, row, shown, digits) for row in shown)]
    has_empty = any("·" in line.plain for line in lines)
    return Text("\n").join([*lines, Text(_caption(plan, stride, has_empty), style="dim")])


def _line(plan: Plan, row: int, shown: range, digits: int) -> Text:
    line = Text(f"{row:{digits}} │", style="dim")
    for col in shown:
        if not plan.matrix.is_live(row, col):
            line.append(f" {'·':>{digits}}")
            continue
        owner = plan.assignment.owner(row, col)
        grid_row, grid_col = plan.assignment.coordinates(owner)
        # Five down and one across: neighbours in the picture are apart in the palette.
        colour = PALETTE[(5 * grid_row + grid_col) % len(PALETTE)]
        line.append(f" {owner:{digits}}", style=f"not dim color({colour})")
    return line


def _stride(places: int, rows: int, *, most: int) -> int:
    """Show every stride-th shard; a factor in common with the tile's rows would hide columns of the grid."""
    stride = -(-places // most)
    while stride > 1 and gcd(stride, rows) > 1:
        stride += 1
    return stride


def _caption(plan: Plan, stride: int, has_empty: bool) -> str:
    ulysses = plan.assignment.ulysses
    who = "the rank" if ulysses == 1 else f"the place ({ulysses} ranks, each with a slice of the heads)"
    caption = f"query shards down, KV shards across; in each block, {who} that computes it"
    if has_empty:
        caption += "; · nothing to compute"
    if stride > 1:
        caption += f"; of {plan.assignment.places} shards, every {_ordinal(stride)} is shown"
    return caption


def _ordinal(number: int) -> str:
    ending = "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


# Timelines: one character for each slice of time


SHADES = " ░▒▓█"
"""Characters for a slice that is idle, and busy for a little, half, most or all of its time."""
COLOURS: dict[Lane, int] = {"compute": 26, "wait": 160, "send": 28, "recv": 134}
"""Terminal colours (of 256) that are readable on black and on white."""
LEAST_WIDTH = 10


def draw_lanes(timeline: Timeline, *, ranks: Sequence[int], width: int) -> Text:
    """Four lines for each rank, below a time axis."""
    names = [f"rank {rank}" for rank in ranks]
    margin = max(map(len, names)) + 1 + max(map(len, LANES)) + 1
    slices = max(LEAST_WIDTH, width - margin)
    lines = [Text(" " * margin + _axis(timeline.time_s, slices), style="dim")]
    for name, rank in zip(names, ranks, strict=True):
        for lane in LANES:
            label = f"{name if lane == LANES[0] else '':<{margin - 8}}{lane:<8}"
            spans = [(s.start_s, s.stop_s) for s in timeline.spans if (s.rank, s.lane) == (rank, lane)]
            busy = busy_shares(spans, stop_s=timeline.time_s, slices=slices)
            line = Text(label, style="dim")
            line.append("".join(map(shade, busy)).rstrip(), style=f"not dim color({COLOURS[lane]})")
            lines.append(line)
    return Text("\n").join(lines)


def busy_shares(spans: Iterable[tuple[float, float]], *, stop_s: float, slices: int) -> list[float]:
    """The share of each slice of the time that is covered by spans; they may overlap."""
    shares = [0.0] * slices
    slice_s = stop_s / slices
    free_s = 0.0
    for start, stop in sorted(spans):
        start, stop = max(start, free_s), min(stop, stop_s)
        free_s = max(free_s, stop)
        at = min(slices - 1, int(start / slice_s)) if slice_s else 0
        while start < stop and at < slices:
            end = min(stop, (at + 1) * slice_s)
            shares[at] += max(0.0, end - start) / slice_s
            start, at = max(start, end), at + 1
    return [min(1.0, share) for share in shares]


def shade(share: float) -> str:
    """Full only for a slice that is busy all the time, or nearly, and blank only for one that is idle."""
    if share <= 0.0:
        return SHADES[0]
    return SHADES[-1] if share > 0.99 else SHADES[1 + min(2, int(3 * share))]


def _axis(stop_s: float, slices: int) -> str:
    """Labels at round times; those that do not fit are left out."""
    unit, ticks = linear_ticks(stop_s or 1e-6, most=max(1, slices // 12))
    axis = ""
    for seconds, text in ticks:
        at = round(seconds / (stop_s or 1e-6) * slices)
        label = f"│{text} {unit}"
        if at >= len(axis) and at + len(label) <= slices:
            axis = axis.ljust(at) + label
    return axis
