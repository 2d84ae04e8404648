"""A call, in five stages: canonical options, problem, plans, program, agreement.

If one rank refuses a call in any stage, all ranks raise. The stages make an `Engine`, which is kept: later calls like
this one find it after the second stage and go straight to its passes. The program is compiled before ranks agree, so
that a rank on which that fails can still tell the others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from mesh_attention.arguments import CallOptions, Softmax, TensorKind, needs_gradient
from mesh_attention.comm.base import Comm
from mesh_attention.errors import UsageError
from mesh_attention.execution.compiled import compile_program
from mesh_attention.execution.engine import Engine
from mesh_attention.execution.graphs import CapturedPasses, GraphMemory
from mesh_attention.plan.assignment import Assignment, Axis, Tile
from mesh_attention.plan.layout import Cached, Layout
from mesh_attention.plan.plan import Plan, PlanRequest
from mesh_attention.plan.steps import DIRECTIONS, Direction
from mesh_attention.problem import Problem
from mesh_attention.session.agreement import Statement
from mesh_attention.session.session import Session

MAX_ENGINES, MAX_TURN_ENGINES = 128, 16
"""Engines kept, the most recently used ones; ranks make the same calls, so they drop the same ones. Those of turns of a
cache are counted apart: most turns have a layout of their own."""
QkvKinds = tuple[TensorKind, TensorKind, TensorKind]
"""Those of one rank's q, k and v."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call in its canonical form: equal calls are equal values, however their arguments were spelled.

    Otherwise two spellings of one call could leave a rank waiting for an agreement while the others, which know the
    call, begin its pass.
    """

    problem: Problem
    softmax: Softmax
    deterministic: bool
    layout: Layout
    gradient: bool
    may_keep: bool
    cuda_graphs: bool

    def plan_request(self, device: torch.device) -> PlanRequest:
        return PlanRequest(
            problem=self.problem,
            layout=self.layout,
            on_gpu=device.type == "cuda",
            needs_gradient=self.gradient,
            may_keep=self.may_keep,
        )


@lru_cache(maxsize=4 * MAX_ENGINES)
def derive_problem(options: CallOptions, kinds: QkvKinds, ranks: int) -> tuple[Problem, Softmax]:
    """Problem and softmax of a call, from checked options and one rank's tensors. Cached: every call asks for them."""
    problem = options.problem(*kinds, ranks=ranks)
    return problem, options.softmax(problem.head_dim_qk)


@dataclass(frozen=True)
class PlanningTalk:
    """What ranks say to each other while they plan a call together. Each message is also an agreement on the call.

    A rank that fails between two messages tells the others in the next one, so none of them is left waiting.
    """

    session: Session
    device: torch.device
    must_match: Mapping[str, str]

    @property
    def comm(self) -> Comm:
        return self.session.comms_on(self.device)[0]

    def share(self, step: str, payload: Any) -> list[Any]:
        """The payloads of all ranks at a step of planning; any JSON."""
        must_match = {**self.must_match, **{f"{direction} plan": step for direction in DIRECTIONS}}
        statements = self.session.agree(Statement(must_match=must_match, payload=payload), device=self.device)
        return [statement.payload for statement in statements]


class Strategy(Protocol):
    """Makes the plans of both passes, the same on every rank."""

    decides_what_to_keep: ClassVar[bool]
    """True if plans depend on `may_keep`."""

    def plans(self, request: PlanRequest, talk: PlanningTalk | None) -> Mapping[Direction, Plan]:
        """The plans; `talk` is None in a local group."""


class Calls:
    """The engines of one `MeshAttention`, by call.

    Nothing here refers back to the `MeshAttention`. Such a cycle would leave its group to the garbage collector,
    perhaps until after the process group is destroyed, and Gloo's threads do not survive that.
    """

    def __init__(self, session: Session, layout: Layout, strategy: Strategy, *, cuda_graphs: bool) -> None:
        self.session, self.layout, self.strategy, self.cuda_graphs = session, layout, strategy, cuda_graphs
        self.engines: dict[Hashable, Engine] = {}
        self.turn_engines: dict[Hashable, Engine] = {}
        self.forward_passes = 0
        """Forward passes asked for so far, except those that one rank makes as a single kernel call."""
        self.observers: list[Callable[[Engine, torch.device], Engine]] = []
        """Wrap the engine of every call, while recordings are made."""
        self._graph_memories: dict[torch.device, GraphMemory] = {}

    def engine(
        self,
        tensors: Sequence[Sequence[Tensor]],
        options: CallOptions,
        *,
        layout: Layout | None = None,
        gradient: bool | None = None,
        may_keep: bool = True,
        stretched_to: tuple[CallOptions, Layout] | None = None,
    ) -> Engine:
        """The engine for inputs like these, q, k and v of each local rank, on this layout or the usual one.

        `gradient` says whether a backward pass follows, for callers whose tensors and grad mode do not show it.
        `may_keep` says whether forward can leave anything but its results for backward. `stretched_to` are options and
        layout of the call that is made, if this one is a typical one like it (`Engine.stretched`). Ranks agree on the
        typical one; the caller makes sure that they have the same in mind.
        """
        self.forward_passes += 1
        with self.session.telling():
            options = options.checked()  # stage 1
            if gradient is None:
                gradient = needs_gradient(tensor for rank in tensors for tensor in rank)
            kinds: list[QkvKinds] = [tuple(map(TensorKind.of, rank)) for rank in tensors]  # type: ignore[misc]
            problem, softmax = derive_problem(options, kinds[0], self.session.size)  # stage 2
            call = Call(
                problem=problem,
                softmax=softmax,
                deterministic=options.deterministic,
                layout=layout or self.layout,
                gradient=gradient,
                may_keep=may_keep and gradient and not self.cuda_graphs and self.strategy.decides_what_to_keep,
                cuda_graphs=self.cuda_graphs,
            )
            # Kinds are in the key too: with seq_len= given, the problem does not show how many tokens this rank holds.
            key = call, *kinds
            is_turn = isinstance(call.layout, Cached)
            kept, most = (self.turn_engines, MAX_TURN_ENGINES) if is_turn else (self.engines, MAX_ENGINES)
            engine = kept.pop(key, None)
        engine = engine or self._new_engine(call, options, kinds)
        kept[key] = engine  # the most recently used comes last
        if len(kept) > most:
            del kept[next(iter(kept))]
        if stretched_to is not None:
            options, exact_layout = stretched_to
            with self.session.telling():
                problem, _ = derive_problem(options.checked(), kinds[0], self.session.size)
                engine = engine.stretched(problem, exact_layout)
        for observe in self.observers:
            engine = observe(engine, kinds[0][0].device)
        return engine

    def _new_engine(self, call: Call, options: CallOptions, kinds: Sequence[QkvKinds]) -> Engine:
        """Plans, program and agreement of a call that is new to this rank."""
        device, session = kinds[0][0].device, self.session
        with session.telling():
            comms = session.comms_on(device)
            self._check_graphs(device, comms)
            # In a local group, each rank judges by its own tensors, as it would in a process of its own.
            must_match = [_must_match(call, derive_problem(options, own, session.size)[0], device) for own in kinds]
        talk = None if session.is_local else PlanningTalk(session, device, must_match[0])
        with session.telling():
            # Stage 3
            plans = self.strategy.plans(call.plan_request(device), talk)
            _check_keep(plans, cuda_graphs=self.cuda_graphs)
            planned = {f"{direction} plan": f"{plan!r}" for direction, plan in plans.items()}
            statements = [
                Statement(must_match={**rank, **planned}, holds=_holds(own), expected=_shard_sizes(call, session.size))
                for rank, own in zip(must_match, kinds, strict=True)
            ]
            # Stage 4
            engine = Engine(
                problem=call.problem,
                softmax=call.softmax,
                deterministic=call.deterministic,
                session=session,
                comms=comms,
                agreed=statements[0],
                programs=cache(lambda direction: [compile_program(plans[direction], comm.rank) for comm in comms]),
                captured=None if isinstance(call.layout, Cached) else self._captured(device),
            )
            engine.prepare(device)
        # Stage 5, not inside `telling`: if this raises, the other ranks raise as well, or cannot be reached.
        session.agree(*statements, device=device)
        return engine

    def _check_graphs(self, device: torch.device, comms: Sequence[Comm]) -> None:
        if not self.cuda_graphs:
            return
        if device.type != "cuda":
            raise UsageError(f"cuda_graphs=True needs CUDA tensors, got {device}")
        if not all(comm.is_capturable for comm in comms):
            raise UsageError(
                "cuda_graphs=True needs transfers that a CUDA graph can capture, and this group's cannot be; "
                "use NCCL, or leave cuda_graphs out"
            )

    def _captured(self, device: torch.device) -> CapturedPasses | None:
        if not self.cuda_graphs:
            return None
        return CapturedPasses(self._graph_memories.setdefault(device, GraphMemory(device)))


# What ranks compare


def _must_match(call: Call, problem: Problem, device: torch.device) -> dict[str, str]:
    return {
        "operation": "attention",
        **{field.name: str(getattr(problem, field.name)) for field in fields(problem)},
        "softmax": str(call.softmax),
        "device": device.type,
        "deterministic": str(call.deterministic),
        "cuda_graphs": str(call.cuda_graphs),
        "gradient": "needed" if call.gradient else "not needed",
        "keeping inputs for backward": "allowed" if call.may_keep else "not allowed",
    }


def _holds(kinds: QkvKinds) -> dict[str, int]:
    q, k, _ = kinds
    return {"q": q.shape[1], "kv": k.shape[1]}


def _shard_sizes(call: Call, ranks: int) -> Callable[[int], dict[str, int]]:
    """The tokens of q and of kv that any rank must hold."""
    problem = call.problem
    sides: tuple[tuple[str, Axis, int], ...] = (("q", "row", problem.seq_q), ("kv", "col", problem.seq_kv))
    layouts = [(name, call.layout.along(axis, problem), tokens) for name, axis, tokens in sides]
    return lambda rank: {
        name: sum(map(len, layout.segments(rank, seq_len=tokens, ranks=ranks))) for name, layout, tokens in layouts
    }


def _check_keep(plans: Mapping[Direction, Plan], *, cuda_graphs: bool) -> None:
    forward, backward = plans["forward"], plans["backward"]
    kept = [(plan.schedule.keep, _grid_of_kept(plan)) for plan in (forward, backward)]
    same = kept[0] == kept[1]
    if (forward.schedule.keep or backward.schedule.keep) and not same:
        raise UsageError(
            f"{forward!r} keeps {forward.schedule.keep} on tile {forward.assignment}, but {backward!r} expects "
            f"{backward.schedule.keep} on tile {backward.assignment}; plan both passes with the same keep, Ulysses "
            "degree and waves, and with the same tile if q or kv is kept"
        )
    if cuda_graphs and forward.schedule.keep:
        raise UsageError(
            f"{forward!r} keeps {', '.join(forward.schedule.keep)} for backward, which CUDA graphs cannot hand over; "
            "leave out cuda_graphs, keep or memory_limit"
        )


def _grid_of_kept(plan: Plan) -> Assignment:
    """The grid, as far as kept items depend on it: a place's own shard does not depend on the tile."""
    grid, is_own = plan.assignment, plan.schedule.keep == ("own",)
    return replace(grid, tile=Tile(1, 1), inner=None) if is_own else grid
