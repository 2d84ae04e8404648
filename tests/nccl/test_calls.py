"""Calls in other orders and places than one after the other on one group."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from mesh_attention import MeshAttention
from mesh_attention.comm.torch_dist import backends
from mesh_attention.integrations.pytorch import saved_attention
from nccl.attending import Attended, assert_all_close, errors_of_cases, planners, worst
from nccl.rig import DEVICE, IS_TRIED_ON_CPU, Rig

NAMES = ("causal", "documents", "cross-causal", "batch", "lse-gradient", "window")
F32 = torch.float32


def errors_of_many(group: Any, options: dict[str, Any]) -> dict[str, float]:
    """Many forward passes, then their backward passes in reverse, and once more in the same order."""
    attention, errors = MeshAttention(group, **options), {}
    for order in (reversed, list):
        made = {f"{name}, {seed}": Attended(attention, name, F32, seed=seed) for seed in range(2) for name in NAMES}
        errors |= {f"{order.__name__} {where}": made[where].error() for where in order(list(made))}
    return errors


@pytest.mark.parametrize("ranks", [3, 8])
def test_many_forward_passes_before_their_backward_passes(rig: Rig, ranks: int) -> None:
    for name in ("ring, routed", "mesh, kept"):
        assert_all_close(rig.run(ranks, errors_of_many, planners(ranks)[name]))


def errors_of_two(group: Any, one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Two attentions on one group: each goes forward before the other goes backward; one loss for both."""
    attentions = MeshAttention(group, **one), MeshAttention(group, **other)
    errors = {}
    for seed in range(2):
        first, second = (Attended(attention, "causal", F32, seed=seed) for attention in attentions)
        third = Attended(attentions[0], "documents", F32, seed=seed)
        errors |= {f"{seed} second": second.error(), f"{seed} first": first.error(), f"{seed} third": third.error()}
        both = [Attended(attention, "batch", F32, seed=seed) for attention in attentions]
        leaves = [t for each in both for t in each.inputs]
        together = torch.autograd.grad(both[0].loss() + both[1].loss(), leaves)
        alone = [t for each in both for t in Attended(each.attention, "batch", F32, seed=seed).gradients()]
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(together, alone, strict=True))
    return errors


@pytest.mark.parametrize("ranks", [2, 6])
def test_two_attentions_take_turns_on_one_group(rig: Rig, ranks: int) -> None:
    assert_all_close(rig.run(ranks, errors_of_two, planners(ranks)["ring"], planners(ranks)["attention2d"]))


def errors_on_a_mesh(group: Any, shape: tuple[int, int]) -> dict[str, float]:
    """Attention over both axes at once: every row of ranks has its own sequence, and so has every column."""
    mesh = init_device_mesh(DEVICE.type, shape, mesh_dim_names=("dp", "cp"))
    by_axis = {axis: MeshAttention(mesh[axis], method="mesh") for axis in ("cp", "dp")}
    seeds = {"cp": mesh.get_local_rank("dp"), "dp": 100 + mesh.get_local_rank("cp")}
    made = {
        f"{axis} {name}": Attended(attention, name, F32, seed=seeds[axis])
        for name in ("causal", "cross", "batch")
        for axis, attention in by_axis.items()
    }
    return {where: made[where].error() for where in reversed(made)}


def test_the_axes_of_a_device_mesh_attend_at_once(rig: Rig) -> None:
    assert_all_close(rig.run(8, errors_on_a_mesh, (2, 4)))


def errors_beside_gloo(group: Any) -> dict[str, float]:
    """Tensors over NCCL, and the texts of ranks over Gloo."""
    mixed = dist.new_group(list(range(8)), backend="gloo" if IS_TRIED_ON_CPU else "cpu:gloo,cuda:nccl")
    assert backends(mixed)["cpu"] == "gloo"
    return errors_of_cases(mixed, {"method": "mesh", "tile": (2, 4)}, [(name, F32) for name in NAMES], {})


def test_a_group_with_a_backend_for_each_device(rig: Rig) -> None:
    assert_all_close(rig.run(8, errors_beside_gloo))


def errors_between_collectives(group: Any) -> dict[str, float]:
    """The caller's own collectives on the group, and a stream of its own."""
    errors, size = {}, dist.get_world_size(group)
    attention = MeshAttention(group, method="mesh")
    stream = None if IS_TRIED_ON_CPU else torch.cuda.Stream()
    for seed in range(4):
        one = torch.ones(1000, device=DEVICE)
        work = dist.all_reduce(one, group=group, async_op=True)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            made = Attended(attention, "causal", F32, seed=seed)
            dist.barrier(group=group)
            errors[f"{seed}"] = made.error()
        assert work is not None
        work.wait()
        assert one.eq(size).all()
    return errors


def test_the_callers_own_collectives_and_streams(rig: Rig) -> None:
    assert_all_close(rig.run(8, errors_between_collectives))


def errors_without_gradients(group: Any, options: dict[str, Any]) -> dict[str, float]:
    attention, errors = MeshAttention(group, **options), {}
    for mode in (torch.no_grad, torch.inference_mode):
        for seed, name in enumerate(NAMES):
            with mode():
                made = Attended(attention, name, F32, seed=seed)
                errors[f"{mode.__name__} {name}"] = made.forward_error()
            assert not made.out.requires_grad
            errors[f"after {mode.__name__} {name}"] = Attended(attention, name, F32, seed=seed).error()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        made = Attended(attention, "causal", F32)
        errors["autocast"] = made.error()
    assert made.out.dtype == F32
    return errors


def test_inference_and_autocast_beside_training(rig: Rig) -> None:
    assert_all_close(rig.run(6, errors_without_gradients, planners(6)["mesh"]))


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
