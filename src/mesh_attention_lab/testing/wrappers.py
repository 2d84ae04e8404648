"""Transports that count or fail transfers. Each wraps another transport."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mesh_attention.comm.base import PASS_ID, Parcel, Sharing, Work, Wrapper
from mesh_attention.errors import TransportError


@dataclass
class Counting(Wrapper):
    """Counts bytes by label, both ways, and messages sent. Pass ids, which a plan does not count, are counted apart."""

    sent_nbytes: Counter[str] = field(default_factory=Counter)
    received_nbytes: Counter[str] = field(default_factory=Counter)
    messages: int = 0
    pass_ids: int = 0
    shared: int = 0

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        items_out, items_in = ([p for p in parcels if p.label != PASS_ID] for parcels in (sends, recvs))
        self.pass_ids += len(sends) - len(items_out)
        self.messages += sum(len(parcel.chunks) for parcel in items_out)
        for parcel in items_out:
            self._count(parcel, self.sent_nbytes)
        for parcel in items_in:
            self._count(parcel, self.received_nbytes)
        return super().post(sends, recvs)

    def share(self, text: str) -> Sharing:
        self.shared += 1
        return super().share(text)

    def _count(self, parcel: Parcel, counter: Counter[str]) -> None:
        counter[parcel.label] += sum(chunk.numel() * chunk.element_size() for chunk in parcel.chunks)


@dataclass
class Failing(Wrapper):
    """Raises instead of posting parcels for which `when` returns True."""

    when: Callable[[Parcel], bool]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.is_capturable = False

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        return self.inner.post([self._checked(p) for p in sends], [self._checked(p) for p in recvs])

    def _checked(self, parcel: Parcel) -> Parcel:
        if self.when(parcel):
            raise TransportError(f"made to fail: {parcel.label} with rank {parcel.peer}")
        return parcel
