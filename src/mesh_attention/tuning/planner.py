"""Choices for a cluster, by a tuning that is cached; and plans of a given choice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import DIRECTIONS, Direction
from mesh_attention.planning.choice import Choice, default_layout
from mesh_attention.planning.comparison import in_few_calls
from mesh_attention.planning.registry import StatedStrategy
from mesh_attention.problem import Problem
from mesh_attention.simulation.simulate import simulate
from mesh_attention.topology import Topology
from mesh_attention.tuning.cache import cached_tune
from mesh_attention.tuning.coarse import can_be_widened, part_of, widened
from mesh_attention.tuning.result import NEAR_TIE, Trial, Tuning
from mesh_attention.tuning.traffic import plan_on


def tuned_choices(
    problem: Problem,
    topology: Topology,
    layout: str,
    needs_gradient: bool,
    *,
    memory_limit: float | None = None,
    is_quick: bool,
) -> tuple[dict[Direction, Choice], Tuning]:
    """The choice of each pass, and the tuning it is from; backward copies forward's if it never runs.

    If `is_quick`, a problem with a local mask may be tuned on a part of its ranks.
    """
    directions = DIRECTIONS if needs_gradient else DIRECTIONS[:1]
    options: dict[str, Any] = {"layout": layout, "memory_limit": memory_limit, "is_quick": is_quick}
    part, on = part_of(problem, topology) if is_quick else (problem, topology)
    tuning, _ = cached_tune(part, on, directions=directions, **options)
    if part.ranks < problem.ranks:
        trials = tuple(trial for trial in tuning.trials if all(map(can_be_widened, trial.choices.values())))
        if trials:
            tuning = replace(tuning, trials=trials)
        else:
            tuning, _ = cached_tune(problem, topology, directions=directions, **options)
    chosen = tuning.chosen.choices
    return {d: widened(chosen.get(d, chosen["forward"]), problem.ranks) for d in DIRECTIONS}, tuning


def plain_choice(problem: Problem, topology: Topology, trial: Trial) -> Choice | None:
    """One choice for all passes of a trial that is as fast without costs, by the prices of a Hopper GPU or with its own
    grouping; None if there is none."""
    first, *others = trial.choices.values()
    if any(other != first for other in others):
        return None
    for choice in dict.fromkeys((replace(first, blocks_per_call=None), first)):
        layout = choice.layout or default_layout(problem)
        plans = StatedStrategy(choice).plans(problem, layout, on_gpu=True, needs_gradient=False)
        times_s = [simulate(plans[direction], topology).time_s for direction in trial.choices]
        if sum(times_s) <= trial.time_s * (1 + NEAR_TIE):
            return choice
    return None


def block_plan_on(topology: Topology, problem: Problem, choice: Choice, direction: Direction) -> Plan:
    """`plan_on` with one block per call, unless the choice states another number, or a rank has many blocks."""
    return plan_on(topology, problem, in_blocks(choice, problem, direction), direction)


def in_blocks(choice: Choice, problem: Problem, direction: Direction) -> Choice:
    """The resolved choice, with the blocks per call that `block_plan_on` plans with."""
    resolved = in_few_calls(choice, problem, direction)
    is_open = resolved.blocks_per_call is None and not resolved.is_collective
    return replace(resolved, blocks_per_call=1) if is_open else resolved


def ring_like(plan: Plan, topology: Topology) -> Plan:
    """Ring-Attention as it is usually run: shards and partials travel along the ring, one block per call."""
    choice = Choice(method="ring", layout=plan.layout, route="ring", partials="ring", keep=plan.schedule.keep)
    return block_plan_on(topology, plan.problem, choice, plan.direction)
