"""The tuner: never beaten by what it looked at, sensible as the cluster changes, within its memory, and explained."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import sqrt
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import plans

from mesh_attention import Problem, Zigzag, causal, full, make_plan, rank_costs, verify
from mesh_attention.clusters import cluster_named
from mesh_attention.errors import MemoryLimitError
from mesh_attention.machine.tuned_strategy import Tuner
from mesh_attention.masks import documents, window
from mesh_attention.plan.layout import LAYOUTS
from mesh_attention.plan.steps import DIRECTIONS, Attend, Direction
from mesh_attention.planners.choice import FAMILIES, Choice
from mesh_attention.planners.costs import least_volume_degree, least_volume_tile
from mesh_attention.simulation.simulate import simulate
from mesh_attention.topology import Topology
from mesh_attention.tuning import tune as tune_module
from mesh_attention.tuning.bounds import needs, pairs_of, plan_on, traffic
from mesh_attention.tuning.candidates import MOST_TILES, of_fewest_bytes, shapes
from mesh_attention.tuning.result import NEAR_TIE, Forecast, Trial, Tuning
from mesh_attention.tuning.search import groupings
from mesh_attention.tuning.stored import cache_folder, cached_tune
from mesh_attention.tuning.tune import FAR_BEHIND, tune, tuned_plans
from mesh_attention.units import GIB
from mesh_attention_lab.bounds import least_nbytes_on_heads, least_received_nbytes, lower_bounds
from mesh_attention_lab.cli.tune import equals_of


def problem(ranks: int, *, seq: int = 1 << 18, heads: int = 32, kv_heads: int = 8, **changes: object) -> Problem:
    made = Problem.self_attention(seq_len=seq, heads=heads, kv_heads=kv_heads, head_dim=128, ranks=ranks, mask=causal())
    return replace(made, **changes)  # type: ignore[arg-type]


def with_nic(cluster: Topology, gb_per_s: float) -> Topology:
    return replace(cluster, between=replace(cluster.between, gb_per_s=gb_per_s))


# The choice


@pytest.mark.parametrize(
    ("cluster", "directions", "kv_heads"),
    [
        ("h100x32", ("forward",), 1),
        ("h100x32", DIRECTIONS, 32),
        ("a100x24", ("forward",), 32),
        ("a100x24", DIRECTIONS, 1),
        ("laptop", ("forward",), 1),
        ("laptop", DIRECTIONS, 32),
    ],
)
def test_no_rival_is_faster_than_the_choice(cluster: str, directions: tuple[Direction, ...], kv_heads: int) -> None:
    topology = cluster_named(cluster)
    asked = problem(topology.ranks, kv_heads=kv_heads, seq=1 << 16)
    found = tune(asked, topology, directions=directions)
    assert found.chosen.time_s <= min(trial.time_s for trial in found.trials) * (1 + NEAR_TIE)
    assert lower_bounds(asked, directions, topology.device)[0] <= found.chosen.compute_s
    assert {trial.family for trial in found.trials} | set(found.left_out) >= set(FAMILIES)
    assert all(trial.reason for trial in found.trials[1:])


@pytest.mark.parametrize(
    ("ranks", "seq", "kv_heads", "direction"), [(16, 1 << 16, 8, "forward"), (12, 1 << 16, 4, "backward")]
)
def test_the_choice_is_near_the_best_of_all_candidates(
    ranks: int, seq: int, kv_heads: int, direction: Direction
) -> None:
    asked, cluster = problem(ranks, seq=seq, kv_heads=kv_heads), cluster_named(f"h100x{ranks}")
    chosen = tuned_plans(asked, cluster, tune(asked, cluster, directions=[direction]).chosen)[direction]
    best_s = float("inf")
    for shape in shapes(asked, cluster, layout=Zigzag()):
        for grouping in groupings(shape):
            candidate = replace(shape, blocks_per_call=grouping)
            plan = plan_on(cluster, asked, candidate, direction)
            best_s = min(best_s, simulate(plan, cluster, priced_ranks=2).time_s)
    assert simulate(chosen, cluster, priced_ranks=2).time_s <= 1.03 * best_s


def test_the_plans_of_the_choice_are_right_and_take_what_was_forecast() -> None:
    asked, cluster = problem(16, seq=1 << 15), cluster_named("h100x16")
    chosen = tune(asked, cluster, directions=DIRECTIONS).chosen
    for direction, plan in tuned_plans(asked, cluster, chosen).items():
        verify(plan)
        assert plan.direction == direction
        assert simulate(plan, cluster, priced_ranks=8).time_s == pytest.approx(chosen.forecasts[direction].time_s)


def test_the_choice_is_tried_by_the_price_of_calls() -> None:
    """Behind slow links a number of blocks a call is never as good; see decision 13."""
    asked, cluster = (
        problem(64, seq=1 << 18),
        with_nic(replace(cluster_named("h100x64"), ranks_per_node=1, nics_per_node=1), 50.0),
    )
    mesh = next(trial for trial in tune(asked, cluster).trials if trial.family == "mesh")
    assert mesh.choices["forward"].blocks_per_call is None
    counted = replace(mesh.choices["forward"], blocks_per_call=4)
    plan = plan_on(cluster, asked, counted, "forward")
    assert mesh.time_s < simulate(plan, cluster, priced_ranks=8).time_s


# As the cluster and the problem change


@pytest.mark.parametrize(("kv_heads", "direction"), [(8, "backward"), (32, "forward")])
def test_more_bandwidth_never_makes_the_forecast_slower(kv_heads: int, direction: Direction) -> None:
    asked, cluster = problem(16, kv_heads=kv_heads), cluster_named("h100x16")
    times_s = [
        tune(asked, with_nic(cluster, rate), directions=[direction]).chosen.time_s for rate in (0.5, 17.0, 400.0)
    ]
    # Schedules are made for the cluster they are for, so times may differ by what the tuner calls near.
    for slow_s, fast_s in pairwise(times_s):
        assert fast_s <= slow_s * (1 + 2 * NEAR_TIE)


def test_one_node_and_a_short_sequence_choose_few_calls() -> None:
    """The own block, which hides some of the transfers, and all the rest at once."""
    asked, cluster = problem(8, seq=2048, kv_heads=1), cluster_named("h100x8")
    plan = tuned_plans(asked, cluster, tune(asked, cluster).chosen)["forward"]
    assert sum(isinstance(step, Attend) for step in plan.program(3).steps) <= 2


def test_a_long_sequence_on_two_ranks_chooses_ring() -> None:
    assert tune(problem(2, seq=1 << 20, kv_heads=1), cluster_named("h100x2")).chosen.family == "ring"


def test_a_slow_network_chooses_to_send_less() -> None:
    asked, cluster = problem(32, kv_heads=1), cluster_named("h100x32")
    fast, slow = (tune(asked, with_nic(cluster, rate)) for rate in (400.0, 2.0))
    sent = slow.chosen.between_nbytes
    assert sent < fast.chosen.between_nbytes or slow.chosen.family == fast.chosen.family
    assert sent <= min(trial.between_nbytes for trial in slow.trials if trial.family == "ring")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_more_kv_heads_never_raise_the_volume_of_the_choice(direction: Direction) -> None:
    """In units, with as many query heads a KV head: every tile stays possible, and larger Ulysses degrees come up."""
    cluster = with_nic(cluster_named("h100x32"), 0.5)
    units = []
    for kv_heads in (1, 8, 32):
        asked = problem(32, heads=4 * kv_heads, kv_heads=kv_heads, seq=1 << 16)
        chosen = tune(asked, cluster, directions=[direction]).chosen
        units.append(chosen.between_nbytes / asked.heads)
    assert units == sorted(units, reverse=True)


def test_fewer_kv_heads_for_the_same_queries_never_raise_it_either() -> None:
    cluster = with_nic(replace(cluster_named("h100x16"), ranks_per_node=1, nics_per_node=1), 0.5)
    sent = [tune(problem(16, kv_heads=kv_heads, seq=1 << 16), cluster).chosen.sent_nbytes for kv_heads in (32, 8, 2, 1)]
    assert sent == sorted(sent, reverse=True)


# Memory


def test_a_memory_limit_is_honoured() -> None:
    asked, cluster = (
        problem(8, kv_heads=32, seq=1 << 16),
        replace(cluster_named("h100x8"), ranks_per_node=4, nics_per_node=4),
    )
    peaks = sorted(trial.peak_nbytes for trial in tune(asked, cluster, directions=DIRECTIONS).trials)
    assert peaks[0] < peaks[-1]
    for limit in (peaks[0], peaks[len(peaks) // 2]):
        limited = tune(asked, cluster, directions=DIRECTIONS, memory_limit=limit)
        assert all(trial.peak_nbytes <= limit for trial in limited.trials)
        for plan in tuned_plans(asked, cluster, limited.chosen).values():
            assert max(rank_costs(plan, rank).peak_nbytes for rank in range(8)) <= limit


def test_what_is_gathered_is_kept_where_memory_allows() -> None:
    asked, cluster = problem(16, kv_heads=32, seq=1 << 17), with_nic(cluster_named("h100x16"), 5.0)
    free, limited = (tune(asked, cluster, directions=DIRECTIONS, memory_limit=m) for m in (None, 60 * GIB))
    assert not any(set(c.keep) - {"own"} for trial in free.trials for c in trial.choices.values())
    assert limited.chosen.time_s <= free.chosen.time_s * (1 + NEAR_TIE)
    kept = [trial for trial in limited.trials if any(set(c.keep) - {"own"} for c in trial.choices.values())]
    assert kept
    for trial in kept:
        assert len({candidate.assignment for candidate in trial.choices.values()}) == 1


# Bounds


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_candidate_is_faster_than_its_bound(data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from((8, 12, 16, 32)))
    mask, layout = data.draw(st.sampled_from(((full(), "contiguous"), (causal(), "zigzag"))))
    asked = problem(ranks, seq=ranks * data.draw(st.sampled_from((64, 512, 4096))), mask=mask, kv_heads=4)
    per_node = data.draw(st.sampled_from((1, 2, 4, 8)))
    cluster = replace(
        cluster_named(f"h100x{ranks}"), ranks_per_node=per_node, nics_per_node=data.draw(st.integers(1, per_node))
    )
    cluster = with_nic(cluster, data.draw(st.floats(0.5, 100)))
    candidate = data.draw(st.sampled_from(list(shapes(asked, cluster, layout=LAYOUTS[layout]))))
    counts = groupings(candidate) if candidate.is_collective else (None, *groupings(candidate))
    candidate = replace(candidate, blocks_per_call=data.draw(st.sampled_from(counts)))
    direction = data.draw(st.sampled_from(DIRECTIONS))
    plan = plan_on(cluster, asked, candidate, direction)
    assert traffic(candidate, asked, cluster, direction).bound_s <= simulate(plan, cluster).time_s * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(plans(max_ranks=6))
def test_no_plan_with_even_work_moves_less_than_the_bound(plan: object) -> None:
    costs = [rank_costs(plan, rank) for rank in range(plan.problem.ranks)]  # type: ignore[attr-defined]
    asked, direction = plan.problem, plan.direction  # type: ignore[attr-defined]
    flops = [cost.flops for cost in costs]
    assume(min(flops) == max(flops) and asked.seq_q % asked.ranks == 0 and asked.seq_kv % asked.ranks == 0)
    assume(not plan.schedule.keep)  # type: ignore[attr-defined]
    received = sum(sum(b.payload for b in cost.received.values()) for cost in costs) / len(costs)
    assert received >= least_received_nbytes(asked, direction) * (1 - 1e-9)
    if plan.assignment.ulysses_degree == 1:  # type: ignore[attr-defined]
        whole_heads_nbytes = least_nbytes_on_heads(asked, direction, asked.batch * asked.kv_heads)
        assert received >= whole_heads_nbytes * (1 - 1e-9)
    assert flops[0] == pytest.approx(asked.flops(direction) / asked.ranks)


@pytest.mark.parametrize(("mask", "share"), [(full(), 1.0), (causal(), 0.5)], ids=str)
@pytest.mark.parametrize("group", [1, 4])
def test_the_bound_is_the_formula(mask: object, share: float, group: int) -> None:
    ranks, seq, heads = 256, 1 << 20, 32
    asked = problem(ranks, seq=seq, heads=heads, kv_heads=heads // group, mask=mask)
    unit = seq / ranks * heads * 128 * 2
    area = share * ranks  # in blocks; half of them under a causal mask
    whole = {
        "forward": 4 * sqrt(area / group) - 2 - 2 / group,
        "backward": 2 * sqrt(12 * area / group) - 3 - 4 / group,
    }
    for direction in DIRECTIONS:
        assert least_nbytes_on_heads(asked, direction, heads // group) / unit == pytest.approx(
            whole[direction], rel=1e-3
        )
    split = 4 * sqrt(area / heads) - (2 + 2 / group) / (heads / group)
    assert least_received_nbytes(asked, "forward") / unit == pytest.approx(split, rel=1e-3)


def test_the_bound_grows_with_the_batch_and_takes_no_longer() -> None:
    asked = problem(8, heads=8, kv_heads=8, mask=causal())
    small, large = (replace(asked, batch=batch) for batch in (512, 1 << 40))
    per_entry = least_received_nbytes(small, "forward") / small.batch
    assert least_received_nbytes(large, "forward") / large.batch == pytest.approx(per_entry, rel=1e-3)


def test_ulysses_on_as_many_ranks_as_heads_meets_the_bound() -> None:
    asked = problem(8, heads=8, kv_heads=8, mask=full())
    received = [rank_costs(make_plan(asked, method="ulysses"), rank).received for rank in range(8)]
    moved = sum(sum(b.payload for b in kinds.values()) for kinds in received) / 8
    assert moved == pytest.approx(least_received_nbytes(asked, "forward"))


# Candidates


def test_every_candidate_has_a_family_and_makes_its_plan() -> None:
    asked, cluster = problem(16, seq=4096, kv_heads=4), cluster_named("h100x16")
    families = set()
    for candidate in shapes(asked, cluster, layout=Zigzag()):
        families.add(candidate.family)
        plan = make_plan(asked, candidate)
        assert plan.assignment == candidate.assignment
        assert plan.schedule.route == candidate.route or candidate.is_collective
    assert families == set(FAMILIES) - {"ulysses"}


# Explanations and the cache


def test_losers_say_why() -> None:
    found = tune(problem(64, kv_heads=32, seq=1 << 20), with_nic(cluster_named("h100x64"), 5.0))
    reasons = {trial.family: trial.reason for trial in found.trials}
    assert "nothing overlaps" in reasons["all-gather"]
    assert "times the bytes between nodes" in reasons["ring"]
    assert found.left_out["ulysses"] == "32 KV heads cannot be spread over 64 ranks"
    limited = tune(
        problem(32, kv_heads=32, seq=1 << 19),
        cluster_named("h100x32"),
        memory_limit=2 * min(t.peak_nbytes for t in found.trials),
    )
    assert "iB allowed" in limited.left_out["all-gather"]


def test_the_cache_gives_back_what_was_found(tmp_path: Path) -> None:
    asked, cluster = problem(8), cluster_named("h100x8")

    def look(**changes: object) -> tuple[Tuning, bool]:
        return cached_tune(asked, cluster, folder=tmp_path, **changes)  # type: ignore[arg-type]

    found, was_there = look()
    assert not was_there
    assert look() == (found, True)
    assert not look(directions=DIRECTIONS)[1]
    assert not look(memory_limit=1e12)[1]
    assert not cached_tune(asked, with_nic(cluster, 1.0), folder=tmp_path)[1]


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        found, was_there = cached_tune(problem(8), cluster_named("h100x8"), folder=tmp_path / "file" / "folder")
    assert isinstance(found.chosen, Trial)
    assert not was_there
    assert "tunings are not cached" in caplog.text


@pytest.mark.parametrize(
    ("asked", "layout"),
    [
        (problem(8, seq=8192, mask=window(4096, 0)), None),
        (problem(8, seq=8192, mask=documents([0, 1000, 5000, 8192])), None),
        # Ranks then skip shards, and rings of inner rings are not among the candidates.
        (problem(8, seq=4096 * 8, kv_heads=4), "contiguous"),
        (problem(12, seq=4096 * 12, kv_heads=4), "contiguous"),
        # `torch.chunk` leaves the last of eight ranks empty.
        *((problem(8, seq=tokens, mask=mask), "chunks") for tokens in (3, 11) for mask in (full(), causal())),
    ],
    ids=str,
)
def test_ranks_that_differ_are_tuned_for_as_well(asked: Problem, layout: str | None) -> None:
    cluster = replace(cluster_named(f"h100x{asked.ranks}"), ranks_per_node=4, nics_per_node=4)
    found = tune(asked, cluster, directions=DIRECTIONS, layout=layout)
    assert found.chosen.time_s <= min(trial.time_s for trial in found.trials) * (1 + NEAR_TIE)
    for plan in tuned_plans(asked, cluster, found.chosen).values():
        verify(plan)


def test_calls_without_gradients_are_tuned_for_forward_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked, cluster = problem(8, seq=1024), cluster_named("h100x8")
    forward = tune(asked, cluster, directions=["forward"], layout="zigzag").chosen
    tuner = Tuner(cluster, Zigzag(), forward.peak_nbytes)
    chosen, _ = tuner.choose(asked, needs_gradient=False)
    plan = chosen.plans(asked, tuner.layout)["forward"]
    assert max(rank_costs(plan, rank).peak_nbytes for rank in range(8)) <= forward.peak_nbytes
    with pytest.raises(MemoryLimitError):
        tuner.choose(asked, needs_gradient=True)


def test_without_a_home_tunings_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert cache_folder() is None


def test_more_ranks_are_priced_before_a_choice_is_made() -> None:
    """Above 64 ranks the first forecast prices one; the choice must stand with eight."""
    asked, cluster = problem(288, seq=288 * 1024, heads=8, kv_heads=8), cluster_named("h100x288")
    found = tune(asked, cluster)
    again = {}
    for trial in found.trials[:4]:
        if trial.time_s > FAR_BEHIND * found.chosen.time_s:
            continue
        plan = tuned_plans(asked, cluster, trial)["forward"]
        again[trial.family] = simulate(plan, cluster, priced_ranks=8).time_s
        assert trial.time_s == pytest.approx(again[trial.family])
    assert again[found.chosen.family] <= min(again.values()) * (1 + NEAR_TIE)


# In the library


# Simple, equal, and many ranks


def made_trial(time_s: float, *texts: str) -> Trial:
    choices = [Choice.parse(text) for text in texts]
    forecast = Forecast(
        time_s=time_s / 2, compute_s=0, exposed_s=0, inside_nbytes=0, between_nbytes=0, peak_nbytes=0, tflops=0
    )
    return Trial(
        family=choices[0].family,
        choices=dict(zip(DIRECTIONS, choices, strict=True)),
        forecasts=dict.fromkeys(DIRECTIONS, forecast),
    )


def test_one_choice_is_simpler_than_two_and_one_method_than_a_product() -> None:
    by_simplicity = [
        made_trial(1, "ring 1x16", "ring 1x16"),
        made_trial(1, "mesh 4x4", "mesh 4x4"),
        made_trial(1, "mesh 4x4, 2 waves", "mesh 4x4, 2 waves"),
        made_trial(1, "ulysses 2 + mesh 2x4", "ulysses 2 + mesh 2x4"),
        made_trial(1, "ring 1x16", "ring 1x16, inner 1x8"),
    ]
    keys = [trial.complexity for trial in by_simplicity]
    assert keys == sorted(keys)


def test_equals_are_within_the_error_of_forecasts() -> None:
    times = {"chosen": 1.01, "fastest": 1.0, "simple": 1.089, "slower": 1.091}
    trials = (
        made_trial(times["chosen"], "mesh 4x4", "mesh 4x4"),
        made_trial(times["fastest"], "ulysses 2 + mesh 2x4", "ulysses 2 + mesh 2x4"),
        made_trial(times["simple"], "pass-q 16x1", "pass-q 16x1"),
        made_trial(times["slower"], "ring 1x16", "ring 1x16"),
    )
    found = Tuning(trials=trials, left_out={}, simulated=4)
    assert equals_of(found) == trials[:3]
    assert equals_of(replace(found, trials=trials[3:])) == trials[3:]


def test_both_passes_have_one_choice_if_it_is_about_as_fast() -> None:
    two = made_trial(1.0, "ring 1x16", "mesh 4x4")
    for time_s, is_chosen in ((1.019, True), (1.021, False)):
        one = made_trial(time_s, "ulysses 2 + mesh 2x4", "ulysses 2 + mesh 2x4")
        chosen, *others = tune_module._ranked([two, one])
        assert (chosen == one) is is_chosen
        assert [other.family for other in others] == [two.family if is_chosen else one.family]


def problem_of(ranks: int) -> Problem:
    return Problem.self_attention(seq_len=4096 * ranks, heads=32, kv_heads=8, head_dim=128, ranks=ranks, mask=causal())


def test_on_many_ranks_few_are_simulated_and_the_choice_is_about_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, cluster = problem_of(64), cluster_named("h100x64")
    thorough = tune(asked, cluster)
    monkeypatch.setattr(tune_module, "MANY_RANKS", 64)
    found = tune(asked, cluster)
    assert found.simulated < thorough.simulated / 3
    assert found.chosen.time_s <= thorough.chosen.time_s * (1 + 2 * NEAR_TIE)
    bounds = {family: why for family, why in found.left_out.items() if "takes at least" in why}
    assert bounds
    for trial in thorough.trials:
        if trial.family in bounds:
            assert bounds[trial.family].startswith("not simulated; takes at least ")
            assert trial.time_s > found.chosen.time_s


def test_tiles_of_the_fewest_bytes_and_one_of_every_family_are_left() -> None:
    asked, cluster = problem_of(256), cluster_named("h100x256")
    every = list(shapes(asked, cluster, layout=Zigzag()))
    kept = of_fewest_bytes(every, asked, DIRECTIONS)
    assert {choice.family for choice in kept} == {choice.family for choice in every}
    tiles_of_every, tiles = (
        Counter((c.assignment.ulysses_degree, c.assignment.tile) for c in of) for of in (every, kept)
    )
    full = [tile for tile, number in tiles.items() if number == tiles_of_every[tile]]
    assert len(full) == MOST_TILES
    assert len(kept) < len(every)
    assert len(set(kept)) == len(kept)
    degree = least_volume_degree(asked, Zigzag(), DIRECTIONS)
    assert (degree, least_volume_tile(asked, Zigzag(), "forward", ulysses_degree=degree)) in full


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_the_pairs_of_one_place_are_those_of_all_counted_at_once(layout: str) -> None:
    asked = Problem.self_attention(seq_len=32 * 100 + 7, heads=8, kv_heads=8, head_dim=64, ranks=32, mask=causal())
    for text in ("mesh 4x8", "ulysses 2 + mesh 2x8", "ring 1x32", "mesh 4x8, inner 2x4"):
        choice = Choice.parse(f"{text}, {layout}")
        assert choice.layout is not None
        found = needs(asked, choice.layout, choice.assignment)
        for place in range(choice.assignment.places):
            pairs = pairs_of(asked, choice.layout, choice.assignment, place)
            assert pairs == pytest.approx((found.whole_pairs[place], found.masked_pairs[place]))
