"""Ranks that make different calls over NCCL, where marks and texts travel on the device, notice it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import said
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention import MeshAttention
from mesh_attention.comm.torch_dist import ROOM, TorchComm
from mesh_attention.errors import MeshAttentionError
from nccl.rig import DEVICE, Rig, new_pool

RANKS, TOKENS = 4, 256


def on_a_new_group(_: Any, function: Callable[..., Any], *given: Any) -> Any:
    """What the function returns on each of the first ranks: its group, of no use afterwards, is nobody else's."""
    group = dist.new_group(list(range(RANKS)))  # all ranks take part in this
    return function(group, *given) if dist.get_rank() < RANKS else None


def _shards(attention: MeshAttention, seed: int) -> tuple[list[Tensor], Tensor]:
    """This rank's Q, K and V, and its part of the causal output of one process."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    whole = [torch.randn(1, TOKENS, 4, 32, generator=generator, device=DEVICE) for _ in range(3)]
    due = scaled_dot_product_attention(*(x.double().transpose(1, 2) for x in whole), is_causal=True).transpose(1, 2)
    return [attention.shard(x) for x in whole], attention.shard(due.float())


def make_calls(group: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Equal calls, then one in which one rank makes a different call from the others, then an equal one."""
    attention, rank = MeshAttention(group, **options), dist.get_rank(group)
    errors, grads = [], []
    for seed in range(4):
        mine, due = _shards(attention, seed)
        out = attention(*mine, causal=True)
        errors.append(float((out - due).abs().max()))
        attention(*mine, causal=True, softmax_scale=0.5)
    trained = [x.requires_grad_() for x in mine]
    for _ in range(3):
        grads = torch.autograd.grad(attention(*trained, causal=True).square().sum(), trained)
    are_finite = all(bool(grad.isfinite().all()) for grad in grads)
    with torch.no_grad():
        # With the same transfers: NCCL would wait for others until the group's timeout.
        out, lse = attention(*mine, causal=True, softmax_scale=0.5 if rank == 1 else None, return_lse=True)
    spoilt = bool(out.isnan().all()) and bool(lse.isnan().all())
    torch.cuda.synchronize()
    try:
        attention(*mine, causal=True)
    except MeshAttentionError as error:
        return {"errors": errors, "finite": are_finite, "spoilt": spoilt, "raised": f"{type(error).__name__}: {error}"}
    return {"raised": "nothing"}


@pytest.mark.usefixtures("needs_cuda")  # over Gloo, a rank raises before it returns a result
@pytest.mark.parametrize(
    "options",
    [
        {"method": "mesh", "tile": (2, 2)},  # rank 2 hears nothing from rank 1, but from ranks that do
        {"method": "ulysses"},
        {"method": "ring", "cuda_graphs": True},
    ],
    ids=str,
)
def test_ranks_in_different_calls_get_nan_and_then_an_error(rig: Rig, options: dict[str, Any]) -> None:
    for answer in rig.run(8, on_a_new_group, make_calls, options)[:RANKS]:
        assert max(answer["errors"]) < 1e-2
        assert answer["finite"]
        assert answer["spoilt"]
        assert answer["raised"].startswith("TransportError: an earlier call on this group failed")
        # A rank that had not begun the pass when the others compared their reports is not named.
        named = (
            "rank 1 makes a different call from ranks? [023](, [023])*|rank [023] makes a different call from rank 1"
        )
        assert re.search(f"call on this group failed: ({named}) in pass", answer["raised"])


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
