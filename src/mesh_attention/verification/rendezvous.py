"""Runs the transfers of all programs without data, to find whether they get through, or the circle in which they wait.

The strictest transport is assumed. A rank's posts run one after the other, as they do on NCCL's one stream: a post
begins when the one before it is over, and is over when every transfer in it has begun at its other end. Whatever else a
rank waits for (an item that it reads, or a sent item that it frees) is part of an earlier post of its own, and a whole
post is waited for; so these waits add nothing. A transport that runs posts side by side, as Gloo does, waits for less.

A transfer without its other end waits for nothing here: the rule of matching reports it.
"""

from __future__ import annotations

from dataclasses import dataclass

from mesh_attention.verification.evidence import End, Evidence, Transfer


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that cannot go on: the step whose transfer waits, and the rank it waits for."""

    rank: int
    step: int
    waits_for: int


def stuck_ranks(evidence: Evidence) -> list[Wait]:
    """The ranks that never get through. Each waits for another one of them."""
    ranks = range(len(evidence.programs))
    posts = [evidence.posts(rank) for rank in ranks]
    at = [-1 for _ in ranks]
    missing = [0 for _ in ranks]  # transfers of a rank's current post that have not begun at their other end
    begun_by: dict[Transfer, int] = {}  # transfers that have begun at one end
    going = list(ranks)
    while going:
        rank = going.pop()
        while not missing[rank] and at[rank] + 1 < len(posts[rank]):
            at[rank] += 1
            for transfer, *_ in posts[rank][at[rank]]:
                other = begun_by.pop(transfer, None)
                if other is not None:
                    missing[other] -= 1
                    going += [other] if not missing[other] and other != rank else []
                elif transfer in evidence.sends and transfer in evidence.recvs:
                    begun_by[transfer] = rank
                    missing[rank] += 1
    return [_wait(rank, posts[rank][at[rank]], begun_by) for rank in ranks if missing[rank]]


def _wait(rank: int, post: list[End], begun_by: dict[Transfer, int]) -> Wait:
    transfer, _, step, _ = next(end for end in post if begun_by.get(end.transfer) == rank)
    return Wait(rank, step, transfer.dest if transfer.source == rank else transfer.source)


def circles(stuck: list[Wait]) -> list[list[Wait]]:
    """The closed circles among waiting ranks; every stuck rank waits, directly or not, for one of them."""
    by_rank = {wait.rank: wait for wait in stuck}
    seen: set[int] = set()
    found = []
    for start in by_rank:
        path: list[int] = []
        rank = start
        while rank in by_rank and rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = by_rank[rank].waits_for
        if rank in path:
            found.append([by_rank[member] for member in path[path.index(rank) :]])
    return found
