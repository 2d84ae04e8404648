"""The protocol of a transport. Transfers are posted, and waited for later; between two ranks, messages arrive in order.

A rank's work is a generator that yields what it waits for: `drive` advances one and blocks, `drive_together` advances
several on one thread, moving on to the next when one has to wait.

An item travels as chunks: contiguous byte tensors, one for each of its spans of tokens. Both ends cut it the same way.
`label` names the kind of item; transports ignore it, wrappers may use it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from mesh_attention.errors import StalledError

Result = TypeVar("Result")

PASS_ID = "pass id"
"""The label of a pass id, which is not an item (see `session.pass_ids`)."""


class Work(Protocol):
    """Posted transfers. After `wait`, the chunks may be read or reused; waiting again does nothing."""

    def is_done(self) -> bool: ...

    def wait(self) -> None: ...


class AllOf:
    """Several works as one, waited for in order; of none at all, one that is done."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = works

    def is_done(self) -> bool:
        return all(work.is_done() for work in self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Parcel(NamedTuple):
    """One end of a transfer: the chunks of an item, and the other rank.

    A transport that has tags lets only parcels with equal tags meet; others may ignore the tag.
    """

    chunks: Sequence[Tensor]
    peer: int
    label: str
    tag: int = 0


class Sharing(Work, Protocol):
    """The texts of all ranks, in rank order, once it is done."""

    def result(self) -> list[str]: ...


class Comm(Protocol):
    """One rank's end of a group. Ranks are counted within the group.

    `is_capturable`: posts and waits can be part of a CUDA graph. A transport may also have a `runs_side_by_side` that
    is True: its posts do not wait for each other, as in Gloo; otherwise they may run one after the other, as in NCCL.
    """

    rank: int
    size: int
    is_capturable: bool

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        """Post all transfers of a turn or a collective at once; none of them waits for another."""

    def share(self, text: str) -> Sharing:
        """Send a text to every rank of the group, and get theirs."""


@dataclass
class Wrapper:
    """A transport around another, to which it passes everything on; for those that change something."""

    inner: Comm

    def __post_init__(self) -> None:
        self.rank, self.size, self.is_capturable = self.inner.rank, self.inner.size, self.inner.is_capturable

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        return self.inner.post(sends, recvs)

    def share(self, text: str) -> Sharing:
        return self.inner.share(text)


def innermost(comm: Any) -> Any:
    """The transport beneath all wrappers."""
    while hasattr(comm, "inner"):
        comm = comm.inner
    return comm


def posts_apart(comm: Comm) -> bool:
    """True if sends are posted apart from receives, so that an arrival does not wait for what leaves. If posts run one
    after the other, a receive posted alone would hold up the send that it waits for."""
    return bool(getattr(innermost(comm), "runs_side_by_side", False))


# Driving. A rank's work is a generator that yields what it waits for. (Threads would not do: autograd runs all CUDA
# backward work of a process on one thread, so ranks that wait for each other there would wait for ever.)


def drive(rank: Generator[Work, None, Result]) -> Result:
    """Advance one generator, blocking on each thing it waits for."""
    try:
        work = next(rank)
        while True:
            try:
                work.wait()
            except Exception as error:
                work = rank.throw(error)
            else:
                work = next(rank)
    except StopIteration as stop:
        result: Result = stop.value
        return result


def drive_together(ranks: Sequence[Generator[Work, None, Result]]) -> list[Result]:
    """Advance several generators on this thread until all have returned."""
    results: dict[int, Result] = {}
    waiting: dict[int, Work | None] = dict.fromkeys(range(len(ranks)))
    while waiting:
        moved = False
        for rank in list(waiting):
            work = waiting[rank]
            while work is None or work.is_done():
                moved = True
                try:
                    work = waiting[rank] = next(ranks[rank])
                except StopIteration as stop:
                    results[rank] = stop.value
                    del waiting[rank]
                    break
        if not moved and not any(_finishes(work) for work in waiting.values() if work is not None):
            raise StalledError(f"ranks {', '.join(map(str, waiting))} wait for each other and nothing moves")
    return [results[rank] for rank in range(len(ranks))]


def _finishes(work: Work) -> bool:
    """True if the work only needs time, as behind a delaying wrapper."""
    try:
        work.wait()
    except StalledError:
        return False
    return True
