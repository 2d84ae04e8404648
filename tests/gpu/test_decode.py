"""Decoding as a GPU runs it: exact for every form of a call, inside CUDA graphs, and without allocations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_cases import Call, Case, attend, make_call
from torch import Tensor

from mesh_attention.kernels.base import Demand
from mesh_attention.kernels.decode import Blocks, Reach, TorchDecode, TritonDecode, choose_decode

CUDA = torch.device("cuda")
ROUNDINGS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}

PLAIN = Case(
    queries=2,
    kv_heads=2,
    group=4,
    dims=(128, 128),
    block_tokens=64,
    reaches=(((0, 400), (0, 401)), ((70, 70), (9, 3)), ((100, 131), (101, 132))),
    scale=0.09,
)
CASES = {
    "plain": PLAIN,
    "softcap": replace(PLAIN, softcap=2.0, scale=0.5),
    "heads first": replace(PLAIN, heads_first=True, group=1),
    "16 tokens a block": replace(PLAIN, block_tokens=16),
    "128 tokens a block": replace(PLAIN, block_tokens=128, kv_heads=1, group=8),
    "48 tokens a block": replace(PLAIN, block_tokens=48),
    "192 and 128": replace(PLAIN, dims=(192, 128)),
    "256": replace(PLAIN, dims=(256, 256)),
    "80 and 60": replace(PLAIN, dims=(80, 60)),
    "33 and 6": replace(PLAIN, dims=(33, 6)),
    "64 rows": replace(PLAIN, queries=16, reaches=(tuple((at, 300 + at) for at in range(16)),)),
    "3 tiles of rows": replace(PLAIN, queries=35, reaches=(tuple((at, 300 + at) for at in range(35)),)),
    "negative scale": replace(PLAIN, scale=-0.09),
}


def exact(call: Call) -> tuple[Tensor, Tensor]:
    """In float64, of the same rounded inputs."""
    wide = call._replace(q=call.q.double(), blocks=Blocks(*(x.double() for x in call.blocks)))
    return attend(TorchDecode(), wide)


def assert_exact(kernel: TritonDecode, call: Call) -> None:
    out, lse = attend(kernel, call)
    due, due_lse = exact(call)
    torch.testing.assert_close(out.double(), due, rtol=0, atol=ROUNDINGS[call.q.dtype])
    torch.testing.assert_close(lse.double(), due_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_form_of_a_call_is_exact(name: str, dtype: torch.dtype) -> None:
    assert_exact(TritonDecode(), make_call(CASES[name], dtype, CUDA))


@pytest.mark.parametrize("name", ["plain", "3 tiles of rows", "192 and 128"])
def test_float32_is_exact(name: str) -> None:
    assert_exact(TritonDecode(), make_call(CASES[name], torch.float32, CUDA))


def large(lengths: list[int], *, queries: int = 1, layers: int = 1) -> tuple[Tensor, list[Blocks], Reach]:
    """32 heads and 8 KV heads of 128, blocks of 64 tokens in any order."""
    generator = torch.Generator(CUDA).manual_seed(0)
    needs = [-(-length // 64) + 1 for length in lengths]
    order = torch.randperm(sum(needs), generator=generator, device=CUDA).int()
    table = torch.zeros(len(lengths), max(needs), dtype=torch.int32, device=CUDA)
    for at, need in enumerate(needs):
        table[at, :need], order = order[:need], order[need:]
    made = [torch.randn(sum(needs), 64, 8, 128, generator=generator, device=CUDA) for _ in range(2 * layers)]
    blocks = [Blocks(k.bfloat16(), v.bfloat16()) for k, v in zip(made[::2], made[1::2], strict=True)]
    behind = torch.arange(queries - 1, -1, -1, dtype=torch.int32, device=CUDA)
    stop = torch.tensor(lengths, dtype=torch.int32, device=CUDA)[:, None] - behind
    q = torch.randn(len(lengths), queries, 32, 128, generator=generator, device=CUDA).bfloat16()
    return q, blocks, Reach(table, torch.zeros_like(stop), stop)


@pytest.mark.parametrize(
    "lengths", [[30000], [9000, 20, 64, 1], [500] * 20, [100 * at for at in range(70)]], ids=lambda each: str(len(each))
)
def test_sequences_of_any_lengths_are_exact(lengths: list[int]) -> None:
    q, (blocks,), reach = large(lengths)
    assert_exact(TritonDecode(), Call(q, blocks, reach, 0.3, 0.0))


def test_a_captured_call_follows_the_lengths() -> None:
    q, (blocks,), reach = large([3000, 40, 700], queries=3)
    kernel, call = TritonDecode(), Call(q, blocks, reach, 0.3, 0.0)
    attend(kernel, call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(kernel, call)
    for grow in (0, 1, 60, 5):
        reach.stop.add_(grow)
        reach.first[1].fill_(grow)
        reach.stop[2].fill_(0 if grow == 60 else 64 * grow + 1)
        graph.replay()
        due, due_lse = exact(call)
        torch.testing.assert_close(out.double(), due, rtol=0, atol=ROUNDINGS[torch.bfloat16])
        torch.testing.assert_close(lse.double(), due_lse, rtol=1e-5, atol=1e-5)


def test_the_same_call_gives_the_same_bits() -> None:
    q, (blocks,), reach = large([5000, 300, 20000])
    kernel, call = TritonDecode(), Call(q, blocks, reach, 0.3, 0.0)
    once = [each.clone() for each in attend(kernel, call)]
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(once, attend(kernel, call), strict=True))


def test_a_repeated_call_allocates_nothing() -> None:
    q, (blocks,), reach = large([3000, 40])
    kernel = TritonDecode()
    out, lse = torch.empty_like(q), torch.empty(2, 1, 32, device=CUDA)
    parts, lses = torch.randn(4, 2, 32, 128, device=CUDA).bfloat16(), torch.randn(4, 2, 32, device=CUDA)

    def act() -> None:
        kernel.attend(q, blocks, reach, scale=0.3, softcap=0.0, out=out, lse=lse)
        kernel.merge(parts, lses, out.view(2, 32, 128), lse.view(2, 32))

    def allocations() -> Any:
        return torch.cuda.memory_stats()["allocation.all.allocated"]

    act()
    before = allocations()
    act()
    assert allocations() == before


@pytest.mark.parametrize("number", [1, 2, 8, 70])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_merging_is_exact(dtype: torch.dtype, number: int) -> None:
    """Of records that end with the LSE; 70 of them are more than are loaded at a time."""
    word = 4 // dtype.itemsize
    records = torch.randn(number, 32, 3, 128 + word, device=CUDA).to(dtype)
    parts, lses = records[..., :128], records.view(torch.float32)[..., 128 // word]
    lses.copy_(torch.randn(number, 32, 3, device=CUDA) * 3)
    lses[:, ::7] = -torch.inf
    lses[1:, 1::7] = -torch.inf
    out, lse = torch.empty(32, 3, 128, dtype=dtype, device=CUDA), torch.empty(32, 3, device=CUDA)
    due, due_lse = (torch.empty_like(each, dtype=torch.float64) for each in (out, lse))
    TritonDecode().merge(parts, lses, out, lse)
    TorchDecode().merge(parts.double(), lses.double(), due, due_lse)
    torch.testing.assert_close(out.double(), due, rtol=0, atol=2 * ROUNDINGS[dtype])
    torch.testing.assert_close(lse.double(), due_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1e4, 1e8])
def test_equal_scores_of_any_size_give_the_mean(size: float) -> None:
    """However the tokens are split."""
    q, (blocks,), reach = large([6400])
    q.fill_(size / 128)
    blocks.k.fill_(1.0)
    out, _ = attend(TritonDecode(), Call(q, blocks, reach, 1.0, 0.0))
    seen = blocks.v[reach.table[0, :100].long()].double().mean((0, 1)).repeat_interleave(4, 0)
    torch.testing.assert_close(out[0, 0].double(), seen, rtol=0, atol=1e-3)


def test_offsets_are_64_bits_wide() -> None:
    """In a cache of more than 2³¹ elements."""
    store = torch.zeros(40_000, 64, 8, 128, dtype=torch.bfloat16, device=CUDA)
    table = torch.tensor([[39_999, 0, 39_998]], dtype=torch.int32, device=CUDA)
    for block in table[0].tolist():
        store[block].normal_()
    reach = Reach(table, *(torch.tensor([[end]], dtype=torch.int32, device=CUDA) for end in (3, 190)))
    q = torch.randn(1, 1, 32, 128, device=CUDA).bfloat16()
    some = table[0].long()
    few = Call(
        q, Blocks(store[some], store[some]), Reach(torch.arange(3, device=CUDA).int()[None], *reach[1:]), 0.1, 0.0
    )
    out, lse = attend(TritonDecode(), Call(q, Blocks(store, store), reach, 0.1, 0.0))
    due, due_lse = exact(few)
    torch.testing.assert_close(out.double(), due, rtol=0, atol=ROUNDINGS[torch.bfloat16])
    torch.testing.assert_close(lse.double(), due_lse, rtol=1e-5, atol=1e-5)


def test_triton_is_chosen_on_a_gpu() -> None:
    plain = {"device": "cuda", "head_dim_qk": 192, "head_dim_v": 128, "softcap": 0.0, "lse_gradient": False}
    for dtype in ROUNDINGS:
        assert choose_decode(Demand(dtype=dtype, **plain)).name == "triton"  # type: ignore[arg-type]
    assert choose_decode(Demand(dtype=torch.float64, **plain)).name == "torch"  # type: ignore[arg-type]
