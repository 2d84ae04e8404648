"""Forecasts: small timelines worked by hand, and two engines that must come to the same times."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh_attention import Problem, Tile, causal, full, make_plan, rank_costs
from mesh_attention.errors import PlanError
from mesh_attention.execution.compiled import compile_program
from mesh_attention.masks import documents, window
from mesh_attention.plan.assignment import Assignment
from mesh_attention.plan.format import format_end, format_step
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.schedule import ROUTES
from mesh_attention.plan.steps import Free, Step, transfers
from mesh_attention.prices import Prices
from mesh_attention.simulation import lockstep
from mesh_attention.simulation.jobs_and_lanes import rank_jobs
from mesh_attention.simulation.lockstep import classes_by_timeline, singleton_classes
from mesh_attention.simulation.simulate import Simulation, simulate
from mesh_attention.timeline import Span, Timeline
from mesh_attention.topology import Device, KernelRate, Link, Topology

RATE = KernelRate(tflops=1.0, call_us=0.0)
DEVICE = Device(forward=RATE, backward=RATE, memory_gb_per_s=1e6, memory_gib=80)
"""So much memory bandwidth that adding up costs nothing to speak of."""


def topology(ranks: int, *, ranks_per_node: int = 1, nics: int | None = None, **changes: object) -> Topology:
    made = Topology(
        name="made up",
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        nics_per_node=ranks_per_node if nics is None else nics,
        device=DEVICE,
        inside=Link(gb_per_s=10.0),
        between=Link(gb_per_s=1.0),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def problem(ranks: int, *, seq: int = 1024, **changes: object) -> Problem:
    made = Problem.self_attention(seq_len=seq, heads=4, head_dim=64, ranks=ranks)
    return replace(made, **changes)  # type: ignore[arg-type]


def by_events(plan: Plan, cluster: Topology) -> Timeline:
    prices, every_rank = Prices(cluster.device, plan.matrix, plan.direction), range(plan.problem.ranks)
    return Simulation(plan, cluster, prices, every_rank, None, lambda *progress: None).by_events()


# Timelines worked by hand

BLOCK_S = 4 * 512 * 512 * 4 * 64 / 1e12  # a block of two ranks with 512 tokens each
KV_S = 512 * 2 * 4 * 64 * 2 / 1e9


def test_ring_on_two_ranks_takes_the_longer_of_block_and_transfer_and_then_a_block() -> None:
    plan = make_plan(problem(2), method="ring")
    timeline = simulate(plan, topology(2))
    assert timeline.time_s == pytest.approx(max(BLOCK_S, KV_S) + BLOCK_S, rel=1e-3)
    assert timeline.exposed_s == pytest.approx(KV_S - BLOCK_S, rel=2e-3)
    assert timeline.sent_nbytes == {"inside": 0, "between": 2 * 512 * 2 * 4 * 64 * 2}
    fast = simulate(plan, topology(2, ranks_per_node=2))
    assert fast.time_s == pytest.approx(2 * BLOCK_S, rel=1e-3)
    assert fast.sent_nbytes["between"] == 0
    assert fast.utilisation == pytest.approx(1.0, abs=1e-3)
    assert fast.overlap == pytest.approx(1.0, abs=1e-3)


def test_a_gather_hides_nothing() -> None:
    plan = make_plan(problem(2), method="attention2d", tile=(1, 2))
    timeline = simulate(plan, topology(2))
    assert timeline.time_s == pytest.approx(KV_S + 2 * BLOCK_S, rel=1e-3)
    assert timeline.overlap == pytest.approx(0.0, abs=2e-3)


def test_a_shared_nic_serves_one_after_the_other() -> None:
    plan = make_plan(problem(4, seq=2048), method="attention2d", tile=(2, 2))
    alone, shared = (simulate(plan, topology(4, ranks_per_node=2, nics=nics)) for nics in (2, 1))
    # Keys and values come from the other node (the KV group is two apart): two ranks share what one had.
    assert shared.time_s - alone.time_s == pytest.approx(KV_S, rel=1e-6)


def test_links_that_are_not_duplex_take_twice_as_long() -> None:
    plan = make_plan(problem(2), method="attention2d", tile=(1, 2))
    duplex, simplex = (simulate(plan, topology(2, full_duplex=d)) for d in (True, False))
    assert simplex.time_s - duplex.time_s == pytest.approx(KV_S, rel=1e-6)


def test_latency_is_paid_by_every_transfer() -> None:
    plan = make_plan(problem(4), method="ring")
    slow = topology(4, between=Link(gb_per_s=1.0, latency_us=1e5))
    assert simulate(plan, slow).time_s - simulate(plan, topology(4)).time_s == pytest.approx(0.3, rel=1e-2)


def test_what_is_freed_has_been_sent() -> None:
    plan = make_plan(problem(4), tile=(2, 2), partials="ring")
    prices = Prices(DEVICE, plan.matrix, "forward")
    for rank in range(4):
        jobs = rank_jobs(plan, rank, prices).jobs
        for index, job in enumerate(jobs):
            if isinstance(job.steps[0], Free):
                freed = job.steps[0].item
                sent = {i for i, other in enumerate(jobs[:index]) for send in other.sends if send.item == freed}
                assert sent <= set(job.waits)
        assert any(isinstance(job.steps[0], Free) for job in jobs)


# Properties


@st.composite
def uniform_plans(draw: st.DrawFn) -> Plan:
    ranks = draw(st.sampled_from((1, 2, 3, 4, 6, 8, 12, 16)))
    degree = draw(st.sampled_from([u for u in (1, 2, 4) if ranks % u == 0]))
    places = ranks // degree
    rows = draw(st.sampled_from([a for a in range(1, places + 1) if places % a == 0]))
    tile = Tile(rows, places // rows)
    inner = Tile(*(draw(st.sampled_from([d for d in range(1, s + 1) if s % d == 0])) for s in (tile.rows, tile.cols)))
    mask, layout = draw(
        st.sampled_from(((full(), "contiguous"), (full(), "zigzag"), (causal(), "zigzag"), (causal(), "striped")))
    )
    options = {"tile": tile, "inner": inner, "ulysses_degree": degree, "layout": layout}
    if draw(st.booleans()):
        options |= {"method": "attention2d"}
    else:
        options |= {"route": draw(st.sampled_from(ROUTES)), "partials": draw(st.sampled_from(ROUTES))}
        options |= {"blocks_per_call": draw(st.integers(1, 4))}
    asked = problem(ranks, seq=ranks * 64, mask=mask)
    return make_plan(asked, direction=draw(st.sampled_from(("forward", "backward"))), **options)


@st.composite
def clusters(draw: st.DrawFn, ranks: int, *, shared: bool) -> Topology:
    ranks_per_node = draw(st.integers(1, ranks))
    rate = st.floats(0.01, 100)
    return topology(
        ranks,
        ranks_per_node=ranks_per_node,
        nics=draw(st.integers(1, ranks_per_node)) if shared else ranks_per_node,
        inside=Link(gb_per_s=draw(rate), latency_us=draw(st.floats(0, 50))),
        between=Link(gb_per_s=draw(rate), latency_us=draw(st.floats(0, 50))),
        full_duplex=draw(st.booleans()) if shared else True,
    )


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_two_engines_agree(data: st.DataObject) -> None:
    plan = data.draw(uniform_plans())
    cluster = data.draw(clusters(plan.problem.ranks, shared=False))
    assert plan.matrix.is_uniform
    at_once, one_by_one = simulate(plan, cluster, spans_of=range(plan.problem.ranks)), by_events(plan, cluster)
    assert at_once.time_s == pytest.approx(one_by_one.time_s, rel=1e-9)
    assert at_once.sent_nbytes == one_by_one.sent_nbytes
    for ours, theirs in zip(at_once.ranks, one_by_one.ranks, strict=True):
        assert (ours.stop_s, ours.compute_s, ours.link_s) == pytest.approx(
            (theirs.stop_s, theirs.compute_s, theirs.link_s), rel=1e-9
        )
    assert _brief(at_once) == _brief(one_by_one)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_ranks_at_the_same_place_of_their_nodes_have_the_same_timeline(data: st.DataObject) -> None:
    """Simulating one rank of each kind gives every rank the times that it has when all are simulated."""
    plan = data.draw(uniform_plans())
    cluster = data.draw(clusters(plan.problem.ranks, shared=False))
    every = range(plan.problem.ranks)
    by_kind = simulate(plan, cluster, spans_of=every, priced_ranks=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lockstep, "classes_by_timeline", lambda assignment, topology: singleton_classes(topology))
        assert simulate(plan, cluster, spans_of=every, priced_ranks=1) == by_kind


def test_a_large_cluster_has_as_many_kinds_of_ranks_as_a_node() -> None:
    cluster = topology(1600, ranks_per_node=8)
    for tile, degree, inner, kinds in (
        (Tile(10, 20), 8, None, 8),
        (Tile(40, 40), 1, None, 8),
        (Tile(1, 1600), 1, None, 8),
        (Tile(40, 40), 1, Tile(4, 2), 8),
        (Tile(1, 1600), 1, Tile(1, 8), 8),
        (Tile(20, 80), 1, None, 40),
    ):
        found = classes_by_timeline(Assignment(tile, degree, inner), cluster)
        assert len(found.first_ranks) == kinds
        assert set(Counter(found.class_of.tolist()).values()) == {1600 // kinds}
    uneven = classes_by_timeline(Assignment(Tile(40, 40)), topology(1600, ranks_per_node=7))  # the last has fewer
    assert len(uneven.first_ranks) == 1600


def _brief(timeline: Timeline) -> list[tuple[object, ...]]:
    """Spans as they can be compared: a wait of one engine may be two of the other's, so the totals speak for those."""
    kept = [(s.rank, s.lane, round(s.start_s, 9), round(s.stop_s, 9), *s[4:]) for s in timeline.spans]
    return sorted(span for span in kept if span[1] != "wait" and span[2] != span[3])


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_the_two_engines_nearly_agree_where_ranks_share_a_nic(data: st.DataObject) -> None:
    plan = data.draw(uniform_plans())
    cluster = data.draw(clusters(plan.problem.ranks, shared=True))
    at_once, one_by_one = simulate(plan, cluster), by_events(plan, cluster)
    assert at_once.time_s == pytest.approx(one_by_one.time_s, rel=0.35)
    assert at_once.sent_nbytes == one_by_one.sent_nbytes


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_faster_link_never_makes_a_plan_slower(data: st.DataObject) -> None:
    plan = data.draw(uniform_plans())
    cluster = data.draw(clusters(plan.problem.ranks, shared=True))
    factor = data.draw(st.floats(1.0, 10.0))
    faster = data.draw(
        st.sampled_from(
            (
                replace(cluster, between=replace(cluster.between, gb_per_s=cluster.between.gb_per_s * factor)),
                replace(cluster, inside=replace(cluster.inside, gb_per_s=cluster.inside.gb_per_s * factor)),
            )
        )
    )
    assert simulate(plan, faster).time_s <= simulate(plan, cluster).time_s * (1 + 1e-9)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_bytes_are_the_plans_and_no_time_is_lost(data: st.DataObject) -> None:
    plan = data.draw(uniform_plans())
    cluster = data.draw(clusters(plan.problem.ranks, shared=True))
    timeline = simulate(plan, cluster, spans_of=range(plan.problem.ranks))
    costs = [rank_costs(plan, rank) for rank in range(plan.problem.ranks)]
    assert sum(timeline.sent_nbytes.values()) == sum(cost.sent_nbytes for cost in costs)
    assert timeline.peak_nbytes == max(compile_program(plan, rank).device_nbytes for rank in range(len(costs)))
    assert timeline.peak_nbytes >= max(cost.peak_nbytes for cost in costs)
    assert timeline.flops == sum(cost.flops for cost in costs)
    for times in timeline.ranks:
        spans = [span for span in timeline.spans if span.rank == times.rank]
        computed = sum(span.stop_s - span.start_s for span in spans if span.lane == "compute")
        assert computed == pytest.approx(times.compute_s)
        assert times.compute_s <= times.stop_s * (1 + 1e-9)
        computing = sorted((span for span in spans if span.lane == "compute"), key=lambda span: span.start_s)
        assert all(before.stop_s <= after.start_s + 1e-12 for before, after in pairwise(computing))


@pytest.mark.parametrize(
    "mask", [window(100, 0), documents([0, 100, 600, 1024]), causal() & documents([0, 300, 1024])], ids=str
)
@pytest.mark.parametrize("method", ["ring", "mesh", "attention2d"])
def test_any_mask_can_be_forecast(mask: object, method: str) -> None:
    for direction in ("forward", "backward"):
        plan = make_plan(problem(6, mask=mask), method=method, direction=direction)
        timeline = simulate(plan, topology(6, ranks_per_node=2))
        assert not plan.matrix.is_uniform
        assert timeline.is_exact
        costs = [rank_costs(plan, rank) for rank in range(6)]
        assert sum(timeline.sent_nbytes.values()) == sum(cost.sent_nbytes for cost in costs)
        assert timeline.time_s >= timeline.compute_s > 0


def test_a_plan_that_cannot_end_is_refused() -> None:
    plan = make_plan(problem(2), method="ring").unrolled()
    assert plan.programs is not None
    first = plan.programs[0]
    without = replace(first, steps=tuple(step for step in first.steps if type(step).__name__ != "Send"))
    with pytest.raises(PlanError, match="the plan deadlocks"):
        simulate(plan.with_programs((without, *plan.programs[1:])), topology(2))


def test_prices_of_some_ranks_stand_for_the_others_and_it_is_said() -> None:
    plan = make_plan(problem(16, seq=16 * 64, mask=causal()), tile=(4, 4), blocks_per_call=2)
    whole, some = (simulate(plan, topology(16), priced_ranks=priced) for priced in (None, 4))
    assert whole.is_exact
    assert not some.is_exact
    assert some.time_s == pytest.approx(whole.time_s, rel=0.05)


@pytest.mark.parametrize(
    "options",
    [{"tile": (2, 3)}, {"method": "attention2d", "tile": (2, 3)}, {"tile": (1, 3), "ulysses_degree": 2}],
    ids=str,
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_spans_say_which_step_of_their_own_rank_they_are(options: dict[str, Any], direction: Any) -> None:
    plan = make_plan(problem(6), direction=direction, **options)
    whole = simulate(plan, topology(6), spans_of=range(6))
    for rank in range(6):
        steps = plan.program(rank).steps
        mine = [span for span in whole.spans if span.rank == rank]
        for span in (*mine, *(span for span in by_events(plan, topology(6)).spans if span.rank == rank)):
            assert span.step is not None
            assert span.name in names_of(steps[span.step], span.lane), span
        assert list(alone_of(plan, rank)) == mine
        for lane, side in (("send", 0), ("recv", 1)):
            posted = [at for at, step in enumerate(steps) for _ in transfers(step)[side]]
            assert sorted(span.step for span in mine if span.lane == lane) == posted


def names_of(step: Step, lane: str) -> list[str]:
    return [format_step(step)] if lane in ("compute", "wait") else [*map(format_end, transfers(step)[lane == "recv"])]


def alone_of(plan: Plan, rank: int) -> tuple[Span, ...]:
    return simulate(plan, topology(6), spans_of=[rank]).spans


def test_the_double_ring_crosses_nodes_less_often() -> None:
    cluster = topology(16, ranks_per_node=4)
    flat = simulate(make_plan(problem(16), method="ring", route="ring"), cluster)
    double = simulate(make_plan(problem(16), method="ring", route="ring", inner=(1, 4)), cluster)
    assert sum(double.sent_nbytes.values()) == sum(flat.sent_nbytes.values())
    # In the flat ring, one rank a node receives all 15 shards from another node; here each rank receives 3.
    assert flat.sent_nbytes["between"] == 4 * 15 * double.sent_nbytes["between"] // (16 * 3)
    assert double.time_s < 0.6 * flat.time_s
