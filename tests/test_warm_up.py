"""Before the first pass on NCCL, every kind of kernel call and merge has been made once, and ranks are connected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pool import shared_pool
from torch import Tensor

from mesh_attention import MeshAttention, Problem, causal, make_plan
from mesh_attention.arguments import CallOptions
from mesh_attention.comm import torch_dist
from mesh_attention.comm.base import AllOf, Parcel
from mesh_attention.comm.torch_dist import TorchComm
from mesh_attention.execution import call, engine, warm_up
from mesh_attention.execution.compiled import compile_program, peers_of
from mesh_attention.kernels.base import CallMask, Gradients, Kernel, RowGradient, Scores
from mesh_attention.kernels.merging import TorchMerging
from mesh_attention.kernels.select import choose_kernel
from mesh_attention.plan.steps import DIRECTIONS

RANKS = 4


class Alone:
    """One rank of several, whose transfers are as on NCCL but carry nothing; notes when the first one is posted."""

    is_capturable = True
    rank, size = 1, RANKS

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> AllOf:
        for parcel in recvs:
            for chunk in parcel.chunks:
                chunk.zero_()
        self.log.append("post")
        return AllOf(())

    def share(self, text: str) -> Any:
        class Shared(AllOf):
            def result(self) -> list[str]:
                return [text] * RANKS

        return Shared(())


class Noted:
    """A kernel that notes the forms of its calls."""

    name = "noted"

    def __init__(self, kernel: Kernel, log: list[Any]) -> None:
        self.kernel, self.log = kernel, log
        self.masks: list[CallMask] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        self.log.append(("forward", scores.mask.form, q.shape, k.shape))
        self.masks.append(scores.mask)
        return self.kernel.forward(q, k, v, scores)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, row: RowGradient, scores: Scores) -> Gradients:
        self.log.append(("backward", scores.mask.form, q.shape, k.shape))
        return self.kernel.backward(q, k, v, row, scores)

    def prepare(self, q: Tensor, v: Tensor, mask: CallMask) -> None:
        self.log.append(("prepared", mask))


class NotedMerging(TorchMerging):
    name = "noted"

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def merge_output(self, total: Tensor, total_lse: Tensor, partial: Tensor, lse: Tensor) -> None:
        self.log.append(("merge", total.shape))
        super().merge_output(total, total_lse, partial, lse)

    def add(self, total: Tensor, partial: Tensor) -> None:
        self.log.append(("add", total.shape))
        super().add(total, partial)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(engine, "choose_kernel", lambda demand: Noted(choose_kernel(demand), found))
    monkeypatch.setattr(engine, "choose_merging", lambda device: NotedMerging(found))
    monkeypatch.setattr(warm_up, "_MADE", set())
    return found


def split(log: list[Any]) -> tuple[list[Any], list[Any]]:
    """What was made before the first post, and after it."""
    at = log.index("post")
    before = [entry for entry in log[:at] if entry[0] != "prepared"]
    return before, [entry for entry in log[at:] if entry != "post"]


@pytest.mark.parametrize(
    "options", [{"tile": (2, 2)}, {"method": "ring"}, {"tile": (1, 2), "ulysses_degree": 2}], ids=str
)
def test_every_form_of_call_is_made_before_the_first_post(log: list[Any], options: dict[str, Any]) -> None:
    attention = MeshAttention(Alone(log), **options)
    leaves = [torch.randn(1, 32, 4, 8, requires_grad=True) for _ in range(3)]
    out = attention(*leaves, causal=True)
    before, after = split(log)
    assert set(before) == set(after)
    assert len(before) <= len(after)
    assert not out.isnan().any()
    log.clear()
    out.sum().backward()
    before, after = split(log)
    assert set(before) == set(after)


def test_what_was_made_once_is_not_made_again(log: list[Any]) -> None:
    for _ in range(2):  # another object has other plans and masks, but no new kernels
        attention = MeshAttention(Alone(log), tile=(2, 2))
        for _ in range(2):
            log.clear()
            attention(*[torch.randn(1, 32, 4, 8)] * 3, causal=True)
    before, after = split(log)
    assert before == []
    assert after
    log.clear()
    attention(*[torch.randn(1, 64, 4, 8)] * 3, causal=True)
    before, after = split(log)
    assert set(before) == set(after)


def test_every_mask_is_prepared_even_where_a_call_like_it_was_made_before(log: list[Any]) -> None:
    attention = MeshAttention(Alone(log), method="ring")
    attention(*[torch.randn(1, 32, 4, 8)] * 3, causal=True)
    (one,) = attention.calls.engines.values()
    (kernel,) = one.kernels.values()
    before = log[: log.index("post")]
    made, prepared = kernel.masks, [entry[1] for entry in before if entry[0] == "prepared"]  # type: ignore[attr-defined]
    rehearsed = made[: sum(entry[0] == "forward" for entry in before)]
    assert prepared
    assert {*rehearsed, *prepared} == {*made}


# Connecting


def test_ranks_connect_with_all_that_a_pass_has_to_do_with() -> None:
    problem = Problem.self_attention(seq_len=96, heads=4, head_dim=8, ranks=6, mask=causal())
    for options in ({"tile": (2, 3)}, {"method": "ring", "route": "ring"}, {"tile": (1, 3), "ulysses_degree": 2}):
        for direction in DIRECTIONS:
            plan = make_plan(problem, direction=direction, **options)  # type: ignore[arg-type]
            by_rank = [peers_of(compile_program(plan, rank)) for rank in range(6)]
            for rank, (dests, sources) in enumerate(by_rank):
                assert dests
                assert all(rank in by_rank[dest][1] for dest in dests)
                assert all(rank in by_rank[source][0] for source in sources)


def reach_others(group: Any) -> list[list[int]]:
    """As on NCCL, over Gloo: whom this rank met in each of three rounds, the second with nobody new."""
    comm = TorchComm(group)
    comm._starts_together = True
    comm._connection.device = torch.device("cpu")
    met: list[list[int]] = []
    post = torch_dist._post_one_by_one

    def note(group: Any, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> list[Any]:
        met.append(sorted({parcel.peer for parcel in (*sends, *recvs)}))
        return post(group, sends, recvs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_dist, "_post_together", note)
        following, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for _ in range(2):
            comm.reach({following}, {before})
        comm.reach({following, before}, {following, before})
    return met


def test_ranks_meet_at_once_and_only_once() -> None:
    for rank, met in enumerate(shared_pool().run(4, reach_others)):
        neighbours = sorted({(rank + 1) % 4, (rank - 1) % 4})
        assert met == [neighbours, neighbours]


def derivations(group: Any) -> list[int]:
    """How often the problem has been derived after a call, after the same again, and after another spelling of it."""
    counted: list[Problem] = []
    derive = CallOptions.problem

    def counting(*given: Any, **named: Any) -> Problem:
        counted.append(derive(*given, **named))
        return counted[-1]

    counts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CallOptions, "problem", counting)
        call.derive_problem.cache_clear()
        attention = MeshAttention(group)
        q = torch.randn(1, 8, 2, 4, requires_grad=True)
        for options in ({}, {}, {"softmax_scale": 0.5}):
            out = attention(q, q, q, causal=True, **options)
            out.sum().backward()
            counts.append(len(counted))
        assert len(attention.calls.engines) == 1  # 0.5 is the scale of head size 4
    return counts


def test_a_call_derives_its_problem_once() -> None:
    assert shared_pool().run(2, derivations) == [[1, 1, 2]] * 2
