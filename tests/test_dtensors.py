"""DTensors through attention: real processes over Gloo, float64, against one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from pool import said, same_on_all
from run_ranks import RankPool
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention import MeshAttention, UsageError
from mesh_attention.context_parallel import attend_dtensor, context_parallel

F64 = torch.float64


def error(ours: Tensor, due: Tensor) -> float:
    assert ours.shape == due.shape
    return ((ours - due).abs().max() / due.abs().max()).item()


def wholes(seq_q: int, seq_kv: int, *, heads: int = 4, kv_heads: int = 4, seed: int = 0) -> list[Tensor]:
    """Q, K, V and dO as (batch, heads, seq, dim)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, heads, seq_q, 8), (2, kv_heads, seq_kv, 8), (2, kv_heads, seq_kv, 6), (2, heads, seq_q, 6)]
    return [torch.randn(shape, dtype=F64, generator=generator) for shape in shapes]


def errors_of(
    attend: Callable[..., DTensor], mesh: DeviceMesh, placements: list[Placement], given: list[Tensor], causal: bool
) -> list[float]:
    """Of the output and the gradients; the placements are checked on the way."""
    *inputs, weights = given
    dense = [t.clone().requires_grad_() for t in inputs]
    due = scaled_dot_product_attention(*dense, is_causal=causal, enable_gqa=True)
    due_gradients = torch.autograd.grad((due * weights).sum(), dense)
    placed = [distribute_tensor(t, mesh, placements).requires_grad_() for t in inputs]
    out = attend(*placed)
    gradients = torch.autograd.grad((out * distribute_tensor(weights, mesh, placements)).sum(), placed)
    assert all(isinstance(t, DTensor) and t.placements == tuple(placements) for t in (out, *gradients))
    return [
        error(one.full_tensor(), other) for one, other in zip((out, *gradients), (due, *due_gradients), strict=True)
    ]


def one_axis_errors(group: Any, cases: list[tuple[int, int, bool]], device: str = "cpu") -> list[float]:
    mesh, errors = DeviceMesh.from_group(group, device), []
    attention = MeshAttention(group, layout="chunks", tensor_format="bhsd")
    for seq_q, seq_kv, causal in cases:

        def direct(*tensors: DTensor, causal: bool = causal) -> Any:
            return attend_dtensor(attention, *tensors, causal=causal)

        given = [t.to(device) for t in wholes(seq_q, seq_kv, kv_heads=2)]
        errors += errors_of(direct, mesh, [Shard(2)], given, causal)
    return errors


def test_dtensors_go_in_and_come_out_with_their_gradients(pool: RankPool) -> None:
    # 16 tokens are 4 each; 14 are 4, 4, 4, 2; 5 are 2, 2, 1 and none.
    cases = [(16, 16, True), (14, 14, True), (14, 14, False), (5, 5, True), (14, 5, False), (5, 16, False)]
    for errors in pool.run(4, one_axis_errors, cases):
        assert max(errors) <= 1e-12


def format_errors(group: Any) -> list[float]:
    mesh, errors = DeviceMesh.from_group(group, "cpu"), []
    q, k, v, _ = (t.transpose(1, 2) for t in wholes(7, 7))
    due, due_lse = MeshAttention(dist.new_group([dist.get_rank()], use_local_synchronization=True))(
        q, k, v, causal=True, return_lse=True
    )
    attention = MeshAttention(group, layout="chunks")
    for take, batch in ((lambda t: t, 1), (lambda t: t[0], 0)):
        inputs = [distribute_tensor(take(t).contiguous(), mesh, [Shard(batch)]) for t in (q, k, v)]
        out, lse = attend_dtensor(attention, *inputs, causal=True, return_lse=True)
        assert lse.placements == (Shard(batch + 1),)
        errors += [error(out.full_tensor(), take(due)), error(lse.full_tensor(), take(due_lse))]
        assert out.flatten(-2).full_tensor().shape == take(due).flatten(-2).shape
    even = MeshAttention(group, layout="contiguous")  # which is the same where ranks hold equal numbers
    inputs = [distribute_tensor(t[:, :6].contiguous(), mesh, [Shard(1)]) for t in (q, k, v)]
    first = attend_dtensor(even, *inputs, causal=True).full_tensor()
    return [*errors, error(first, due[:, :6])]


def test_every_format_and_the_lse(pool: RankPool) -> None:
    for errors in pool.run(3, format_errors):
        assert max(errors) <= 1e-12


@lru_cache(maxsize=1)
def two_axes() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=("other", "cp"))


def two_axis_errors(group: Any) -> list[float]:
    mesh, errors = two_axes(), []
    attention = MeshAttention(mesh["cp"], layout="chunks", tensor_format="bhsd")
    for other in (Replicate(), Shard(0), Shard(1)):
        given = wholes(9, 9, heads=4, kv_heads=2)  # 3, 3, 3 and none
        placements = [other, Shard(2)]
        errors += errors_of(lambda *t: attend_dtensor(attention, *t, causal=True), mesh, placements, given, True)
    return errors


def test_other_axes_hold_copies_or_shard_the_batch_or_the_heads(pool: RankPool) -> None:
    for errors in pool.run(8, two_axis_errors):
        assert max(errors) <= 1e-12


# What is refused


def refusals(group: Any) -> dict[str, str]:
    mesh = DeviceMesh.from_group(group, "cpu")
    chunks, zigzag = MeshAttention(group, layout="chunks"), MeshAttention(group)
    alone = MeshAttention(dist.new_group([dist.get_rank()], use_local_synchronization=True), layout="chunks")
    x = torch.randn(2, 6, 4, 8)

    def placed(placement: Placement) -> DTensor:
        return DTensor.from_local(x, mesh, [placement], run_check=False)

    d = placed(Shard(1))

    def in_context(*tensors: Tensor) -> None:
        with context_parallel(mesh):
            scaled_dot_product_attention(*tensors)

    return {
        "zigzag": said(lambda: attend_dtensor(zigzag, d, d, d)),
        "uneven": said(lambda: attend_dtensor(MeshAttention(group, layout="contiguous"), *uneven(mesh))),
        "mixed": said(lambda: attend_dtensor(chunks, d, x, x)),
        "placements": said(lambda: attend_dtensor(chunks, d, placed(Replicate()), d)),
        "copies": said(lambda: attend_dtensor(chunks, *[placed(Replicate())] * 3)),
        "heads alone": said(lambda: attend_dtensor(chunks, *[placed(Shard(2))] * 3)),
        "partial": said(lambda: attend_dtensor(chunks, *[placed(Partial())] * 3)),
        "length": said(lambda: attend_dtensor(chunks, d, d, d, seq_len=12)),
        "group": said(lambda: attend_dtensor(alone, d, d, d)),
        "dimensions": said(lambda: attend_dtensor(chunks, *[d[0, :, 0]] * 3)),
        "unknown": said(lambda: attend_dtensor(chunks, d, d, d, is_causal=True)),
        "context": said(lambda: in_context(*[placed(Shard(2))] * 3)),
        "context, mixed": said(lambda: in_context(x, placed(Shard(2)), x)),
    }


def uneven(mesh: DeviceMesh) -> list[DTensor]:
    return [distribute_tensor(torch.zeros(1, 5, 2, 4), mesh, [Shard(1)]) for _ in range(3)]


def test_what_cannot_be_done_right_is_refused(pool: RankPool, golden: Callable[[str, str], None]) -> None:
    golden("dtensor-refusals.txt", same_on_all(pool.run(4, refusals)) + same_on_all(pool.run(8, two_axis_refusals)))


def two_axis_refusals(group: Any) -> dict[str, str]:
    mesh = two_axes()
    attention, wrong = (MeshAttention(mesh[axis], layout="chunks") for axis in ("cp", "other"))

    def placed(placements: list[Placement]) -> DTensor:
        return DTensor.from_local(torch.randn(2, 6, 4, 8), mesh, placements, run_check=False)

    q, k = (distribute_tensor(torch.randn(2, 8, heads, 8), mesh, [Shard(2), Shard(1)]) for heads in (6, 3))
    axis_0 = {"partial on another axis": Partial(), "dims on another axis": Shard(3), "tokens on both axes": Shard(1)}
    return {
        **{
            name: said(partial(attend_dtensor, attention, *[placed([one, Shard(1)])] * 3))
            for name, one in axis_0.items()
        },
        "uneven heads": said(lambda: attend_dtensor(attention, q, k, k)),
        "group of another axis": said(lambda: attend_dtensor(wrong, q, q, q)),
    }


def refusals_of_plain_calls(group: Any) -> list[str]:
    mesh, heard = DeviceMesh.from_group(group, "cpu"), []
    attention = MeshAttention(group, layout="chunks")
    given = [distribute_tensor(torch.randn(1, 8, 2, 8), mesh, [Shard(1)]) for _ in range(3)]
    plain = [t.to_local() for t in given]
    for tensors in (given, [*plain[:2], given[2]], plain):
        try:
            attention(*tensors)
            heard.append("none")
        except UsageError as refusal:
            heard.append(str(refusal))
    return heard


def test_a_plain_call_says_where_to_give_dtensors(pool: RankPool) -> None:
    for ranks in (1, 2):
        for all_three, one, none in pool.run(ranks, refusals_of_plain_calls):
            assert "got a DTensor; use mesh_attention.context_parallel.attend_dtensor" in all_three
            assert all_three == one
            assert none == "none"
