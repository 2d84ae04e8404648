"""The ways to plan a decoded step of one layer, and their forecasts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, replace
from typing import Any

from mesh_attention.plan.plan import Plan
from mesh_attention.planners.over_cache import Combining, Queries, StepShape, plan_decode
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.units import format_time
from mesh_attention_lab.comparison import PlanTrial
from mesh_attention_lab.decode_simulator import decode_seconds, simulate_decode

WAYS: dict[str, tuple[Queries, Combining]] = {
    "replicated, all_gather": ("replicated", "all_gather"),
    "replicated, reduce_scatter": ("replicated", "reduce_scatter"),
    "sharded": ("sharded", "reduce_scatter"),
}
"""Simplest first."""


def decode_plans(problem: Problem, *, queries: Queries | None = None) -> dict[str, Plan]:
    """Every way to plan a step, or those of `queries`. Each batch entry is a sequence with its new tokens."""
    shape = StepShape(
        new_tokens=(problem.seq_q,) * problem.batch,
        ranks=problem.ranks,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        head_dim_qk=problem.head_dim_qk,
        head_dim_v=problem.head_dim_v,
        dtype=problem.dtype,
    )
    return {
        name: plan_decode(shape, queries=held, combining=combine)
        for name, (held, combine) in WAYS.items()
        if queries in (None, held)
    }


def decode_trials(
    problem: Problem, topology: Topology, *, queries: Queries | None = None, spans_of: Collection[int] = ()
) -> tuple[PlanTrial, ...]:
    """The chosen way, then the others and why they are not, fastest first."""
    attend_s, trials = decode_seconds(topology.device, problem), []
    for name, plan in decode_plans(problem, queries=queries).items():
        timeline = simulate_decode(plan, topology, attend_s=attend_s, spans_of=spans_of)
        trials.append(PlanTrial.of(name, {"forward": plan}, {"forward": timeline}))
    first, *losers = sorted(trials, key=lambda trial: trial.time_s)
    return first, *(replace(loser, reason=_why_not(loser, first)) for loser in losers)


def decode_trial_as_json(trial: PlanTrial) -> dict[str, Any]:
    (queries, combine), plan = WAYS[trial.family], trial.plans["forward"]
    facts = {"name": trial.family, "queries": queries, "combine": combine, "reason": trial.reason}
    return facts | asdict(trial.forecasts["forward"]) | {"plan": str(plan), "digest": plan.digest}


def _why_not(loser: PlanTrial, chosen: PlanTrial) -> str:
    exposed_s, compute_s = loser.exposed_s - chosen.exposed_s, loser.compute_s - chosen.compute_s
    if loser.time_s <= chosen.time_s:
        return "as fast"
    if compute_s > exposed_s:
        return f"merges and copies for {format_time(compute_s)} longer"
    is_longer = WAYS[chosen.family][1] == "all_gather" != WAYS[loser.family][1]
    return f"{'one more exchange' if is_longer else 'larger exchanges'}: {format_time(exposed_s)} longer"
