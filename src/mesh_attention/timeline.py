"""Timelines: spans on the lanes of ranks, and their totals, simulated or measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from mesh_attention.topology import LinkClass

Lane = Literal["compute", "wait", "send", "recv"]
LANES: tuple[Lane, ...] = ("compute", "wait", "send", "recv")


class Span(NamedTuple):
    """Something a lane of a rank was busy with, in seconds from the start of the pass.

    `step` is the index of its step in the rank's program of that pass: the first step of a turn of posts, and the step
    that posts a transfer. None where the span belongs to no step.
    """

    rank: int
    lane: Lane
    start_s: float
    stop_s: float
    name: str
    nbytes: int = 0
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """One rank's totals. `link_s` is the time of the transfers it received or sent, whichever is longer."""

    rank: int
    stop_s: float
    compute_s: float
    link_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One pass of one plan.

    `ranks` holds the totals of every rank, `spans` those of the requested ranks. `sent_nbytes` is the sum over all
    ranks, by link class. `is_exact` is True if every rank's calls were priced one by one; otherwise the prices of some
    places represent those of their neighbours. (The order in which ranks that share a link are served is an assumption
    either way.)
    """

    name: str
    ranks: tuple[RankTimes, ...]
    sent_nbytes: dict[LinkClass, int]
    peak_nbytes: int
    flops: int
    spans: tuple[Span, ...] = ()
    is_exact: bool = True

    @property
    def time_s(self) -> float:
        """Time until the last rank is done."""
        return max((rank.stop_s for rank in self.ranks), default=0.0)

    @property
    def compute_s(self) -> float:
        """Compute time of the busiest rank."""
        return max((rank.compute_s for rank in self.ranks), default=0.0)

    @property
    def exposed_s(self) -> float:
        """Exposed communication: the time in which the busiest rank does not compute."""
        return self.time_s - self.compute_s

    @property
    def utilisation(self) -> float:
        """The share of all ranks' time in which they compute."""
        total = self.time_s * len(self.ranks)
        return sum(rank.compute_s for rank in self.ranks) / total if total else 1.0

    @property
    def overlap(self) -> float:
        """The share of transfer time hidden behind compute, on the rank with the most of it; 1 if nothing was sent."""
        link_s = max((rank.link_s for rank in self.ranks), default=0.0)
        return 1.0 - min(1.0, self.exposed_s / link_s) if link_s else 1.0

    @property
    def tflops(self) -> float:
        """Rate that an average rank achieves."""
        return self.flops / len(self.ranks) / self.time_s / 1e12 if self.time_s else 0.0
