"""How good is the tuner's choice, and how long does it take to find? Simulated, on one core.

    python benchmarks/how_good_is_the_tuner.py              # 256 and 1024 H100-class ranks, 1M tokens, causal
    python benchmarks/how_good_is_the_tuner.py --exhaustive # and all candidates with all groupings, at 256 (minutes)

For each problem, it prints the seconds that the tuner took, its choice, and how much slower the best of each other
family is. With --exhaustive, it also finds the fastest of all candidates that could win by their bounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

from rich.console import Console
from rich.table import Table
from run_facts import start_result

from mesh_attention import Problem, causal
from mesh_attention.clusters import cluster_named
from mesh_attention.plan.steps import DIRECTIONS, Direction
from mesh_attention.planners.choice import FAMILIES, Choice, Family, default_layout
from mesh_attention.simulation.simulate import simulate
from mesh_attention.topology import Topology
from mesh_attention.tuning.bounds import plan_on, traffic
from mesh_attention.tuning.candidates import shapes
from mesh_attention.tuning.result import Trial, Tuning
from mesh_attention.tuning.search import groupings
from mesh_attention.tuning.tune import tune
from mesh_attention_lab.bounds import lower_bounds
from mesh_attention_lab.comparison import fastest

STARTRAIL = cast("Family", "startrail")

ROWS: tuple[Family, ...] = (*FAMILIES, STARTRAIL)
LIMIT_S = {256: 10.0, 1024: 60.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--exhaustive", action="store_true", help="simulate all candidates, at 256 ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 1024])
    given = parser.parse_args()
    facts, cases = start_result("how_good_is_the_tuner"), []
    for ranks in given.ranks:
        cluster = cluster_named(f"h100x{ranks}")
        found = [(case, *_timed(*case, cluster)) for case in _cases(ranks)]
        _print(cluster, found)
        for (problem, directions), tuning, seconds in found:
            fact = _fact(problem, directions, tuning, seconds)
            if given.exhaustive and ranks <= 256:
                fact["exhaustive"] = {d: _best_of_all(problem, cluster, d, tuning.chosen) for d in directions}
            cases.append(fact)
    print(json.dumps({**facts, "cases": cases}))
    return 0


Case = tuple[Problem, tuple[Direction, ...]]


def _cases(ranks: int) -> Iterator[Case]:
    for kv_heads in (32, 8):
        problem = Problem.self_attention(
            seq_len=1 << 20, heads=32, kv_heads=kv_heads, head_dim=128, ranks=ranks, mask=causal()
        )
        for directions in (DIRECTIONS[:1], DIRECTIONS[1:], DIRECTIONS):
            yield problem, directions


def _timed(problem: Problem, directions: Sequence[Direction], cluster: Topology) -> tuple[Tuning, float]:
    start = time.process_time()
    tuning = tune(problem, cluster, directions=directions)
    seconds = time.process_time() - start
    bound = startrail(tuning, problem, cluster)
    return replace(tuning, trials=(*tuning.trials, *filter(None, [bound]))), seconds


# StarTrail has no planner here. With degree C, it gathers Q, K and V in teams of C, passes the gathered K and V round
# rings of teams, and reduces the outputs in teams. A rank computes C query shards with n / C key/value shards: the
# blocks of a mesh tile of C rows. It sends everything that mesh does, and also gathers K and V. So it takes at least as
# long as the fastest schedule found for a mesh tile of C rows.


MOST_DEGREES = 2


def startrail(tuning: Tuning, problem: Problem, topology: Topology) -> Trial | None:
    """The bound of its best degree, one for both passes; None where there is none."""
    chosen = tuning.chosen.choices
    layout = next(iter(chosen.values())).layout or default_layout(problem)
    n = problem.ranks
    tiles: dict[int, list[Choice]] = {c: [] for c in range(2, n) if c * c <= n and n % (c * c) == 0}
    for choice in shapes(problem, topology, layout=layout):
        if _startrail_degree(choice) in tiles:
            tiles[choice.assignment.tile.rows].append(choice)

    def least_s(degree: int) -> float:
        return sum(min(traffic(c, problem, topology, direction).bound_s for c in tiles[degree]) for direction in chosen)

    bounds = []
    for degree in sorted(tiles, key=least_s)[:MOST_DEGREES]:
        forecasts = {}
        for direction in chosen:
            tuned = [t.forecasts[direction] for t in tuning.trials if _startrail_degree(t.choices[direction]) == degree]
            forecasts[direction] = min(
                [fastest(tiles[degree], problem, topology, direction), *tuned], key=lambda forecast: forecast.time_s
            )
        bounds.append(Trial(family=STARTRAIL, choices={}, forecasts=forecasts))
    return min(bounds, key=lambda bound: bound.time_s, default=None)


def _startrail_degree(choice: Choice) -> int | None:
    """The degree whose blocks a choice computes without Ulysses; None for other choices."""
    return None if choice.assignment.ulysses_degree > 1 or choice.keep else choice.assignment.tile.rows


def _print(cluster: Topology, found: Sequence[tuple[Case, Tuning, float]]) -> None:
    names = [f"{problem.kv_heads} KV\n{'+'.join(d[:3] for d in directions)}" for (problem, directions), _, _ in found]
    table = Table(
        "", *names, title=f"{cluster.name}, {cluster.ranks} ranks; 1M tokens, causal, 32 heads of 128, bfloat16"
    )
    table.add_row("tuner, CPU s", *(f"{seconds:.1f}" for _, _, seconds in found))
    table.add_row("simulated", *(str(tuning.simulated) for _, tuning, _ in found))
    table.add_row("choice", *("\n".join(map(str, t.chosen.choices.values())) for _, t, _ in found))
    table.add_row("time, ms", *(f"{tuning.chosen.time_s * 1e3:.1f}" for _, tuning, _ in found))
    bounds = [lower_bounds(problem, ds, cluster.device)[0] for (problem, ds), _, _ in found]
    shares = [bound_s / tuning.chosen.time_s for bound_s, (_, tuning, _) in zip(bounds, found, strict=True)]
    table.add_row("compute bound", *(f"{share:.0%}" for share in shares), end_section=True)
    for family in ROWS:
        table.add_row(family, *(_cell(tuning, family) for _, tuning, _ in found))
    Console(width=170).print(table)


def _cell(tuning: Tuning, family: Family) -> str:
    """Time relative to the choice, which is 1."""
    trial = next((t for t in tuning.trials if t.family == family), None)
    if trial is None:
        return "–"
    return f"{'≥ ' if trial.family == STARTRAIL else ''}{trial.time_s / tuning.chosen.time_s:.3f}"


def _fact(problem: Problem, directions: Sequence[Direction], tuning: Tuning, seconds: float) -> dict[str, object]:
    chosen = tuning.chosen
    return {
        "ranks": problem.ranks,
        "kv_heads": problem.kv_heads,
        "directions": list(directions),
        "tuner_cpu_s": round(seconds, 2),
        "limit_s": LIMIT_S.get(problem.ranks),
        "choice": [str(candidate) for candidate in chosen.choices.values()],
        "time_ms": round(chosen.time_s * 1e3, 2),
        "slower": {t.family: round(t.time_s / chosen.time_s, 4) for t in tuning.trials[1:]},
    }


def _best_of_all(problem: Problem, cluster: Topology, direction: Direction, chosen: Trial) -> dict[str, object]:
    """The best of all candidates and groupings with a bound below the choice's time; two ranks are priced for both."""
    candidate = chosen.choices[direction]
    ours = _simulated(candidate, problem, cluster, direction)
    best, best_s, tried = candidate, ours, 0
    for shape in shapes(problem, cluster, layout=candidate.layout or default_layout(problem)):
        if traffic(shape, problem, cluster, direction).bound_s >= ours:
            continue
        for grouping in groupings(shape):
            other = replace(shape, blocks_per_call=grouping)
            seconds = _simulated(other, problem, cluster, direction)
            tried += 1
            if seconds < best_s:
                best, best_s = other, seconds
    found = {"tried": tried, "best": str(best), "choice_over_best": round(ours / best_s, 4)}
    print(f"{problem.kv_heads} KV heads, {direction}: {found}", flush=True)
    return found


def _simulated(candidate: Choice, problem: Problem, cluster: Topology, direction: Direction) -> float:
    plan = plan_on(cluster, problem, candidate, direction)
    return simulate(plan, cluster, priced_ranks=2).time_s


if __name__ == "__main__":
    sys.exit(main())
