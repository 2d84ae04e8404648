"""Waves: the same work and the same bytes as in one go, with less of it exposed, and in less memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from strategies import plans

from mesh_attention import Problem, causal, cluster_named, make_plan, rank_costs, verify
from mesh_attention.plan.buffer_sizes import held_nbytes
from mesh_attention.plan.kernel_calls import kernel_calls, peak_nbytes, scratch_nbytes
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.program import Program
from mesh_attention.plan.steps import DIRECTIONS, Exchange, Item, Unpack
from mesh_attention.planners.choice import Choice
from mesh_attention.planners.costs import even_costs
from mesh_attention.simulation.simulate import simulate
from mesh_attention.verification.rules import check

LONG = Problem.self_attention(seq_len=2**17, heads=32, kv_heads=32, head_dim=128, ranks=16, mask=causal())


@given(plans(max_ranks=8))
@settings(max_examples=100)
def test_waves_move_the_bytes_and_do_the_work_of_one(plan: Plan) -> None:
    choice = Choice(
        method=plan.method,  # type: ignore[arg-type]
        tile=plan.assignment.tile,
        ulysses_degree=plan.assignment.ulysses_degree,
        inner=plan.assignment.inner,
        layout=plan.layout,
        route=plan.schedule.route,
        partials=plan.schedule.partials,
        keep=plan.schedule.keep,
    )
    whole = make_plan(plan.problem, choice, direction=plan.direction)
    for rank in range(plan.problem.ranks):
        ours, theirs = rank_costs(plan, rank), rank_costs(whole, rank)
        assert ours.flops == theirs.flops
        assert ours.received.keys() <= theirs.received.keys()
        for kind, received in ours.received.items():
            due = theirs.received[kind]
            assert received.statistics <= due.statistics
            if kind not in ("o", "do"):  # their tokens are padded for the statistics
                assert received.payload <= due.payload
                assert received.payload == due.payload or plan.assignment.cut == "rows"  # parts of rows may need less


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "text", ["ulysses 8 + mesh 1x2, zigzag", "ulysses 4 + attention2d 2x2, zigzag", "mesh 4x4, zigzag"]
)
def test_waves_expose_less_and_take_less_memory(text: str, direction: str) -> None:
    cluster = cluster_named("h100x16")
    one, two = (make_plan(LONG, replace(Choice.parse(text), waves=waves), direction=direction) for waves in (1, 2))  # type: ignore[arg-type]
    verify(two)
    before, after = simulate(one, cluster), simulate(two, cluster)
    assert after.exposed_s < before.exposed_s
    assert after.peak_nbytes < before.peak_nbytes


@pytest.mark.parametrize("text", ["ulysses 4, 2 waves of rows", "ulysses 2 + mesh 2x1, 2 waves", "ulysses 4, keep own"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_lost_or_swapped_exchange_is_noticed(text: str, direction: str) -> None:
    problem = Problem.self_attention(seq_len=64, heads=8, kv_heads=8, head_dim=4, ranks=4, mask=causal())
    plan = make_plan(problem, text, direction=direction).unrolled()  # type: ignore[arg-type]
    assert not check(plan)
    assert plan.programs is not None
    first = plan.programs[0]
    for index, step in enumerate(first.steps):
        if not isinstance(step, Exchange | Unpack):
            continue
        without = (*first.steps[:index], *first.steps[index + 1 :])
        other = replace(step, after=step.after._replace(part=1 - step.after.part))
        for steps in (without, (*first.steps[:index], other, *first.steps[index + 1 :])):
            assert check(plan.with_programs((replace(first, steps=steps), *plan.programs[1:]))), step


@pytest.mark.parametrize("text", ["ulysses 4, 2 waves of rows", "ulysses 4, 2 waves"])
def test_a_piece_that_both_ends_leave_out_is_noticed(text: str) -> None:
    plan = make_plan(replace(LONG, ranks=4), text).unrolled()
    assert plan.programs is not None

    def without(program: Program, gone: Item) -> Program:
        ends = {"sends", "recvs"}
        steps = (
            replace(step, **{name: tuple(end for end in getattr(step, name) if end.item != gone) for name in ends})
            if isinstance(step, Exchange)
            else step
            for step in program.steps
        )
        return replace(program, steps=tuple(steps))

    pieces = {send.item for step in plan.programs[0].steps if isinstance(step, Exchange) for send in step.sends}
    assert pieces
    for piece in pieces:
        breaches = check(plan.with_programs(tuple(without(program, piece) for program in plan.programs)))
        assert "form" in {breach.rule for breach in breaches}


@pytest.mark.parametrize("waves", [1, 2])
def test_a_part_of_the_callers_gradient_is_copied_and_counted(waves: int) -> None:
    """A kernel takes the whole of the caller's dO as it is; some of its heads are not contiguous."""
    plan = make_plan(LONG, method="ring", waves=waves, direction="backward")
    steps, matrix = plan.steps(0), plan.matrix
    calls = kernel_calls(steps, matrix)
    assert all(grad.form == "home" for index in calls for grad in steps[index].grads)  # type: ignore[union-attr]
    held = held_nbytes(steps, matrix)
    with_copies = max(held[i] + max(scratch_nbytes(call, matrix, "backward") for call in calls[i]) for i in calls)
    assert (peak_nbytes(plan, 0, steps, calls) < with_copies) is (waves == 1)


def test_without_prices_transfers_take_no_longer_than_compute() -> None:
    small = replace(LONG, seq_q=8192, seq_kv=8192, dtype="float32")
    for text in ("mesh 4x4", "ulysses 4 + mesh 2x2", "ring 1x16"):
        grid = Choice.parse(text).resolved(small, "forward").assignment
        costs = even_costs(small, grid, "forward")
        rows, cols = grid.tile.rows, grid.tile.cols
        traded = (costs.q + costs.kv + costs.o) * (1 - 1 / grid.ulysses_degree)
        assert (costs.q + costs.o) * (rows - 1) + costs.kv * (cols - 1) + traded == pytest.approx(rows * cols)
