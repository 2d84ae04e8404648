"""Engines: everything a call needs that outlives it, made at the first call of a configuration and then kept.

`Engines.find` works out the problem and its plans, lets the ranks agree on them, and keeps the result. An `Engine` runs
passes: it compiles each rank's program once and hands it to executors.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from mesh_attention.arguments import CallOptions, Softmax, check_tensors, needs_gradient
from mesh_attention.comm.base import Comm, Work
from mesh_attention.comm.marked import Marked
from mesh_attention.errors import DisagreementError, UsageError
from mesh_attention.execution.agreement import Configuration, agree_on_call, number_of_call
from mesh_attention.execution.buffers import DTYPES, STATISTICS, Buffer, Meter, fields_of
from mesh_attention.execution.compiled import Compiled, compile_program, describe_post, peers_of
from mesh_attention.execution.driving import Ledger, PlayedRanks
from mesh_attention.execution.executor import Executor, Fields
from mesh_attention.execution.graphs import CapturedPasses, GraphMemory, Tensors
from mesh_attention.execution.rehearsal import Nowhere, RehearsedKernel, RehearsedMerging, this_thread
from mesh_attention.execution.together import PlanningTogether, plan_together
from mesh_attention.kernels.base import Demand, Kernel, Scores
from mesh_attention.kernels.merging import Merging
from mesh_attention.kernels.select import choose_kernel, choose_merging
from mesh_attention.plan.assignment import Assignment, Tile
from mesh_attention.plan.layout import Cached, Layout
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import INPUTS, Direction, Item
from mesh_attention.problem import Problem

MOST_ENGINES = 128
"""Configurations kept, the most recently used ones; ranks make the same calls, so they drop the same ones."""
Drive = Callable[[Sequence[Generator[Work, None, dict[str, Fields]]]], list[dict[str, Fields]]]


class Planning(Protocol):
    """Makes the plans of both passes, the same on every rank (`planning.registry.Planning`)."""

    @property
    def decides_what_to_keep(self) -> bool:
        """True if plans depend on `may_keep`."""

    def plans(
        self, problem: Problem, layout: Layout, *, on_gpu: bool, needs_gradient: bool, may_keep: bool
    ) -> Mapping[Direction, Plan]:
        """The plans as each rank makes them alone."""

    def together(self, comm: Comm, device: torch.device) -> PlanningTogether | None:
        """How the ranks plan as one; None if each plans alone."""


class Engines:
    """The engines of one group, by configuration.

    They do not refer to the `MeshAttention` they belong to, so that a group is released with the last reference to it:
    left to the garbage collector, it may outlive the process group, and Gloo's threads do not survive that.
    """

    def __init__(self, played: PlayedRanks, layout: Layout, planning: Planning, *, cuda_graphs: bool) -> None:
        self.played, self.layout, self.planning, self.cuda_graphs = played, layout, planning, cuda_graphs
        self.known: dict[Hashable, Engine] = {}
        self._meanings: dict[tuple[Any, ...], Hashable] = {}
        """The keys of `known` by how a call was spelled; to avoid working them out again."""
        self.forward_passes = 0
        """Forward passes asked for so far, except those that one rank makes as a single kernel call."""
        self.watchers: list[Callable[[Engine, torch.device], Engine]] = []
        """Wrap every engine that is found, while recordings are made."""
        self._graph_memories: dict[torch.device, GraphMemory] = {}

    @property
    def ranks(self) -> int:
        return self.played.size

    def find(
        self,
        tensors: Sequence[Sequence[Tensor]],
        options: CallOptions,
        *,
        layout: Layout | None = None,
        gradient: bool | None = None,
        may_keep: bool = True,
    ) -> Engine:
        """The engine for inputs like these, q, k and v of each rank played here, on this layout or the usual one.

        `gradient` says whether there will be a backward pass, where tensors and grad mode do not; `may_keep`, whether
        forward can hand anything but its results to it.
        """
        self.forward_passes += 1
        with self.played.telling:
            options = options.checked()
            flat = [tensor for rank in tensors for tensor in rank]
            gradient = needs_gradient(flat) if gradient is None else gradient
            may_keep = may_keep and gradient and not self.cuda_graphs and self.planning.decides_what_to_keep
            layout = layout or self.layout
            kinds = ((tensor.shape, tensor.dtype, tensor.device) for tensor in flat)
            spelling = (options, layout, gradient, may_keep, *kinds)
            if spelling not in self._meanings:
                if len(self._meanings) >= 4 * MOST_ENGINES:
                    self._meanings.clear()
                self._meanings[spelling] = self._meaning(spelling, tensors)
            key = self._meanings[spelling]
            engine = self.known.pop(key, None)
        engine = engine or self._new(tensors, options, layout, gradient, may_keep)
        if not isinstance(layout, Cached):  # the next turn of a cache has another layout
            self.known[key] = engine  # the most recently used comes last
        if len(self.known) > MOST_ENGINES:
            del self.known[next(iter(self.known))]
        for watch in self.watchers:
            engine = watch(engine, flat[0].device)
        return engine

    def _meaning(self, spelling: tuple[Any, ...], tensors: Sequence[Sequence[Tensor]]) -> Hashable:
        """A key of the call that does not depend on its spelling: arguments may be given or left to their defaults.

        Otherwise a rank with one spelling would ask for agreement while others, with another, find what they know.
        """
        options, *others = spelling
        try:
            problem = options.problem(tensors[0], self.ranks)
            return (problem, options.softmax(problem), options.deterministic, *others)
        except UsageError:
            return spelling  # refused later, on every rank

    def _new(
        self,
        tensors: Sequence[Sequence[Tensor]],
        options: CallOptions,
        layout: Layout,
        gradient: bool,
        may_keep: bool,
    ) -> Engine:
        with self.played.telling:
            device = tensors[0][0].device
            found = self._configuration(tensors, options, layout, gradient, may_keep)
            comms = self.played.comms_on(device)
        found = replace(found, plans=self._plans(found, comms[0], tensors[0]))
        with self.played.telling:
            _check_keep(found.plans, cuda_graphs=self.cuda_graphs)
            number = number_of_call(found, tensors[0])
            captured = None if isinstance(layout, Cached) else self._captured(device)
            engine = Engine.of(found, self.played, comms, number, captured)
            engine.prepare(device)
        with self.played.ledger.talking(UsageError, DisagreementError):
            self.played.drive([agree_on_call(comm, found, rank) for comm, rank in zip(comms, tensors, strict=True)])
        return engine

    def _configuration(
        self,
        tensors: Sequence[Sequence[Tensor]],
        options: CallOptions,
        layout: Layout,
        gradient: bool,
        may_keep: bool,
    ) -> Configuration:
        """The call, still without plans."""
        for rank in tensors:
            check_tensors(*rank)
        device = tensors[0][0].device
        self._check_graphs(device)
        problem = options.problem(tensors[0], self.ranks)
        return Configuration(
            options=options,
            problem=problem,
            layout=layout,
            softmax=options.softmax(problem),
            gradient=gradient,
            may_keep=may_keep,
            cuda_graphs=self.cuda_graphs,
        )

    def _plans(self, found: Configuration, comm: Comm, tensors: Sequence[Tensor]) -> Mapping[Direction, Plan]:
        device = tensors[0].device
        together = None if self.played.is_local else self.planning.together(comm, device)
        if together is not None:
            return plan_together(together, self.played, found, tensors)
        with self.played.telling:
            passes = {"needs_gradient": found.gradient, "may_keep": found.may_keep}
            return self.planning.plans(found.problem, found.layout, on_gpu=device.type == "cuda", **passes)

    def _check_graphs(self, device: torch.device) -> None:
        if not self.cuda_graphs:
            return
        if device.type != "cuda":
            raise UsageError(f"cuda_graphs=True needs CUDA tensors, got {device}")
        if not all(comm.is_capturable for comm in self.played.comms_on(device)):
            raise UsageError(
                "cuda_graphs=True needs transfers that a CUDA graph can capture, and this group's cannot be; "
                "use NCCL, or leave cuda_graphs out"
            )

    def _captured(self, device: torch.device) -> CapturedPasses | None:
        if not self.cuda_graphs:
            return None
        if device not in self._graph_memories:
            self._graph_memories[device] = GraphMemory(device)
        return CapturedPasses(self._graph_memories[device])


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


@dataclass(frozen=True)
class Engine:
    """Runs the passes of one configuration for the ranks played here."""

    problem: Problem
    softmax: Softmax
    deterministic: bool
    comms: Sequence[Comm]
    ledger: Ledger
    marked: Marked | None
    """The transport that marks passes, beneath `comms`; None where one process plays all ranks."""
    number: int
    """A hash of the call, equal on all ranks."""
    programs: Callable[[Direction], Sequence[Compiled]]
    drive: Drive
    captured: CapturedPasses | None = None
    """The passes that are launched as CUDA graphs. They can keep nothing for each other."""
    kernels: dict[tuple[torch.device, bool, bool], Kernel] = field(default_factory=dict)
    rehearsed: set[Hashable] = field(default_factory=set)
    meters: list[Meter] = field(default_factory=list)
    """Memory of the last pass that ran step by step, one meter for each rank played here."""

    @classmethod
    def of(
        cls,
        configuration: Configuration,
        played: PlayedRanks,
        comms: Sequence[Comm],
        number: int,
        captured: CapturedPasses | None,
    ) -> Engine:
        plans = configuration.plans

        @lru_cache(maxsize=2)
        def programs(direction: Direction) -> list[Compiled]:
            return [compile_program(plans[direction], comm.rank) for comm in comms]

        return cls(
            problem=configuration.problem,
            softmax=configuration.softmax,
            deterministic=configuration.options.deterministic,
            comms=comms,
            ledger=played.ledger,
            marked=comms[0] if isinstance(comms[0], Marked) else None,
            number=number,
            programs=programs,
            drive=played.drive,
            captured=captured,
        )

    def run(
        self,
        direction: Direction,
        inputs: Sequence[Mapping[str, Fields]],
        tokens: Sequence[dict[str, int]],
        kernel: Kernel,
        kept: Sequence[Mapping[Item, Buffer]] | None = None,
        forward_pass: int | Tensor = 0,
    ) -> tuple[Tensors, list[dict[Item, Buffer]]]:
        """One pass of every rank played here: its results, and what it keeps for backward.

        `tokens` are the local lengths of q and kv; `kept` is what the forward pass kept, and `forward_pass` its number.
        """
        given = kept or [{} for _ in self.comms]
        with self.ledger.talking():
            if self.marked is not None:
                mark = self._mark(direction, inputs[0], forward_pass)
                inputs = [{**inputs[0], "mark": {"mark": mark}}]
                describe = partial(describe_post, self.programs(direction)[0])
                self.marked.watch(mark.device, self.ledger.history, direction, describe)
            if self.captured is None:
                return self._run(direction, inputs, tokens, kernel, given)
            return self.captured.run(
                (direction, kernel.name), inputs, lambda own: self._run(direction, own, tokens, kernel, given)[0]
            ), [{} for _ in self.comms]

    def _mark(self, direction: Direction, inputs: Mapping[str, Fields], forward_pass: int | Tensor) -> Tensor:
        """The mark of the pass that begins now. A graph reads it like an input."""
        device = inputs["q"]["q"].device if self.comms[0].is_capturable else None
        return self.ledger.mark(self.number + (direction == "backward"), device, forward_pass)

    def _run(
        self,
        direction: Direction,
        inputs: Sequence[Mapping[str, Fields]],
        tokens: Sequence[dict[str, int]],
        kernel: Kernel,
        kept: Sequence[Mapping[Item, Buffer]],
    ) -> tuple[list[dict[str, Fields]], list[dict[Item, Buffer]]]:
        device = next(iter(inputs[0]["q"].values())).device
        merging = choose_merging(device)

        def executors_over(comms: Sequence[Comm], kernel: Kernel, merging: Merging) -> list[Executor]:
            return [
                Executor(
                    compiled=compiled,
                    comm=comm,
                    kernel=kernel,
                    softmax=self.softmax,
                    inputs=given,
                    device=device,
                    new_output=Outputs(self.problem, lengths, device),
                    merging=merging,
                    kept=of_rank,
                )
                for compiled, comm, given, lengths, of_rank in zip(
                    self.programs(direction), comms, inputs, tokens, kept, strict=True
                )
            ]

        if self.marked is not None and self.marked.is_capturable:
            part = direction, kernel.name, this_thread()
            if part not in self.rehearsed:
                self.rehearsed.add(part)
                nowhere = [Nowhere(comm.rank, comm.size) for comm in self.comms]
                rehearsals = executors_over(nowhere, RehearsedKernel(kernel), RehearsedMerging(merging))
                self.drive([rehearsal.run() for rehearsal in rehearsals])
                del rehearsals  # and their memory
                self.marked.reach(*peers_of(self.programs(direction)[0]))
        executors = executors_over(self.comms, kernel, merging)
        if self.marked is not None:
            self.marked.open(inputs[0]["mark"]["mark"], self.ledger.history)
        results = self.drive([executor.run() for executor in executors])
        if self.marked is not None:
            self.marked.close([tensor for fields in results[0].values() for tensor in fields.values()])
        self.meters[:] = [executor.meter for executor in executors]
        for executor, result, lengths in zip(executors, results, tokens, strict=True):
            _fill_in_empty(result, executor.new_output, direction, lengths)
        return results, [executor.kept_for_backward() if direction == "forward" else {} for executor in executors]

    def prepare(self, device: torch.device) -> None:
        """Choose the kernel and compile the programs of forward, so that nothing is left that one rank could refuse."""
        self.kernel_for(device, lse_gradient=False)
        self.programs("forward")

    @cached_property
    def keeps_all_inputs(self) -> bool:
        """True if backward reads what forward kept, and none of the caller's inputs."""
        kept = set(self.programs("forward")[0].plan.schedule.keep)
        return self.single_call is None and ("own" in kept or kept == set(INPUTS["forward"]))

    # One kernel call

    @cached_property
    def single_call(self) -> Scores | None:
        """The scores of the only kernel call, where one rank holds everything; otherwise None."""
        if self.problem.ranks != 1:
            return None
        calls = [call for instruction in self.programs("forward")[0].instructions for call in instruction.calls]
        if len(calls) != 1 or calls[0].q_span is not None or calls[0].kv_span is not None:
            return None
        return Scores(calls[0].mask, self.softmax.scale, self.softmax.softcap)

    def single_forward(self, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Forward by the only kernel call, as one function: a small call waits for every line of it."""
        assert self.single_call is not None
        forward, scores = self.kernel_for(device, lse_gradient=False).forward, self.single_call
        dtype = DTYPES[self.problem.dtype]

        def attend_once(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scores)
            out = out.transpose(1, 2)
            return (out if out.dtype == dtype else out.to(dtype)), lse

        return attend_once

    # Kernels

    def kernel_for(self, device: torch.device, *, lse_gradient: bool) -> Kernel:
        """The kernel of a pass. Kept, because choosing one takes longer than a small call should."""
        key = device, lse_gradient, self.deterministic or torch.are_deterministic_algorithms_enabled()
        found = self.kernels.get(key)
        if found is None:
            found = self.kernels[key] = choose_kernel(self._demand(*key))
        return found

    def _demand(self, device: torch.device, lse_gradient: bool, deterministic: bool) -> Demand:
        return Demand(
            device=device.type,
            dtype=DTYPES[self.problem.dtype],
            head_dim_qk=self.problem.head_dim_qk,
            head_dim_v=self.problem.head_dim_v,
            softcap=self.softmax.softcap,
            lse_gradient=lse_gradient,
            deterministic=deterministic,
        )


@dataclass(frozen=True)
class Outputs:
    """Makes the tensors the caller gets: (batch, tokens, heads, dim), and LSE (batch, heads, tokens)."""

    problem: Problem
    tokens: dict[str, int]
    device: torch.device

    def __call__(self, kind: str) -> Fields:
        problem = self.problem
        wire = DTYPES[problem.dtype]
        wide = torch.float64 if wire is torch.float64 else torch.float32
        tokens = self.tokens["kv" if kind == "dkv" else "q"]
        made = {}
        for name, heads, dim in fields_of(kind, problem):  # type: ignore[arg-type]
            if name in STATISTICS:
                made[name] = torch.empty((problem.batch, heads, tokens), dtype=wide, device=self.device)
            else:
                tensor = torch.empty((problem.batch, tokens, heads, dim), dtype=wire, device=self.device)
                made[name] = tensor.transpose(1, 2)
        return made


def _fill_in_empty(
    result: dict[str, Fields], new_output: Callable[[str], Fields], direction: Direction, tokens: dict[str, int]
) -> None:
    """Add empty results for a rank without tokens, which has no step that makes them."""
    for kind in ("o",) if direction == "forward" else ("dq", "dkv"):
        if kind not in result:
            assert not tokens["kv" if kind == "dkv" else "q"]
            result[kind] = new_output(kind)
