"""Axes as values: where they begin and end, and their ticks. Times are in seconds; ticks say the unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log2, log10
from typing import Literal

from mesh_attention.units import SECONDS, time_unit

Tick = tuple[float, str]
"""Value of a tick, in the unit of the data, and its label."""

_LOG_STEPS = tuple(step * 10**power for power in range(5) for step in (1, 2, 5))
_MOST_LOG_TICKS = 10
LOG_FROM = 10.0
"""Times that differ by more than this factor are drawn on a log axis."""
SHOWN_BELOW = 100.0
"""On a log axis, exposed communication this many times shorter than the shortest time is drawn as 0."""
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
    """A linear scale from 0 if times are similar, otherwise a log scale, with 0 below it if a time is 0."""
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
    """A log2 scale with ticks at the numbers themselves."""
    first, last = min(numbers), max(numbers)
    pad = 2 ** (0.04 * log2(last / first) or 1.0)
    ticks = [(at, write(at)) for at in spaced(numbers)]
    return Scale(kind="log2", low=first / pad, high=last * pad, ticks=ticks, label=label)


def text_scale(texts: Sequence[str], *, label: str) -> Scale:
    """Texts side by side, from 0 on; if there are many, only some have a tick."""
    ticks = [(float(place), text) for place, text in enumerate(texts)]
    shown = ticks[:: ceil(len(ticks) / MOST_TEXTS)]
    return Scale(kind="linear", low=-0.25, high=len(texts) - 0.75, ticks=shown, label=label)


# Ticks


def linear_ticks(stop_s: float, *, most: int = 8) -> tuple[str, list[Tick]]:
    """The unit, and round numbers of it from 0 to `stop_s`."""
    unit, scale = time_unit(stop_s)
    return unit, [(at * scale, text) for at, text in round_ticks(stop_s / scale, most=most)]


def round_ticks(stop: float, *, most: int = 8) -> list[Tick]:
    """Round numbers from 0 to `stop`."""
    step = _round_up(stop / most)
    decimals = max(0, -floor(log10(step)))
    return [(i * step, f"{i * step:,.{decimals}f}") for i in range(floor(stop / step + 1e-9) + 1)]


def log_ticks(start_s: float, stop_s: float) -> list[Tick]:
    """Round times, each with its own unit; powers of ten only where there would be many."""
    ticks = {
        (step * scale, step): f"{step} {unit}"
        for (unit, scale), (_, following) in zip(SECONDS, (*SECONDS[1:], ("", 1e9)), strict=True)
        for step in _LOG_STEPS
        if step * scale < following / 1.5 and start_s <= step * scale <= stop_s
    }
    if len(ticks) > _MOST_LOG_TICKS:
        ticks = {key: text for key, text in ticks.items() if str(key[1]).startswith("1")}
    return [(seconds, text) for (seconds, _), text in ticks.items()]


def spaced(values: Sequence[float], *, most: int = 12) -> list[float]:
    """The values that a log axis has room for; the largest is always included."""
    ordered = sorted(set(values), reverse=True)
    gap = log2(ordered[0] / ordered[-1]) / most
    kept = ordered[:1]
    for value in ordered[1:]:
        if log2(kept[-1] / value) >= gap:
            kept.append(value)
    return kept[::-1]


def _round_up(value: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** floor(log10(value))
    return power * next(step for step in (1, 2, 5, 10) if step >= value / power - 1e-9)
