"""Is the emulated limit real? Gloo traffic in four patterns, as payload against the configured rate.

    python benchmarks/emulation/network.py --nodes 4 --rate 1gbit -- python benchmarks/emulation/check_rate.py

Payload is about 95.6 % of the rate; the rest is headers. Exits 1 when a limited pattern is faster than the limit (a
leak) or slower than --floor times it (the machine is the bottleneck, not the link).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Post = Callable[[], Sequence[Any]]
"""Posts this rank's part of a pattern and returns what to wait for."""
MOST = 1.02
"""Of the limit: what fits the bucket passes at full speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Who sends to whom, all at once. Receives are posted before sends.

    Gloo answers "ready to receive" on the same connection, and that answer would wait behind a large send under way,
    which halves the speed.
    """

    name: str
    nbytes: int
    """Payload through the busiest link, one way."""
    post: Post
    is_limited: bool = True


def patterns(nbytes: int) -> list[Pattern]:
    """One way, duplex, ring and incast between nodes; and inside a node where it has several ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    a_node, nodes = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["NNODES"])
    source, dest = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    made = []
    if nodes > 1:
        made += [between(f"{name} between nodes", source, dest, 0, a_node, both=name == "duplex") for name in WAYS]
        # One rank a node, so that each link carries exactly one message each way.
        leads, after, before = rank % a_node == 0, (rank + a_node) % ranks, (rank - a_node) % ranks
        made.append(Pattern(name="ring of nodes", nbytes=nbytes, post=_shift(source, dest, before, after, leads)))
        made.append(_incast(source, dest, nodes=nodes, a_node=a_node))
    if a_node > 1:
        made += [between(f"{name} in a node", source, dest, 0, 1, both=name == "duplex") for name in WAYS]
    return made


WAYS = ("one way", "duplex")


def between(name: str, source: Tensor, dest: Tensor, first: int, second: int, *, both: bool) -> Pattern:
    """From one rank to another; or each to the other, at once."""
    rank, a_node = dist.get_rank(), int(os.environ["LOCAL_WORLD_SIZE"])
    peers = {first: second, second: first}

    def post() -> Sequence[Any]:
        if rank not in peers:
            return []
        works = [dist.irecv(dest, peers[rank])] if both or rank == second else []
        return [*works, *([dist.isend(source, peers[rank])] if both or rank == first else [])]

    return Pattern(name=name, nbytes=source.numel(), post=post, is_limited=first // a_node != second // a_node)


def _shift(source: Tensor, dest: Tensor, before: int, after: int, takes_part: bool) -> Post:
    return lambda: [dist.irecv(dest, before), dist.isend(source, after)] if takes_part else []


def _incast(source: Tensor, dest: Tensor, *, nodes: int, a_node: int) -> Pattern:
    """All other nodes send to node 0; the limit is its receiving side."""
    rank, part = dist.get_rank(), source.numel() // (nodes - 1)

    def post() -> Sequence[Any]:
        if rank == 0:
            return [dist.irecv(dest[i * part : (i + 1) * part], (i + 1) * a_node) for i in range(nodes - 1)]
        return [dist.isend(source[:part], 0)] if rank % a_node == 0 else []

    return Pattern(name="incast", nbytes=part * (nodes - 1), post=post)


def seconds_of(post: Post, *, repeats: int) -> list[float]:
    """The slowest rank's seconds, each time, after a first time that opens the connections."""
    seconds = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        for work in post():
            work.wait()
        slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        seconds.append(slowest.item())
    return seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="how long a transfer lasts at the limit")
    parser.add_argument("--floor", type=float, default=0.85)
    parser.add_argument("--repeats", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    limit = int(os.environ["NETNS_RATE_BITS"])
    is_fine = True
    for pattern in patterns(int((limit or 10**9) / 8 * given.seconds)):
        bits = 8 * pattern.nbytes / min(seconds_of(pattern.post, repeats=given.repeats))
        verdict = ""
        if limit and pattern.is_limited:
            holds = given.floor <= bits / limit <= MOST
            verdict = f"{bits / limit:6.1%} of the limit, {'fine' if holds else 'NOT FINE'}"
            is_fine &= holds
        if dist.get_rank() == 0:
            print(f"{pattern.name:22} {bits / 1e6:9.1f} Mbit/s  {verdict}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(not is_fine)


if __name__ == "__main__":
    main()
