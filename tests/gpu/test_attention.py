"""The production path on a GPU: every planner, every mask, all ranks in one process, against dense attention."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attending import CASES, both_passes, error_ratios, planners, relative_error, wrong_of
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
ROUNDING = 2.0**-8
"""Half a unit in the last place of bfloat16."""
SLACK = 6
"""Roundings on the way from inputs to gradients: P, dS, dO·V, and a partial's own."""
LEAST = 1.0
"""What errors are relative to at least; inputs are about as large, and small differences have their roundings."""


@pytest.mark.parametrize(("turn", "name"), list(enumerate(CASES)), ids=CASES)
def test_every_mask_in_one_process(turn: int, name: str) -> None:
    """On one rank, and by a planner on 4 or 16; `tests/nccl` has more of them."""
    call = replace(CASES[name], dtype=("bfloat16", "float16")[turn % 2])
    ranks = (4, 16)[turn % 2]
    every = list(planners(ranks).values())
    assert not wrong_of(LocalGroup(1), {}, call, CUDA)
    assert not wrong_of(LocalGroup(ranks), every[turn % len(every)], call, CUDA)


@pytest.mark.parametrize(("name", "dtype"), [("causal-documents-window", "float32"), ("lse-gradient", "float64")])
def test_wide_dtypes_go_the_same_way(name: str, dtype: str) -> None:
    for options in list(planners(4).values())[dtype == "float64" :: 2]:
        assert not wrong_of(LocalGroup(4), options, replace(CASES[name], dtype=dtype), CUDA)


# Larger ones, where the fast kernels are at work


LARGE: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window_size": (700, 0)},
    "documents": {"causal": True, "cu_seqlens_q": [0, 300, 1100, 1801, 3072]},
}
NAMES = (
    *("ring, routed", "pass-q", "mesh", "mesh, grouped", "mesh, kept", "attention2d"),
    *("ulysses", "ulysses x mesh", "usp"),
)


def tensors(dtype: torch.dtype, *, tokens: int = 3072, heads: int = 16, dim: int = 128, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator(CUDA).manual_seed(seed)
    return [torch.randn((1, tokens, heads, dim), generator=generator, device=CUDA).to(dtype) for _ in range(4)]


def spread(name: str, **call: Any) -> list[Tensor]:
    """Output and gradients over 16 ranks."""
    attention = MeshAttention(LocalGroup(16), **planners(16)[name])
    return both_passes(attention, tensors(torch.bfloat16), causal=True, **call)


def assert_near(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """The same output; dQ is added in no fixed order."""
    assert torch.equal(ours[0], theirs[0])
    assert all(relative_error(*pair, LEAST) <= SLACK * ROUNDING for pair in zip(ours, theirs, strict=True))


SOME = ("ring, routed", "mesh, grouped", "ulysses x mesh")


@pytest.mark.parametrize(
    ("mask", "dtype", "names"),
    [
        ("causal", torch.bfloat16, NAMES),
        ("full", torch.float16, SOME),
        ("window", torch.bfloat16, SOME),
        ("documents", torch.float16, SOME),
    ],
    ids=list(LARGE),
)
def test_16_ranks_are_about_as_exact_as_one_kernel(mask: str, dtype: torch.dtype, names: tuple[str, ...]) -> None:
    layout = {} if mask in ("causal", "full") else {"layout": "contiguous"}
    given = [(name, MeshAttention(LocalGroup(16), **planners(16)[name], **layout)) for name in names]
    if mask == "causal":
        given.append(("striped", MeshAttention(LocalGroup(4), tile=(2, 2), layout="striped")))
    ratios = error_ratios(given, tensors(dtype), **LARGE[mask])
    print(mask, dtype, {name: round(ratio, 3) for name, ratio in ratios.items()})
    assert max(ratios.values()) <= 1.5


# Graphs, streams, allocators


@pytest.mark.parametrize("name", SOME)
def test_playing_a_graph_gives_what_steps_give(name: str) -> None:
    graphed, stepped = (MeshAttention(LocalGroup(16), cuda_graphs=on, **planners(16)[name]) for on in (True, False))
    for seed in range(4):
        wholes = tensors(torch.bfloat16, seed=seed)
        assert_near(*(both_passes(attention, wholes, causal=True) for attention in (graphed, stepped)))


def test_graphs_leave_earlier_results_alone() -> None:
    attention = MeshAttention(LocalGroup(4), tile=(2, 2), cuda_graphs=True)
    shards = [[attention.shard(t) for t in tensors(torch.bfloat16, seed=seed)[:3]] for seed in range(4)]
    outs = [attention(*given, causal=True) for given in shards]
    again = [attention(*given, causal=True) for given in shards]
    for before, after in zip(outs, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


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
        assert_near(*results)


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
    expected = spread("mesh")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = spread("mesh")
    stream.synchronize()
    assert torch.equal(found[0], expected[0])


def test_gradients_are_the_same_bits_if_asked_for() -> None:
    once, again = (spread("mesh, grouped", deterministic=True) for _ in range(2))
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
@pytest.mark.parametrize(("name", "kv_heads"), [*((name, 8) for name in NAMES), ("ulysses", 32)])
def test_memory_is_what_the_plan_states(name: str, kv_heads: int, direction: Direction) -> None:
    ranks = 16 if name != "ulysses" else 8
    problem = Problem.self_attention(
        seq_len=ranks * 2048, heads=32, kv_heads=kv_heads, head_dim=128, ranks=ranks, mask=causal(), dtype="bfloat16"
    )
    plan = make_plan(problem, direction=direction, layout="zigzag", **planners(ranks)[name])
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
        attentions = MeshAttention(), MeshAttention(LocalGroup(1))
        assert_near(*(both_passes(attention, tensors(torch.bfloat16), causal=True) for attention in attentions))
    finally:
        dist.destroy_process_group()
