"""What a replay measured, pass by pass, and what follows from it. Values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from mesh_attention.plan.steps import Direction


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPass:
    """One undisturbed kernel call in place of a pass. `times_s` are those of every round."""

    direction: Direction
    flops: int
    times_s: tuple[float, ...]

    @property
    def time_s(self) -> float:
        return median(self.times_s)

    @property
    def tflops(self) -> float:
        return self.flops / self.time_s / 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass(KernelPass):
    """One pass of one plan, as one rank ran it.

    `compute_s` is the time of the pass without transfers, `host_s` the host's time to queue it, `forecast_s` the
    simulator's answer for that rank. `plan_nbytes` is the memory that the plan states, `peak_nbytes` what it used.
    """

    compute_s: float
    host_s: float
    forecast_s: float
    plan_nbytes: int
    peak_nbytes: int | None

    @property
    def exposed_s(self) -> float:
        """The time that transfers add."""
        return max(0.0, self.time_s - self.compute_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A method's passes, forward first."""

    name: str
    description: str
    passes: tuple[Pass, ...]

    @property
    def time_s(self) -> float:
        return sum(one.time_s for one in self.passes)

    @property
    def tflops(self) -> float:
        return sum(one.flops for one in self.passes) / self.time_s / 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """All contenders and the one kernel, measured in the same rounds."""

    rank: int
    contenders: tuple[Contender, ...]
    kernel: tuple[KernelPass, ...]

    def share(self, passes: Sequence[Pass]) -> float:
        """Of the rate at which the one kernel would do the work of these passes."""
        rates = {one.direction: one.tflops * 1e12 for one in self.kernel}
        return sum(one.flops / rates[one.direction] for one in passes) / sum(one.time_s for one in passes)
