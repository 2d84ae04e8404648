"""Sizes as people write them, and bytes and FLOPs as people read them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mesh_attention.errors import ParseError

_MULTIPLE = {"": 1, "k": 1024, "m": 1024**2}
_NBYTES = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}

Units = tuple[tuple[str, int], ...]
BYTES: Units = (("B", 1), ("KiB", 1024), ("MiB", 1024**2), ("GiB", 1024**3), ("TiB", 1024**4))
TIMES: Units = (("ns", 1), ("µs", 10**3), ("ms", 10**6), ("s", 10**9))
FLOPS: Units = (("FLOP", 1), ("kFLOP", 10**3), ("MFLOP", 10**6), ("GFLOP", 10**9), ("TFLOP", 10**12))


def parse_size(option: str, text: str) -> int:
    """``4096``, ``128k`` or ``1m``; k is 1024."""
    found = re.fullmatch(r"([0-9]{1,18})([km]?)", text.strip().lower())
    if found is None:
        raise ParseError(f"{option} {text!r}: expected a whole number such as 4096, 128k or 1m (k is 1024)")
    return int(found[1]) * _MULTIPLE[found[2]]


def parse_whole(option: str, text: str, *, least: int = 1) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text.strip()) or int(text) < least:
        raise ParseError(f"{option} {text!r}: expected a whole number, {least} or more, of at most 18 digits")
    return int(text)


def parse_nbytes(option: str, text: str) -> int:
    """``20GiB``, ``512MiB`` or ``20g``; g is 1024³. Bytes by themselves, and powers of ten, would be slips."""
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) ?([kmgt])(?:ib)?", text.strip().lower())
    nbytes = 0 if found is None else int(float(found[1]) * _NBYTES[found[2]])
    if nbytes < 1:
        raise ParseError(f"{option} {text!r}: expected bytes above 0 with a unit, such as 20GiB, 512MiB or 20g (GiB)")
    return nbytes


def format_size(tokens: int) -> str:
    """The opposite of `parse_size`, where that is short: 131072 is 128k; 100000 is 100,000."""
    for unit in ("m", "k"):
        if tokens % _MULTIPLE[unit] == 0:
            return f"{tokens // _MULTIPLE[unit]}{unit}"
    return f"{tokens:,}"


def format_nbytes(nbytes: int) -> str:
    """Three digits and a unit."""
    unit, (text,) = format_together([nbytes], BYTES, below=1000, digits=3)
    return f"{text} {unit}"


def format_together(values: Sequence[int], units: Units, *, below: int, digits: int = 4) -> tuple[str, list[str]]:
    """The values in the smallest unit that keeps them below `below`, and with equally many decimals."""
    largest = max(values, default=0)
    unit, scale = next((u for u in units if largest < below * u[1]), units[-1])
    decimals = max(0, digits - len(str(largest // scale))) if scale > 1 else 0
    return unit, [f"{value / scale:,.{decimals}f}" for value in values]


def three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
