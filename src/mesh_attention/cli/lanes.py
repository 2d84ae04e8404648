"""Timelines as text: what the lanes of some ranks are busy with, a character for each slice of the time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.text import Text

from mesh_attention.drawing.scales import linear_ticks
from mesh_attention.timeline import LANES, Lane, Timeline

SHADES = " ░▒▓█"
"""Busy for nothing of the slice, a little, half, most, all of it."""
COLOURS: dict[Lane, int] = {"compute": 26, "wait": 160, "send": 28, "recv": 134}
"""Terminal colours, of the 256, that stand out from black and from white alike."""
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
    """Only what is busy (all but) all the time is black, and only what is not at all is blank."""
    if share <= 0.0:
        return SHADES[0]
    return SHADES[-1] if share > 0.99 else SHADES[1 + min(2, int(3 * share))]


def _axis(stop_s: float, slices: int) -> str:
    """Round times, each beginning where it is; what does not fit is left out."""
    unit, ticks = linear_ticks(stop_s or 1e-6, most=max(1, slices // 12))
    axis = ""
    for seconds, text in ticks:
        at = round(seconds / (stop_s or 1e-6) * slices)
        label = f"│{text} {unit}"
        if at >= len(axis) and at + len(label) <= slices:
            axis = axis.ljust(at) + label
    return axis
