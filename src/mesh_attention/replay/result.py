"""Times and memory of a replay, pass by pass. Values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from mesh_attention.plan.steps import Direction


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPass:
    """One kernel by itself, undisturbed. Times are of every round, in seconds."""

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
    """One pass of one plan, as one rank runs it, in the same rounds.

    `compute_s` is the pass without transfers, `host_s` the time to queue it, `forecast_s` the simulator's answer for
    that rank. `plan_nbytes` is the memory that the plan states, `peak_nbytes` what was measured.
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

    def plan_words(self, direction: Direction) -> str:
        """The plan of one pass; descriptions of passes that differ follow each other."""
        texts = self.description.split("; ")
        at = [one.direction for one in self.passes].index(direction)
        return texts[at] if len(texts) == len(self.passes) else self.description


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """All contenders and the one kernel, measured in the same rounds."""

    rank: int
    contenders: tuple[Contender, ...]
    kernel: tuple[KernelPass, ...]

    def share(self, passes: Sequence[Pass]) -> float:
        """Rate of these passes, relative to the one kernel on the same work."""
        rates = {one.direction: one.tflops * 1e12 for one in self.kernel}
        return sum(one.flops / rates[one.direction] for one in passes) / sum(one.time_s for one in passes)
