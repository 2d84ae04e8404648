"""Text reads back to the same plan and size, and golden plans are what they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import plans

from mesh_attention import Plan, Problem, causal, documents, make_plan, parse_plan, window
from mesh_attention.units import format_size
from mesh_attention_lab.cli.options import parse_size


def examples() -> dict[str, Plan]:
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
    }


@given(plans(max_ranks=6))
@settings(max_examples=150)
def test_every_plan_reads_back_from_its_text(plan: Plan) -> None:
    for form in (plan, plan.unrolled()):
        assert parse_plan(str(form)) == form


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


@pytest.mark.parametrize("name", examples())
def test_golden_plans_are_what_they_were(name: str, golden: Callable[[str, str], None]) -> None:
    """The moves, and the steps of two ranks. Rewrite with --rewrite-golden, then read the diff."""
    plan = examples()[name]
    written = "\n".join([str(plan), *(str(plan.program(rank)) for rank in (0, plan.problem.ranks - 1))]) + "\n"
    golden(f"{name}.txt", written)


@given(st.integers(0, 1 << 40) | st.integers(0, 1 << 20).map((1 << 10).__mul__))
def test_a_size_reads_as_it_is_written(size: int) -> None:
    assert parse_size(format_size(size).replace(",", "")) == size
