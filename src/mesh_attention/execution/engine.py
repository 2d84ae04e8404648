"""An engine runs the passes of one call: it hands the compiled programs of the local ranks to executors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from mesh_attention.arguments import Softmax
from mesh_attention.comm.base import Comm, Work, posts_apart
from mesh_attention.execution.buffers import STATISTICS, Buffer, Fields, Meter, fields_of
from mesh_attention.execution.compiled import Compiled, describe_post, peers_of, stretched
from mesh_attention.execution.executor import Executor
from mesh_attention.execution.graphs import CapturedPasses, Tensors
from mesh_attention.execution.warm_up import DryComm, DryKernel, DryMerging, this_thread
from mesh_attention.kernels.base import DTYPES, Demand, Kernel, Merging, Scores
from mesh_attention.kernels.select import choose_kernel, choose_merging
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.steps import INPUTS, OUTPUTS, Direction, Item
from mesh_attention.problem import Problem
from mesh_attention.session.agreement import Statement
from mesh_attention.session.session import Session

Pass = Generator[Work, None, dict[str, Fields]]
"""One rank's part of a pass, which yields what it waits for."""


@dataclass
class Engine:
    """Runs the passes of one call for the local ranks."""

    problem: Problem
    softmax: Softmax
    deterministic: bool
    session: Session
    comms: Sequence[Comm]
    agreed: Statement
    """What ranks agreed on for this call."""
    programs: Callable[[Direction], Sequence[Compiled]]
    """Those of the local ranks; each is compiled at first use."""
    captured: CapturedPasses | None = None
    """The passes that are launched as CUDA graphs. A captured forward pass keeps nothing for backward."""
    observed: Callable[[list[Pass]], list[Pass]] = list
    """Wraps the ranks' parts of every pass; a recording notes there how long they wait."""
    kernels: dict[tuple[torch.device, bool, bool], Kernel] = field(default_factory=dict)
    warmed_up: set[Hashable] = field(default_factory=set)
    meters: list[Meter] = field(default_factory=list)
    """Memory of the last pass that ran step by step, one meter for each local rank."""
    last_stretched: dict[tuple[Problem, Layout], Engine] = field(default_factory=dict)
    """The engine that `stretched` made last."""

    def run(
        self,
        direction: Direction,
        inputs: Sequence[Mapping[str, Fields]],
        kernel: Kernel,
        *,
        kept: Sequence[Mapping[Item, Buffer]] | None = None,
        forward_pass: int | Tensor = 0,
        context: int = 0,
    ) -> tuple[Tensors, list[dict[Item, Buffer]]]:
        """One pass of every local rank: its results, and what it keeps for backward.

        `kept` is what the forward pass kept, and `forward_pass` its number. `context` is what ranks compare besides the
        call.
        """
        device = inputs[0]["q"]["q"].device
        with self.session.call():
            pass_id = self.session.begin_pass(
                # Numbers only: the hash of a text differs from process to process.
                hash((self.agreed.call_id, direction == "backward", context)),
                device,
                forward_pass=forward_pass,
                direction=direction,
                describe=partial(describe_post, self.programs(direction)[0], posts_apart(self.comms[0])),
                call=self.agreed,
            )
            run_pass = partial(self._run, direction, kernel, device)
            if self.captured is None:
                return run_pass(inputs, pass_id, kept or [{} for _ in self.comms])
            nothing: list[dict[Item, Buffer]] = [{} for _ in self.comms]
            results = self.captured.run(
                (direction, kernel.name), inputs, pass_id, lambda own, own_id: run_pass(own, own_id, nothing)[0]
            )
            return results, nothing

    def _run(
        self,
        direction: Direction,
        kernel: Kernel,
        device: torch.device,
        inputs: Sequence[Mapping[str, Fields]],
        pass_id: Tensor | None,
        kept: Sequence[Mapping[Item, Buffer]],
    ) -> tuple[list[dict[str, Fields]], list[dict[Item, Buffer]]]:
        merging = choose_merging(device)

        def executors_over(comms: Sequence[Comm], kernel: Kernel, merging: Merging) -> list[Executor]:
            return [
                Executor(
                    compiled=compiled,
                    comm=comm,
                    kernel=kernel,
                    softmax=self.softmax,
                    inputs=fields,
                    device=device,
                    new_output=Outputs(self.problem, _tokens(fields), device),
                    merging=merging,
                    kept=held,
                )
                for compiled, comm, fields, held in zip(self.programs(direction), comms, inputs, kept, strict=True)
            ]

        if self.session.needs_warm_up(device) and (direction, kernel.name, this_thread()) not in self.warmed_up:
            self.warmed_up.add((direction, kernel.name, this_thread()))
            dry_comms = [DryComm(comm.rank, comm.size) for comm in self.comms]
            dry_runs = executors_over(dry_comms, DryKernel(kernel), DryMerging(merging))
            self.session.drive([dry_run.run() for dry_run in dry_runs])
            del dry_runs  # and their memory
            # NCCL would otherwise connect ranks in the middle of the pass.
            self.session.connect(device, *peers_of(self.programs(direction)[0]))
        executors = executors_over(self.comms, kernel, merging)
        ranks = self.observed([executor.run() for executor in executors])
        results = self.session.run_pass(ranks, pass_id, device, _tensors_of)
        self.meters[:] = [executor.meter for executor in executors]
        for executor, result in zip(executors, results, strict=True):
            for kind in OUTPUTS[direction]:
                if kind not in result:  # of a rank without tokens, which has no step that makes it
                    result[kind] = executor.new_output(kind)
        return results, [executor.kept_for_backward() if direction == "forward" else {} for executor in executors]

    def prepare(self, device: torch.device) -> None:
        """Choose the kernel and compile forward's programs: what can fail on one rank must fail before agreement."""
        self.kernel_for(device, lse_gradient=False)
        self.programs("forward")

    @cached_property
    def keeps_all_inputs(self) -> bool:
        """True if backward reads what forward kept, and none of the caller's inputs."""
        kept = set(self.programs("forward")[0].plan.schedule.keep)
        return self.single_call is None and ("own" in kept or kept == set(INPUTS["forward"]))

    def stretched(self, problem: Problem, layout: Layout) -> Engine:
        """The engine of a forward pass that differs from this one in the lengths of cached segments: the same moves,
        steps and kernel calls. See `compiled.stretched`."""
        (plan, *_) = [compiled.plan for compiled in self.programs("forward")]
        if (plan.problem, plan.layout) == (problem, layout):
            return self
        key = problem, layout
        if key not in self.last_stretched:
            plan = replace(plan, problem=problem, layout=layout)
            programs = [stretched(compiled, plan) for compiled in self.programs("forward")]
            engine = replace(
                self, problem=problem, programs=lambda _: programs, warmed_up=set(), meters=[], last_stretched={}
            )
            self.last_stretched = {key: engine}
        return self.last_stretched[key]

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
        """Forward as one short function around its only kernel call: beside a small call, the time of Python shows."""
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
        kernel = self.kernels.get(key)
        if kernel is None:
            kernel = self.kernels[key] = choose_kernel(self._demand(*key))
        return kernel

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


def _tokens(inputs: Mapping[str, Fields]) -> dict[str, int]:
    return {"q": inputs["q"]["q"].shape[2], "kv": inputs["kv"]["k"].shape[2]}


def _tensors_of(result: Mapping[str, Fields]) -> list[Tensor]:
    return [tensor for fields in result.values() for tensor in fields.values()]


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
