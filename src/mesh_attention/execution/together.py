"""Planning together: rank 0 chooses the plans of a call, and all ranks make them from its words.

In between, ranks share texts, each of which is also an agreement: if one rank refuses, or was asked for something else,
all of them raise. Nobody is left waiting, because a rank that fails between two sharings tells the others in the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mesh_attention.comm.base import Comm
from mesh_attention.errors import DisagreementError, UsageError
from mesh_attention.execution.agreement import Configuration, meet_on_call
from mesh_attention.execution.driving import PlayedRanks, drive
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import Direction
from mesh_attention.problem import Problem


class PlanningTogether(Protocol):
    """What ranks do to plan as one. What they say to each other is any JSON."""

    @property
    def measures(self) -> bool:
        """True if rank 0 may want a measurement by all ranks."""

    def facts(self, device: torch.device) -> Any:
        """What this rank says about itself."""

    def wants_probe(self, problem: Problem, facts: Sequence[Any], comm: Comm) -> bool:
        """Asked on rank 0, with the facts of all ranks."""

    def probe(self, problem: Problem, facts: Sequence[Any], comm: Comm, device: torch.device) -> None:
        """Measure; on all ranks at once."""

    def choose(
        self, problem: Problem, layout: Layout, facts: Sequence[Any], *, needs_gradient: bool, may_keep: bool
    ) -> Any:
        """How to plan; asked on rank 0."""

    def plans_of(self, problem: Problem, layout: Layout, chosen: Any) -> Mapping[Direction, Plan]:
        """The plans that rank 0 chose; made on all ranks."""


def plan_together(
    planning: PlanningTogether, played: PlayedRanks, found: Configuration, tensors: Sequence[Tensor]
) -> Mapping[Direction, Plan]:
    """The plans of a configuration that has none yet, the same on every rank."""
    device, problem = tensors[0].device, found.problem
    comm = played.comms_on(device)[0]

    def share(step: str, says: Any) -> list[Any]:
        with played.ledger.talking(UsageError, DisagreementError):
            return drive(meet_on_call(comm, found, tensors, step=step, says=says))

    with played.telling:
        fact = planning.facts(device)
    facts = share("chosen by rank 0", fact)
    if planning.measures:
        with played.telling:
            is_wanted = comm.rank == 0 and planning.wants_probe(problem, facts, comm)
        if share("to be measured", is_wanted)[0]:
            with played.ledger.talking(UsageError):
                planning.probe(problem, facts, comm, device)
    with played.telling:
        passes = {"needs_gradient": found.gradient, "may_keep": found.may_keep}
        chosen = planning.choose(problem, found.layout, facts, **passes) if comm.rank == 0 else None
    chosen = share("read from rank 0", chosen)[0]
    with played.telling:
        return planning.plans_of(problem, found.layout, chosen)
