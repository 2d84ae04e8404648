"""Axes as values: what stands where, and what the ticks say. Times stay in seconds; ticks say the unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Literal

from mesh_attention.drawing.ticks import Tick, linear_ticks, log_ticks, spaced

LOG_FROM = 10.0
"""Times that differ by more than this factor are drawn on a log axis."""
SHOWN_BELOW = 100.0
"""On it, exposed communication that is this many times less than the shortest time is as good as 0."""
MOST_TEXTS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """`symlog` is log above `linear_below` and linear from there to 0."""

    kind: Literal["linear", "log2", "log", "symlog"]
    low: float
    high: float
    ticks: Sequence[Tick]
    label: str
    linear_below: float = 0.0

    @property
    def tick_texts(self) -> list[str]:
        return [text for _, text in self.ticks]


def time_scale(times_s: Sequence[float], exposed_s: Sequence[float]) -> Scale:
    """From 0 where times are alike; log where they are not, with 0 below it if something is 0."""
    shortest, largest = min(times_s), max(*times_s, *exposed_s)
    if not shortest or max(times_s) <= LOG_FROM * shortest:
        high = 1.05 * largest or 1e-6
        unit, ticks = linear_ticks(high)
        return Scale(kind="linear", low=0.0, high=high, ticks=ticks, label=f"time, {unit}")
    seen = [seconds for seconds in exposed_s if seconds > shortest / SHOWN_BELOW]
    low, high = min([shortest, *seen]) / 1.3, largest * 1.3
    ticks = log_ticks(low, high)
    if len(seen) == len(exposed_s):
        return Scale(kind="log", low=low, high=high, ticks=ticks, label="time")
    return Scale(kind="symlog", low=0.0, high=high, ticks=[(0.0, "0"), *ticks], label="time", linear_below=low)


def number_scale(numbers: Sequence[float], *, label: str, write: Callable[[float], str]) -> Scale:
    """Log2, with ticks at the numbers themselves."""
    first, last = min(numbers), max(numbers)
    pad = 2 ** (0.04 * log2(last / first) or 1.0)
    ticks = [(at, write(at)) for at in spaced(numbers)]
    return Scale(kind="log2", low=first / pad, high=last * pad, ticks=ticks, label=label)


def text_scale(texts: Sequence[str], *, label: str) -> Scale:
    """Side by side from 0 on; where there are many, not each has a tick."""
    ticks = [(float(place), text) for place, text in enumerate(texts)]
    shown = ticks[:: ceil(len(ticks) / MOST_TEXTS)]
    return Scale(kind="linear", low=-0.25, high=len(texts) - 0.75, ticks=shown, label=label)
