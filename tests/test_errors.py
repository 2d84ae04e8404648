"""Every refusal says what was given, what was expected and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from mesh_attention import Contiguous, Plan, Problem, Striped, Tile, Zigzag, causal, documents, full, make_plan, window
from mesh_attention.errors import MaskError, ParseError, ProblemError, ScheduleError, TileError
from mesh_attention.masks import Mask
from mesh_attention.plan.assignment import Assignment
from mesh_attention.plan.layout import permutation, position_ids
from mesh_attention.plan.schedule import GroupMove
from mesh_attention.planners.costs import Costs, estimate_costs


def problem(ranks: int = 12, **changes: object) -> Problem:
    fields: dict[str, object] = {"seq_len": 96, "heads": 8, "kv_heads": 2, "head_dim": 4, "ranks": ranks}
    return Problem.self_attention(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("refused", "error", "message"),
    [
        (lambda: problem(seq_len=0), ProblemError, "seq_q=0: expected a whole number of at least 1"),
        (lambda: problem(heads=2.0), ProblemError, "heads=2.0: expected a whole number"),
        (lambda: problem(heads=True), ProblemError, "heads=True: expected a whole number"),
        (lambda: problem(kv_heads=3), ProblemError, "8 heads cannot share 3 KV heads evenly"),
        (lambda: problem(dtype="int8"), ProblemError, "dtype='int8': expected one of float64, float32, bfloat16"),
        (
            lambda: make_plan(problem(), tile=(5, 2)),
            TileError,
            "12 ranks cannot form a 5x2 tile; rows·cols must be 12: 1x12 2x6 3x4 4x3 6x2 12x1",
        ),
        (lambda: Tile(0, 3), TileError, "rows and columns must be whole numbers of at least 1"),
        (
            lambda: make_plan(problem(), ulysses_degree=4),
            TileError,
            "Ulysses degree 4 does not divide 2 KV heads; degrees that do: 1 2",
        ),
        (
            lambda: make_plan(problem(), ulysses_degree=5),
            TileError,
            "Ulysses degree 5 does not divide 12 ranks; degrees that do: 1 2 3 4 6 12",
        ),
        (
            lambda: make_plan(problem(), ulysses_degree=0),
            TileError,
            "Ulysses degree 0: expected a whole number of at least 1",
        ),
        (
            lambda: make_plan(problem(), ulysses_degree=2, tile=(3, 4)),
            TileError,
            "12 ranks with Ulysses degree 2 cannot form a 3x4 tile; rows·cols must be 6",
        ),
        (
            lambda: make_plan(problem(), method="ring", tile=(2, 6)),
            TileError,
            "method ring uses the 1x12 tile here",
        ),
        (
            lambda: make_plan(problem(ranks=2), method="ulysses", ulysses_degree=1),
            TileError,
            "method ulysses spreads heads over all 2 ranks, got ulysses_degree=1",
        ),
        (lambda: make_plan(problem(), method="ulysses"), TileError, "Ulysses degree 12 does not divide 2 KV heads"),
        (
            lambda: make_plan(problem(), method="torus"),
            ScheduleError,
            "method 'torus': expected one of mesh, ring, pass-q, attention2d, ulysses",
        ),
        (
            lambda: make_plan(problem(), method="attention2d", route="ring", blocks_per_call=4),
            ScheduleError,
            "attention2d uses collectives and has no route, blocks_per_call; use mesh instead",
        ),
        (lambda: make_plan(problem(), route="scenic"), ScheduleError, "route 'scenic': expected one of ring, direct"),
        (lambda: make_plan(problem(), direction="up"), ScheduleError, "direction 'up': expected forward or backward"),
        (lambda: make_plan(problem(), tile=(3.0, 4)), TileError, "must be whole numbers"),
        (lambda: make_plan(problem(), tile=(3,)), TileError, r"tile \(3,\): expected \(rows, columns\)"),
        (lambda: make_plan(problem(), tile="3y4"), ParseError, "tile '3y4': expected ROWSxCOLS"),
        (lambda: make_plan(problem(), layout="spiral"), ParseError, "layout 'spiral': expected one of"),
        (lambda: make_plan(problem(), route=""), ScheduleError, "route '': expected one of"),
        (lambda: make_plan(problem(), costs={}), ScheduleError, r"costs {}: expected Costs"),
        (lambda: make_plan(problem(), blocks_per_call=1.5), ScheduleError, "blocks_per_call=1.5: expected a whole"),
        (
            lambda: make_plan(problem(ranks=2), method="ulysses", route="ring"),
            ScheduleError,
            "ulysses uses collectives",
        ),
        (lambda: replace(make_plan(problem()), direction="up"), ScheduleError, "direction 'up'"),
        (lambda: GroupMove("dance", "q"), ScheduleError, "op 'dance'"),
        (lambda: make_plan(problem(), keep="kv"), ScheduleError, "keep 'kv': expected a tuple of at most two of"),
        (lambda: make_plan(problem(), keep=("o",)), ScheduleError, "expected a tuple of at most two of"),
        (lambda: make_plan(problem(), keep=("own",)), ScheduleError, "keep own needs a Ulysses degree above 1"),
        (lambda: make_plan(problem(), waves=0), TileError, "waves=0: expected a whole number of at least 1"),
        (lambda: make_plan(problem(), waves=2, cut="cols"), TileError, "cut='cols': expected heads or rows"),
        (lambda: make_plan(problem(), cut="rows"), TileError, "cut='rows' needs waves=2 or more"),
        (lambda: make_plan(problem(), waves=97), TileError, "waves=97 does not divide the number of KV heads"),
        (lambda: estimate_costs(problem(), Assignment(Tile(3, 4)), "up"), ScheduleError, "direction 'up'"),
        (lambda: estimate_costs(problem(), Assignment(Tile(9, 9)), "forward"), TileError, "cannot form a 9x9 tile"),
        (lambda: Costs(q="a"), ScheduleError, "cost of q is 'a'"),
        (lambda: replace(problem(), mask=None), ProblemError, "mask=None: expected a mask"),
        (lambda: Mask(left=-1), MaskError, "left=-1: expected a number of tokens, or None"),
        (lambda: window(1.5, 0), MaskError, "window left=1.5"),
        (lambda: documents([0, 2.5, 96]), MaskError, "expected running totals, whole numbers"),
        (lambda: documents(None), MaskError, "cu_seqlens_q=None: expected running totals"),
        (lambda: position_ids(Zigzag(), 7, seq_len=80, ranks=4), ProblemError, "rank 7 of 4"),
        (lambda: position_ids(Striped(), 0, seq_len=80, ranks=0), ProblemError, "rank 0 of 0"),
        (lambda: permutation(Striped(), seq_len=80, ranks=0), ProblemError, "0 ranks"),
        (lambda: make_plan(problem()).program("a"), ScheduleError, "rank 'a'"),
        (lambda: make_plan(problem()).program(12), ScheduleError, "rank 12: the plan has ranks 0 to 11"),
        (
            lambda: make_plan(problem(ranks=2)).with_programs(()),
            ScheduleError,
            r"programs are of ranks \[\]; expected one for each of the 2 ranks",
        ),
    ],
)
def test_a_refusal_says_what_was_given_and_what_was_expected(
    refused: Callable[[], Plan], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        refused()
    assert isinstance(caught.value, ValueError)


def test_the_default_layout_suits_the_mask() -> None:
    assert make_plan(problem(mask=causal())).layout == Zigzag()
    assert make_plan(problem(mask=full())).layout == Contiguous()
    assert make_plan(problem(mask=window(4, 0))).layout == Contiguous()
