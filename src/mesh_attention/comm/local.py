"""`LocalGroup`: all ranks in one process and one thread, for tests and teaching, on CPU or on one GPU.

Nothing blocks here. `comm.base.drive_together` advances the ranks, moving on to the next when one has to wait.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from mesh_attention.comm.base import AllOf, Parcel, Sharing, Work
from mesh_attention.errors import StalledError, TransportError, UsageError


class LocalGroup:
    """The ranks of one process. `comm(rank)` is one rank's end."""

    def __init__(self, size: int) -> None:
        if type(size) is not int or size < 1:
            raise UsageError(f"LocalGroup({size!r}): expected a number of ranks, at least 1")
        self.size = size
        self._sends: dict[tuple[int, int], deque[tuple[Parcel, _LocalWork]]] = defaultdict(deque)
        self._recvs: dict[tuple[int, int], deque[tuple[Parcel, _LocalWork]]] = defaultdict(deque)
        self._sharings: list[dict[int, str]] = []
        """Texts by rank; whoever waits for them holds them, too, so those of all ranks are dropped here."""

    def comm(self, rank: int) -> LocalComm:
        if type(rank) is not int or not 0 <= rank < self.size:
            raise UsageError(
                f"got rank {rank!r} of a LocalGroup of {self.size} ranks, expected a rank from 0 to {self.size - 1}"
            )
        return LocalComm(self, rank)

    def post(self, source: int, dest: int, *, send: Parcel | None = None, recv: Parcel | None = None) -> Work:
        """Post one end of a transfer; the bytes move once both ends are posted."""
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
        """Drop everything posted whose other end is missing; after an error it would meet the wrong transfer."""
        self._sends.clear()
        self._recvs.clear()
        self._sharings.clear()


def _move(sent: Parcel, received: Parcel) -> None:
    sizes = [[chunk.numel() for chunk in parcel.chunks] for parcel in (sent, received)]
    if sizes[0] != sizes[1]:
        raise TransportError(
            f"a send of {sent.label} in chunks of {sizes[0]} bytes met a receive of {received.label} in chunks of "
            f"{sizes[1]} bytes; sends and receives between two ranks must match in order and size"
        )
    for source, dest in zip(sent.chunks, received.chunks, strict=True):
        dest.copy_(source)


class LocalComm:
    """One rank's end of a local group."""

    is_capturable = True

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self.group, self.rank, self.size = group, rank, group.size

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        works = [self.group.post(parcel.peer, self.rank, recv=parcel) for parcel in recvs]
        works += [self.group.post(self.rank, parcel.peer, send=parcel) for parcel in sends]
        return AllOf(works)

    def share(self, text: str) -> Sharing:
        sharings = self.group._sharings
        texts = next((texts for texts in sharings if self.rank not in texts), None)
        if texts is None:
            sharings.append(texts := {})
        texts[self.rank] = text
        if len(texts) == self.size:
            sharings.pop(0)
        return _LocalSharing(texts, self.size)


class _LocalWork:
    moved = False

    def is_done(self) -> bool:
        return self.moved

    def wait(self) -> None:
        if not self.moved:
            raise StalledError("the other end of a transfer is not posted yet; advance the ranks with drive_together")


class _LocalSharing:
    def __init__(self, texts: dict[int, str], size: int) -> None:
        self.texts, self.size = texts, size

    def is_done(self) -> bool:
        return len(self.texts) == self.size

    def wait(self) -> None:
        if not self.is_done():
            raise StalledError("not every rank has shared its text yet; advance the ranks with drive_together")

    def result(self) -> list[str]:
        self.wait()
        return [self.texts[rank] for rank in range(self.size)]
