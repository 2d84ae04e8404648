"""Marks on NCCL: four processes share one GPU, each on a host of its own as far as NCCL knows."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention import MeshAttention
from mesh_attention.errors import MeshAttentionError
from mesh_attention.testing.run_ranks import share_one_gpu

RANKS, TOKENS = 4, 256


def on_nccl(function: Callable[[int], Any], folder: Path) -> list[Any]:
    """What the function returns on each rank."""
    torch.multiprocessing.spawn(_rank, args=(function, str(folder)), nprocs=RANKS)
    return [torch.load(folder / str(rank)) for rank in range(RANKS)]


def _rank(rank: int, function: Callable[[int], Any], folder: str) -> None:
    share_one_gpu(rank)
    torch.cuda.set_device(0)
    store, timeout = f"file://{folder}/store", timedelta(seconds=60)
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=RANKS, timeout=timeout)
    torch.save(function(rank), f"{folder}/{rank}")
    dist.destroy_process_group()


def _shards(attention: MeshAttention, seed: int) -> tuple[list[Tensor], Tensor]:
    """This rank's Q, K and V, and its part of the causal output of one process."""
    generator = torch.Generator("cuda").manual_seed(seed)
    whole = [torch.randn(1, TOKENS, 4, 32, generator=generator, device="cuda") for _ in range(3)]
    due = scaled_dot_product_attention(*(x.double().transpose(1, 2) for x in whole), is_causal=True).transpose(1, 2)
    return [attention.shard(x) for x in whole], attention.shard(due.float())


def make_calls(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """Equal calls, then one in which one rank makes another call than the others, then an equal one."""
    attention = MeshAttention(**options)
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


def make_calls_in_a_tile(rank: int) -> dict[str, Any]:
    """Rank 2 hears nothing from rank 1, but from ranks that do."""
    return make_calls(rank, {"tile": (2, 2)})


def make_calls_on_a_ring(rank: int) -> dict[str, Any]:
    return make_calls(rank, {"method": "ring"})


def make_calls_by_ulysses(rank: int) -> dict[str, Any]:
    return make_calls(rank, {"method": "ulysses"})


def make_calls_in_graphs(rank: int) -> dict[str, Any]:
    return make_calls(rank, {"method": "ring", "cuda_graphs": True})


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch with NCCL")
@pytest.mark.parametrize(
    "calls", [make_calls_in_a_tile, make_calls_on_a_ring, make_calls_by_ulysses, make_calls_in_graphs]
)
def test_ranks_in_different_calls_get_nan_and_then_an_error(calls: Callable[[int], Any], tmp_path: Path) -> None:
    answers = on_nccl(calls, tmp_path)
    for answer in answers:
        assert max(answer["errors"]) < 1e-2
        assert answer["finite"]
        assert answer["spoilt"]
        assert answer["raised"].startswith("TransportError: an earlier call on this group failed")
        assert "The earlier error: ranks made different calls" in answer["raised"]
