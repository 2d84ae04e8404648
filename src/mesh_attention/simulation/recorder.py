"""Totals of every rank and spans of the requested ranks, collected while an engine runs."""

from __future__ import annotations

from collections.abc import Collection

from mesh_attention.plan.steps import Item
from mesh_attention.plan.text import format_item
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

    def compute(self, rank: int, start: float, stop: float, name: str) -> None:
        self.compute_s[rank] += stop - start
        self._span(rank, "compute", start, stop, name)

    def wait(self, rank: int, start: float, stop: float, name: str) -> None:
        self._span(rank, "wait", start, stop, name)

    def transfer(
        self,
        ends: tuple[int, int],
        items: tuple[Item, Item],
        link_class: LinkClass,
        start: float,
        stop: float,
        nbytes: int,
    ) -> None:
        source, dest = ends
        self.out_s[source] += stop - start
        self.in_s[dest] += stop - start
        self.sent[link_class] += nbytes
        self.transfer_span(ends, items, start, stop, nbytes)

    def transfer_span(
        self, ends: tuple[int, int], items: tuple[Item, Item], start: float, stop: float, nbytes: int
    ) -> None:
        """Record a transfer at both ends, where they are requested. `items` are the sender's and the receiver's."""
        (source, dest), (sent, received) = ends, items
        if source in self.spans_of:
            self._span(source, "send", start, stop, f"{format_item(sent)} to {dest}", nbytes)
        if dest in self.spans_of:
            self._span(dest, "recv", start, stop, f"{format_item(received)} from {source}", nbytes)

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

    def _span(self, rank: int, lane: Lane, start: float, stop: float, name: str, nbytes: int = 0) -> None:
        if rank in self.spans_of and stop > start:
            self.spans.append(Span(rank, lane, start, stop, name, nbytes))
