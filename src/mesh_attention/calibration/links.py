"""Times of messages inside a node and between nodes, one way and both ways.

All pairs of a node send at once, as attention does. Between nodes, one pair alone is measured as well: the rate of all
pairs together, relative to that of one, gives the number of NICs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from mesh_attention.calibration.effort import THOROUGH, Effort
from mesh_attention.calibration.fit import MessageTime
from mesh_attention.calibration.timing import Report, gather_values, within
from mesh_attention.comm.base import Comm, Parcel
from mesh_attention.topology import LinkClass

LEAST_SAMPLES, MOST_SAMPLES, BRIEF_SAMPLES = 3, 15, 5

Pair = tuple[int, int]


def time_links(
    comm: Comm, *, device: torch.device, ranks_per_node: int, report: Report, effort: Effort = THOROUGH
) -> list[MessageTime]:
    """Times of every kind of link, the same on every rank; none for one rank."""
    sets = pair_sets(comm.size, ranks_per_node)
    times, sizes = list[MessageTime](), effort.message_nbytes
    for number, (link_class, pairs) in enumerate(sets):
        what = "one pair" if len(pairs) == 1 else f"{len(pairs)} pairs at once"
        for step, nbytes in enumerate(sizes):
            report(f"messages {link_class}, {what}, {nbytes:,} bytes", (number + step / len(sizes)) / len(sets))
            times.append(_time_message(comm, link_class, pairs, nbytes, device, effort))
            if max(times[-1].one_way_s, times[-1].both_ways_s) > effort.longest_message_s:
                break
    return times


def pair_sets(ranks: int, ranks_per_node: int) -> list[tuple[LinkClass, list[Pair]]]:
    """Pairs that send at once: neighbours within the first node; ranks of the first node and of the second."""
    here = min(ranks, ranks_per_node)
    inside = [(rank, rank + 1) for rank in range(0, here - 1, 2)]
    between = [(rank, rank + ranks_per_node) for rank in range(here) if rank + ranks_per_node < ranks]
    sets: list[tuple[LinkClass, list[Pair]]] = [("inside", inside)] if inside else []
    return sets + [("between", between[:count]) for count in sorted({1, len(between)}) if between]


def _time_message(
    comm: Comm, link_class: LinkClass, pairs: Sequence[Pair], nbytes: int, device: torch.device, effort: Effort
) -> MessageTime:
    ping_pong, exchange = _exchanges(comm, pairs, nbytes, device)
    return MessageTime(
        link_class=link_class,
        pairs=len(pairs),
        nbytes=nbytes,
        one_way_s=_slowest_s(ping_pong, comm, device, effort) / 2,
        both_ways_s=_slowest_s(exchange, comm, device, effort),
    )


def _exchanges(
    comm: Comm, pairs: Sequence[Pair], nbytes: int, device: torch.device
) -> tuple[Callable[[], None] | None, Callable[[], None] | None]:
    """This rank's part of a message there and back, and of both ways at once; None for a rank without a pair."""
    first = dict(pairs)
    peer = (first | {b: a for a, b in pairs}).get(comm.rank)
    if peer is None:
        return None, None
    out = Parcel([torch.zeros(nbytes, dtype=torch.uint8, device=device)], peer, "calibration")
    back = Parcel([torch.zeros(nbytes, dtype=torch.uint8, device=device)], peer, "calibration")

    def both() -> None:
        comm.post([out], [back]).wait()

    def answer() -> None:
        comm.post([], [back]).wait()
        comm.post([out], []).wait()

    # The first sender posts the receive of the answer at once: a late receive holds up the other end.
    return both if comm.rank in first else answer, both


def _slowest_s(exchange: Callable[[], None] | None, comm: Comm, device: torch.device, effort: Effort) -> float:
    """Seconds of one exchange: the longest of the ranks' medians."""
    _sample_s(exchange, device)
    samples = BRIEF_SAMPLES
    if effort.is_thorough:
        first_s = max(gather_values(comm, _sample_s(exchange, device)))
        samples = within(int(effort.messages_s / first_s), LEAST_SAMPLES, MOST_SAMPLES)
    return max(gather_values(comm, median(_sample_s(exchange, device) for _ in range(samples))))


def _sample_s(exchange: Callable[[], None] | None, device: torch.device) -> float:
    if exchange is None:
        return 0.0
    start = time.perf_counter()
    exchange()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
