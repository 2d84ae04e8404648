"""Errors on one rank over NCCL alone, where texts travel on the device."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from pool import said

from mesh_attention import MeshAttention
from mesh_attention.comm.torch_dist import ROOM, TorchComm
from nccl.rig import DEVICE, Rig, new_pool
from nccl.test_pass_ids import RANKS, on_a_new_group


def make_mistakes(group: Any) -> list[str]:
    rank = dist.get_rank(group)
    attention, odd = MeshAttention(group, method="mesh"), rank == 1
    x = torch.randn(1, 64, 4, 32, device=DEVICE)
    wrong: dict[str, Any] = {"casual": True} if odd else {}
    found = [said(lambda: attention(x, x, x, **wrong))]  # the first message on this group
    found.append(said(lambda: attention(x, x, x, causal=odd)))
    found.append(said(lambda: attention.unshard(x.double() if odd else x)))
    assert attention(x, x, x, causal=True).isfinite().all()
    text = "é" * (ROOM + rank)
    assert [len(one) for one in TorchComm(group, DEVICE).share(text).result()] == [ROOM + n for n in range(RANKS)]
    return found


def test_whatever_one_rank_refuses_is_told_to_all(rig: Rig) -> None:
    for rank, (refused, differs, shards) in enumerate(rig.run(8, on_a_new_group, make_mistakes)[:RANKS]):
        assert refused.startswith("UsageError: unknown" if rank == 1 else "DisagreementError: rank 1 refused the call")
        assert differs.startswith("DisagreementError: ranks were called with different arguments: mask is")
        assert "dtype is torch.float32 on rank(s) 0,2-3, but torch.float64 on rank(s) 1" in shards


def miss_one(_: Any) -> str:
    """Rank 1 does not take part in the first call on a group."""
    group = dist.new_group(list(range(RANKS)), timeout=timedelta(seconds=4))
    rank = dist.get_rank(group)
    x = torch.randn(1, 64, 4, 32, device=DEVICE)
    if rank == 1:
        time.sleep(6)
        return ""
    return said(lambda: MeshAttention(group, method="mesh")(x, x, x))


def test_a_rank_that_does_not_take_part_is_named() -> None:
    with new_pool(RANKS) as pool:
        answers = pool.run(RANKS, miss_one)
    for rank, answer in enumerate(answers):
        assert rank == 1 or answer.startswith(
            "TransportError: rank 1 did not take part when ranks compared their calls"
        )
