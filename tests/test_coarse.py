"""Choices that are kept for problems that are alike: the same from any history, and plans that are right for each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import strategies
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mesh_attention import Problem, causal, cluster_named, make_plan, verify
from mesh_attention.machine import tuned_strategy
from mesh_attention.machine.tuned_strategy import Tuner, tuned
from mesh_attention.masks import Mask, documents, full, window
from mesh_attention.plan.assignment import Assignment, tiles_of
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.layout import LAYOUTS, Contiguous, Zigzag
from mesh_attention.plan.steps import DIRECTIONS
from mesh_attention.planners.choice import as_choice
from mesh_attention.simulation.simulate import simulate
from mesh_attention.tuning.bounds import _work, needs, plan_on
from mesh_attention.tuning.representative import MOST_SHORTENED, can_be_widened, coarse, part_of, retargeted, widened
from mesh_attention.tuning.result import NEAR_TIE
from mesh_attention.tuning.tune import tune


def problem(ranks: int, *, tokens: int = 4096, mask: Mask | None = None, kv_heads: int = 8) -> Problem:
    """`tokens` are of the whole sequence."""
    return Problem.self_attention(
        seq_len=tokens, heads=32, kv_heads=kv_heads, head_dim=128, ranks=ranks, mask=causal() if mask is None else mask
    )


def batch_of_documents(tokens: int, seed: int) -> Mask:
    rng = random.Random(seed)
    return causal() & documents([0, *sorted(rng.randrange(tokens) for _ in range(40)), tokens])


@contextmanager
def no_history() -> Iterator[None]:
    """Nothing is remembered from before."""
    tuned_strategy.tuned.cache_clear()
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        yield


@given(data=st.data(), cluster=st.sampled_from(["h100", "paper", "laptop"]))
@settings(max_examples=25, deadline=None)
def test_the_plans_of_a_quick_choice_are_right_for_the_problem_itself(data: st.DataObject, cluster: str) -> None:
    asked, layout = data.draw(strategies.problems(max_ranks=9)), data.draw(strategies.layouts())
    with no_history():
        chosen, _ = Tuner(cluster_named(cluster).with_ranks(asked.ranks), layout, None).choose(
            asked, needs_gradient=True
        )
        for direction, plan in chosen.plans(asked, layout).items():
            assert (plan.problem, plan.layout, plan.direction) == (asked, layout, direction)
            verify(plan)


def test_new_lengths_and_new_batches_of_documents_need_no_new_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = []

    def counted(asked: Problem, *rest: object, **options: object) -> object:
        tuned.append(asked)
        return cached(asked, *rest, **options)  # type: ignore[arg-type]

    cached = tuned_strategy.cached_tune
    monkeypatch.setattr(tuned_strategy, "cached_tune", counted)
    with no_history():
        tuner = Tuner(cluster_named("h100x4"), Zigzag(), None)
        for tokens in range(8000, 8400, 37):
            tuner.choose(problem(4, tokens=tokens), needs_gradient=True)
        assert len(tuned) == 1
        for seed in range(30):
            tuner.choose(problem(4, tokens=8192, mask=batch_of_documents(8192, seed)), needs_gradient=True)
        assert len(tuned) <= 3


@given(asked=strategies.problems())
def test_a_coarse_problem_stands_for_itself(asked: Problem) -> None:
    assume(asked.mask.documents is None)
    stands_for = coarse(asked)
    assert coarse(stands_for) == stands_for
    assert replace(asked, seq_q=1, seq_kv=1, mask=full()) == replace(stands_for, seq_q=1, seq_kv=1, mask=full())


@given(tokens=st.integers(100, 1 << 30), ranks=st.integers(1, 8))
def test_a_coarse_problem_is_about_as_long(tokens: int, ranks: int) -> None:
    """Within what memory is left for, and rounding to whole tokens."""
    assume(tokens >= 32 * ranks)
    found = coarse(problem(ranks, tokens=tokens)).seq_q
    assert found / MOST_SHORTENED / 1.07 <= tokens <= found * MOST_SHORTENED * 1.07


@given(seed=st.integers(0, 1000))
def test_typical_documents_leave_about_as_many_pairs(seed: int) -> None:
    asked = problem(8, tokens=1 << 16, mask=batch_of_documents(1 << 16, seed))
    found = coarse(asked)
    assert found.mask.documents is not None
    assert found.mask.right == 0
    assert 1 / 4 < found.pairs / asked.pairs < 4


@given(seq_q=st.integers(1, 5000), seq_kv=st.integers(1, 5000), cuts=st.lists(st.floats(0, 1), max_size=9))
def test_documents_of_another_length_for_keys_stay_pairs_of_documents(
    seq_q: int, seq_kv: int, cuts: list[float]
) -> None:
    shares = [0, *sorted(cuts), 1]
    mask = documents(*([round(share * tokens) for share in shares] for tokens in (seq_q, seq_kv)))
    found = coarse(replace(problem(4), seq_q=seq_q, seq_kv=seq_kv, mask=mask))
    assert found.mask.documents is not None
    assert len(found.mask.documents.q) == len(found.mask.documents.kv)


def test_documents_that_fit_into_a_rank_are_not_counted_one_by_one() -> None:
    many = coarse(problem(8, tokens=1 << 20, mask=causal() & documents(range(0, (1 << 20) + 1, 8))))
    assert many.mask.documents is not None
    assert len(many.mask.documents.q) < 1500


def test_where_shards_are_left_out_a_ring_of_inner_rings_becomes_direct() -> None:
    asked = problem(8, tokens=4096, mask=full())
    plan = make_plan(asked, "ring 1x8, contiguous, inner 1x4, route ring, 1 block per call")
    short = replace(asked, seq_q=5, seq_kv=5)  # three ranks have no tokens
    assert retargeted(plan, replace(asked, seq_q=4000, seq_kv=4000), plan.layout).schedule.route == "ring"
    found = retargeted(plan, short, plan.layout)
    assert found.schedule.route == "direct"
    verify(found)


# Parts of a cluster


@pytest.mark.parametrize("text", ["ring 1x16", "ulysses 2 + ring 1x8", "attention2d 1x16", "attention2d 2x8"])
def test_a_local_mask_takes_as_long_on_a_part_of_the_cluster(text: str) -> None:
    asked, cluster = problem(64, tokens=64 * 4096, mask=window(4096, 0)), cluster_named("h100x64")
    part, on = part_of(asked, cluster)
    assert (part.ranks, on.ranks) == (16, 16)
    choice = as_choice(f"{text}, contiguous")
    assert can_be_widened(choice)
    for direction in DIRECTIONS:
        small = simulate(plan_on(on, part, choice, direction), on)
        whole = simulate(plan_on(cluster, asked, widened(choice, 64), direction), cluster)
        assert whole.time_s == pytest.approx(small.time_s, rel=0.02)


def test_a_choice_with_rows_is_not_widened() -> None:
    """Another one is taken, which was about as good on the part."""
    assert not can_be_widened(as_choice("mesh 2x8"))
    asked, cluster = problem(64, tokens=64 * 4096, mask=window(4096, 0)), cluster_named("h100x64")
    with no_history(), pytest.MonkeyPatch.context() as patch:
        found = tune(*part_of(asked, cluster), directions=DIRECTIONS)
        mesh, ring = (next(t for t in found.trials if t.family == family) for family in ("mesh", "ring"))
        patch.setattr(tuned_strategy, "cached_tune", lambda *_, **__: (replace(found, trials=(mesh, ring)), False))
        chosen, _ = tuned.__wrapped__(asked, cluster, Contiguous(), True, None, is_coarse=True)
        assert {str(each.choice.assignment) for each in chosen.passes.values()} == {"1x64"}


@pytest.mark.parametrize("mask", [full(), causal(), window(100_000, 0), causal() & documents([0, 1 << 17, 1 << 18])])
def test_a_mask_that_reaches_far_needs_the_whole_cluster(mask: Mask) -> None:
    asked, cluster = problem(64, tokens=64 * 4096, mask=mask), cluster_named("h100x64")
    assert part_of(asked, cluster) == (asked, cluster)


def test_documents_are_cut_where_the_part_ends() -> None:
    mask = causal() & documents([*range(0, 64 * 4096, 5000), 64 * 4096])
    part, _ = part_of(problem(64, tokens=64 * 4096, mask=mask), cluster_named("h100x64"))
    assert part.ranks == 16
    assert part.mask.documents is not None
    assert part.mask.documents.q[-1] == part.seq_q == 16 * 4096


# Quick against thorough


@pytest.mark.parametrize(
    ("cluster", "mask"),
    [("h100x4", full()), ("h100x4", window(2048, 0)), ("a100x12", causal()), ("laptopx4", causal())],
)
def test_a_quick_choice_is_about_as_fast_as_a_thorough_one(mask: Mask, cluster: str) -> None:
    topology = cluster_named(cluster)
    asked = problem(topology.ranks, tokens=topology.ranks * 2048, mask=mask)
    quick, thorough = (tune(asked, topology, directions=DIRECTIONS, is_quick=q) for q in (True, False))
    assert quick.simulated < thorough.simulated
    assert quick.chosen.time_s <= thorough.chosen.time_s * 1.03


def test_a_near_tie_is_said_to_be_one() -> None:
    found = tune(problem(8, tokens=8 * 4096, kv_heads=32), cluster_named("h100x8"), directions=DIRECTIONS)
    times = sorted(trial.time_s for trial in found.trials)
    alike = sum(time_s <= times[0] * (1 + NEAR_TIE) for time_s in times)
    assert found.chosen in found.near_ties
    assert len(found.near_ties) == alike
    assert found.tie_words == "" or alike > 1
    assert replace(found, trials=found.trials[:1]).tie_words == ""


# Estimates


@given(data=st.data())
def test_work_is_what_the_mask_leaves(data: st.DataObject) -> None:
    asked = data.draw(strategies.problems())
    mask = data.draw(
        st.one_of(
            st.sampled_from([full(), causal()]),
            st.builds(window, st.integers(-1, 90), st.integers(-1, 90)),
            st.lists(st.integers(0, asked.seq_q), max_size=4).map(
                lambda cuts: (
                    data.draw(st.sampled_from([full(), causal()]), label="band")
                    & documents([0, *sorted(cuts), asked.seq_q])
                )
            ),
        )
    )
    if mask.documents is not None:
        asked = replace(asked, seq_kv=asked.seq_q, mask=full())
    asked = replace(asked, mask=mask)
    degrees = [u for u in range(1, asked.ranks + 1) if asked.ranks % u == 0 and asked.kv_heads % u == 0]
    layout = data.draw(st.sampled_from([Contiguous(), Zigzag(), LAYOUTS["chunks"]]))
    tile = data.draw(st.sampled_from(tiles_of(asked.ranks // (degree := data.draw(st.sampled_from(degrees))))))
    matrix = BlockMatrix(asked, layout, Assignment(tile, degree))
    places = range(tile.rows * tile.cols)
    exact = np.array([[matrix.pairs(row, col) for col in places] for row in places])
    whole, masked = _work(asked, layout, degree)
    assert np.array_equal(whole + masked, exact)
    needed = needs(asked, layout, matrix.assignment)
    for place in places:
        for axis in ("row", "col"):
            pairs = zip(needed.members[axis][place], needed.is_needed[axis][place], strict=True)
            assert {int(shard): bool(is_needed) for shard, is_needed in pairs} == {
                shard: matrix.needs(axis, place, shard) for shard in matrix.assignment.group(axis, place)
            }
    assert (needed.whole_pairs + needed.masked_pairs).sum() == exact.sum()
    assert needed.live_blocks.sum() == (exact > 0).sum()
