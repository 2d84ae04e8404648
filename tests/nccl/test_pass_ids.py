"""Marks on NCCL: ranks that make different calls notice it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention import MeshAttention
from mesh_attention.errors import MeshAttentionError
from nccl.rig import DEVICE, Rig

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
