"""A choice is one value: its text and options read back, it is checked in one place, and it settles for a problem."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_attention import Choice, LocalGroup, MeshAttention, Problem, Tile, Zigzag, causal, make_plan
from mesh_attention.errors import ScheduleError, UsageError
from mesh_attention.plan.layout import LAYOUTS, PLANNED_LAYOUTS
from mesh_attention.plan.schedule import KEEPABLE, ROUTES
from mesh_attention.planners.choice import COLLECTIVE_METHODS, METHODS
from mesh_attention.planners.costs import Costs
from mesh_attention.planners.make import make_cost_based_plan

PROBLEM = Problem.self_attention(seq_len=4096, heads=8, head_dim=16, ranks=16, mask=causal())


@st.composite
def choices(draw: st.DrawFn) -> Choice:
    side = st.integers(1, 64)
    tile = draw(st.one_of(st.none(), st.builds(Tile, side, side)))
    method = draw(st.sampled_from(METHODS))
    choice = Choice(
        method=method,
        tile=None if method == "ulysses" else tile,
        ulysses_degree=draw(st.sampled_from((None, 2, 8))),
        layout=draw(st.sampled_from((None, *PLANNED_LAYOUTS.values()))),
        keep=draw(st.sampled_from(KEEPABLE)),
    )
    if method in COLLECTIVE_METHODS:
        return choice
    inner = None if choice.tile is None else Tile(1, choice.tile.cols)
    return replace(
        choice,
        inner=draw(st.sampled_from((None, inner))),
        route=draw(st.sampled_from(ROUTES)),
        partials=draw(st.sampled_from(ROUTES)),
        blocks_per_call=draw(st.sampled_from((None, 1, 7))),
    )


@given(choices())
def test_text_and_options_read_back(choice: Choice) -> None:
    assert Choice.parse(str(choice)) == choice
    assert Choice.parse(str(choice).upper()) == choice
    assert str(choice).isascii()
    written = json.loads(json.dumps(choice.options))
    assert Choice.of(**written | {"keep": tuple(written["keep"])}) == choice


@given(choices())
def test_text_is_a_plain_scalar_of_yaml(choice: Choice) -> None:
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(f"choice: {choice}") == {"choice": str(choice)}


def test_resolving_fills_in_what_was_left_open_and_changes_nothing_else() -> None:
    resolved = Choice(route="ring").resolved(PROBLEM, "forward")
    assert resolved == Choice.of(tile=resolved.tile, ulysses_degree=1, layout="zigzag", route="ring")
    assert resolved.resolved(PROBLEM, "forward") == resolved
    assert Choice(method="ulysses").resolved(replace(PROBLEM, ranks=8), "forward").ulysses_degree == 8
    with pytest.raises(ScheduleError, match="has no tile yet"):
        _ = Choice().assignment


def test_value_text_and_keywords_make_the_same_plan() -> None:
    text, options = "ulysses 2 + mesh 2x4, zigzag", {"tile": (2, 4), "ulysses_degree": 2, "layout": "zigzag"}
    plans = {make_plan(PROBLEM, text), make_plan(PROBLEM, Choice.parse(text)), make_plan(PROBLEM, **options)}  # type: ignore[arg-type]
    assert len(plans) == 1
    with pytest.raises(UsageError, match="tile cannot be combined with a choice"):
        make_plan(PROBLEM, text, tile=(2, 4))


def test_a_priced_plan_is_ordered_by_the_price_and_collectives_have_none() -> None:
    asked: list[Choice] = []

    def price(problem: Problem, choice: Choice, direction: str) -> Costs:
        asked.append(choice)
        return Costs(q=8.0, kv=1.0)

    plan = make_cost_based_plan(PROBLEM, Choice.of(tile="4x4"), "forward", price)
    assert asked == [Choice.of(tile="4x4").resolved(PROBLEM, "forward")]
    assert plan == make_plan(PROBLEM, tile="4x4", costs=Costs(q=8.0, kv=1.0)) != make_plan(PROBLEM, tile="4x4")
    make_cost_based_plan(PROBLEM, Choice(method="attention2d"), "forward", price)
    assert len(asked) == 1


def test_mesh_attention_takes_a_choice() -> None:
    attention = MeshAttention(LocalGroup(4), choice="mesh 2x2, contiguous")
    assert attention.layout == LAYOUTS["contiguous"]
    assert MeshAttention(LocalGroup(4), choice="ring").layout == Zigzag()
    with pytest.raises(UsageError, match="tile cannot be combined with a choice"):
        MeshAttention(LocalGroup(4), choice="ring", tile=(2, 2))
    with pytest.raises(UsageError, match="choice cannot be combined with cluster="):
        MeshAttention(LocalGroup(4), choice="ring", cluster="h100x4")
