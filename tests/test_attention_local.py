"""The production path with all ranks in one process, in float64, against dense attention."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from attending import (
    CASES,
    DTYPES,
    Attended,
    call_of,
    counts_of,
    error_ratios,
    options_of,
    planners,
    relative_error,
    truth_of,
    widened,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import plans
from torch.multiprocessing.reductions import StorageWeakRef

from mesh_attention.api import MeshAttention
from mesh_attention.comm.local import LocalGroup
from mesh_attention.plan.layout import LAYOUTS
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import DIRECTIONS, Direction, Keep
from mesh_attention_lab.testing.wrappers import Counting


def assert_right(
    name: str, ranks: int, *, turn: int = 0, of: int = 1, layout: str | None = None, **changes: Any
) -> None:
    """A case by every planner, or every `of`-th, beginning with planner `turn`; in an odd turn with heads first."""
    truths = {}
    for options in list(planners(ranks).values())[turn % of :: of]:
        call = replace(widened(CASES[name], options), **changes)
        truth = truths.setdefault(call.heads, truth_of(call))
        heads_first = {"tensor_format": "bhsd"} if turn % 2 else {}
        Attended(MeshAttention(LocalGroup(ranks), layout=layout, **heads_first, **options), call, truth=truth).compare()


@pytest.mark.parametrize(("turn", "name"), list(enumerate(CASES)), ids=CASES)
@pytest.mark.parametrize(("ranks", "of"), [(1, 11), (4, 1), (5, 2)], ids=["1", "4", "5"])
def test_every_feature_is_exact(turn: int, name: str, ranks: int, of: int) -> None:
    assert_right(name, ranks, turn=turn, of=of)


@pytest.mark.parametrize(("turn", "layout"), list(enumerate(LAYOUTS)), ids=LAYOUTS)
@pytest.mark.parametrize("name", ["causal", "causal-documents-window", "cross-causal", "shorter-than-the-ranks"])
def test_every_layout_is_exact(name: str, turn: int, layout: str) -> None:
    assert_right(name, 6, turn=turn + len(name), of=2, layout=layout)


@pytest.mark.slow
@pytest.mark.parametrize(("turn", "layout"), list(enumerate(["zigzag", "chunks"])))
def test_sixteen_ranks_are_exact(turn: int, layout: str) -> None:
    assert_right("causal", 16, turn=turn, of=2, layout=layout)


@pytest.mark.parametrize(("turn", "dtype"), list(enumerate(["float32", "bfloat16", "float16"])))
def test_narrow_dtypes_are_as_exact_as_they_can_be(turn: int, dtype: str) -> None:
    assert_right("causal", 8, turn=turn, of=2, dtype=dtype)


@pytest.mark.slow
@given(plans(max_ranks=16, of_inputs=True), st.sampled_from([0.0, 2.0]))
@settings(max_examples=50)
def test_any_plan_computes_attention(plan: Plan, softcap: float) -> None:
    """Whatever problem, planner and options: the forward and backward plans of one draw, executed."""
    attention = MeshAttention(LocalGroup(plan.problem.ranks), layout=plan.layout, **options_of(plan))
    Attended(attention, call_of(plan.problem, softcap=softcap)).compare()


SPOILED = ("q", "k", "v", "o", "qkvo")


@pytest.mark.parametrize(("turn", "layout"), list(enumerate(LAYOUTS)), ids=LAYOUTS)
@pytest.mark.parametrize("name", ["causal-documents-window", "cross-documents", "documents", "batch"])
def test_a_spoiled_document_stays_alone_by_every_planner(name: str, turn: int, layout: str) -> None:
    for ranks, dim_v, softcap, dtype in ((4, 8, 0.0, "float32"), (3, 5, 1.5, "bfloat16")):
        for number, options in list(enumerate(planners(ranks).values()))[(turn + len(name)) % 4 :: 4]:
            call = widened(replace(CASES[name], dtype=dtype, dim_v=dim_v), options)
            spoiled = SPOILED[number % 5], number % call.batch, number % 3, ("nan", "inf")[turn % 2]
            call = replace(call, arguments=call.arguments | {"softcap": softcap}, spoiled=spoiled)
            Attended(MeshAttention(LocalGroup(ranks), layout=layout, **options), call).compare()


@given(
    plans(max_ranks=8, of_inputs=True),
    st.sampled_from([0.0, 2.0]),
    st.tuples(st.sampled_from(SPOILED), st.integers(0, 1), st.integers(0, 3), st.sampled_from(["nan", "inf"])),
    st.sampled_from(list(DTYPES)),
)
@settings(max_examples=40)
def test_a_spoiled_document_stays_alone(
    plan: Plan, softcap: float, spoiled: tuple[str, int, int, str], dtype: str
) -> None:
    """Whatever problem, planner and options: NaN of one document, or row of a batch, reaches no other."""
    attention = MeshAttention(LocalGroup(plan.problem.ranks), layout=plan.layout, **options_of(plan))
    call = call_of(plan.problem, softcap=softcap)
    spoiled = (spoiled[0], spoiled[1] % call.batch, *spoiled[2:])
    Attended(attention, replace(call, dtype=dtype, spoiled=spoiled)).compare()


@pytest.mark.parametrize(("name", "ranks"), [("causal", 6), ("window", 4), ("cross-documents", 6), ("batch", 4)])
def test_bytes_on_the_wire_and_bytes_held_are_the_plans(name: str, ranks: int) -> None:
    for options in planners(ranks).values():
        group = LocalGroup(ranks)
        attention = MeshAttention([Counting(group.comm(rank)) for rank in range(ranks)], **options)
        for counted, planned in counts_of(attention, widened(CASES[name], options)):
            assert counted == planned


def test_ranks_are_about_as_exact_as_one_kernel() -> None:
    """The harness by which tests/gpu and tests/nccl judge large calls."""
    wholes = [torch.randn(1, 256, 8, 16).bfloat16() for _ in range(4)]
    given = [(name, MeshAttention(LocalGroup(4), **options)) for name, options in planners(4).items()]
    ratios = error_ratios(given, wholes, causal=True)
    assert max(ratios.values()) <= 1.5, ratios


LARGE = [
    {},
    {"method": "ring"},
    {"method": "pass-q"},
    {"tile": (2, 2)},
    {"method": "attention2d"},
    {"method": "ulysses"},
]


@pytest.mark.parametrize("options", LARGE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_scores_of_any_size_give_the_mean(options: dict[str, Any], dtype: torch.dtype) -> None:
    attention = MeshAttention(LocalGroup(4), **options)
    for size in (1e3, 8e4, 1e7, 1e8, -1e8):
        torch.manual_seed(0)
        q, k = torch.zeros(1, 32, 4, 8, dtype=dtype), torch.zeros(1, 32, 4, 8, dtype=dtype)
        q[..., 0], k[..., 0] = size, 1.0
        v = torch.randn(1, 32, 4, 8, dtype=dtype)
        out = attention.unshard(attention(*map(attention.shard, (q, k, v)), softmax_scale=1.0))
        mean = v.double().mean(1, keepdim=True).expand(v.shape)
        assert relative_error(out, mean) <= 4 * torch.finfo(dtype).eps, size


def test_blocks_whose_scores_overflow_do_not_count() -> None:
    """The scores of one rank's keys are -inf in float32; those of the others are 0."""
    attention = MeshAttention(LocalGroup(4), layout="contiguous")
    q, k, v = torch.full((1, 32, 4, 8), 1e20), torch.zeros(1, 32, 4, 8), torch.randn(1, 32, 4, 8)
    k[:, 8:16] = -1e20
    out = attention.unshard(attention(*map(attention.shard, (q, k, v))))
    mean = torch.cat([v[:, :8], v[:, 16:]], 1).double().mean(1, keepdim=True).expand(v.shape)
    assert relative_error(out, mean) <= 1e-6


@pytest.mark.parametrize("size", [1e-42, 1e-38, 1e37, 1e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_at_the_ends_of_the_range_are_those_of_one_rank(dtype: torch.dtype, size: float) -> None:
    q, k, v = (torch.randn(1, 8, 1, 16).to(dtype) for _ in range(3))
    inputs = [x.requires_grad_() for x in (q, k, v * 1e-3)]
    d_out = (torch.rand(1, 8, 1, 16) * size).to(dtype)
    found = []
    for ranks in (1, 2):
        attention = MeshAttention(LocalGroup(ranks))
        out = attention.unshard(attention(*(attention.shard(x) for x in inputs), causal=True))
        found.append(torch.autograd.grad(out, inputs, d_out))
    for one, two in zip(*found, strict=True):
        assert two.isfinite().all()
        torch.testing.assert_close(two, one, atol=float(0.02 * one.abs().max()) + 1e-38, rtol=0.02)


def test_a_cached_call_shares_nothing_and_plans_nothing() -> None:
    group = LocalGroup(4)
    comms = [Counting(group.comm(rank)) for rank in range(4)]
    planned: list[Direction] = []

    def planner(problem: Any, *, direction: Direction, layout: Any) -> Plan:
        from mesh_attention import make_plan

        planned.append(direction)
        return make_plan(problem, direction=direction, layout=layout)

    attention = MeshAttention(comms, planner=planner)
    for _ in range(3):
        Attended(attention, CASES["causal"]).compare()
    assert planned == list(DIRECTIONS)
    assert [comm.shared for comm in comms] == [1] * 4


def test_a_group_is_let_go_with_its_attention_and_not_left_to_the_garbage_collector() -> None:
    gc.disable()
    try:
        attention = MeshAttention(LocalGroup(2))
        x = torch.randn(1, 8, 2, 4, requires_grad=True)
        out = attention(*(attention.shard(tensor) for tensor in (x, x, x)))
        sum(shard.sum() for shard in out).backward()
        comm = weakref.ref(attention.comms[0])
        del attention, out
        assert comm() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("keep", [(), ("kv",), ("q", "kv"), ("own",)])
def test_inputs_that_are_kept_in_another_form_are_not_saved_as_well(keep: tuple[Keep, ...]) -> None:
    attention = MeshAttention(LocalGroup(4), method="ulysses", keep=keep)
    leaves = [torch.randn(1, 32, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    shards = [attention.shard(leaf * 1.0) for leaf in leaves]
    memory = [StorageWeakRef(shard.untyped_storage()) for side in shards for shard in side]
    out = attention.unshard(attention(*shards, causal=True))
    del shards
    assert all(one.expired() for one in memory) == (keep in (("q", "kv"), ("own",)))
    gradients = torch.autograd.grad(out.square().sum(), leaves)
    alone = MeshAttention(LocalGroup(1))
    (whole,) = alone(*([leaf] for leaf in leaves), causal=True)
    for ours, theirs in zip(gradients, torch.autograd.grad(whole.square().sum(), leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
