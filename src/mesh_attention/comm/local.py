"""All ranks in one process and one thread: for tests, teaching and replay, on CPU or on one GPU.

Ranks take turns: whoever waits for something that is not there gives way to the next. (Threads would not do: autograd
runs all CUDA backward work of a process on one thread, so ranks that wait for each other there would wait for ever.)
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from typing import TypeVar

from mesh_attention.comm.base import Comm, Parcel, Sharing, Work
from mesh_attention.errors import StalledError

Result = TypeVar("Result")


class LocalGroup:
    """The ranks of one process. `comm(rank)` is one rank's end."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._sends: dict[tuple[int, int], deque[tuple[Parcel, _LocalWork]]] = defaultdict(deque)
        self._recvs: dict[tuple[int, int], deque[tuple[Parcel, _LocalWork]]] = defaultdict(deque)
        self._texts: list[list[str]] = [[] for _ in range(size)]

    def comm(self, rank: int) -> LocalComm:
        return LocalComm(self, rank)

    def post(self, source: int, dest: int, *, send: Parcel | None = None, recv: Parcel | None = None) -> Work:
        """One end of a transfer; when both are there, the bytes move."""
        work = _LocalWork()
        pair = (source, dest)
        if send is not None:
            self._sends[pair].append((send, work))
        if recv is not None:
            self._recvs[pair].append((recv, work))
        while self._sends[pair] and self._recvs[pair]:
            (sent, sent_work), (received, received_work) = self._sends[pair].popleft(), self._recvs[pair].popleft()
            _move(sent, received)
            sent_work.moved = received_work.moved = True
        return work

    def forget(self) -> None:
        """Drop what was posted and never met; after an error it would meet the wrong thing."""
        self._sends.clear()
        self._recvs.clear()
        for texts in self._texts:
            texts.clear()


def _move(sent: Parcel, received: Parcel) -> None:
    sizes = [[chunk.numel() for chunk in parcel.chunks] for parcel in (sent, received)]
    if sizes[0] != sizes[1]:
        raise StalledError(
            f"chunks of {sizes[0]} bytes were sent ({sent.label}), {sizes[1]} expected ({received.label})"
        )
    for source, dest in zip(sent.chunks, received.chunks, strict=True):
        dest.copy_(source)


def forget_posted(comms: Sequence[Comm]) -> None:
    """Clean up after ranks of one process that stopped in the middle, whatever their transports are wrapped in."""
    for comm in comms:
        while hasattr(comm, "inner"):
            comm = comm.inner
        if isinstance(comm, LocalComm):
            comm.group.forget()


class LocalComm:
    """One rank's end of a local group."""

    is_recordable = True

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self.group, self.rank, self.size = group, rank, group.size

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        works = [self.group.post(parcel.peer, self.rank, recv=parcel) for parcel in recvs]
        works += [self.group.post(self.rank, parcel.peer, send=parcel) for parcel in sends]
        return _AllOf(works)

    def share(self, text: str) -> Sharing:
        texts = self.group._texts
        texts[self.rank].append(text)
        return _LocalSharing(texts, len(texts[self.rank]) - 1)


class _LocalWork:
    moved = False

    def is_done(self) -> bool:
        return self.moved

    def wait(self) -> None:
        if not self.moved:
            raise StalledError("a transfer was waited for whose other end is not posted; run the ranks in turns")


class _AllOf:
    def __init__(self, works: list[Work]) -> None:
        self.works = works

    def is_done(self) -> bool:
        return all(work.is_done() for work in self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class _LocalSharing:
    def __init__(self, texts: list[list[str]], ordinal: int) -> None:
        self.texts, self.ordinal = texts, ordinal

    def is_done(self) -> bool:
        return all(len(told) > self.ordinal for told in self.texts)

    def wait(self) -> None:
        if not self.is_done():
            raise StalledError("not every rank has shared its text yet; run the ranks in turns")

    def result(self) -> list[str]:
        self.wait()
        return [told[self.ordinal] for told in self.texts]


def take_turns(ranks: Sequence[Generator[Work, None, Result]]) -> list[Result]:
    """Run generators that yield what they wait for until all have returned."""
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
        if not moved and not any(_comes_later(work) for work in waiting.values() if work is not None):
            raise StalledError(f"ranks {', '.join(map(str, waiting))} wait for each other and nothing moves")
    return [results[rank] for rank in range(len(ranks))]


def _comes_later(work: Work) -> bool:
    """Whether something is only a matter of time, as behind a delaying wrapper."""
    try:
        work.wait()
    except StalledError:
        return False
    return True


def block(steps: Generator[Work, None, Result]) -> Result:
    """Run one generator by waiting for whatever it yields."""
    try:
        work = next(steps)
        while True:
            try:
                work.wait()
            except Exception as error:
                work = steps.throw(error)
            else:
                work = next(steps)
    except StopIteration as stop:
        result: Result = stop.value
        return result
