"""Forecasts of turns and of decoded steps: bytes, bounds, what is chosen and why, the size of a cache, and replays."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh_attention import Problem, ShardedCache, causal, cluster_named, make_plan, rank_costs
from mesh_attention.comm.base import Parcel
from mesh_attention.errors import MemoryLimitError
from mesh_attention.masks import BlockKind
from mesh_attention.plan.assignment import tiles_of
from mesh_attention.plan.buffer_sizes import layer_nbytes
from mesh_attention.plan.kernel_calls import kernel_calls
from mesh_attention.planners.choice import Choice
from mesh_attention.serving import CachedLayer
from mesh_attention.simulation.simulate import simulate
from mesh_attention.timeline import Timeline
from mesh_attention.topology import Link, Topology
from mesh_attention.tuning.bounds import plan_on
from mesh_attention.tuning.tune import tune
from mesh_attention_lab.bounds import least_received_nbytes
from mesh_attention_lab.cli.terminal import cache_nbytes, travel_words
from mesh_attention_lab.comparison import WAYS, decode_plans, decode_trials
from mesh_attention_lab.decode_simulator import decode_seconds, kv_nbytes, simulate_decode
from mesh_attention_lab.replay.actor import Actor, BaselineKernel
from mesh_attention_lab.replay.cache import FilledCache, StepActor
from mesh_attention_lab.replay.replay import replay
from mesh_attention_lab.replay.result import decoded_parts
from mesh_attention_lab.replay.transport import JoinedComm

CPU = torch.device("cpu")
NODES = cluster_named("h100x16")


def problem_of(
    new: int, cached: int, *, ranks: int = 16, batch: int = 1, heads: int = 32, kv_heads: int = 8
) -> Problem:
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim_qk": 128, "head_dim_v": 128}
    return Problem(seq_q=new, seq_kv=new + cached, ranks=ranks, batch=batch, mask=causal(), **sizes)


# The size of a cache


@given(
    new=st.integers(1, 3000),
    cached=st.integers(0, 10**6),
    ranks=st.integers(1, 65),
    batch=st.integers(1, 9),
    layers=st.integers(1, 3),
)
@settings(max_examples=50, deadline=None)
def test_a_cache_needs_as_many_bytes_as_forecasts_say(
    new: int, cached: int, ranks: int, batch: int, layers: int
) -> None:
    problem = problem_of(new, cached, ranks=ranks, batch=batch, kv_heads=4)
    layer = CachedLayer(kv_heads=4, head_dim=128)
    needed = ShardedCache.required_nbytes([layer] * layers, ranks=ranks, tokens=batch * (new + cached), sequences=batch)
    assert cache_nbytes(problem, layers=layers) == needed
    assert needed >= layers * kv_nbytes(problem)


# Turns


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_no_plan_of_a_turn_receives_less_than_the_bound(data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from((2, 4, 6, 8)))
    new, cached = data.draw(st.integers(ranks, 400)), data.draw(st.sampled_from((0, 7, 300, 5000)))
    problem = problem_of(new, cached, ranks=ranks, heads=8, kv_heads=data.draw(st.sampled_from((2, 8))))
    plan = make_plan(problem, layout="turn", tile=data.draw(st.sampled_from(tiles_of(ranks))))
    received = [sum(n.payload for n in rank_costs(plan, rank).received.values()) for rank in range(ranks)]
    assert sum(received) / ranks >= 0.999 * least_received_nbytes(problem, "forward")


def test_few_new_tokens_on_a_long_cache_choose_a_tall_tile() -> None:
    problem = problem_of(1024, 2**20)
    tuning = tune(problem, NODES, layout="turn")
    chosen = tuning.chosen.choices["forward"]
    assert chosen.assignment.tile.rows > chosen.assignment.tile.cols
    assert {"ring", "pass-q", "all-gather"} <= {trial.family for trial in tuning.trials}


def test_a_first_prompt_chooses_keys_and_values_that_travel() -> None:
    problem = problem_of(2**18, 0, ranks=8)
    chosen = tune(problem, cluster_named("h100x8"), layout="turn").chosen.choices["forward"]
    tile, ulysses = chosen.assignment.tile, chosen.assignment.ulysses_degree
    assert tile.cols >= tile.rows
    assert ulysses == 8 or "keys and values" in travel_words(problem, chosen).split(": ")[1]


def test_cached_keys_are_attended_by_all_queries_in_one_call() -> None:
    problem = problem_of(1024, 2**16)
    plan = make_plan(problem, method="attention2d", tile=(16, 1), layout="turn")
    for rank in (1, 7, 15):  # the new tokens of rank 0 follow its last cached ones, and are one segment with them
        program = plan.program(rank)
        (calls,) = kernel_calls(program.steps, plan.matrix).values()
        pairs = sum(plan.matrix.pairs(row, rank) for row in range(16))
        counted = 0
        for call in calls:
            q, kv = (sum(map(len, side)) for side in (call.q, call.kv))
            masked = sum(problem.mask.pairs(a, b, seq_q=1024, seq_kv=problem.seq_kv) for a in call.q for b in call.kv)
            counted += q * kv if call.kind is BlockKind.FULL else masked
        assert counted == pairs
        largest = max(calls, key=lambda call: sum(map(len, call.kv)))
        assert (sum(map(len, largest.q)), sum(map(len, largest.kv))) == (1024, 2**16 // 16)


def test_short_rows_meet_in_calls_that_fill_the_device() -> None:
    problem, topology = problem_of(4096, 2**20, ranks=64), cluster_named("h100x64")
    cost_based = Choice.of(method="pass-q", layout="turn").resolved(problem, "forward")
    choices = [replace(cost_based, blocks_per_call=blocks) for blocks in (None, 1, 8, 16)]
    plans = [plan_on(topology, problem, choice, "forward") for choice in choices]
    priced, *counted = (simulate(plan, topology, priced_ranks=2).time_s for plan in plans)
    assert priced < 0.4 * min(counted)


# Decoded steps


DECODED = problem_of(1, 2**20, batch=8)


def steps(problem: Problem = DECODED, topology: Topology = NODES) -> dict[str, float]:
    return {trial.family: trial.time_s for trial in decode_trials(problem, topology)}


def forecasts_by_name(problem: Problem, topology: Topology) -> dict[str, Timeline]:
    return {trial.family: trial.timelines["forward"] for trial in decode_trials(problem, topology)}


EXCHANGES = {"replicated, all_gather": 1, "replicated, reduce_scatter": 2, "sharded": 2}


def test_a_decoded_step_takes_longer_with_more_of_anything() -> None:
    base = steps()
    for more in (
        problem_of(1, 2**21, batch=8),
        problem_of(1, 2**20, batch=16),
        problem_of(4, 2**20, batch=8),
        problem_of(1, 2**20, batch=8, heads=64),
    ):
        found = steps(more)
        assert all(found[name] > base[name] for name in base)
    slower = replace(NODES, between=Link(gb_per_s=10, latency_us=20))
    later = replace(NODES, between=Link(gb_per_s=45, latency_us=80))
    for topology in (slower, later):
        found = steps(topology=topology)
        assert all(found[name] > base[name] for name in found)


def test_reading_keys_and_values_bounds_every_step() -> None:
    bound = kv_nbytes(DECODED) / (NODES.device.memory_gb_per_s * 1e9)
    assert kv_nbytes(DECODED) == 8 * (2**20 // 16 + 1) * 8 * 256 * 2
    for trial in decode_trials(DECODED, NODES):
        assert trial.time_s > trial.compute_s > decode_seconds(NODES.device, DECODED) > bound
        assert trial.time_s == pytest.approx(trial.compute_s + trial.exposed_s)


def test_small_partials_are_gathered_and_large_ones_meet_in_slices() -> None:
    for batch, name in ((1, "replicated, all_gather"), (256, "replicated, reduce_scatter")):
        found = decode_trials(replace(DECODED, batch=batch), NODES, queries="replicated")
        assert found[0].family == name
    assert all(a.time_s <= b.time_s for a, b in pairwise(found))


def test_every_plan_but_the_first_has_a_reason() -> None:
    for topology in (NODES, cluster_named("h100x1"), cluster_named("laptopx2")):
        found = decode_trials(replace(DECODED, ranks=topology.ranks), topology)
        assert not found[0].reason
        assert all(one.reason for one in found[1:])


def test_ranks_that_share_a_nic_wait_for_each_other() -> None:
    alone, shared = (
        forecasts_by_name(DECODED, replace(NODES, nics_per_node=nics))["replicated, reduce_scatter"] for nics in (8, 1)
    )
    sent_s = alone.sent_nbytes["between"] / 16 / (NODES.between.gb_per_s * 1e9)
    assert shared.time_s - alone.time_s == pytest.approx(7 * sent_s)


def test_an_exchange_has_the_latency_of_one_message_however_many_ranks_there_are() -> None:
    links = {"inside": Link(gb_per_s=1e6, latency_us=7), "between": Link(gb_per_s=1e6, latency_us=50)}
    for ranks in (8, 64, 512):
        topology = replace(NODES, ranks=ranks, **links)
        problem = replace(DECODED, ranks=ranks)
        for name, timeline in forecasts_by_name(problem, topology).items():
            latency_s = EXCHANGES[name] * (7e-6 if ranks == 8 else 50e-6)
            attend_s = decode_seconds(topology.device, problem)
            assert timeline.time_s - attend_s == pytest.approx(latency_s, abs=20e-6)


@given(
    ranks=st.integers(2, 9),
    batch=st.integers(1, 12),
    new=st.integers(1, 3),
    per_node=st.integers(1, 4),
    name=st.sampled_from(tuple(WAYS)),
)
@settings(max_examples=40, deadline=None)
def test_a_forecast_sends_the_bytes_that_the_plan_does(
    ranks: int, batch: int, new: int, per_node: int, name: str
) -> None:
    topology = replace(NODES, ranks=ranks, ranks_per_node=per_node, nics_per_node=1)
    problem = problem_of(new, 100, ranks=ranks, batch=batch, heads=6, kv_heads=2)
    plan, timeline = decode_plans(problem)[name], forecasts_by_name(problem, topology)[name]
    costs = [rank_costs(plan, rank) for rank in range(ranks)]
    assert sum(timeline.sent_nbytes.values()) == sum(cost.sent_nbytes for cost in costs)
    assert sum(cost.sent_nbytes for cost in costs) == sum(cost.received_nbytes for cost in costs)
    attend_s = decode_seconds(topology.device, problem)
    spans = simulate_decode(plan, topology, attend_s=attend_s, spans_of=range(ranks)).spans
    for lane, sent in (("send", True), ("recv", False)):
        moved = sum(span.nbytes for span in spans if span.lane == lane)
        assert moved == sum(cost.sent_nbytes if sent else cost.received_nbytes for cost in costs)
    assert all(0 <= span.start_s < span.stop_s <= timeline.time_s * (1 + 1e-9) for span in spans)


# Replays


def test_the_one_kernel_of_a_turn_has_its_queries_and_a_ranks_keys() -> None:
    kernel = BaselineKernel(problem_of(4096, 2**20, ranks=64), device=CPU)
    assert (kernel.tokens, kernel.kv_tokens, kernel.scores.mask.form) == (4096, 16416, "full")
    square = BaselineKernel(problem_of(2**20, 0, ranks=64), device=CPU)
    assert (square.tokens, square.scores.mask.form) == (square.kv_tokens, "causal")
    long = BaselineKernel(problem_of(2**19, 2**19, ranks=64), device=CPU)
    assert long.tokens == pytest.approx(long.kv_tokens, rel=0.01)


def test_a_rank_of_a_turn_is_played_at_its_own_sizes() -> None:
    problem = replace(problem_of(64, 960, ranks=4, heads=4, kv_heads=2), head_dim_qk=8, head_dim_v=8, dtype="float32")
    actor = Actor(make_plan(problem, method="pass-q", layout="turn"), 1, device=CPU)
    assert actor.tokens == {"q": 16, "kv": 256}
    assert actor.inputs["kv"]["k"].shape == (1, 2, 256, 8)
    assert actor.run(JoinedComm(1, 4, device=CPU))["o"]["o"].shape == (1, 4, 16, 8)


def tiny(*, batch: int = 3, queries: int = 1) -> Problem:
    problem = problem_of(queries, 600, ranks=4, batch=batch, heads=4, kv_heads=2)
    return replace(problem, head_dim_qk=16, head_dim_v=8, dtype="float32")


@pytest.mark.parametrize("queries", [1, 3])
def test_every_plan_of_a_step_is_played_like_any_plan(queries: int) -> None:
    problem, topology = tiny(queries=queries), cluster_named("h200x4")
    parts, cache = decoded_parts(problem), FilledCache(problem, device=CPU)
    found = replay(parts, topology, rank=1, device=CPU, rounds=2, cache=cache)
    assert [row.method for row in found.passes] == list(WAYS)
    (kernel,) = found.kernel
    assert (kernel.tokens, kernel.kv_tokens, cache.passes, cache.is_capturable) == (queries, 151, 2, False)
    for row in found.passes:
        plan = parts[list(WAYS).index(row.method)].plans["forward"]
        timeline = simulate_decode(plan, topology, attend_s=decode_seconds(topology.device, problem))
        assert row.forecast_s == timeline.ranks[1].stop_s
        assert row.flops == kernel.flops == 3 * queries * 151 * 4 * 2 * (16 + 8)
        assert len(row.times_s) == 2
        assert row.kernel_s == pytest.approx(kernel.time_s)
        assert row.plan_nbytes == rank_costs(plan, 1).peak_nbytes


def test_exchanges_of_a_played_step_are_one_copy_each_way_of_the_plans_bytes() -> None:
    problem = tiny()
    for name, plan in decode_plans(problem).items():
        copied = list[tuple[int, int]]()

        class Counted(JoinedComm):
            def _joined(self, way: str, parcels: object) -> list[Parcel]:
                found = super()._joined(way, parcels)  # type: ignore[arg-type]
                copied.append((way == "out", sum(parcel.chunks[0].numel() for parcel in found)))  # noqa: B023
                assert len(found) <= 1
                return found

        cache = FilledCache(problem, device=CPU)
        StepActor(plan, 0, cache).run(Counted(0, 4, device=CPU))
        assert len(copied) == 2 * EXCHANGES[name] * cache.passes
        costs = rank_costs(plan, 0)
        for is_sent, nbytes in ((True, costs.sent_nbytes), (False, costs.received_nbytes)):
            assert sum(n for sent, n in copied if sent == is_sent) == cache.passes * nbytes


def test_a_played_step_reads_every_token_of_the_rank() -> None:
    stage = FilledCache(tiny(queries=2), device=CPU)
    assert stage.kv_tokens == 151
    assert stage.state.reach.stop.tolist() == [[151, 151]] * 3
    assert stage.memory.nbytes == stage.passes * layer_nbytes(9, token_nbytes=2 * (16 + 8) * 4)
    used = stage.state.reach.table.flatten().tolist()
    assert len(set(used)) == len(used) == 3 * 3
    assert stage.state.slots.tolist() == [150, 150, 192 + 150, 192 + 150, 384 + 150, 384 + 150]


def test_a_cache_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh_attention_lab.replay.cache.free_nbytes", lambda device: 1000)
    with pytest.raises(
        MemoryLimitError, match=r"K and V of 2 layers need \S+ KiB, but cpu has 0.98 KiB free; use more"
    ):
        FilledCache(tiny(), device=CPU)
