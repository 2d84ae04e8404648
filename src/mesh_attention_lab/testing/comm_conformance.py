"""Checks that every transport must pass. Each is one rank's part, as a generator that yields what it waits for.

Run them with `comm.base.drive_together` for several ranks in one process, or with `comm.base.drive` for
one rank per process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

import torch

from mesh_attention.comm.base import Comm, Parcel, Work

Check = Callable[[Comm], Generator[Work, None, None]]


def _bytes_of(rank: int, number: int, size: int = 5) -> torch.Tensor:
    return torch.full((size,), 16 * rank + number, dtype=torch.uint8)


def messages_arrive_in_the_order_they_were_sent(comm: Comm) -> Generator[Work, None, None]:
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    received = [torch.zeros(5, dtype=torch.uint8) for _ in range(4)]
    works = [comm.post([], [Parcel([chunk], before, "kv")]) for chunk in received]
    works += [comm.post([Parcel([_bytes_of(comm.rank, number)], after, "kv")], []) for number in range(4)]
    yield from works
    for number, chunk in enumerate(received):
        assert torch.equal(chunk, _bytes_of(before, number))


def an_item_of_several_chunks_arrives_whole(comm: Comm) -> Generator[Work, None, None]:
    """The chunks go into slices of one buffer, like those of a zigzag shard."""
    peer = comm.size - 1 - comm.rank
    if peer == comm.rank:
        return
    landing = torch.zeros(20, dtype=torch.uint8)
    arrival = comm.post([], [Parcel([landing[2:7], landing[12:20]], peer, "q")])
    departure = comm.post([Parcel([_bytes_of(comm.rank, 1), _bytes_of(comm.rank, 2, 8)], peer, "q")], [])
    yield arrival
    yield departure
    assert torch.equal(landing[2:7], _bytes_of(peer, 1))
    assert torch.equal(landing[12:20], _bytes_of(peer, 2, 8))
    assert not torch.cat([landing[:2], landing[7:12]]).any()


def a_send_posted_before_its_receive_waits_for_it(comm: Comm) -> Generator[Work, None, None]:
    if comm.rank == 0:
        yield comm.post([Parcel([_bytes_of(0, 3)], 1, "o")], [])
    elif comm.rank == 1:
        landing = torch.zeros(5, dtype=torch.uint8)
        yield comm.post([], [Parcel([landing], 0, "o")])
        assert torch.equal(landing, _bytes_of(0, 3))


def everybody_can_exchange_with_everybody(comm: Comm) -> Generator[Work, None, None]:
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    landing = {rank: torch.zeros(5, dtype=torch.uint8) for rank in others}
    yield comm.post(
        [Parcel([_bytes_of(comm.rank, rank)], rank, "kv") for rank in others],
        [Parcel([landing[rank]], rank, "kv") for rank in others],
    )
    for rank in others:
        assert torch.equal(landing[rank], _bytes_of(rank, comm.rank))


def waiting_again_does_nothing(comm: Comm) -> Generator[Work, None, None]:
    """A post is waited for twice: by the step that reads what arrived and by the step that frees what was sent."""
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    landing = torch.zeros(5, dtype=torch.uint8)
    work = comm.post([Parcel([_bytes_of(comm.rank, 7)], after, "kv")], [Parcel([landing], before, "kv")])
    yield work
    yield work
    assert torch.equal(landing, _bytes_of(before, 7))


def turns_are_waited_for_in_any_order(comm: Comm) -> Generator[Work, None, None]:
    """Many are outstanding, and the last is waited for first."""
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    landings = [torch.zeros(size, dtype=torch.uint8) for size in range(1, 31)]
    works = [
        comm.post(
            [Parcel([_bytes_of(comm.rank, number % 16, number + 1)], after, "kv")], [Parcel([landing], before, "kv")]
        )
        for number, landing in enumerate(landings)
    ]
    yield from reversed(works)
    for number, landing in enumerate(landings):
        assert torch.equal(landing, _bytes_of(before, number % 16, number + 1))


def what_was_sent_may_be_overwritten_after_waiting(comm: Comm) -> Generator[Work, None, None]:
    """The executor reuses buffers at once, also for the next receive."""
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    chunk, landing = _bytes_of(comm.rank, 0, 4096), torch.zeros(4096, dtype=torch.uint8)
    for number in range(1, 9):
        yield comm.post([Parcel([chunk], after, "kv")], [Parcel([landing], before, "kv")])
        chunk.fill_(16 * comm.rank + number)
        assert torch.equal(landing, _bytes_of(before, number - 1, 4096))
        landing.zero_()


def an_empty_collective_is_done(comm: Comm) -> Generator[Work, None, None]:
    yield comm.post([], [])


def texts_are_shared_in_rank_order(comm: Comm) -> Generator[Work, None, None]:
    for round_ in range(2):
        sharing = comm.share(f"round {round_} of {comm.rank}")
        yield sharing
        assert sharing.result() == [f"round {round_} of {rank}" for rank in range(comm.size)]


def a_sharing_is_done_without_being_waited_for(comm: Comm) -> Generator[Work, None, None]:
    """A rank with an error looks whether the others have heard of it, and does not wait for ever."""
    first = comm.share("first")
    yield comm.share("second")
    end = time.monotonic() + 10.0
    while not first.is_done():
        assert time.monotonic() < end
        time.sleep(0.001)
    assert first.result() == ["first"] * comm.size


CHECKS: tuple[Check, ...] = (
    messages_arrive_in_the_order_they_were_sent,
    an_item_of_several_chunks_arrives_whole,
    a_send_posted_before_its_receive_waits_for_it,
    everybody_can_exchange_with_everybody,
    waiting_again_does_nothing,
    turns_are_waited_for_in_any_order,
    what_was_sent_may_be_overwritten_after_waiting,
    an_empty_collective_is_done,
    texts_are_shared_in_rank_order,
    a_sharing_is_done_without_being_waited_for,
)
