"""Times, token counts and axis ticks as people read them, from microseconds to hours."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log2, log10

Tick = tuple[float, str]
"""Where it stands, in the unit of the data, and what it says."""

_UNITS = (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0), ("min", 60.0))
_MINUTES_FROM_S = 120.0
_LOG_STEPS = tuple(step * 10**power for power in range(5) for step in (1, 2, 5))
_MOST_LOG_TICKS = 10
_ROUNDING_S = 5e-10


def unit_of(seconds: float) -> tuple[str, float]:
    """The largest unit of which there is at least one, and how many seconds it has; minutes from two on."""
    if seconds >= _MINUTES_FROM_S:
        return _UNITS[-1]
    return next((unit for unit in reversed(_UNITS[:-1]) if seconds >= unit[1]), _UNITS[0])


def format_time(seconds: float) -> str:
    """Three digits and a unit; what is less than half a nanosecond is 0."""
    if abs(seconds) < _ROUNDING_S:
        return "0"
    rounded = float(f"{seconds:.3g}")
    unit, scale = unit_of(abs(rounded))
    value = rounded / scale
    return f"{value:,.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"


def format_tokens(tokens: float) -> str:
    """131072 is 128k, 1048576 is 1m, 100000 is 97.7k."""
    for unit, scale in (("m", 1024**2), ("k", 1024)):
        if tokens >= scale:
            return f"{tokens / scale:.3g}{unit}" if tokens < 1000 * scale else f"{tokens / scale:,.0f}{unit}"
    return f"{tokens:g}"


def linear_ticks(stop_s: float, *, most: int = 8) -> tuple[str, list[Tick]]:
    """The unit, and round numbers of it from 0 to `stop_s`."""
    unit, scale = unit_of(stop_s)
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
        for (unit, scale), (_, following) in zip(_UNITS, (*_UNITS[1:], ("", 1e9)), strict=True)
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
