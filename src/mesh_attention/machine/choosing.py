"""A choice by price, and the plans that follow from it: the same on every rank that is given the same `Chosen`.

A choice is made for the coarse form of a problem, which stands for all that are like it (`tuning.coarse`), and so are
its plans: a new length of the same model needs neither. With a memory limit, each problem has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from mesh_attention.errors import MemoryLimitError
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import DIRECTIONS, Direction
from mesh_attention.planning.choice import Choice
from mesh_attention.planning.costs import Costs
from mesh_attention.planning.registry import make_plan
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.cache import cached_tune
from mesh_attention.tuning.coarse import coarse, part_of, plan_like, widened
from mesh_attention.tuning.result import Tuning
from mesh_attention.tuning.traffic import costs_on

MOST_KEPT = 256


class PassChoice(NamedTuple):
    """A settled choice, and the costs that order its transfers; None for a method that has no order."""

    choice: Choice
    costs: Costs | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """How to plan both passes; of the coarse form of a problem, or of the problem itself."""

    is_coarse: bool
    passes: dict[Direction, PassChoice]

    def plans(self, problem: Problem) -> Mapping[Direction, Plan]:
        alike = coarse(problem) if self.is_coarse else problem
        plans = {direction: _plan(alike, direction, *one) for direction, one in self.passes.items()}
        return {direction: plan_like(plan, problem) for direction, plan in plans.items()}

    def to_json(self) -> dict[str, Any]:
        passes = {
            direction: {"choice": choice.options, "costs": None if costs is None else asdict(costs)}
            for direction, (choice, costs) in self.passes.items()
        }
        return {"is_coarse": self.is_coarse, "passes": passes}

    @classmethod
    def from_json(cls, written: Any) -> Chosen:
        passes = {
            direction: PassChoice(Choice.of(**one["choice"]), None if one["costs"] is None else Costs(**one["costs"]))
            for direction, one in written["passes"].items()
        }
        return cls(is_coarse=written["is_coarse"], passes=passes)


def by_price(
    problem: Problem, topology: Topology, layout: Layout, *, needs_gradient: bool, memory_nbytes: float | None
) -> tuple[Chosen, Tuning]:
    """The tuner's choice for these ranks. Without gradients only forward is tuned, and backward, which never runs,
    copies it."""
    if memory_nbytes is None:
        try:
            return _tuned(coarse(problem), topology, layout, needs_gradient, None, is_coarse=True)
        except MemoryLimitError:
            pass  # the coarse form may be a little longer than the problem
    return _tuned(problem, topology, layout, needs_gradient, memory_nbytes, is_coarse=False)


@lru_cache(maxsize=MOST_KEPT)
def _tuned(
    problem: Problem,
    topology: Topology,
    layout: Layout,
    needs_gradient: bool,
    memory_nbytes: float | None,
    *,
    is_coarse: bool,
) -> tuple[Chosen, Tuning]:
    part, of_topology = part_of(problem, topology) if is_coarse else (problem, topology)
    tuning, _ = cached_tune(
        part,
        of_topology,
        directions=DIRECTIONS if needs_gradient else DIRECTIONS[:1],
        layout=layout.name,
        memory_nbytes=memory_nbytes,
        is_quick=is_coarse,
    )
    found, times = tuning.chosen.choices, problem.ranks // part.ranks
    passes = {}
    for direction in DIRECTIONS:
        choice = widened(found.get(direction, found["forward"]), times).settled(problem, direction)
        costs = None if choice.is_collective else costs_on(topology, problem, choice, direction)
        passes[direction] = PassChoice(choice, costs)
    return Chosen(is_coarse=is_coarse, passes=passes), tuning


def by_bytes(problem: Problem, choice: Choice) -> Chosen:
    """A choice that needs no prices, for both passes."""
    passes = {direction: PassChoice(choice.settled(problem, direction), None) for direction in DIRECTIONS}
    return Chosen(is_coarse=False, passes=passes)


@lru_cache(maxsize=MOST_KEPT)
def _plan(problem: Problem, direction: Direction, choice: Choice, costs: Costs | None) -> Plan:
    return make_plan(problem, choice, direction=direction, costs=costs)
