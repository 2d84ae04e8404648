"""Autograd over a forward and a backward plan, for all the ranks this process plays.

That is one under torch.distributed, and all of them in a local group.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mesh_attention.comm.base import Comm, Work
from mesh_attention.errors import UsageError
from mesh_attention.execution.buffers import DTYPES, STATISTICS, Buffer, Meter, fields_of, record_of
from mesh_attention.execution.compiled import Compiled
from mesh_attention.execution.executor import Executor, Fields, Softmax
from mesh_attention.execution.graphs import RecordedPasses, Tensors
from mesh_attention.kernels.base import Demand, Kernel, RowGradient, Scores
from mesh_attention.kernels.rows import delta_of, row_delta
from mesh_attention.kernels.select import choose_kernel, choose_merging
from mesh_attention.plan.steps import Direction, Item
from mesh_attention.problem import Problem

Runs = Sequence[Generator[Work, None, dict[str, Fields]]]


@dataclass(frozen=True)
class Engine:
    """What a call needs and outlives it: programs of the ranks played here, their transports, how to run them."""

    problem: Problem
    softmax: Softmax
    comms: Sequence[Comm]
    programs: Callable[[Direction], Sequence[Compiled]]
    run: Callable[[Runs], list[dict[str, Fields]]]
    kernel: Callable[[Demand], Kernel] = choose_kernel
    kernels: dict[tuple[torch.device, bool, bool], Kernel] = field(default_factory=dict)
    deterministic: bool = False
    recorded: RecordedPasses | None = None
    """For passes that are played from CUDA graphs. Nothing may be kept between them."""
    meters: list[Meter] = field(default_factory=list)
    """One for each rank played here, of the last pass that ran step by step; for those who look at memory."""

    def execute(
        self,
        direction: Direction,
        inputs: Sequence[Mapping[str, Fields]],
        tokens: Sequence[dict[str, int]],
        kernel: Kernel,
        kept: Sequence[Mapping[Item, Buffer]] | None = None,
    ) -> tuple[Tensors, list[dict[Item, Buffer]]]:
        """One pass of every rank played here: its results, and what it leaves for backward.

        `tokens` are the local lengths of q and kv; `kept` is what forward left.
        """
        given = kept or [{} for _ in self.comms]
        if self.recorded is None:
            return self._execute(direction, inputs, tokens, kernel, given)
        return self.recorded.run(
            (direction, kernel.name), inputs, lambda own: self._execute(direction, own, tokens, kernel, given)[0]
        ), [{} for _ in self.comms]

    def _execute(
        self,
        direction: Direction,
        inputs: Sequence[Mapping[str, Fields]],
        tokens: Sequence[dict[str, int]],
        kernel: Kernel,
        kept: Sequence[Mapping[Item, Buffer]],
    ) -> tuple[list[dict[str, Fields]], list[dict[Item, Buffer]]]:
        device = next(iter(inputs[0]["q"].values())).device
        merging = choose_merging(device)
        executors = [
            Executor(
                compiled=compiled,
                comm=comm,
                kernel=kernel,
                softmax=self.softmax,
                inputs=given,
                device=device,
                new_output=Outputs(self.problem, lengths, device),
                merging=merging,
                kept=left,
            )
            for compiled, comm, given, lengths, left in zip(
                self.programs(direction), self.comms, inputs, tokens, kept, strict=True
            )
        ]
        results = self.run([executor.run() for executor in executors])
        self.meters[:] = [executor.meter for executor in executors]
        for executor, result, lengths in zip(executors, results, tokens, strict=True):
            _fill_in_empty(result, executor.new_output, direction, lengths)
        return results, [executor.left_over() if direction == "forward" else {} for executor in executors]

    @cached_property
    def only_call(self) -> Scores | None:
        """The kernel call that is all there is, where one rank has everything."""
        if self.problem.ranks != 1:
            return None
        calls = [call for instruction in self.programs("forward")[0].instructions for call in instruction.calls]
        if len(calls) != 1 or calls[0].q_span is not None or calls[0].kv_span is not None:
            return None
        return Scores(calls[0].mask, self.softmax.scale, self.softmax.softcap)

    def alone(self, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Forward where one kernel call is all there is, as one function: a small call waits for every line here."""
        assert self.only_call is not None
        forward, scores = self.kernel_for(device, lse_gradient=False).forward, self.only_call
        dtype = DTYPES[self.problem.dtype]

        def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scores)
            out = out.transpose(1, 2)
            return (out if out.dtype == dtype else out.to(dtype)), lse

        return run

    def kernel_for(self, device: torch.device, *, lse_gradient: bool) -> Kernel:
        """The kernel of a pass, asked for once: looking up a demand takes longer than a small call should."""
        key = device, lse_gradient, self.deterministic or torch.are_deterministic_algorithms_enabled()
        found = self.kernels.get(key)
        if found is None:
            found = self.kernels[key] = self.kernel(self.demand(device, lse_gradient=lse_gradient))
        return found

    def demand(self, device: torch.device, *, lse_gradient: bool) -> Demand:
        return Demand(
            device=device.type,
            dtype=DTYPES[self.problem.dtype],
            head_dim_qk=self.problem.head_dim_qk,
            head_dim_v=self.problem.head_dim_v,
            softcap=self.softmax.softcap,
            lse_gradient=lse_gradient,
            deterministic=self.deterministic or torch.are_deterministic_algorithms_enabled(),
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
                made[name] = _heads_first(tensor)
        return made


def _fill_in_empty(
    result: dict[str, Fields], new_output: Callable[[str], Fields], direction: Direction, tokens: dict[str, int]
) -> None:
    """A rank without tokens has no step that makes its results."""
    for kind in ("o",) if direction == "forward" else ("dq", "dkv"):
        if kind not in result:
            assert not tokens["kv" if kind == "dkv" else "q"]
            result[kind] = new_output(kind)


def attend(engine: Engine, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """O and LSE of every rank played here, from its Q, K and V; differentiable once."""
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return run_forward(engine, tensors)[0]
    results: tuple[Tensor, ...] = AttentionFunction.apply(engine, *tensors)  # type: ignore[no-untyped-call]
    return results


class AttentionFunction(torch.autograd.Function):
    """``apply(engine, q0, k0, v0, q1, …)`` gives ``o0, lse0, o1, …``; tensors are (batch, tokens, heads, dim)."""

    @staticmethod
    def forward(ctx: Any, engine: Engine, *tensors: Tensor) -> tuple[Tensor, ...]:
        outs, kept = run_forward(engine, tensors)
        ctx.engine = engine
        raws, ctx.kept = _as_tensors(kept)
        ctx.save_for_backward(*tensors, *outs, *raws)
        ctx.set_materialize_grads(False)
        return outs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UsageError(
                "mesh attention was asked for a gradient of a gradient (create_graph=True); only first derivatives "
                "exist; call backward without create_graph"
            )
        engine, saved = ctx.engine, ctx.saved_tensors
        size = len(engine.comms)
        tensors, outs, raws = saved[: 3 * size], saved[3 * size : 5 * size], saved[5 * size :]
        kept = _as_buffers(raws, ctx.kept, engine) if raws else None
        given = run_backward(engine, tensors, outs, gradients, kept)
        needed = ctx.needs_input_grad[1:]
        return None, *(gradient if need else None for gradient, need in zip(given, needed, strict=True))


Kept = list[dict[Item, Buffer]]


def run_forward(engine: Engine, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Kept]:
    """O and LSE of every rank, and what each leaves for backward; without a gradient."""
    device = tensors[0].device
    kernel = engine.kernel_for(device, lse_gradient=False)
    with _as_given(device):
        if engine.only_call is not None:
            return engine.alone(device)(*tensors), []
        ranks = [tensors[i : i + 3] for i in range(0, len(tensors), 3)]
        results, kept = engine.execute("forward", [_forward_inputs(*rank) for rank in ranks], _tokens(ranks), kernel)
    outs = (tensor for result in results for tensor in (_heads_first(result["o"]["o"]), result["o"]["lse"]))
    return tuple(outs), kept


def run_backward(
    engine: Engine,
    tensors: Sequence[Tensor],
    outs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    kept: Kept | None = None,
) -> list[Tensor]:
    """dQ, dK and dV of every rank, from what went into forward, what came out, and the gradients of that."""
    lse_gradient = any(gradient is not None for gradient in gradients[1::2])
    if lse_gradient and engine.recorded is not None and engine.only_call is None:
        raise UsageError(
            "a gradient into the LSE came, and with cuda_graphs all ranks must record the same passes; use "
            "MeshAttention without cuda_graphs for what depends on the LSE"
        )
    kernel = engine.kernel_for(tensors[0].device, lse_gradient=lse_gradient)
    with _as_given(tensors[0].device):
        if engine.only_call is not None:
            return list(_backward_alone(engine.only_call, kernel, tensors, outs, gradients))
        return _backward(engine, kernel, tensors, outs, gradients, kept)


def _backward(
    engine: Engine,
    kernel: Kernel,
    tensors: Sequence[Tensor],
    outs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    kept: Kept | None,
) -> list[Tensor]:
    """dQ, dK and dV of every rank, by the backward plan."""
    ranks = [tensors[i : i + 3] for i in range(0, len(tensors), 3)]
    inputs = [
        _backward_inputs(rank, outs[2 * i : 2 * i + 2], gradients[2 * i : 2 * i + 2]) for i, rank in enumerate(ranks)
    ]
    results, _ = engine.execute("backward", inputs, _tokens(ranks), kernel, kept)
    return [
        _heads_first(field)
        for result in results
        for field in (result["dq"]["dq"], result["dkv"]["dk"], result["dkv"]["dv"])
    ]


def _backward_alone(
    scores: Scores,
    kernel: Kernel,
    tensors: Sequence[Tensor],
    outs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
) -> Iterator[Tensor]:
    """dQ, dK and dV where one kernel call is all there is."""
    q, k, v = map(_heads_first, tensors)
    (out, lse), (d_out, d_lse) = outs, gradients
    d_out = torch.zeros_like(out) if d_out is None else d_out
    row = RowGradient(_heads_first(d_out), lse, out=_heads_first(out))
    if d_lse is not None:
        row = row._replace(delta=delta_of(row) - d_lse, out=None)
    for gradient, tensor in zip(kernel.backward(q, k, v, row, scores), tensors, strict=True):
        yield _heads_first(gradient).to(tensor.dtype)


def _as_given(device: torch.device) -> AbstractContextManager[None]:
    """Dtypes are the caller's, in every kernel."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _tokens(ranks: Sequence[Sequence[Tensor]]) -> list[dict[str, int]]:
    return [{"q": q.shape[1], "kv": k.shape[1]} for q, k, _ in ranks]


def _as_tensors(kept: Sequence[Mapping[Item, Buffer]]) -> tuple[list[Tensor], list[dict[Item, int]]]:
    """The bytes of kept buffers, for autograd to save, and which of them each item lies in."""
    raws: list[Tensor] = []
    number: dict[int, int] = {}
    places: list[dict[Item, int]] = []
    for held in kept:
        for buffer in held.values():
            if id(buffer) not in number and buffer.raw is not None:
                number[id(buffer)] = len(raws)
                raws.append(buffer.raw)
        places.append({item: number[id(buffer)] for item, buffer in held.items()})
    return raws, places


def _as_buffers(
    raws: Sequence[Tensor], places: Sequence[Mapping[Item, int]], engine: Engine
) -> list[dict[Item, Buffer]]:
    made: dict[int, Buffer] = {}
    for held, compiled in zip(places, engine.programs("backward"), strict=True):
        for item, number in held.items():
            record = record_of(item.kind, engine.problem, compiled.plan.assignment.ulysses, False)
            made.setdefault(number, Buffer.over(record, raws[number]))
    return [{item: made[number] for item, number in held.items()} for held in places]


def _backward_inputs(
    tensors: Sequence[Tensor], outs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> dict[str, Fields]:
    """What the backward plan starts from: Q, K, V, and dO with LSE and delta = rowsum(O∘dO) less the LSE's gradient."""
    (q, k, v), (out, lse), (d_out, d_lse) = tensors, outs, gradients
    d_out = torch.zeros_like(out) if d_out is None else d_out
    delta = row_delta(out, d_out, wide=lse.dtype).transpose(1, 2)
    if d_lse is not None:
        delta = delta - d_lse
    row = {"lse": lse, "delta": delta, "do": _heads_first(d_out)}
    return {**_forward_inputs(q, k, v), "do": row}


def _forward_inputs(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Fields]:
    return {"q": {"q": _heads_first(q)}, "kv": {"k": _heads_first(k), "v": _heads_first(v)}}


def _heads_first(tensor: Tensor) -> Tensor:
    """(batch, tokens, heads, dim) as (batch, heads, tokens, dim), and back."""
    return tensor.transpose(1, 2)
