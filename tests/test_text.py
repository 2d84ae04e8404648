"""Text reads back to the same plan, and golden plans are what they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from strategies import plans

from mesh_attention import Plan, Problem, causal, documents, make_plan, parse_plan, window
from mesh_attention.errors import ParseError, ScheduleError, TileError
from mesh_attention.plan.format import format_item
from mesh_attention.plan.parse import parse_item, parse_step
from mesh_attention.plan.steps import Item, Recv

GOLDEN = Path(__file__).parent / "golden"


def example(name: str) -> Plan:
    problem = Problem.self_attention(seq_len=4096, heads=8, kv_heads=2, head_dim=64, ranks=6, mask=causal())
    packed = Problem.self_attention(
        seq_len=4096, heads=8, kv_heads=2, head_dim=64, ranks=4, mask=documents([0, 1000, 4096]) & window(512, 0)
    )
    return {
        "mesh-2x3-forward": make_plan(problem, tile=(2, 3), route="ring", partials="ring"),
        "mesh-2x3-backward": make_plan(problem, tile=(2, 3), direction="backward"),
        "mesh-2x3-grouped": make_plan(problem, tile=(2, 3), blocks_per_call=3),
        "ring-6": make_plan(problem, method="ring", route="ring"),
        "attention2d-2x3": make_plan(problem, method="attention2d", tile=(2, 3)),
        "ulysses-2-ring-3": make_plan(problem, method="ring", ulysses_degree=2),
        "documents-window-ring-4": make_plan(packed, method="ring", direction="backward"),
    }[name]


@given(plans(max_ranks=6))
@settings(max_examples=150)
def test_every_plan_reads_back_from_its_text(plan: Plan) -> None:
    for form in (plan, plan.unrolled()):
        assert parse_plan(str(form)) == form


def test_a_step_reads_as_it_is_written() -> None:
    assert parse_step("recv kv1 from 3") == Recv(Item("kv", 1), source=3)
    for text in ("o3@5", "o3~", "home:q6", "q6/2", "do0"):
        assert format_item(parse_item(text)) == text


@given(plans(max_ranks=5))
@settings(max_examples=60)
def test_digests_tell_plans_apart_and_forget_nothing(plan: Plan) -> None:
    assert plan.digest == parse_plan(str(plan)).digest
    assert plan.digest != plan.unrolled().digest
    longer = Problem(**{name: getattr(plan.problem, name) for name in plan.problem.__slots__} | {"batch": 3})
    assert (
        make_plan(longer, tile=plan.assignment.tile, ulysses_degree=plan.assignment.ulysses_degree).digest
        != plan.digest
    )


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*-*-*.txt")))
def test_golden_plans_are_what_they_were(name: str, golden: Callable[[str, str], None]) -> None:
    """The moves, and the steps of two ranks. Rewrite with --rewrite-golden, then read the diff."""
    plan = example(name)
    written = "\n".join([str(plan), *(str(plan.program(rank)) for rank in (0, plan.problem.ranks - 1))]) + "\n"
    golden(f"{name}.txt", written)


def test_a_method_is_one_line() -> None:
    with pytest.raises(ScheduleError, match=r"method .*: expected one line of text"):
        replace(example("mesh-2x3-forward"), method="mesh\ntile 2x3")


def test_a_text_that_is_no_plan_is_refused() -> None:
    """What is said of it is in tests/golden/cli."""
    with pytest.raises(ParseError, match="expected 'mesh-attention plan 2'"):
        parse_plan("{}")
    with pytest.raises(TileError, match="6 ranks cannot form a 2x2 tile"):
        parse_plan(str(example("mesh-2x3-forward")).replace("tile 2x3", "tile 2x2"))


def test_endless_numbers_in_a_step_are_refused() -> None:
    with pytest.raises(ParseError, match="expected"):
        parse_step("recv q" + "1" * 5000 + " from 0")
