"""Totals of every rank and spans of the requested ranks, collected while an engine runs."""

from __future__ import annotations

from collections.abc import Collection

from mesh_attention.plan.steps import Recv, Send
from mesh_attention.plan.text import format_end
from mesh_attention.simulation.jobs import Job
from mesh_attention.timeline import Lane, RankTimes, Span
from mesh_attention.topology import LinkClass


class Recorder:
    """Collects what an engine reports, one rank at a time."""

    def __init__(self, ranks: int, spans_of: Collection[int]) -> None:
        self.spans_of = frozenset(spans_of)
        self.compute_s, self.stop_s = [0.0] * ranks, [0.0] * ranks
        self.out_s, self.in_s = [0.0] * ranks, [0.0] * ranks
        self.sent: dict[LinkClass, int] = {"inside": 0, "between": 0}
        self.spans: list[Span] = []

    def compute(self, rank: int, start: float, stop: float, job: Job) -> None:
        self.compute_s[rank] += stop - start
        self._busy(rank, "compute", start, stop, job)

    def wait(self, rank: int, start: float, stop: float, job: Job) -> None:
        self._busy(rank, "wait", start, stop, job)

    def transfer(self, ends: tuple[int, int], link_class: LinkClass, start: float, stop: float, nbytes: int) -> None:
        """Add a transfer to the totals of both its ends."""
        source, dest = ends
        self.out_s[source] += stop - start
        self.in_s[dest] += stop - start
        self.sent[link_class] += nbytes

    def transfer_span(self, rank: int, job: Job, end: Send | Recv, start: float, stop: float, nbytes: int) -> None:
        """One end of a transfer, which a job of the rank posted."""
        if rank in self.spans_of and stop > start:
            lane: Lane = "send" if isinstance(end, Send) else "recv"
            self.spans.append(Span(rank, lane, start, stop, format_end(end), nbytes, job.index_of(end)))

    def stop(self, rank: int, now: float) -> None:
        self.stop_s[rank] = max(self.stop_s[rank], now)

    def rank_times(self) -> tuple[RankTimes, ...]:
        return tuple(
            RankTimes(
                rank=rank,
                stop_s=stop,
                compute_s=self.compute_s[rank],
                wait_s=stop - self.compute_s[rank],
                link_s=max(self.out_s[rank], self.in_s[rank]),
            )
            for rank, stop in enumerate(self.stop_s)
        )

    def _busy(self, rank: int, lane: Lane, start: float, stop: float, job: Job) -> None:
        if rank in self.spans_of and stop > start:
            self.spans.append(Span(rank, lane, start, stop, job.name, step=job.index))
