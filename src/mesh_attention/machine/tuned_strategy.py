"""`TunedStrategy`: cost-based plans for the machine that the ranks are on, or volume-based where costs are not known.

Rank 0 picks and broadcasts the strategy, a `Chosen`; every rank builds the same plans from it. One line in the log says
what was chosen, for which machine, and how to choose something else.

A choice is made for the coarse form of a problem, the representative of all that are like it
(`tuning.representative`), and so are its plans. It also serves lengths up to twice as long and half as long, so that a
new length of the same model need not wait. With a memory limit, each problem has its own.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from mesh_attention.comm.base import Comm, innermost
from mesh_attention.errors import MemoryLimitError, TopologyError, UsageError
from mesh_attention.execution.call import PlanningTalk
from mesh_attention.machine.detected_cluster import (
    Facts,
    Machine,
    facts_of,
    keep_measured,
    known_machine,
    measured_file,
    preset_machine,
    ranks_per_node,
    read_kept,
    slug,
)
from mesh_attention.machine.fit import fit_topology
from mesh_attention.machine.timing import probe
from mesh_attention.plan.layout import LAYOUTS, Cached, Layout, Listed, TypicalTurn, Zigzag
from mesh_attention.plan.plan import Plan, PlanRequest
from mesh_attention.plan.steps import DIRECTIONS, Direction
from mesh_attention.planners.choice import Choice, least_volume_choice
from mesh_attention.planners.costs import Costs
from mesh_attention.planners.make import CostsOf, StatedStrategy, gpu_costs, make_plan, with_costs
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.bounds import costs_on
from mesh_attention.tuning.representative import can_be_widened, coarse, part_of, retargeted, widened
from mesh_attention.tuning.result import Tuning
from mesh_attention.tuning.stored import cached_tune
from mesh_attention.units import GIB, format_time

log = logging.getLogger(__name__)
MOST_KEPT = 256
LARGEST_RATIO = 2.1
"""Lengths whose ratio is at most this have the same choice; a little above 2, because coarse lengths are rounded."""
OVERRIDE = 'to decide yourself: MeshAttention(group, choice="…") or cluster=…'


@dataclass
class TunedStrategy:
    """Chooses method, degree, tile, placement and grouping. `rank` is this process's, or 0 in a local group.

    `cluster` is where prices come from: a cluster, a measurement by the ranks, or what is known about the machine. In
    the last case, the choice of ranks that do not talk over NCCL is volume-based.
    """

    layout: Layout
    cluster: Topology | Literal["measure"] | None
    memory_limit: float | None
    rank: int
    _measured: dict[Hashable, Machine] = field(default_factory=dict)
    _tuners: dict[tuple[Topology, Layout], Tuner] = field(default_factory=dict)
    _said: set[Hashable] = field(default_factory=set)
    decides_what_to_keep: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.cluster is not None and not self._has_known_layout:
            known = ", ".join(LAYOUTS)
            raise UsageError(
                f"layout {self.layout!r}: the tuner knows only {known}; use one of them, or leave out cluster="
            )

    @property
    def _has_known_layout(self) -> bool:
        """False for a layout of the caller's own, which choices, known by their texts, cannot name."""
        return type(LAYOUTS.get(self.layout.name)) is type(self.layout)

    def plans(self, request: PlanRequest, talk: PlanningTalk | None = None) -> Mapping[Direction, Plan]:
        """Rank 0 picks and broadcasts a cost-based strategy; every rank builds the same plans."""
        if talk is not None and self._is_cost_based(talk):
            return self._plans_of_rank_0(request, talk)
        if isinstance(self.cluster, Topology):
            return self._choose(request, ()).plans(request.problem, request.layout)
        return StatedStrategy(self._volume_based(request)).plans(request)

    def _is_cost_based(self, talk: PlanningTalk) -> bool:
        has_prices = self.cluster is not None or (talk.device.type == "cuda" and talk.comm.is_capturable)
        return has_prices and talk.comm.size > 1 and self._has_known_layout

    def _plans_of_rank_0(self, request: PlanRequest, talk: PlanningTalk) -> Mapping[Direction, Plan]:
        """Ranks say which host and device they have, measure if need be, and take what rank 0 chooses."""
        comm, problem = talk.comm, request.problem
        facts = [Facts(**fields) for fields in talk.share("chosen by rank 0", asdict(facts_of(talk.device)))]
        if self.cluster == "measure":
            is_wanted = comm.rank == 0 and self._wants_probe(problem, facts, comm)
            if talk.share("to be measured", is_wanted)[0]:
                with talk.session.call(UsageError):
                    self._probe(problem, facts, comm, talk.device)
        chosen = self._choose(request, facts).to_json() if comm.rank == 0 else None
        return Chosen.from_json(talk.share("read from rank 0", chosen)[0]).plans(problem, request.layout)

    def _wants_probe(self, problem: Problem, facts: Sequence[Facts], comm: Comm) -> bool:
        """True unless this object, or a file of an earlier job, has a measurement of these ranks."""
        if _key(problem) in self._measured:
            return False
        path = measured_file(problem, facts, _transport(comm))
        cluster = read_kept(path)
        if cluster is None or cluster.ranks != len(facts):
            return True
        self._measured[_key(problem)] = Machine(topology=cluster, source=f"measured earlier, {path}")
        return False

    def _probe(self, problem: Problem, facts: Sequence[Facts], comm: Comm, device: torch.device) -> None:
        here = ranks_per_node([rank.host for rank in facts])
        times = probe(problem, comm=comm, device=device, ranks_per_node=here)
        if comm.rank != 0:
            return
        unmeasured = Machine(topology=None, source="volume-based") if device.type == "cpu" else preset_machine(facts)
        try:
            topology = fit_topology(
                times,
                name=slug(times.device),
                ranks=comm.size,
                ranks_per_node=here,
                unmeasured=unmeasured.topology,
            )
        except TopologyError as error:
            log.warning("the measurement of this group is not used: %s", error)
            self._measured[_key(problem)] = unmeasured
            return
        keep_measured(
            measured_file(problem, facts, _transport(comm)),
            topology,
            f"Measured by {comm.size} ranks at their first call. Remove this file to measure again.",
        )
        self._measured[_key(problem)] = Machine(topology=topology, source="measured")

    def _choose(self, request: PlanRequest, facts: Sequence[Facts]) -> Chosen:
        problem, layout = request.problem, _typical(request.layout)
        machine = self._machine(problem, facts)
        topology = machine.topology
        if topology is None:
            choice = replace(self._volume_based(request), layout=layout)
            return volume_based(problem, choice, costs_of=gpu_costs if facts[0].memory_gib else None)
        tuner = self._tuners.setdefault((topology, layout), Tuner(topology, layout, self.memory_limit))
        chosen, tuning = tuner.choose(problem, needs_gradient=request.needs_gradient)
        chosen = chosen if request.may_keep else chosen.keeping_nothing()
        choices = {direction: chosen.passes[direction].choice for direction in tuning.chosen.choices}
        self._say((*choices.values(), machine), describe_choice(problem, machine, choices, tuning))
        return chosen

    def _volume_based(self, request: PlanRequest) -> Choice:
        problem, may_keep = request.problem, request.needs_gradient and request.may_keep
        passes = DIRECTIONS if request.needs_gradient else DIRECTIONS[:1]
        choice = least_volume_choice(problem, request.layout, passes, may_keep=may_keep)
        if problem.ranks > 1:
            self._say(choice, f"{choice} for {_describe(problem)}: it moves the fewest bytes; {OVERRIDE}")
        return choice

    def _machine(self, problem: Problem, facts: Sequence[Facts]) -> Machine:
        if isinstance(self.cluster, Topology):
            return Machine(topology=self.cluster, source="given")
        return self._measured[_key(problem)] if self.cluster == "measure" else known_machine(facts)

    def _say(self, what: Hashable, line: str) -> None:
        """Log the line, unless the same choice for the same machine has been logged before."""
        if self.rank == 0 and what not in self._said:
            self._said.add(what)
            log.info("mesh-attention: %s", line)


def _typical(layout: Layout) -> Layout:
    """The layout that prices are worked out for. Those of a cache or of packed documents differ from call to call, but
    hardly in price."""
    if isinstance(layout, Listed):
        return Zigzag()
    return TypicalTurn() if isinstance(layout, Cached) else layout


def describe_choice(problem: Problem, machine: Machine, choices: Mapping[Direction, Choice], tuning: Tuning) -> str:
    """One line: what was chosen, for which machine, why, and how to choose something else."""
    texts = {direction: str(choice) for direction, choice in choices.items()}
    text, *differing = dict.fromkeys(texts.values())
    what = "; ".join(f"{direction} {text}" for direction, text in texts.items()) if differing else text
    times = ", ".join(f"{format_time(f.time_s)} {direction}" for direction, f in tuning.chosen.forecasts.items())
    others = tuning.trials[1:]
    why = tuning.tie_words.rstrip(".")
    if others and not why:
        why = f"next best {others[0].family} with {format_time(others[0].time_s)} in all"
    return "; ".join([what, f"for {_describe(problem)} ({machine}): forecast {times}", *filter(None, [why]), OVERRIDE])


def _describe(problem: Problem) -> str:
    cached = f" after {problem.seq_kv - problem.seq_q:,} cached" if problem.seq_kv > problem.seq_q else ""
    return f"{problem.seq_q:,} tokens{cached} on {problem.ranks} ranks"


def _key(problem: Problem) -> Hashable:
    return problem.dtype, problem.head_dim_qk, problem.head_dim_v


def _transport(comm: Comm) -> str:
    return f"{type(innermost(comm)).__name__} {'on the device' if comm.is_capturable else 'through the host'}"


# The choice, from which every rank makes the same plans


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


def volume_based(problem: Problem, choice: Choice, *, costs_of: CostsOf | None = None) -> Chosen:
    """A choice for both passes; if calls have costs, these decide how large they are."""
    return Chosen(lengths=None, passes=_passes(problem, dict.fromkeys(DIRECTIONS, choice), costs_of))


def _passes(
    problem: Problem, choices: Mapping[Direction, Choice], costs_of: CostsOf | None
) -> dict[Direction, PassChoice]:
    return {
        direction: PassChoice(*with_costs(problem, choice, direction, costs_of))
        for direction, choice in choices.items()
    }


@lru_cache(maxsize=MOST_KEPT)
def _plan(problem: Problem, direction: Direction, choice: Choice, costs: Costs | None) -> Plan:
    return make_plan(problem, choice, direction=direction, costs=costs)
