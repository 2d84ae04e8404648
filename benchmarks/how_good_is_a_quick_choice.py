"""How good is the choice that a call gets, and how long does a call wait for it? Forecasts, on one core.

    python benchmarks/how_good_is_a_quick_choice.py              # 4 to 256 ranks (minutes)
    python benchmarks/how_good_is_a_quick_choice.py --ranks 4 8  # choices at 4 and 8 ranks only

A call's choice comes from a quick tuning of the coarse form of its problem. The first table has the seconds until both
plans are there, for a first call, for a new length and for another batch of documents, and to compile one rank's
programs. The second compares the forecast of these plans with that of the thorough tuning of the problem itself. Prints
both and a JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from statistics import mean, median
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import track
from rich.table import Table
from run_facts import start_result

from mesh_attention import Problem, causal
from mesh_attention.clusters import cluster_named
from mesh_attention.errors import MemoryLimitError
from mesh_attention.execution.compiled import compile_program
from mesh_attention.machine.tuned_strategy import Tuner, tuned
from mesh_attention.masks import Mask, documents, full, window
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import DIRECTIONS
from mesh_attention.planners.choice import default_layout
from mesh_attention.simulation.simulate import simulate
from mesh_attention.topology import Topology
from mesh_attention.tuning.tune import tune

TIMED_RANKS = (8, 64, 256)
LIMIT_S = {8: 1.0, 64: 1.0, 256: 3.0}
NEW_LENGTH_LIMIT_S = 0.05
MASKS = ("causal", "full", "window", "documents", "short documents")
PRESETS = ("h100", "h200", "a100", "laptop")
TOKENS_OF_A_RANK = (512, 1200, 4096, 10_000, 32_768, 60_000)
SAMPLES = {4: 40, 8: 40, 16: 20, 64: 7, 256: 3}
PRICED_RANKS = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 64, 256], help="of the second table")
    given = parser.parse_args()
    facts = start_result("how_good_is_a_quick_choice")
    waits = [_waits(ranks, mask) for ranks, mask in product(TIMED_RANKS, MASKS)]
    _print_waits(waits)
    cases = [case for ranks in given.ranks for case in _sample(ranks)]
    compared = []
    for case in track(cases, console=Console(stderr=True), transient=True):
        found = _compared(*case)
        compared += [] if found is None else [found]
    _print_compared(compared)
    print(json.dumps({**facts, "waits": waits, "compared": compared}))
    return 0


def _problem(ranks: int, tokens: int, mask: str, kv_heads: int, *, seed: int, dtype: str = "bfloat16") -> Problem:
    return Problem.self_attention(
        seq_len=tokens,
        heads=32,
        kv_heads=kv_heads,
        head_dim=128,
        ranks=ranks,
        mask=_mask(mask, tokens, seed),
        dtype=dtype,
    )


def _mask(name: str, tokens: int, seed: int) -> Mask:
    if name in ("causal", "full"):
        return causal() if name == "causal" else full()
    if name == "window":
        return window(min(4096, tokens // 4), 0)
    rng, cuts = random.Random(seed), [0]
    length = 1000 if name == "short documents" else max(16, tokens // 10)
    while cuts[-1] < tokens:
        cuts.append(min(tokens, cuts[-1] + max(1, round(rng.expovariate(1 / length)))))
    return causal() & documents(cuts)


@contextmanager
def _nothing_remembered() -> Iterator[None]:
    with TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        tuned.cache_clear()
        yield


# Waiting


@_nothing_remembered()
def _waits(ranks: int, mask: str) -> dict[str, object]:
    base, seconds = 4096 * ranks, {}
    tuner = _tuner(cluster_named(f"h100x{ranks}"), _problem(ranks, base, mask, 8, seed=0))
    for name, tokens, seed in (("first", base, 0), ("new length", base + 37, 0), ("new batch", base, 1)):
        asked = _problem(ranks, tokens, mask, 8, seed=seed)
        start = time.process_time()
        plans = _plans(tuner, asked)
        seconds[name] = time.process_time() - start
    start = time.process_time()
    for plan in plans:
        compile_program(plan, ranks - 1)
    seconds["compile"] = time.process_time() - start
    return {"ranks": ranks, "mask": mask, **{name: round(value, 4) for name, value in seconds.items()}}


def _tuner(cluster: Topology, asked: Problem) -> Tuner:
    return Tuner(cluster, default_layout(asked), memory_limit=None)


def _plans(tuner: Tuner, asked: Problem) -> list[Plan]:
    chosen, _ = tuner.choose(asked, needs_gradient=True)
    return list(chosen.plans(asked, default_layout(asked)).values())


def _print_waits(waits: Sequence[dict[str, object]]) -> None:
    table = Table("ranks", "mask", "first", "new length", "new batch", "compile", title="CPU seconds that a call waits")
    for row in waits:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    print(f"limits: first {LIMIT_S}; new length, with compiling, {NEW_LENGTH_LIMIT_S}")


# Choices

Case = tuple[str, int, int, int, str, int]


def _sample(ranks: int) -> list[Case]:
    """Some of all combinations, the same every time."""
    grid = list(product(PRESETS, (ranks,), (32, 8, 4), TOKENS_OF_A_RANK, MASKS))
    chosen = random.Random(ranks).sample(grid, min(len(grid), SAMPLES.get(ranks, 5)))
    if ranks > 64:  # where masks make ranks differ, the thorough tuning takes minutes
        chosen = [(preset, ranks, kv, tokens, "causal") for preset, _, kv, tokens, _ in chosen]
    return [(*one, seed) for seed, one in enumerate(chosen)]


@_nothing_remembered()
def _compared(preset: str, ranks: int, kv_heads: int, tokens: int, mask: str, seed: int) -> dict[str, object] | None:
    cluster = cluster_named(f"{preset}x{ranks}")
    dtype = "float32" if preset == "laptop" else "bfloat16"
    asked = _problem(ranks, tokens * ranks, mask, kv_heads, seed=seed, dtype=dtype)
    try:
        thorough = tune(asked, cluster, directions=DIRECTIONS)
        plans = _plans(_tuner(cluster, asked), asked)
    except MemoryLimitError:
        return None
    best_s = min(trial.time_s for trial in thorough.trials)
    return {
        "preset": preset,
        "ranks": ranks,
        "kv_heads": kv_heads,
        "tokens_of_a_rank": tokens,
        "mask": mask,
        "quick": [f"{plan.method} {plan.assignment}" for plan in plans],
        "thorough": [str(choice) for choice in thorough.chosen.choices.values()],
        "slower": round(sum(_seconds(plan, cluster) for plan in plans) / best_s - 1, 4),
    }


def _seconds(plan: Plan, cluster: Topology) -> float:
    return simulate(plan, cluster, priced_ranks=PRICED_RANKS).time_s


def _print_compared(compared: Sequence[dict[str, object]]) -> None:
    names = ("ranks", "mask", "problems", "median", "mean", "most", "within 2 %", "within 5 %")
    table = Table(*names, title="slower than the best of the thorough tuning")
    for row in _rows(compared):
        table.add_row(*row)
    Console().print(table)


def _rows(compared: Sequence[dict[str, object]]) -> Iterator[tuple[str, ...]]:
    every = sorted({case["ranks"] for case in compared}, key=str)
    for ranks, mask in (*product(every, MASKS), ("all", "all")):
        alike = [case for case in compared if ranks in (case["ranks"], "all") and mask in (case["mask"], "all")]
        slower = [float(str(case["slower"])) for case in alike]
        if slower:
            shares = [sum(one <= limit for one in slower) / len(slower) for limit in (0.02, 0.05)]
            figures = (median(slower), mean(slower), max(slower))
            yield str(ranks), mask, str(len(slower)), *(f"{x:.1%}" for x in figures), *(f"{x:.0%}" for x in shares)


if __name__ == "__main__":
    sys.exit(main())
