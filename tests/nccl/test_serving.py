"""Serving over NCCL: chunks, turns and decoding, step by step and as CUDA graphs; memory beside what turns state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from serving_cases import Model, cache_of
from torch import Tensor

from mesh_attention import MeshAttention
from mesh_attention.errors import MeshAttentionError
from mesh_attention.serving import CachedLayer, ShardedCache
from nccl.rig import DEVICE, Rig
from nccl.test_pass_ids import on_a_new_group

LARGEST_ERRORS = {torch.float64: 1e-12, torch.float32: 2.0**-15, torch.bfloat16: 2.0**-5}
"""Eight roundings on the way from inputs to outputs: P, partials of ranks, their sum."""


def converse(group: Any, dtype: torch.dtype, cuda_graphs: bool, layout: str) -> float:
    """Two sequences, in chunks, turns and steps of several shapes, each often enough to be captured."""
    attention = MeshAttention(group, layout=layout, cuda_graphs=cuda_graphs)  # type: ignore[arg-type]
    sizes = {"tokens": 2000, "sequences": 3, "scale": 16, "block_tokens": 16}
    cache = cache_of(attention, [None, 40], dtype=dtype, device=DEVICE, **sizes)
    model = Model(cache, softcap=3.0 if dtype is torch.float32 else 0.0)
    chats = [model.new(), model.new()]
    model.prefill({chats[0]: 300, chats[1]: 77})
    for _ in range(4):
        model.decode(chats)
    model.prefill({chats[1]: 100})
    for queries, combine in (("replicated", "all_gather"), ("replicated", "reduce_scatter"), ("sharded", None)):
        for _ in range(3):
            model.decode(chats, 2, queries=queries, combine=combine)
    chats.append(model.fork(chats[0]))
    for _ in range(20):
        model.decode(chats)
    model.prefill(dict.fromkeys(chats, 65))
    model.decode(chats)
    return model.error


@pytest.mark.parametrize(
    ("ranks", "layout", "dtype", "cuda_graphs"),
    [
        (2, "striped", torch.float64, False),
        (4, "zigzag", torch.float32, False),
        (8, "zigzag", torch.bfloat16, False),
        (2, "striped", torch.bfloat16, True),
        (8, "zigzag", torch.bfloat16, True),
    ],
    ids=["2", "4", "8", "2, graphs", "8, graphs"],
)
def test_a_conversation_is_right(rig: Rig, ranks: int, layout: str, dtype: torch.dtype, cuda_graphs: bool) -> None:
    if cuda_graphs and DEVICE.type == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    assert max(rig.run(ranks, converse, dtype, cuda_graphs, layout)) <= LARGEST_ERRORS[dtype]


# Different tokens


def decode_other_tokens(group: Any) -> dict[str, Any]:
    attention = MeshAttention(group)
    layers = [CachedLayer(kv_heads=2, head_dim=64)] * 2
    cache = ShardedCache(attention, layers, tokens=99, dtype=torch.bfloat16, device=DEVICE)
    chat, rank = cache.new(), dist.get_rank(group)
    q, k, v = (torch.ones(1, 1, heads, 64, device=DEVICE, dtype=torch.bfloat16) for heads in (4, 2, 2))
    found: list[Tensor] = []
    for tokens in (torch.tensor(5, device=DEVICE), torch.tensor(5 + (rank == 1), device=DEVICE)):
        step = cache.decode({chat: 1})
        step.fingerprint = tokens
        found += [step.attend(layer, q, k, v) for layer in range(2)]
    torch.cuda.synchronize()
    try:
        cache.decode({chat: 1}).attend(0, q, k, v)
    except MeshAttentionError as error:
        return {"right": bool((found[0] == 1).all()), "spoilt": bool(found[2].isnan().all()), "raised": str(error)}
    return {"raised": "nothing"}


@pytest.mark.usefixtures("needs_cuda")
def test_ranks_that_decode_different_tokens_get_nan_and_raise(rig: Rig) -> None:
    for found in rig.run(8, on_a_new_group, decode_other_tokens)[:4]:
        assert found["right"], found
        assert found["spoilt"], found
        assert "different calls" in found["raised"]


# Memory


def chunks_of_a_prompt(group: Any, tokens: int, chunk: int) -> dict[str, Any]:
    """A long prompt in chunks: for each, the bytes that its turn states, and those that attention took."""
    layer = CachedLayer(kv_heads=4, head_dim=128)
    sizes: dict[str, Any] = {"tokens": tokens, "dtype": torch.bfloat16}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    cache = ShardedCache(MeshAttention(group), [layer], device=DEVICE, **sizes)
    taken = torch.cuda.memory_allocated() - before
    chat, stated, measured = cache.new(), [], []
    for _ in range(tokens // chunk):
        turn = cache.prefill({chat: chunk})
        own = turn.position_ids.shape[1]
        q, k, v = (torch.randn(1, own, n, 128, device=DEVICE, dtype=torch.bfloat16) for n in (16, 4, 4))
        stated.append(turn.peak_nbytes(0, heads=16))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        turn.attend(0, q, k, v)
        torch.cuda.synchronize()
        measured.append(torch.cuda.max_memory_allocated() - start)
    needs = ShardedCache.required_nbytes([layer], ranks=cache.ranks, **sizes)
    return {"stated": stated, "measured": measured, "cache": (needs, cache.nbytes, taken)}


@pytest.mark.usefixtures("needs_cuda")
def test_chunks_take_the_memory_that_their_turns_state(rig: Rig) -> None:
    tokens, chunk, ranks = 131072, 16384, 4
    for rank, found in enumerate(rig.run(ranks, chunks_of_a_prompt, tokens, chunk)):
        needs, states, taken = found["cache"]
        assert needs == states
        assert abs(taken - needs) <= 2**21, found  # the allocator rounds up
        share = tokens // ranks * 2 * 4 * 128 * 2
        assert share <= needs <= share + 2 * 64 * 2 * 4 * 128 * 2
        stated, measured = max(found["stated"]), max(found["measured"])
        if rank == 0:
            rig.notes.append(
                f"{tokens} tokens in chunks of {chunk} on {ranks} ranks, MiB: cache {needs / 2**20:.1f} stated, "
                f"{taken / 2**20:.1f} taken; attention {stated / 2**20:.1f} stated, {measured / 2**20:.1f} taken"
            )
        assert abs(measured / stated - 1) <= 0.02, found
