"""Sizes, bytes, times and counts as people write and read them.

Everything shown to a person goes through here: three significant digits and a unit, k = 1024 tokens, KiB = 1024 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

GIB = 2**30

Progress = Callable[[str, float], None]
"""Hears of progress: the current activity, and the fraction done."""


def part_report(report: Progress, number: int, of: int, prefix: str = "") -> Progress:
    """Reports the progress of one of several equal parts as that of the whole."""
    return lambda activity, fraction: report(f"{prefix}{activity}", (number + fraction) / of)


Units = tuple[tuple[str, int], ...]
BYTES: Units = (("B", 1), ("KiB", 1024), ("MiB", 1024**2), ("GiB", GIB), ("TiB", 1024**4))
TIMES: Units = (("ns", 1), ("µs", 10**3), ("ms", 10**6), ("s", 10**9))
SECONDS = (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0), ("min", 60.0))

TOKENS = {"": 1, "k": 1024, "m": 1024**2}
_MINUTES_FROM_S = 120.0
_ROUNDING_S = 5e-10


def brief(value: object) -> str:
    """A value as an error message shows it: its repr, cut off where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python writes no numbers of thousands of digits
        return f"a {type(value).__name__}, too large to show"
    return text if len(text) <= 60 else f"{text[:57]}..."


# Writing


def format_size(tokens: float) -> str:
    """Tokens in their largest exact unit: 131072 is 128k; 100000 is 100,000."""
    for unit in ("m", "k"):
        if tokens and tokens % TOKENS[unit] == 0:
            return f"{tokens / TOKENS[unit]:.0f}{unit}"
    return f"{tokens:,.0f}"


def format_nbytes(nbytes: float) -> str:
    """Three digits and a unit."""
    unit, (text,) = format_together([round(nbytes)], BYTES, below=1000, digits=3)
    return f"{text} {unit}"


def format_time(seconds: float) -> str:
    """Three digits and a unit, µs to minutes; less than half a nanosecond is 0."""
    if abs(seconds) < _ROUNDING_S:
        return "0"
    rounded = float(f"{seconds:.3g}")
    units = SECONDS if abs(rounded) >= _MINUTES_FROM_S else SECONDS[:-1]
    unit, scale = next((unit for unit in reversed(units) if abs(rounded) >= unit[1]), SECONDS[0])
    return f"{three_digits(rounded / scale)} {unit}"


def format_together(values: Sequence[int], units: Units, *, below: int, digits: int = 4) -> tuple[str, list[str]]:
    """A column: all values in the smallest unit that keeps them below `below`, with the same number of decimals."""
    largest = max(values, default=0)
    unit, scale = next((u for u in units if largest < below * u[1]), units[-1])
    decimals = max(0, digits - len(str(largest // scale))) if scale > 1 else 0
    return unit, [f"{value / scale:,.{decimals}f}" for value in values]


def three_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
