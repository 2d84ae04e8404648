"""Mutated plans: whatever `verify` accepts is executed and must be right. Run it: python tests/campaign/plans.py

A plan is drawn, changed at random (`mutations.py`) and verified. If no rule objects, all its ranks run in this process
(`strict.py`) on a network that is as unhelpful as a real one may be, and their results are compared with dense
attention. Case i of a seed is always the same plan; a failure prints how to build it again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from random import Random

import torch

sys.path.insert(0, str(Path(__file__).parent))

from mutations import mutated
from strict import WrongPlanError, execute

from mesh_attention.errors import UsageError
from mesh_attention.masks import Mask, causal, documents, full, window
from mesh_attention.plan.assignment import CUTS, Tile, divisors, tiles_of
from mesh_attention.plan.layout import LAYOUTS
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.schedule import KEEPABLE, ROUTES
from mesh_attention.planners.choice import Choice
from mesh_attention.planners.make import make_plan
from mesh_attention.planners.over_cache import COMBININGS, QUERIES, StepShape, plan_decode
from mesh_attention.problem import Problem
from mesh_attention.verification.rules import check, format_breaches

MUTANTS = 64
"""Mutants of each plan that is drawn."""
OVER_CACHE = 0.25
"""The share of plans that are of a decoded step."""
SHOWN = 10
"""Failures printed in full; the others are counted."""


# Drawing


def drawn_problem(rng: Random) -> Problem:
    """Up to 8 ranks and 20 tokens, float64; often fewer tokens than ranks, and cross attention."""
    ranks = rng.choice((1, 2, 2, 3, 3, 4, 4, 4, 5, 6, 8))
    seq_q = rng.choice((rng.randint(1, ranks + 1), rng.randint(1, 20)))
    seq_kv = seq_q if rng.random() < 0.7 else rng.randint(1, 20)
    kv_heads = rng.choice((1, 2, 2, 4))
    return Problem(
        seq_q=seq_q,
        seq_kv=seq_kv,
        heads=kv_heads * rng.choice((1, 1, 2)),
        kv_heads=kv_heads,
        head_dim_qk=rng.randint(1, 3),
        head_dim_v=rng.randint(1, 3),
        ranks=ranks,
        batch=rng.choice((1, 1, 2)),
        dtype="float64",
        mask=_drawn_mask(rng, seq_q, seq_kv),
    )


def _drawn_mask(rng: Random, seq_q: int, seq_kv: int) -> Mask:
    mask = rng.choice((full(), causal(), causal(), window(rng.randint(-1, seq_kv), rng.randint(-1, seq_kv))))
    if rng.random() < 0.25:
        inner = rng.randint(0, 3)
        q, kv = ([0, *sorted(rng.randint(0, seq) for _ in range(inner)), seq] for seq in (seq_q, seq_kv))
        mask &= documents(q) if seq_q == seq_kv and rng.random() < 0.7 else documents(q, kv)
    return mask


def drawn_decode_plan(rng: Random) -> Plan:
    """A plan of a decoded step, often with fewer sequences or rows than ranks."""
    ranks, kv_heads = rng.choice((1, 2, 2, 3, 3, 4, 4, 5, 6, 8)), rng.choice((1, 2))
    most = rng.choice((1, 1, 2, 4))
    shape = StepShape(
        new_tokens=tuple(rng.randint(1, most) for _ in range(rng.choice((1, 1, 2, 3, ranks, ranks + 2)))),
        ranks=ranks,
        heads=kv_heads * rng.choice((1, 1, 2)),
        kv_heads=kv_heads,
        head_dim_qk=rng.randint(1, 3),
        head_dim_v=rng.randint(1, 3),
        dtype="float64",
    )
    return plan_decode(shape, queries=rng.choice(QUERIES), combining=rng.choice(COMBININGS))


def drawn_plan(rng: Random) -> Plan:
    """A plan of any method with any options that it takes."""
    if rng.random() < OVER_CACHE:
        return drawn_decode_plan(rng)
    problem = drawn_problem(rng)
    degree = rng.choice([u for u in divisors(problem.ranks) if problem.kv_heads % u == 0])
    tile = rng.choice(tiles_of(problem.ranks // degree))
    cut = rng.choice(CUTS if degree > 1 else CUTS[:1])
    choice = Choice(
        tile=tile,
        ulysses_degree=degree,
        layout=rng.choice(tuple(LAYOUTS.values())),
        keep=rng.choice([keep for keep in KEEPABLE if degree > 1 or "own" not in keep]) if rng.random() < 0.5 else (),
        waves=rng.choice(divisors(problem.kv_heads // degree) if cut == "heads" else divisors(degree)[1:]),
        cut=cut,
    )
    if rng.random() < 0.3:
        choice = replace(choice, method="attention2d")
    else:
        blocks, inner = rng.choice((1, 1, 2, 3, 4)), Tile(*(rng.choice(divisors(s)) for s in (tile.rows, tile.cols)))
        routes = {"route": rng.choice(ROUTES), "partials": rng.choice(ROUTES)}
        choice = replace(choice, blocks_per_call=blocks, **routes)  # type: ignore[arg-type]
        if rng.random() < 0.3:
            choice = replace(choice, inner=inner)
    direction = rng.choice(("forward", "forward", "backward"))
    try:
        return make_plan(problem, choice, direction=direction)
    except UsageError:  # inner rings under a mask that leaves out shards
        return make_plan(problem, replace(choice, inner=None), direction=direction)


@lru_cache(maxsize=4)
def base_plan(seed: int, number: int) -> Plan:
    return drawn_plan(Random(f"plan {seed} {number}"))


def case(seed: int, index: int) -> Plan:
    """The plan of one case: every `MUTANTS`-th is as it was planned, the others are changed."""
    plan = base_plan(seed, index // MUTANTS)
    return mutated(plan, Random(f"mutation {seed} {index}")) if index % MUTANTS else plan


# Judging


@dataclass
class Tally:
    """What became of the plans."""

    plans: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    executed: int = 0
    repeated: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    reports: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.plans += other.plans
        self.executed += other.executed
        self.repeated += other.repeated
        self.refused += other.refused
        self.failures += other.failures
        self.reports += other.reports[: max(0, SHOWN - len(self.reports))]

    def __str__(self) -> str:
        rules = ", ".join(f"{rule} {count:,}" for rule, count in self.refused.most_common())
        failed = ", ".join(f"{what} {count:,}" for what, count in self.failures.most_common())
        accepted = self.executed + self.repeated
        return "\n".join(
            [
                f"{self.plans:,} plans: {self.plans - accepted:,} refused, {accepted:,} accepted, of which "
                f"{self.executed:,} executed and {self.repeated:,} equal to one executed before",
                f"refused by (a plan may break several rules): {rules}",
                f"failures: {failed or 'none'}",
            ]
        )


def judge(seed: int, index: int, tally: Tally, executed: set[int]) -> None:
    """Draw one case, verify it and, if it is accepted, execute it."""
    tally.plans += 1
    try:
        plan = case(seed, index)
    except UsageError:
        tally.refused["constructor"] += 1
        return None
    except Exception as error:
        return _fail(
            tally, seed, index, f"building crashed with {type(error).__name__}", traceback.format_exc(limit=-3)
        )
    try:
        breaches = check(plan)
        if index % 8 == 1:
            format_breaches(plan, breaches)  # what `verify` does beyond that, which takes long
    except Exception as error:
        return _fail(tally, seed, index, f"verify crashed with {type(error).__name__}", traceback.format_exc(limit=-3))
    rules = {breach.rule for breach in breaches}
    if rules:
        tally.refused.update(rules)
        if not index % MUTANTS:
            _fail(tally, seed, index, f"a planner's plan breaks {', '.join(sorted(rules))}", repr(plan))
        return None
    key = hash(plan)
    if key in executed:
        tally.repeated += 1
        return None
    executed.add(key)
    tally.executed += 1
    try:
        execute(plan, Random(f"network {seed} {index}"))
    except WrongPlanError as failure:
        _fail(tally, seed, index, failure.kind, str(failure))
    except Exception as error:
        _fail(tally, seed, index, f"execution crashed with {type(error).__name__}", traceback.format_exc(limit=-4))
    return None


def _fail(tally: Tally, seed: int, index: int, kind: str, detail: str) -> None:
    tally.failures[kind] += 1
    lines = [f"{kind}: case {index} of seed {seed}", *detail.splitlines()[-6:]]
    lines.append(f"  python tests/campaign/plans.py --seed {seed} --first {index} --count 1 --processes 1 --show")
    tally.reports.append("\n".join(lines))


def run_cases(seed: int, indices: range, deadline: float) -> Tally:
    torch.set_num_threads(1)
    tally, executed = Tally(), set[int]()
    for index in indices:
        if time.monotonic() > deadline:
            break
        judge(seed, index, tally, executed)
    return tally


def _shares(arguments: argparse.Namespace) -> Iterator[tuple[int, range, float]]:
    """The cases in runs of whole plans; all mutants of a plan are judged by one process."""
    first, stop = arguments.first, arguments.first + arguments.count
    deadline = time.monotonic() + arguments.seconds
    run = MUTANTS * 8
    for start in range(first - first % run, stop, run):
        yield arguments.seed, range(max(first, start), min(stop, start + run)), deadline


def _run_share(share: tuple[int, range, float]) -> Tally:
    return run_cases(*share)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000, help="cases to judge")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the first case")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this time")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="print each plan, step by step")
    arguments = parser.parse_args()
    begun = time.monotonic()
    if arguments.show:
        for index in range(arguments.first, arguments.first + arguments.count):
            print(case(arguments.seed, index))
    total = Tally()
    with multiprocessing.get_context("fork").Pool(arguments.processes) as pool:
        for tally in pool.imap_unordered(_run_share, _shares(arguments)):
            total.add(tally)
    for report in total.reports:
        print(report, end="\n\n")
    took = time.monotonic() - begun
    print(total)
    rate = total.plans / took / arguments.processes
    print(f"seed {arguments.seed}, {took:.0f} s, {rate:.0f} plans a second and process")
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
