"""How fast is planning? One rank's program at 4096 ranks; plan and full verification at 256, forward and backward.

Every figure is the median of several repetitions, each with cold caches. Prints a table and a JSON line.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import track
from rich.table import Table
from run_facts import start_result

from mesh_attention import Problem, causal, make_plan
from mesh_attention.plan.blocks import block_matrix
from mesh_attention.plan.steps import DIRECTIONS
from mesh_attention.verification.rules import check

REPEATS = 3
LIMITS_S = {"program": 0.2, "verify": 10.0}


def problem(ranks: int) -> Problem:
    return Problem.self_attention(seq_len=4096 * ranks, heads=32, kv_heads=8, head_dim=128, ranks=ranks, mask=causal())


def one_program(blocks_per_call: int, route: str) -> None:
    for direction in DIRECTIONS:
        make_plan(
            problem(4096), tile=(64, 64), direction=direction, blocks_per_call=blocks_per_call, route=route
        ).program(1234)


def plan_and_verify(blocks_per_call: int, route: str) -> None:
    for direction in DIRECTIONS:
        plan = make_plan(problem(256), tile=(16, 16), direction=direction, blocks_per_call=blocks_per_call, route=route)
        assert check(plan) == ()


def median_seconds(work: Callable[[int, str], None], blocks_per_call: int, route: str) -> float:
    seconds = []
    for _ in range(REPEATS):
        block_matrix.cache_clear()
        start = time.perf_counter()
        work(blocks_per_call, route)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    facts = start_result("how_fast_is_planning")
    # Each repetition builds two programs, one per direction; the limit is for one.
    cases = {
        "program": ("one rank's program, 4096 ranks, 64x64", one_program, 2),
        "verify": ("plan and verify, 256 ranks, 16x16, forward and backward", plan_and_verify, 1),
    }
    rows = []
    grid = [(name, blocks, route) for name in cases for blocks in (1, 4) for route in ("ring", "direct")]
    for name, blocks_per_call, route in track(grid, console=Console(stderr=True), transient=True):
        title, work, share = cases[name]
        seconds = median_seconds(work, blocks_per_call, route) / share
        row = {"what": title, "blocks_per_call": blocks_per_call, "route": route}
        rows.append(row | {"seconds": round(seconds, 3), "limit": LIMITS_S[name]})
    table = Table("what", "blocks a call", "route", "seconds", "limit")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
    print(json.dumps({**facts, "rows": rows}))


if __name__ == "__main__":
    main()
