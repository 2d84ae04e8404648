"""What a transport is. Everything is posted and waited for later; between two ranks, messages arrive in the order sent.

An item travels as chunks: contiguous byte tensors, one for each run of its tokens. Both ends cut it the same way.
`label` says what travels; transports ignore it, wrappers may look at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class Work(Protocol):
    """Something posted. After `wait`, the chunks may be read or used again; waiting again does nothing."""

    def is_done(self) -> bool: ...

    def wait(self) -> None: ...


class Parcel(NamedTuple):
    """One end of a transfer: the chunks of an item, and the other rank."""

    chunks: Sequence[Tensor]
    peer: int
    label: str


class Sharing(Work, Protocol):
    """Everybody's text, in rank order, once it is done."""

    def result(self) -> list[str]: ...


class Comm(Protocol):
    """One rank's end of a group. Ranks are counted within the group.

    `is_recordable`: what is posted, and waited for, can be part of a CUDA graph.
    """

    rank: int
    size: int
    is_recordable: bool

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        """All transfers of a turn or a collective, at once: none of them waits for another of them."""

    def share(self, text: str) -> Sharing:
        """Tell every rank of the group a text."""
