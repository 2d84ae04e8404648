"""The protocol of a transport. Transfers are posted, and waited for later; between two ranks, messages arrive in order.

An item travels as chunks: contiguous byte tensors, one for each of its spans of tokens. Both ends cut it the same way.
`label` names the kind of item; transports ignore it, wrappers may use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

MARK = "mark"
"""The label of a mark, which is not an item (see `marked`)."""


class Work(Protocol):
    """Posted transfers. After `wait`, the chunks may be read or reused; waiting again does nothing."""

    def is_done(self) -> bool: ...

    def wait(self) -> None: ...


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


def innermost(comm: Any) -> Any:
    """The transport beneath all wrappers."""
    while hasattr(comm, "inner"):
        comm = comm.inner
    return comm
