"""Bytes read off the steps equal the formulas, exactly. unit = tokens a rank × heads × head size, in bytes."""

from __future__ import annotations

from fractions import Fraction

import pytest

from mesh_attention import Problem, causal, documents, full, make_plan, rank_costs, window
from mesh_attention.plan.assignment import tiles_of
from mesh_attention.plan.schedule import ROUTES
from mesh_attention.plan.steps import Direction

TOKENS_A_RANK, HEADS, HEAD_DIM, WIDTH = 32, 8, 16, 2
UNIT = TOKENS_A_RANK * HEADS * HEAD_DIM * WIDTH
STATISTIC = TOKENS_A_RANK * HEADS * 4
"""One float32 for each row and head: an LSE or a delta."""
MASKS = {"full": full(), "causal": causal()}


def problem(ranks: int, group_size: int, mask: str) -> Problem:
    return Problem.self_attention(
        seq_len=TOKENS_A_RANK * ranks,
        heads=HEADS,
        kv_heads=HEADS // group_size,
        head_dim=HEAD_DIM,
        ranks=ranks,
        mask=MASKS[mask],
    )


def expected_units(direction: Direction, a: int, b: int, u: int, g: int) -> Fraction:
    """DESIGN §3. An exchange moves (u-1)/u of everything once: Q, K, V, O forward; Q, dO, K, V, dQ, dK, dV backward."""
    if direction == "forward":
        return (2 + Fraction(2, g)) * Fraction(u - 1, u) + 2 * (a - 1) + Fraction(2, g) * (b - 1)
    return (3 + Fraction(4, g)) * Fraction(u - 1, u) + 3 * (a - 1) + Fraction(4, g) * (b - 1)


def expected_statistics(direction: Direction, a: int, u: int) -> Fraction:
    """LSE with each partial O; LSE and delta with each dO."""
    return (1 if direction == "forward" else 2) * (Fraction(u - 1, u) + a - 1)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("group_size", [1, 4, 8])
@pytest.mark.parametrize("ranks", [1, 4, 6, 7, 16])
def test_bytes_equal_the_formulas(ranks: int, group_size: int, direction: Direction, mask: str) -> None:
    asked = problem(ranks, group_size, mask)
    degrees = [u for u in (1, 2, 4, 8) if ranks % u == 0 and asked.kv_heads % u == 0]
    for degree in degrees:
        for tile in tiles_of(ranks // degree):
            common = {"tile": tile, "direction": direction, "ulysses_degree": degree}
            # Causal blocks are never empty under zigzag, the default layout there.
            plans = [make_plan(asked, route=r, partials=p, **common) for r in ROUTES for p in ROUTES]
            plans.append(make_plan(asked, method="attention2d", **common))
            units = expected_units(direction, tile.rows, tile.cols, degree, group_size)
            statistics = expected_statistics(direction, tile.rows, degree)
            for plan in plans:
                for rank in (0, ranks // 2, ranks - 1):
                    costs = rank_costs(plan, rank)
                    for moved in (costs.sent, costs.received):
                        assert sum(size.payload for size in moved.values()) == units * UNIT
                        assert sum(size.statistics for size in moved.values()) == statistics * STATISTIC


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("mask", [window(40, 0), documents([0, 100, 200, 300, 512])])
def test_a_window_or_document_plan_moves_less(mask: object, direction: Direction, route: str) -> None:
    everything = Problem.self_attention(seq_len=512, heads=4, head_dim=8, ranks=16)
    some = Problem.self_attention(seq_len=512, heads=4, head_dim=8, ranks=16, mask=mask)  # type: ignore[arg-type]
    for options in ({"tile": (4, 4), "route": route}, {"method": "ring", "route": route}, {"method": "attention2d"}):
        whole, less = (
            sum(
                rank_costs(make_plan(asked, direction=direction, **options), rank).received_nbytes for rank in range(16)
            )
            for asked in (everything, some)
        )
        assert less < 0.8 * whole


def test_a_window_plan_fetches_just_its_neighbours() -> None:
    asked = Problem.self_attention(seq_len=512, heads=4, head_dim=8, ranks=16, mask=window(32, 0))
    costs = rank_costs(make_plan(asked, method="ring"), 5)
    one_shard = 32 * 4 * 16 * 2
    assert costs.received_nbytes == costs.sent_nbytes == one_shard


@pytest.mark.parametrize("keep", [("q",), ("kv",), ("q", "kv")])
def test_what_is_kept_is_not_sent_again(keep: tuple[str, ...]) -> None:
    asked = problem(16, 4, "causal")
    for method, u, a, b in (("mesh", 1, 4, 4), ("attention2d", 1, 2, 8), ("mesh", 2, 2, 4)):
        options = {"method": method, "tile": (a, b), "ulysses_degree": u, "direction": "backward"}
        plain, spared = (rank_costs(make_plan(asked, keep=kept, **options), 5) for kept in ((), keep))
        units = {"q": Fraction(u - 1, u) + (a - 1), "kv": (Fraction(u - 1, u) + b - 1) * Fraction(2, 4)}
        saved = sum(units[kind] for kind in keep)
        assert plain.received_nbytes - spared.received_nbytes == saved * UNIT
        assert all(kind not in spared.received for kind in keep)


def test_peaks_worked_out_by_hand() -> None:
    """In units of one Q shard in bfloat16: K and V are 2, a sum 2 and its LSE 1/4 (float64, head size 16)."""
    asked = problem(8, 1, "causal")
    lse = Fraction(1, 4)
    ring, direct = (rank_costs(make_plan(asked, method="ring", route=route), 3).peak_nbytes for route in ROUTES)
    assert ring == UNIT * (2 * 2 + (2 + lse))  # the KV shard attended, the next one arriving, and O's sum
    assert direct == UNIT * (3 * 2 + (2 + lse))  # and its own, packed, until everybody has it
    gathered = rank_costs(make_plan(asked, method="attention2d", tile=(2, 4)), 3).peak_nbytes
    attending = 2 * 1 + 4 * 2 + 2 * (2 + lse)  # both Q, four KV, two sums
    assert gathered == UNIT * attending
    alone = Problem.self_attention(seq_len=32, heads=8, head_dim=16, ranks=1, mask=causal())
    assert rank_costs(make_plan(alone), 0).peak_nbytes == UNIT * ((2 + lse) + (1 + lse / 2))  # a sum and the result


def test_peak_memory_of_a_ring_does_not_grow_with_the_ring() -> None:
    peaks = [rank_costs(make_plan(problem(ranks, 1, "causal"), method="ring"), 0).peak_nbytes for ranks in (8, 16, 64)]
    assert len(set(peaks)) == 1
