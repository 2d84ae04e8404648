"""How good is the greedy order? Compares its makespan with that of the shortest possible schedule, for all small tiles.

`orders/clocks.py` prices both, so this shows how good the order is in its own model, not how good the model is. Costs
range from links that hide behind a tenth of a block to links that need ten blocks, in the proportions of multi-head
attention and of four and eight query heads per KV head. Prints two tables and a JSON line.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from orders.clocks import price_moves
from orders.optimum import optimal_moves
from rich.console import Console
from rich.progress import track
from rich.table import Table
from run_facts import start_result

from mesh_attention import Problem, Tile
from mesh_attention.plan.assignment import Assignment
from mesh_attention.plan.steps import DIRECTIONS, Direction
from mesh_attention.planners.costs import Costs, estimate_costs
from mesh_attention.planners.make import greedy_moves

TILES = [Tile(rows, cols) for rows, cols in product(range(1, 5), repeat=2) if rows * cols > 1]
Q_COSTS = [round(10 ** (exponent / 6), 3) for exponent in range(-6, 7)]
"""Blocks that hide the transfer of one Q shard."""
GROUPS = (1, 4, 8)
"""Query heads a KV head."""
OPTIMAL = 1 + 1e-9


class Case(NamedTuple):
    direction: Direction
    tile: Tile
    group: int
    q_cost: float

    def costs(self) -> Costs:
        places = self.tile.rows * self.tile.cols
        problem = Problem.self_attention(
            seq_len=4096 * places, heads=32, kv_heads=32 // self.group, head_dim=128, ranks=places
        )
        at_one = estimate_costs(problem, Assignment(self.tile), self.direction, flops_per_byte=1.0)
        return estimate_costs(problem, Assignment(self.tile), self.direction, flops_per_byte=self.q_cost / at_one.q)

    def ratio(self) -> float:
        """The makespan of the greedy order, divided by the shortest."""
        costs = self.costs()
        schedules = (make(self.tile, self.direction, costs=costs) for make in (greedy_moves, optimal_moves))
        greedy, shortest = (price_moves(s, self.tile, self.direction, costs=costs).makespan for s in schedules)
        return greedy / shortest


def summary(ratios: Iterable[float]) -> dict[str, float]:
    found = list(ratios)
    return {
        "mean": round(statistics.mean(found), 4),
        "worst": round(max(found), 3),
        "optimal": round(sum(ratio < OPTIMAL for ratio in found) / len(found), 2),
    }


def print_summaries(what: str, rows: Sequence[Mapping[str, object]]) -> None:
    table = Table(what, "direction", "mean", "worst", "optimal")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)


def main() -> None:
    facts = start_result("how_good_is_the_greedy")
    start = time.perf_counter()
    cases = [Case(*values) for values in product(DIRECTIONS, TILES, GROUPS, Q_COSTS)]
    ratios = {case: case.ratio() for case in track(cases, console=Console(stderr=True), transient=True)}
    seconds = time.perf_counter() - start

    def where(**wanted: object) -> dict[str, float]:
        return summary(r for case, r in ratios.items() if wanted.items() <= case._asdict().items())

    by_tile = [{"tile": str(t), "direction": d} | where(tile=t, direction=d) for d, t in product(DIRECTIONS, TILES)]
    by_cost = [{"cost of q": c, "direction": d} | where(q_cost=c, direction=d) for d, c in product(DIRECTIONS, Q_COSTS)]
    overall = [{"tile": "all", "direction": d} | where(direction=d) for d in DIRECTIONS]
    overall += [{"tile": "all", "direction": "both"} | where()]
    print_summaries("tile", [*by_tile, *overall])
    print_summaries("cost of q", by_cost)
    size = {"cases": len(cases), "seconds": round(seconds, 1)}
    rows = {"by_tile": by_tile, "by_cost": by_cost, "overall": overall}
    print(json.dumps({**facts, **size, **rows}))


if __name__ == "__main__":
    main()
