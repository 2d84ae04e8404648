"""What the order guarantees for any costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import directions

from mesh_attention import Problem, Tile, causal
from mesh_attention.plan.assignment import Assignment
from mesh_attention.plan.schedule import Fetch, Meet, Return
from mesh_attention.plan.steps import KINDS, Direction
from mesh_attention.planners.costs import Costs, estimate_costs
from mesh_attention.planners.make import greedy_moves

COSTS = st.builds(Costs, **{kind: st.floats(0.01, 50) for kind in KINDS})
TILES = st.builds(Tile, st.integers(1, 9), st.integers(1, 9))


@given(TILES, directions(), COSTS, st.integers(1, 10))
def test_every_block_meets_once_after_its_fetches_and_before_its_return(
    tile: Tile, direction: Direction, costs: Costs, blocks_per_call: int
) -> None:
    here = {"row": {0}, "col": {0}}
    met: set[tuple[int, int]] = set()
    for move in greedy_moves(tile, direction, costs=costs, blocks_per_call=blocks_per_call):
        match move:
            case Fetch(kind, offset):
                here["col" if kind == "kv" else "row"].add(offset)
            case Meet(rows, cols):
                assert set(rows) <= here["row"]
                assert set(cols) <= here["col"]
                blocks = {(row, col) for row in rows for col in cols}
                assert not blocks & met
                met |= blocks
            case Return("o" | "dq", offset):
                assert all((offset, col) in met for col in range(tile.cols))
            case Return("dkv", offset):
                assert all((row, offset) in met for row in range(tile.rows))
    assert len(met) == tile.rows * tile.cols


@pytest.mark.parametrize(("tile", "most"), [(Tile(16, 16), 48), (Tile(1, 256), 70), (Tile(256, 1), 70)])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_grouping_makes_few_large_calls(tile: Tile, most: int, direction: Direction) -> None:
    costs = Costs(q=0.2, kv=0.4, do=0.1, o=0.2, dq=0.1, dkv=0.2)
    calls = [m for m in greedy_moves(tile, direction, costs=costs, blocks_per_call=4) if isinstance(m, Meet)]
    assert len(calls) <= most


def test_costs_follow_from_bytes_and_flops() -> None:
    """One block: 2·2·T²·H·D operations for T·H·D·2 bytes of Q, so a Q hides behind 2 / (4·T / f) blocks."""
    problem = Problem.self_attention(seq_len=4 * 1024, heads=8, head_dim=64, ranks=4)
    costs = estimate_costs(problem, Assignment(Tile(2, 2)), "forward", flops_per_byte=1000.0)
    assert costs.q == pytest.approx(2 * 1000 / (4 * 1024))
    assert costs.kv == pytest.approx(2 * costs.q)
    half = Problem.self_attention(seq_len=4 * 1024, heads=8, head_dim=64, ranks=4, mask=causal())
    masked = estimate_costs(half, Assignment(Tile(2, 2)), "forward", flops_per_byte=1000.0)
    assert masked.q == pytest.approx(2 * costs.q, rel=1e-3)
