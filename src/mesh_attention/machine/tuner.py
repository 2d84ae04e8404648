"""A cost-based choice, and the plans that follow from it: the same on every rank that is given the same `Chosen`.

A choice is made for the coarse form of a problem, the representative of all that are like it (`tuning.coarse`), and so
are its plans. It also serves lengths up to twice as long and half as long, so that a new length of the same model need
not wait. With a memory limit, each problem has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

from mesh_attention.errors import MemoryLimitError
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import DIRECTIONS, Direction
from mesh_attention.planners.choice import Choice
from mesh_attention.planners.costs import Costs
from mesh_attention.planners.make import Price, make_plan, priced
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.representative import can_be_widened, coarse, part_of, retargeted, widened
from mesh_attention.tuning.result import Tuning
from mesh_attention.tuning.stored import cached_tune
from mesh_attention.tuning.traffic import costs_on
from mesh_attention.units import GIB

MOST_KEPT = 256
LARGEST_RATIO = 2.1
"""Lengths whose ratio is at most this have the same choice; a little above 2, because coarse lengths are rounded."""


class PassChoice(NamedTuple):
    """A resolved choice, and the costs that order its transfers; None for a method that has no order."""

    choice: Choice
    costs: Costs | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """How to plan both passes. `lengths` are those of the coarse problem, or None for the problem itself."""

    lengths: tuple[int, int] | None
    passes: dict[Direction, PassChoice]

    def plans(self, problem: Problem, layout: Layout) -> Mapping[Direction, Plan]:
        representative = problem
        if self.lengths is not None:
            representative = replace(coarse(problem), seq_q=self.lengths[0], seq_kv=self.lengths[1])
        plans = {direction: _plan(representative, direction, *chosen) for direction, chosen in self.passes.items()}
        return {direction: retargeted(plan, problem, layout) for direction, plan in plans.items()}

    def keeping_nothing(self) -> Chosen:
        """The same for a forward pass that can hand nothing but its results to backward."""
        passes = {d: chosen._replace(choice=replace(chosen.choice, keep=())) for d, chosen in self.passes.items()}
        return replace(self, passes=passes)

    def to_json(self) -> dict[str, Any]:
        passes = {
            direction: {"choice": choice.options, "costs": None if costs is None else asdict(costs)}
            for direction, (choice, costs) in self.passes.items()
        }
        return {"lengths": self.lengths, "passes": passes}

    @classmethod
    def from_json(cls, written: Any) -> Chosen:
        passes = {
            direction: PassChoice(Choice.of(**fields["choice"]), fields["costs"] and Costs(**fields["costs"]))
            for direction, fields in written["passes"].items()
        }
        lengths = None if written["lengths"] is None else tuple(written["lengths"])
        return cls(lengths=lengths, passes=passes)


class Tuner:
    """Chooses for one machine, and remembers for which coarse problems it has. Both passes are tuned together; without
    gradients only forward is, and backward, which never runs, copies it."""

    def __init__(self, topology: Topology, layout: Layout, memory_limit: float | None) -> None:
        self.topology, self.layout, self.memory_limit = topology, layout, memory_limit
        self.known: dict[bool, dict[Problem, Tuning]] = {True: {}, False: {}}

    def choose(self, problem: Problem, *, needs_gradient: bool) -> tuple[Chosen, Tuning]:
        if self.memory_limit is None:
            known = self.known[needs_gradient]
            alike = find_alike(coarse(problem), known, most_nbytes=self.topology.device.memory_gib * GIB)
            try:
                chosen, known[alike] = tuned(alike, self.topology, self.layout, needs_gradient, None, is_coarse=True)
                return chosen, known[alike]
            except MemoryLimitError:
                pass  # the coarse form may be a little longer than the problem
        return tuned(problem, self.topology, self.layout, needs_gradient, self.memory_limit, is_coarse=False)


def find_alike(own: Problem, known: Mapping[Problem, Tuning], *, most_nbytes: float) -> Problem:
    """The closest known problem that differs only in length, by at most `LARGEST_RATIO`, and whose choice fits into
    memory; `own` if there is none."""
    if own.mask.documents is not None:  # they say where the sequence ends
        return own
    near = {
        other: ratio
        for other, tuning in known.items()
        if (ratio := _ratio(own, other)) <= LARGEST_RATIO
        and replace(own, seq_q=other.seq_q, seq_kv=other.seq_kv) == other
        and tuning.chosen.peak_nbytes * ratio <= most_nbytes
    }
    return min(near, key=lambda other: near[other], default=own)


def _ratio(a: Problem, b: Problem) -> float:
    return max(a.seq_q / b.seq_q, b.seq_q / a.seq_q, a.seq_kv / b.seq_kv, b.seq_kv / a.seq_kv)


@lru_cache(maxsize=MOST_KEPT)
def tuned(
    problem: Problem,
    topology: Topology,
    layout: Layout,
    needs_gradient: bool,
    memory_limit: float | None,
    *,
    is_coarse: bool,
) -> tuple[Chosen, Tuning]:
    """The choice for a problem, and the tuning it is from; backward copies forward's if it never runs.

    If it `is_coarse`, a problem with a local mask may be tuned on a part of its ranks, and the tuning is a quick one.
    """
    directions = DIRECTIONS if needs_gradient else DIRECTIONS[:1]
    options: dict[str, Any] = {"layout": layout, "memory_limit": memory_limit, "is_quick": is_coarse}
    part, on = part_of(problem, topology) if is_coarse else (problem, topology)
    tuning, _ = cached_tune(part, on, directions=directions, **options)
    if part.ranks < problem.ranks:
        trials = tuple(trial for trial in tuning.trials if all(map(can_be_widened, trial.choices.values())))
        if trials:
            tuning = replace(tuning, trials=trials)
        else:
            tuning, _ = cached_tune(problem, topology, directions=directions, **options)
    best = tuning.chosen.choices
    choices = {d: widened(best.get(d, best["forward"]), problem.ranks) for d in DIRECTIONS}
    passes = _passes(problem, choices, partial(costs_on, topology))
    return Chosen(lengths=(problem.seq_q, problem.seq_kv) if is_coarse else None, passes=passes), tuning


def volume_based(problem: Problem, choice: Choice, *, price: Price | None = None) -> Chosen:
    """A choice for both passes; if calls have a price, it decides how large they are."""
    return Chosen(lengths=None, passes=_passes(problem, dict.fromkeys(DIRECTIONS, choice), price))


def _passes(problem: Problem, choices: Mapping[Direction, Choice], price: Price | None) -> dict[Direction, PassChoice]:
    return {direction: PassChoice(*priced(problem, choice, direction, price)) for direction, choice in choices.items()}


@lru_cache(maxsize=MOST_KEPT)
def _plan(problem: Problem, direction: Direction, choice: Choice, costs: Costs | None) -> Plan:
    return make_plan(problem, choice, direction=direction, costs=costs)
