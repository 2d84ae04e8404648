"""The production path on a GPU: every planner, every mask, all ranks in one process, against dense attention."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attention_cases import BY_NAME, CASES, Case, assert_close, attend, dense_answer, methods, relative_error
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mesh_attention import Problem, causal, make_plan
from mesh_attention.api import MeshAttention
from mesh_attention.comm.local import LocalGroup
from mesh_attention.errors import UsageError
from mesh_attention.plan.steps import DIRECTIONS, Direction
from mesh_attention_lab.replay.actor import Actor
from mesh_attention_lab.replay.transport import ReplayComm

CUDA = torch.device("cuda")
ROUNDINGS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-18, torch.float64: 2.0**-40}
"""Half a unit in the last place; wide dtypes less, for what thousands of additions lose."""
SLACK = 6
"""Roundings on the way from inputs to gradients: P, dS, dO·V, and a partial's own."""
LEAST = 1.0
"""What errors are relative to at least; inputs are about as large, and small differences have their roundings."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_mask_in_one_process(case: Case) -> None:
    """On one rank, and by a planner on 4 or 16; `tests/nccl` has more of them."""
    dtype = (torch.bfloat16, torch.float16)[CASES.index(case) % 2]
    truth = dense_answer(case, dtype)
    assert_close(case, attend(MeshAttention(LocalGroup(1)), case, dtype, CUDA), truth, SLACK * ROUNDINGS[dtype], LEAST)
    ranks = 4 if dtype is torch.bfloat16 else 16
    every = methods(ranks, case.kv_heads)
    ours = attend(MeshAttention(LocalGroup(ranks), **every[CASES.index(case) % len(every)]), case, dtype, CUDA)
    assert_close(case, ours, truth, SLACK * ROUNDINGS[dtype], LEAST)


@pytest.mark.parametrize(
    ("name", "dtype"), [("causal-documents-window", torch.float32), ("lse-gradient", torch.float64)], ids=str
)
def test_wide_dtypes_go_the_same_way(name: str, dtype: torch.dtype) -> None:
    case = BY_NAME[name]
    for options in methods(4, case.kv_heads):
        ours = attend(MeshAttention(LocalGroup(4), **options), case, dtype, CUDA)
        assert_close(case, ours, dense_answer(case, dtype), SLACK * ROUNDINGS[dtype], LEAST)


# Larger ones, where the fast kernels are at work


LARGE: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window_size": (700, 0)},
    "documents": {"causal": True, "cu_seqlens_q": [0, 300, 1100, 1801, 3072]},
}
PLANNERS: dict[str, dict[str, Any]] = {
    "ring": {"method": "ring", "route": "ring"},
    "pass-q": {"method": "pass-q"},
    "mesh": {"method": "mesh", "tile": (4, 4)},
    "mesh, grouped": {"method": "mesh", "tile": (4, 4), "blocks_per_call": 4},
    "mesh, kept": {"method": "mesh", "tile": (4, 4), "keep": ("kv",)},
    "attention2d": {"method": "attention2d", "tile": (4, 4)},
    "ulysses": {"method": "ulysses"},
    "ulysses 4 x mesh": {"method": "mesh", "ulysses_degree": 4, "tile": (2, 2)},
    "usp": {"method": "ring", "ulysses_degree": 4},
}


def tensors(dtype: torch.dtype, *, tokens: int = 3072, heads: int = 16, dim: int = 128, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator(CUDA).manual_seed(seed)
    return [torch.randn((1, tokens, heads, dim), generator=generator, device=CUDA).to(dtype) for _ in range(4)]


def spread(options: dict[str, Any], call: dict[str, Any], dtype: torch.dtype, ranks: int, **more: Any) -> list[Tensor]:
    """Output and gradients over some ranks."""
    attention = MeshAttention(LocalGroup(ranks), **options)
    q, k, v, d_out = tensors(dtype, **more)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = attention.unshard(attention(*(attention.shard(t) for t in leaves), **call))
    return [out.detach(), *torch.autograd.grad((out * d_out).sum(), leaves)]


def errors(ours: list[Tensor], truth: list[Tensor]) -> list[float]:
    return [float((a.double() - b).square().mean().sqrt()) for a, b in zip(ours, truth, strict=True)]


def truth_of(call: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    """In float64, of the same rounded inputs, by one reference kernel."""
    attention = MeshAttention(LocalGroup(1))
    q, k, v, d_out = (t.double() for t in tensors(dtype))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    (out,) = attention([leaves[0]], [leaves[1]], [leaves[2]], **call)
    return [out.detach(), *torch.autograd.grad((out * d_out).sum(), leaves)]


SOME = ("ring", "mesh, grouped", "ulysses 4 x mesh")


@pytest.mark.parametrize(
    ("mask", "dtype", "names"),
    [
        ("causal", torch.bfloat16, tuple(PLANNERS)),
        ("full", torch.float16, SOME),
        ("window", torch.bfloat16, SOME),
        ("documents", torch.float16, SOME),
    ],
    ids=list(LARGE),
)
def test_16_ranks_are_about_as_exact_as_one_kernel(mask: str, dtype: torch.dtype, names: tuple[str, ...]) -> None:
    truth = truth_of(LARGE[mask], dtype)
    single = errors(spread({}, LARGE[mask], dtype, 1), truth)
    worst: dict[str, float] = {}
    for name in names:
        layout = {} if mask in ("causal", "full") else {"layout": "contiguous"}
        found = errors(spread({**PLANNERS[name], **layout}, LARGE[mask], dtype, 16), truth)
        worst[name] = max(error / alone for error, alone in zip(found, single, strict=True))
    print(mask, dtype, {name: round(ratio, 3) for name, ratio in worst.items()})
    assert max(worst.values()) <= 1.5


def test_striped_layouts_use_fast_kernels_exactly() -> None:
    truth = truth_of(LARGE["causal"], torch.bfloat16)
    single = errors(spread({}, LARGE["causal"], torch.bfloat16, 1), truth)
    found = errors(spread({"tile": (2, 2), "layout": "striped"}, LARGE["causal"], torch.bfloat16, 4), truth)
    assert all(error <= 1.5 * alone for error, alone in zip(found, single, strict=True))


# Graphs, streams, allocators


@pytest.mark.parametrize("name", SOME)
def test_playing_a_graph_gives_what_steps_give(name: str) -> None:
    graphed, stepped = (MeshAttention(LocalGroup(16), cuda_graphs=on, **PLANNERS[name]) for on in (True, False))
    for seed in range(4):
        q, k, v, d_out = tensors(torch.bfloat16, seed=seed)
        results = []
        for attention in (graphed, stepped):
            leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
            out = attention.unshard(attention(*(attention.shard(t) for t in leaves), causal=True))
            results.append([out.detach(), *torch.autograd.grad((out * d_out).sum(), leaves)])
        assert torch.equal(results[0][0], results[1][0])
        for ours, theirs in zip(*results, strict=True):
            assert (
                relative_error(ours, theirs, LEAST) <= SLACK * ROUNDINGS[torch.bfloat16]
            )  # dQ is added in no fixed order


def test_graphs_leave_earlier_results_alone() -> None:
    attention = MeshAttention(LocalGroup(4), tile=(2, 2), cuda_graphs=True)
    shards = [[attention.shard(t) for t in tensors(torch.bfloat16, seed=seed)[:3]] for seed in range(4)]
    outs = [attention(*given, causal=True) for given in shards]
    again = [attention(*given, causal=True) for given in shards]
    for before, after in zip(outs, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("softcap", torch.bfloat16), ("documents", torch.float32), ("not-contiguous", torch.bfloat16)],
    ids=str,
)
def test_any_mask_and_kernel_can_be_captured(name: str, dtype: torch.dtype) -> None:
    case = BY_NAME[name]
    truth = dense_answer(case, dtype)
    attention = MeshAttention(LocalGroup(4), tile=(2, 2), cuda_graphs=True)
    for _ in range(3):
        assert_close(case, attend(attention, case, dtype, CUDA), truth, SLACK * ROUNDINGS[dtype], LEAST)


def test_graphs_play_for_layers_that_are_computed_again() -> None:
    """Two layers of one configuration, the first one's forward once more in backward, in autograd's thread."""
    graphed, stepped = (MeshAttention(LocalGroup(4), tile=(2, 2), cuda_graphs=on) for on in (True, False))

    def layers(attention: MeshAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def layer(x: Tensor) -> Tensor:
            return attention.unshard(attention(*(attention.shard(t) for t in (x, k, v)), causal=True))

        return layer(checkpoint(layer, q, use_reentrant=False))

    for seed in range(4):
        q, k, v, d_out = tensors(torch.bfloat16, seed=seed)
        results = []
        for attention in (graphed, stepped):
            leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
            out = layers(attention, *leaves)
            results.append([out.detach(), *torch.autograd.grad((out * d_out).sum(), leaves)])
        assert torch.equal(results[0][0], results[1][0])
        for ours, theirs in zip(*results, strict=True):
            assert relative_error(ours, theirs, LEAST) <= SLACK * ROUNDINGS[torch.bfloat16]


def test_graphs_play_on_two_streams_without_meeting() -> None:
    attention = MeshAttention(LocalGroup(4), tile=(2, 2), cuda_graphs=True)
    shards = [[attention.shard(t) for t in tensors(torch.bfloat16, seed=seed)[:3]] for seed in range(2)]
    expected = [attention(*given, causal=True) for given in (*shards, *shards)][2:]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in shards]
    found: list[list[list[Tensor]]] = [[] for _ in shards]
    for _ in range(5):
        for stream, given, kept in zip(streams, shards, found, strict=True):
            with torch.cuda.stream(stream):
                kept.append(attention(*given, causal=True))
    torch.cuda.synchronize()
    for due, kept in zip(expected, found, strict=True):
        assert all(torch.equal(a, b) for outs in kept for a, b in zip(outs, due, strict=True))


def test_graphs_are_refused_where_they_cannot_be_had() -> None:
    attention = MeshAttention(LocalGroup(2), method="mesh", cuda_graphs=True)
    with pytest.raises(UsageError, match="needs CUDA tensors, got cpu"):
        attention(*([torch.randn(1, 4, 2, 8)] * 2 for _ in range(3)))
    keeping = MeshAttention(LocalGroup(2), method="mesh", cuda_graphs=True, keep=("kv",))
    q, k, v, _ = tensors(torch.bfloat16, tokens=256)
    with pytest.raises(UsageError, match="keeps kv for backward, which CUDA graphs cannot hand over"):
        keeping(*(keeping.shard(t) for t in (q, k, v)))
    attention = MeshAttention(LocalGroup(2), method="mesh", cuda_graphs=True)
    outs, lses = attention(*(attention.shard(t.requires_grad_()) for t in (q, k, v)), return_lse=True)
    with pytest.raises(UsageError, match="does not support gradients of the LSE"):
        (torch.cat(outs).sum() + torch.cat(lses, 2).sum()).backward()


def test_any_stream_will_do() -> None:
    expected = spread(PLANNERS["mesh"], {"causal": True}, torch.bfloat16, 16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = spread(PLANNERS["mesh"], {"causal": True}, torch.bfloat16, 16)
    stream.synchronize()
    assert torch.equal(found[0], expected[0])


def test_gradients_are_the_same_bits_if_asked_for() -> None:
    call = {"causal": True, "deterministic": True}
    once, again = (spread(PLANNERS["mesh, grouped"], call, torch.bfloat16, 16) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_expandable_segments_change_nothing() -> None:
    """In a process of its own: the allocator is chosen when CUDA is first used."""
    wanted = "(test_playing_a_graph or test_memory) and grouped"
    settings = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(Path(__file__)), "-k", wanted]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


# Memory


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("name", "kv_heads"), [*((name, 8) for name in PLANNERS), ("ulysses", 32)])
def test_memory_is_what_the_plan_states(name: str, kv_heads: int, direction: Direction) -> None:
    options = PLANNERS[name]
    ranks = 16 if name != "ulysses" else 8
    problem = Problem.self_attention(
        seq_len=ranks * 2048, heads=32, kv_heads=kv_heads, head_dim=128, ranks=ranks, mask=causal(), dtype="bfloat16"
    )
    plan = make_plan(problem, direction=direction, layout="zigzag", **options)
    actor = Actor(plan, ranks // 2, device=CUDA)
    comm = ReplayComm(ranks // 2, ranks, device=CUDA)
    for _ in range(2):
        actor.run(comm)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    actor.run(comm)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    assert taken == pytest.approx(actor.device_nbytes, rel=0.02)


# NCCL


def test_nccl_of_one_rank() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611")
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        attention = MeshAttention()
        q, k, v, d_out = tensors(torch.bfloat16)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = attention(*leaves, causal=True)
        found = [out.detach(), *torch.autograd.grad((out * d_out).sum(), leaves)]
        expected = spread({}, {"causal": True}, torch.bfloat16, 1)
        assert torch.equal(found[0], expected[0])
        for ours, theirs in zip(found, expected, strict=True):
            assert relative_error(ours, theirs, LEAST) <= SLACK * ROUNDINGS[torch.bfloat16]
        torch.testing.assert_close(attention.unshard(out.detach()), out.detach())
    finally:
        dist.destroy_process_group()
