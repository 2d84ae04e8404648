"""Gloo with staging on a real device: four processes share one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attending import CASES, Attended, planners, widened
from run_ranks import RankPool

from mesh_attention.api import MeshAttention
from mesh_attention.comm.base import Parcel, drive
from mesh_attention.comm.staged import StagedComm
from mesh_attention.comm.torch_dist import TorchComm, comm_for
from mesh_attention_lab.testing.comm_conformance import CHECKS

DEVICE = "cuda"
TENTH_OF_A_SECOND = 200_000_000
"""In cycles of the device, about."""


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, on_gpu=True) as pool:
        yield pool


def run_checks(group: Any) -> None:
    comm = StagedComm(group)
    with torch.device(DEVICE):  # where the checks make their tensors
        for check in CHECKS:
            drive(check(comm))
    assert [device.type for device in comm._stages] == [DEVICE]


@pytest.mark.parametrize("ranks", [2, 3])
def test_staging_is_held_to_the_checks_of_every_transport(pool: RankPool, ranks: int) -> None:
    pool.run(ranks, run_checks)


def wrong_over_staging(group: Any, options: dict[str, Any], dtype: str) -> list[str]:
    call = replace(widened(CASES["causal"], options), dtype=dtype)
    attention = MeshAttention(group, **options)
    attended = Attended(attention, call, DEVICE)
    assert isinstance(attention.session.comms_on(torch.device(DEVICE, 0))[0].inner, StagedComm)
    return attended.wrong()


@pytest.mark.parametrize(
    ("planner", "dtype"),
    [("ring, routed", "bfloat16"), ("mesh", "float64"), ("mesh, kept", "float64"), ("ulysses x mesh", "bfloat16")],
)
def test_attention_of_four_processes_is_exact(pool: RankPool, planner: str, dtype: str) -> None:
    for wrong in pool.run(4, wrong_over_staging, planners(4)[planner], dtype):
        assert not wrong


# Streams


def exchange_behind_compute(group: Any, is_side_stream: bool) -> dict[str, bool]:
    """Posts while the device is busy, queues more, waits, and uses both chunks again at once."""
    comm, peer = StagedComm(group), 1 - dist.get_rank(group)
    with torch.cuda.stream(torch.cuda.Stream() if is_side_stream else torch.cuda.default_stream()):
        chunk, landing = (torch.zeros(1 << 22, dtype=torch.uint8, device=DEVICE) for _ in range(2))
        parcels = [Parcel([chunk], peer, "kv")], [Parcel([landing], peer, "kv")]
        comm.post(*parcels).wait()  # pinned memory and streams are there from now on
        torch.cuda.synchronize()
        torch.cuda._sleep(2 * TENTH_OF_A_SECOND)
        chunk.fill_(7 + comm.rank)
        found_before = landing.clone()
        queued = torch.cuda.current_stream().record_event()
        work = comm.post(*parcels)
        answers = {"post waits for nothing": not queued.query()}
        torch.cuda._sleep(10 * TENTH_OF_A_SECOND)
        work.wait()
        answers["later work is not waited for"] = not torch.cuda.current_stream().query()
        arrived = landing.clone()
        chunk.fill_(99)
        landing.fill_(99)
        torch.cuda.synchronize()
    answers["earlier work reads what was there"] = not bool(found_before.any())
    answers["what was queued before is sent, and there after waiting"] = arrived.unique().tolist() == [7 + peer]
    return answers


@pytest.mark.parametrize("is_side_stream", [False, True])
def test_copies_keep_the_order_of_the_stream(pool: RankPool, is_side_stream: bool) -> None:
    for answers in pool.run(2, exchange_behind_compute, is_side_stream):
        assert [what for what, holds in answers.items() if not holds] == []


def exchange_what_is_freed(group: Any) -> list[int]:
    """The turns in which something else arrived than was sent; chunks are let go as soon as they are posted."""
    comm, peer, size = StagedComm(group), 1 - dist.get_rank(group), 1 << 20
    wrong: list[int] = []
    for turn in range(60):
        landing = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
        chunk = torch.full((size,), turn + comm.rank, dtype=torch.uint8, device=DEVICE)
        work = comm.post([Parcel([chunk], peer, "kv")], [Parcel([landing], peer, "kv")])
        del chunk
        torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)  # takes the memory, if it can be had
        work.wait()
        if not bool((landing == turn + peer).all()):
            wrong.append(turn)
    return wrong


def test_chunks_may_be_let_go_once_posted(pool: RankPool) -> None:
    assert pool.run(2, exchange_what_is_freed) == [[], []]


# Choosing


def share_over_nccl(group: Any) -> list[str]:
    """The texts go over Gloo, the meeting over NCCL."""
    mixed = dist.new_group([dist.get_rank()], backend="cpu:gloo,cuda:nccl", use_local_synchronization=True)
    comm = comm_for(mixed, torch.device(DEVICE, 0))
    assert isinstance(comm, TorchComm)
    return [text for word in ("one", "two") for text in comm.share(word).result()]


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch with NCCL")
def test_a_group_with_nccl_uses_it(pool: RankPool) -> None:
    assert pool.run(1, share_over_nccl) == [["one", "two"]]
