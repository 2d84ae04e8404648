"""Every transport, bare and wrapped, is held to the same checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from delaying import Delaying
from pool import shared_pool

from mesh_attention.api import MeshAttention
from mesh_attention.comm.base import Comm, Parcel, drive, drive_together
from mesh_attention.comm.local import LocalGroup
from mesh_attention.comm.staged import StagedComm
from mesh_attention.comm.torch_dist import TorchComm
from mesh_attention.errors import StalledError, TransportError
from mesh_attention_lab.testing.comm_conformance import CHECKS, Check
from mesh_attention_lab.testing.wrappers import Counting, Failing

WRAPPERS: dict[str, Callable[[Comm], Comm]] = {
    "bare": lambda comm: comm,
    "recording": Counting,
    "delaying": lambda comm: Delaying(comm, 0.002),
    "failing": lambda comm: Failing(comm, when=lambda parcel: False),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_local_transport(check: Check, wrapper: str, ranks: int) -> None:
    group = LocalGroup(ranks)
    drive_together([check(WRAPPERS[wrapper](group.comm(rank))) for rank in range(ranks)])


def run_checks(group: Any, transport: type, wrapper: str) -> None:
    comm = transport(group)  # one for all of them: each leaves it as it was
    for check in CHECKS:
        drive(check(WRAPPERS[wrapper](comm)))


@pytest.mark.parametrize("transport", [TorchComm, StagedComm])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_transports_between_processes(transport: type, wrapper: str, ranks: int) -> None:
    shared_pool().run(ranks, run_checks, transport, wrapper)


def test_a_local_group_keeps_no_texts() -> None:
    """Not even if ranks are several sharings apart, in any order; each sharing has its own texts."""
    group = LocalGroup(3)
    sharings = {(rank, number): group.comm(rank).share(f"{number}") for rank in (2, 0, 1) for number in range(4)}
    assert [sharing.result() for sharing in sharings.values()] == [[f"{number}"] * 3 for number in range(4)] * 3
    attention = MeshAttention(group)
    for tokens in range(3, 12):
        parts = attention.shard(torch.zeros(1, tokens, 1, 4))
        attention(parts, parts, parts, seq_len=tokens)
    assert "attention" not in repr(vars(group))
    group.comm(0).share("of a call that fails")
    group.forget()
    assert "fails" not in repr(vars(group))


def test_recording_counts_both_ways_by_label() -> None:
    group = LocalGroup(2)
    ends = [Counting(group.comm(rank)) for rank in range(2)]
    ends[1].post([], [Parcel([torch.zeros(4, dtype=torch.uint8)], 0, "kv")])
    ends[0].post([Parcel([torch.zeros(4, dtype=torch.uint8)], 1, "kv")], [])
    assert dict(ends[0].sent_nbytes) == dict(ends[1].received_nbytes) == {"kv": 4}
    assert ends[0].messages == 1


class _Watched:
    """Knows whether everything that was posted was waited for."""

    def __init__(self, inner: Comm) -> None:
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.open: set[int] = set()

    def _watch(self, work: Any) -> Any:
        self.open.add(id(work))
        self.works = [*getattr(self, "works", []), work]
        is_done = work.is_done

        def watched() -> bool:
            if is_done():
                self.open.discard(id(work))
                return True
            return False

        work.is_done = watched
        return work

    def post(self, sends: Any, recvs: Any) -> Any:
        return self._watch(self.inner.post(sends, recvs))

    def share(self, text: str) -> Any:
        return self.inner.share(text)


@pytest.mark.parametrize("keep", [(), ("kv",), ("q", "kv")])
@pytest.mark.parametrize("route", ["ring", "direct"])
def test_whatever_is_posted_is_waited_for(keep: tuple[str, ...], route: str) -> None:
    group = LocalGroup(4)
    comms = [_Watched(group.comm(rank)) for rank in range(4)]
    attention = MeshAttention(comms, tile=(2, 2), keep=keep, route=route)
    q, k, v = ([torch.randn(1, 4, 2, 8, requires_grad=True) for _ in range(4)] for _ in range(3))
    out = attention(q, k, v, causal=True)
    assert not any(comm.open for comm in comms)
    torch.cat(out).sum().backward()
    assert not any(comm.open for comm in comms)


def test_failing_fails_what_it_is_told_to() -> None:
    comm = Failing(LocalGroup(2).comm(0), when=lambda parcel: parcel.label == "o")
    comm.post([Parcel([torch.zeros(1, dtype=torch.uint8)], 1, "kv")], [])
    with pytest.raises(TransportError, match="made to fail: o with rank 1"):
        comm.post([Parcel([torch.zeros(1, dtype=torch.uint8)], 1, "o")], [])


def test_ranks_that_wait_for_nothing_are_named() -> None:
    group = LocalGroup(2)

    def lonely(comm: Comm) -> Any:
        yield comm.post([], [Parcel([torch.zeros(1, dtype=torch.uint8)], 1 - comm.rank, "q")])

    with pytest.raises(StalledError, match="ranks 0, 1 wait for each other"):
        drive_together([lonely(group.comm(rank)) for rank in range(2)])


def test_chunks_of_another_size_are_refused() -> None:
    group = LocalGroup(2)
    group.comm(1).post([], [Parcel([torch.zeros(3, dtype=torch.uint8)], 0, "q")])
    with pytest.raises(TransportError, match=r"kv in chunks of \[4\] bytes met a receive of q in chunks of \[3\]"):
        group.comm(0).post([Parcel([torch.zeros(4, dtype=torch.uint8)], 1, "kv")], [])
