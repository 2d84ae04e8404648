"""A replay as rows: a method's passes one by one, and together. Values, JSON and bars; nothing is printed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from mesh_attention.drawing.rates import Bar, BarGroup
from mesh_attention.plan.steps import Direction
from mesh_attention.replay.result import Contender, KernelPass, Pass, Replayed

What = Literal["forward", "backward", "both"]
BASE = "ring"
"""The method that the others are set against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One pass of a method, or both one after the other; `times_s` are of every round.

    `share` is of one kernel's rate, `times_ring` how many times as fast as ring it was. Of both passes, the memory is
    that of the larger one.
    """

    method: str
    plan: str
    what: What
    flops: int
    times_s: tuple[float, ...]
    time_s: float
    share: float
    times_ring: float | None
    exposed_s: float
    host_s: float
    plan_nbytes: int
    peak_nbytes: int | None
    forecast_s: float
    passes: tuple[Pass, ...] = field(repr=False)

    @property
    def tflops(self) -> float:
        return self.flops / self.time_s / 1e12

    @property
    def forecast_tflops(self) -> float:
        return self.flops / self.forecast_s / 1e12

    @property
    def spread(self) -> float:
        """Half of what lies between the fastest and the slowest round, as a share of the median."""
        return (max(self.times_s) - min(self.times_s)) / 2 / self.time_s

    @property
    def forecast_error(self) -> float:
        return self.forecast_s / self.time_s - 1

    @property
    def memory_error(self) -> float | None:
        """How far the plan's statement is from what was taken; None where it was not measured."""
        return None if not self.peak_nbytes else self.plan_nbytes / self.peak_nbytes - 1


def rows_of(replayed: Replayed) -> list[Row]:
    """Method by method: forward, backward, and both where both were played."""
    rings = [contender for contender in replayed.contenders if contender.name == BASE]
    found = []
    for contender in replayed.contenders:
        for what, passes in _takes(contender):
            ring = next((taken for other, taken in _takes(rings[0]) if other == what), None) if rings else None
            found.append(_row(contender, what, passes, ring=ring, share=replayed.share(passes)))
    return found


def _takes(contender: Contender) -> list[tuple[What, tuple[Pass, ...]]]:
    takes: list[tuple[What, tuple[Pass, ...]]] = [(one.direction, (one,)) for one in contender.passes]
    return takes if len(takes) == 1 else [*takes, ("both", contender.passes)]


def _row(
    contender: Contender, what: What, passes: tuple[Pass, ...], *, ring: Sequence[Pass] | None, share: float
) -> Row:
    largest = max(passes, key=lambda one: one.plan_nbytes)
    time_s = sum(one.time_s for one in passes)
    return Row(
        method=contender.name,
        plan="" if what == "both" else plan_words(contender, passes[0].direction),
        what=what,
        flops=sum(one.flops for one in passes),
        times_s=tuple(map(sum, zip(*(one.times_s for one in passes), strict=True))),
        time_s=time_s,
        share=share,
        times_ring=None if ring is None else sum(one.time_s for one in ring) / time_s,
        exposed_s=sum(one.exposed_s for one in passes),
        host_s=sum(one.host_s for one in passes),
        plan_nbytes=largest.plan_nbytes,
        peak_nbytes=largest.peak_nbytes,
        forecast_s=sum(one.forecast_s for one in passes),
        passes=passes,
    )


def plan_words(contender: Contender, direction: Direction) -> str:
    """Of one pass, less the method: descriptions of passes that differ stand one after the other."""
    texts = contender.description.split("; ")
    directions = [one.direction for one in contender.passes]
    text = texts[directions.index(direction)] if len(texts) == len(directions) else contender.description
    return text.removeprefix(contender.name).replace(" 1 a call", "").replace(" a call", "/call").strip()


# For machines


def row_as_json(row: Row) -> dict[str, Any]:
    written = {name: value for name, value in asdict(row).items() if name != "passes"}
    figures = ("tflops", "spread", "forecast_tflops", "forecast_error", "memory_error")
    return written | {name: getattr(row, name) for name in figures} | {"compute_s": _compute_s(row)}


def _compute_s(row: Row) -> float:
    return sum(one.compute_s for one in row.passes)


def kernel_as_json(one: KernelPass) -> dict[str, Any]:
    return asdict(one) | {"time_s": one.time_s, "tflops": one.tflops}


# For pictures


def bar_groups(replayed: Replayed) -> list[BarGroup]:
    """One for each pass, and one for both."""
    rows = rows_of(replayed)
    return [
        BarGroup(
            name="forward and backward" if what == "both" else what,
            line=median(row.tflops / row.share for row in rows if row.what == what),
            bars=tuple(
                Bar(name=row.method, value=row.tflops, expected=row.forecast_tflops) for row in rows if row.what == what
            ),
        )
        for what in dict.fromkeys(row.what for row in rows)
    ]
