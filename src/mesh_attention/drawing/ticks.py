"""Axis ticks at round numbers, times from microseconds to hours among them."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log2, log10

from mesh_attention.units import SECONDS, time_unit

Tick = tuple[float, str]
"""Its value, in the unit of the data, and its label."""

_LOG_STEPS = tuple(step * 10**power for power in range(5) for step in (1, 2, 5))
_MOST_LOG_TICKS = 10


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
    """Those of the values that a log axis has room for, the last one among them."""
    ordered = sorted(set(values), reverse=True)
    gap = log2(ordered[0] / ordered[-1]) / most
    kept = ordered[:1]
    for value in ordered[1:]:
        if log2(kept[-1] / value) >= gap:
            kept.append(value)
    return kept[::-1]


def _round_up(value: float) -> float:
    """To 1, 2 or 5 times a power of ten."""
    power = 10.0 ** floor(log10(value))
    return power * next(step for step in (1, 2, 5, 10) if step >= value / power - 1e-9)
