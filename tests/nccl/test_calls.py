"""Calls in other orders and places than one after the other on one group."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attending import planners
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from mesh_attention import MeshAttention
from mesh_attention.comm.torch_dist import backends
from mesh_attention.integrations.pytorch import saved_attention
from nccl.attending import assert_right, case, made, worst, wrong_with
from nccl.rig import DEVICE, IS_TRIED_ON_CPU, Rig

NAMES = ("causal", "documents", "cross-causal", "batch", "lse-gradient", "window")


def wrong_with_many(group: Any, options: dict[str, Any]) -> list[str]:
    """Many forward passes, then their backward passes in reverse, and once more in the same order."""
    attention, wrong = MeshAttention(group, **options), []
    for order in (reversed, list):
        forward = [made(attention, case(name, seed=seed)) for seed in range(2) for name in NAMES]
        wrong += [why for attended in order(forward) for why in attended.wrong()]
    return wrong


@pytest.mark.parametrize(("ranks", "planner"), [(3, "mesh, kept"), (8, "ring, routed")])
def test_many_forward_passes_before_their_backward_passes(rig: Rig, ranks: int, planner: str) -> None:
    assert_right(rig.run(ranks, wrong_with_many, planners(ranks)[planner]))


def wrong_with_two(group: Any, one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Two attentions on one group: each goes forward before the other goes backward; one loss for both."""
    attentions = MeshAttention(group, **one), MeshAttention(group, **other)
    wrong = []
    for seed in range(2):
        first, second = (made(attention, case("causal", seed=seed)) for attention in attentions)
        third = made(attentions[0], case("documents", seed=seed))
        wrong += second.wrong() + first.wrong() + third.wrong()
        both = [made(attention, case("batch", seed=seed)) for attention in attentions]
        torch.autograd.backward(*zip(*both[0].ends(), *both[1].ends(), strict=True))
        wrong += [why for attended in both for why in attended.wrong_results() + attended.wrong_gradients()]
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_two_attentions_take_turns_on_one_group(rig: Rig, ranks: int) -> None:
    assert_right(rig.run(ranks, wrong_with_two, planners(ranks)["ring"], planners(ranks)["attention2d"]))


def wrong_on_a_mesh(group: Any, shape: tuple[int, int]) -> list[str]:
    """Attention over both axes at once: every row of ranks has its own sequence, and so has every column."""
    mesh = init_device_mesh(DEVICE.type, shape, mesh_dim_names=("dp", "cp"))
    by_axis = {axis: MeshAttention(mesh[axis], method="mesh") for axis in ("cp", "dp")}
    seeds = {"cp": mesh.get_local_rank("dp"), "dp": 100 + mesh.get_local_rank("cp")}
    forward = [
        made(attention, case(name, seed=seeds[axis]))
        for name in ("causal", "cross", "batch")
        for axis, attention in by_axis.items()
    ]
    return [why for attended in reversed(forward) for why in attended.wrong()]


def test_the_axes_of_a_device_mesh_attend_at_once(rig: Rig) -> None:
    assert_right(rig.run(8, wrong_on_a_mesh, (2, 4)))


def wrong_beside_gloo(group: Any) -> list[str]:
    """Tensors over NCCL, and the texts of ranks over Gloo."""
    mixed = dist.new_group(list(range(8)), backend="gloo" if IS_TRIED_ON_CPU else "cpu:gloo,cuda:nccl")
    assert backends(mixed)["cpu"] == "gloo"
    return wrong_with(mixed, {"method": "mesh", "tile": (2, 4)}, [case(name) for name in NAMES[:3]])


def test_a_group_with_a_backend_for_each_device(rig: Rig) -> None:
    assert_right(rig.run(8, wrong_beside_gloo))


def wrong_between_collectives(group: Any) -> list[str]:
    """The caller's own collectives on the group, and a stream of its own."""
    wrong, size = [], dist.get_world_size(group)
    attention = MeshAttention(group, method="mesh")
    stream = None if IS_TRIED_ON_CPU else torch.cuda.Stream()
    for seed in range(4):
        one = torch.ones(1000, device=DEVICE)
        work = dist.all_reduce(one, group=group, async_op=True)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            attended = made(attention, case("causal", seed=seed))
            dist.barrier(group=group)
            wrong += attended.wrong()
        assert work is not None
        work.wait()
        assert one.eq(size).all()
    return wrong


def test_the_callers_own_collectives_and_streams(rig: Rig) -> None:
    assert_right(rig.run(8, wrong_between_collectives))


def wrong_without_gradients(group: Any, options: dict[str, Any]) -> list[str]:
    attention, wrong = MeshAttention(group, **options), []
    for mode in ("no_grad", "inference"):
        for seed, name in enumerate(NAMES[:4]):
            attended = made(attention, case(name, seed=seed, mode=mode))
            assert not attended.outs[0].requires_grad
            wrong += attended.wrong() + made(attention, case(name, seed=seed)).wrong()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        return wrong + made(attention, case("causal")).wrong()


def test_inference_and_autocast_beside_training(rig: Rig) -> None:
    assert_right(rig.run(3, wrong_without_gradients, planners(3)["mesh"]))


def errors_of_recomputing(group: Any, options: dict[str, Any]) -> float:
    """The largest difference that checkpointing makes to the gradients of two layers."""
    attention = MeshAttention(group, **options)
    rank = dist.get_rank(group)
    x = torch.randn(1, 64, 4, 32, generator=torch.Generator().manual_seed(rank)).to(DEVICE)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return x + attention(x, x.sin(), x.cos(), causal=True)

    found = []
    for how in ({}, {"use_reentrant": False}, {"use_reentrant": True}, {"context_fn": saved_attention}):
        leaf = x.clone().requires_grad_()
        out = leaf
        for _ in range(2):
            out = checkpoint(layer, out, **{"use_reentrant": False, **how}) if how else layer(out)
        out.square().sum().backward()
        found.append(leaf.grad)
    return worst(float((one - found[0]).abs().max()) for one in found[1:])


def test_activation_checkpointing_changes_nothing(rig: Rig) -> None:
    assert worst(rig.run(4, errors_of_recomputing, planners(4)["mesh, routed"])) <= 1e-4
