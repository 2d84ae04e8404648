"""Transports that count, delay or fail transfers. Each wraps another transport."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mesh_attention.comm.base import CALL_ID, Comm, Parcel, Sharing, Work
from mesh_attention.errors import TransportError


@dataclass
class Counting:
    """Counts bytes by label, both ways, and messages sent. Call ids, which a plan does not count, are counted apart."""

    inner: Comm
    sent_nbytes: Counter[str] = field(default_factory=Counter)
    received_nbytes: Counter[str] = field(default_factory=Counter)
    messages: int = 0
    call_ids: int = 0
    shared: int = 0

    def __post_init__(self) -> None:
        self.rank, self.size, self.is_capturable = self.inner.rank, self.inner.size, self.inner.is_capturable

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        items_out, items_in = ([p for p in parcels if p.label != CALL_ID] for parcels in (sends, recvs))
        self.call_ids += len(sends) - len(items_out)
        self.messages += sum(len(parcel.chunks) for parcel in items_out)
        for parcel in items_out:
            self._count(parcel, self.sent_nbytes)
        for parcel in items_in:
            self._count(parcel, self.received_nbytes)
        return self.inner.post(sends, recvs)

    def share(self, text: str) -> Sharing:
        self.shared += 1
        return self.inner.share(text)

    def _count(self, parcel: Parcel, counter: Counter[str]) -> None:
        counter[parcel.label] += sum(chunk.numel() * chunk.element_size() for chunk in parcel.chunks)


@dataclass
class Delaying:
    """Makes every transfer take at least `seconds` longer."""

    inner: Comm
    seconds: float

    def __post_init__(self) -> None:
        self.rank, self.size, self.is_capturable = self.inner.rank, self.inner.size, False

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        return _Later(self.inner.post(sends, recvs), self.seconds)

    def share(self, text: str) -> Sharing:
        return self.inner.share(text)


class _Later:
    def __init__(self, work: Work, seconds: float) -> None:
        self.work, self.due = work, time.monotonic() + seconds

    def is_done(self) -> bool:
        return time.monotonic() >= self.due and self.work.is_done()

    def wait(self) -> None:
        time.sleep(max(0.0, self.due - time.monotonic()))
        self.work.wait()


@dataclass
class Failing:
    """Raises instead of posting parcels for which `when` returns True."""

    inner: Comm
    when: Callable[[Parcel], bool]

    def __post_init__(self) -> None:
        self.rank, self.size, self.is_capturable = self.inner.rank, self.inner.size, False

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        return self.inner.post([self._checked(p) for p in sends], [self._checked(p) for p in recvs])

    def share(self, text: str) -> Sharing:
        return self.inner.share(text)

    def _checked(self, parcel: Parcel) -> Parcel:
        if self.when(parcel):
            raise TransportError(f"made to fail: {parcel.label} with rank {parcel.peer}")
        return parcel
