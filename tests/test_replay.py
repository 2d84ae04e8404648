"""Replays on a CPU: what they count is the plan's, what moves is as large as the plan says, all methods take turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mesh_attention import Problem, causal, cluster_named, make_plan, rank_costs
from mesh_attention.comm.base import Parcel
from mesh_attention.errors import MemoryLimitError
from mesh_attention.execution.compiled import compile_program
from mesh_attention.plan.steps import DIRECTIONS
from mesh_attention.topology import Topology
from mesh_attention_lab.cli.replay import rates_of
from mesh_attention_lab.replay.actor import Actor, BaselineKernel
from mesh_attention_lab.replay.device import check_memory, measure_cluster
from mesh_attention_lab.replay.replay import replay
from mesh_attention_lab.replay.result import BEST, KernelPass, Part, Replayed, ReplayRow, rows_of, tuned_parts
from mesh_attention_lab.replay.transport import ReplayComm
from mesh_attention_lab.testing.wrappers import Counting

CPU = torch.device("cpu")
PROBLEM = Problem.self_attention(
    seq_len=64, heads=4, kv_heads=4, head_dim=8, ranks=4, batch=2, dtype="float32", mask=causal()
)
RANK = 2
METHODS = ("ring", "mesh", "ulysses")


@pytest.fixture(scope="module")
def topology() -> Topology:
    return cluster_named("h100x4")


@pytest.fixture(scope="module")
def parts(topology: Topology) -> list[Part]:
    return tuned_parts(PROBLEM, topology, METHODS, directions=DIRECTIONS)


@pytest.fixture(scope="module")
def replayed(parts: list[Part], topology: Topology) -> Replayed:
    return replay(parts, topology, rank=RANK, device=CPU, rounds=3)


# The transport


def parcel(nbytes: int, *, peer: int = 1) -> Parcel:
    return Parcel([torch.zeros(nbytes, dtype=torch.uint8)], peer, "x")


def test_what_arrives_is_noise_of_a_believable_size() -> None:
    comm, arrived = ReplayComm(0, 2, device=CPU), parcel(4096)
    comm.post([parcel(8192)], [arrived]).wait()
    for dtype in (torch.bfloat16, torch.float32):
        values = arrived.chunks[0].view(dtype)
        assert values.isfinite().all()
        assert 0.5 < values.float().std() < 2


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("method", METHODS)
def test_a_replay_moves_the_bytes_that_the_plan_says(parts: list[Part], method: str, direction: str) -> None:
    plan = next(part for part in parts if part.name == method).plans[direction]  # type: ignore[index]
    comm = Counting(ReplayComm(RANK, PROBLEM.ranks, device=CPU))
    Actor(plan, RANK, device=CPU).run(comm)
    costs = rank_costs(plan, RANK)
    assert sum(comm.sent_nbytes.values()) == costs.sent_nbytes > 0
    assert sum(comm.received_nbytes.values()) == costs.received_nbytes > 0


# The parts


def test_parts_come_in_the_order_asked_for_with_a_plan_for_each_pass(parts: list[Part]) -> None:
    assert [part.name for part in parts] == list(METHODS)
    for part in parts:
        assert list(part.plans) == list(DIRECTIONS)
        assert all(plan.direction == direction for direction, plan in part.plans.items())


def test_the_best_is_replayed_once_even_if_it_is_asked_for_by_name_too(topology: Topology) -> None:
    (best,) = tuned_parts(PROBLEM, topology, [BEST], directions=["forward"])
    assert len(tuned_parts(PROBLEM, topology, [best.name, BEST], directions=["forward"])) == 1


# The replay


def test_every_pass_of_every_method_is_timed_in_every_round(replayed: Replayed) -> None:
    assert [(one.method, one.what) for one in replayed.passes] == [
        (name, way) for name in METHODS for way in DIRECTIONS
    ]
    assert [one.direction for one in replayed.kernel] == list(DIRECTIONS)
    for one in (*replayed.kernel, *replayed.passes):
        assert len(one.times_s) == 3
        assert min(one.times_s) > 0
        assert one.tflops == pytest.approx(one.flops / one.time_s / 1e12)


def test_flops_and_memory_are_the_plans(parts: list[Part], replayed: Replayed) -> None:
    plans = {(part.name, direction): plan for part in parts for direction, plan in part.plans.items()}
    for one in replayed.passes:
        plan = plans[one.method, one.what]  # type: ignore[index]
        assert one.flops == rank_costs(plan, RANK).flops
        compiled = compile_program(plan, RANK)
        kept = sum(compiled.allocations[item].nbytes for item in compiled.kept) if one.what == "backward" else 0
        assert one.plan_nbytes == compiled.device_nbytes - kept
        assert one.peak_nbytes is None
        assert one.forecast_s > 0
        assert one.compute_s > 0


@pytest.mark.parametrize("keep", [("kv",), ("q", "kv")])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_forward_keeps_is_there_for_backward_and_no_part_of_its_memory(
    topology: Topology, keep: tuple[str, ...], dtype: str
) -> None:
    problem = replace(PROBLEM, dtype=dtype)
    plans = {d: make_plan(problem, tile=(2, 2), direction=d, keep=keep) for d in DIRECTIONS}  # type: ignore[arg-type]
    part = Part(name="kept", choices=dict.fromkeys(DIRECTIONS, ""), plans=plans)
    _, backward = replay([part], topology, rank=RANK, device=CPU, rounds=1, cuda_graphs=False).passes
    compiled = compile_program(plans["backward"], RANK)
    kept = {compiled.allocations[item].items: compiled.allocations[item].nbytes for item in compiled.kept}
    assert backward.plan_nbytes == compiled.device_nbytes - sum(kept.values()) < compiled.device_nbytes


@pytest.mark.parametrize("problem", [PROBLEM, replace(PROBLEM, mask=replace(causal(), right=None))])
def test_the_one_kernel_has_a_ranks_share_of_the_work(problem: Problem) -> None:
    plan = make_plan(problem, method="ring")
    average = sum(rank_costs(plan, rank).flops for rank in range(4)) / 4
    assert BaselineKernel(problem, device=CPU).flops("forward") == pytest.approx(average, rel=0.1)


def test_this_device_and_its_link_are_measured_as_a_cluster() -> None:
    cluster = measure_cluster(PROBLEM, device=CPU, report=lambda activity, fraction: None)
    assert (cluster.ranks, cluster.ranks_per_node, cluster.full_duplex) == (4, 1, True)
    assert cluster.between == cluster.inside
    assert cluster.between.gb_per_s > 0


# What follows from it


def test_memory_that_is_too_small_is_said_before_anything_runs(
    parts: list[Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(free: int, *, is_captured: bool = True) -> None:
        monkeypatch.setattr("mesh_attention_lab.replay.device.free_nbytes", lambda device: free)
        check_memory(parts, rank=RANK, device=CPU, is_captured=is_captured)

    check(2**30)
    with pytest.raises(MemoryLimitError, match=r"ring, mesh, ulysses and the one kernel need .*, .*--no-graphs"):
        check(2**17)
    with pytest.raises(MemoryLimitError, match=r"fewer methods$"):
        check(2**17, is_captured=False)


def made_up(method: str, what: str, *, plan: str, times_s: tuple[float, ...], flops: int, kernel_s: float) -> ReplayRow:
    return ReplayRow(
        method=method,
        plan=plan,
        what=what,  # type: ignore[arg-type]
        flops=flops,
        times_s=times_s,
        compute_s=0.75 * times_s[1],
        forecast_s=1.1 * times_s[1],
        kernel_s=kernel_s,
        plan_nbytes=99,
        peak_nbytes=90,
    )


@pytest.fixture
def known() -> Replayed:
    """Ring takes 2 s and 4 s, mesh half of that; the one kernel would take 0.8 s and 1.6 s."""
    forward: dict[str, Any] = {"what": "forward", "flops": 2 * 10**12, "kernel_s": 0.8}
    backward: dict[str, Any] = {"what": "backward", "flops": 5 * 10**12, "kernel_s": 1.6}
    words = "mesh 2x2, 2 blocks per call"
    return Replayed(
        rank=0,
        passes=(
            made_up("ring", plan="ring 1x4, route ring, 4 blocks per call", times_s=(1.9, 2, 2.1), **forward),
            made_up("ring", plan="ring 1x4", times_s=(4, 4, 4), **backward),
            made_up("mesh", plan=words, times_s=(1, 1, 1), **forward),
            made_up("mesh", plan=words, times_s=(2, 2, 2), **backward),
        ),
        kernel=(
            KernelPass(direction="forward", tokens=9, kv_tokens=9, flops=10**12, times_s=(0.4,)),
            KernelPass(direction="backward", tokens=9, kv_tokens=9, flops=10**12, times_s=(0.32,)),
        ),
    )


def test_rows_are_each_pass_and_both(known: Replayed) -> None:
    rows = rows_of(known)
    assert [(row.method, row.what) for row in rows] == [
        (method, what) for method in ("ring", "mesh") for what in ("forward", "backward", "both")
    ]
    assert [row.plan for row in rows] == [
        "ring 1x4, route ring, 4 blocks per call",
        "ring 1x4",
        "",
        *["mesh 2x2, 2 blocks per call"] * 2,
        "",
    ]
    assert [row.times_ring for row in rows] == [1, 1, 1, 2, 2, 2]
    assert [row.share for row in rows] == pytest.approx([0.4, 0.4, 0.4, 0.8, 0.8, 0.8])
    assert [row.exposed_s for row in rows] == pytest.approx([0.5, 1, 1.5, 0.25, 0.5, 0.75])
    assert rows[2].times_s == pytest.approx((5.9, 6, 6.1))
    assert rows[2].tflops == pytest.approx(7 / 6)


def test_errors_and_spread_are_shares_of_what_was_measured(known: Replayed) -> None:
    for row in rows_of(known):
        assert row.forecast_error == pytest.approx(0.1)
        assert row.memory_error == pytest.approx(0.1)
    assert rows_of(known)[0].spread == pytest.approx(0.05)


def test_without_ring_nothing_is_set_against_it(known: Replayed) -> None:
    alone = replace(known, passes=known.passes[2:])
    assert {row.times_ring for row in rows_of(alone)} == {None}


def test_bars_stand_below_the_rate_of_the_one_kernel_on_the_same_work(known: Replayed) -> None:
    forward, backward, both = rates_of(known)
    assert (forward.one_kernel, backward.one_kernel, both.one_kernel) == pytest.approx((2.5, 3.125, 7 / 2.4))
    assert [rate for rate, _ in both.bars.values()] == pytest.approx([7 / 6, 7 / 3])
    assert [forecast for _, forecast in both.bars.values()] == pytest.approx([7 / 6.6, 7 / 3.3])
