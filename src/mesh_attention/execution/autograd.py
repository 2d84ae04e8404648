"""Autograd over a forward and a backward plan, for all local ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from mesh_attention.arguments import arrived, is_transformed, needs_gradient
from mesh_attention.errors import UsageError
from mesh_attention.execution.buffers import Buffer, Fields, token_format
from mesh_attention.execution.engine import Engine
from mesh_attention.kernels.base import Kernel, RowGradient, Scores
from mesh_attention.kernels.merging import delta_of, row_delta
from mesh_attention.plan.steps import Item

Kept = list[dict[Item, Buffer]]
NO_SECOND_DERIVATIVES = "mesh attention has no second derivatives; call backward without create_graph=True"


def attend(engine: Engine, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """O and LSE of every local rank, from its Q, K and V; differentiable once."""
    if not needs_gradient(tensors):
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
        ctx.shapes = [tensor.shape for tensor in tensors] if engine.keeps_all_inputs else None
        # A tensor, so that a checkpoint replaces it as well when it runs forward again.
        forward_pass = torch.tensor(engine.session.state.passes, device="cpu")
        ctx.save_for_backward(forward_pass, *outs, *raws, *(tensors if ctx.shapes is None else ()))
        ctx.set_materialize_grads(False)
        return outs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UsageError(NO_SECOND_DERIVATIVES)
        engine, (forward_pass, *saved) = ctx.engine, ctx.saved_tensors
        size = len(engine.comms)
        outs, saved = saved[: 2 * size], saved[2 * size :]
        if ctx.shapes is None:
            saved, tensors = saved[: -3 * size], saved[-3 * size :]
        else:
            tensors = [outs[0].new_empty(()).expand(shape) for shape in ctx.shapes]  # never read: all is kept
        kept = _as_buffers(saved, ctx.kept, engine) if saved else None
        gradients_in = run_backward(engine, tensors, outs, gradients, forward_pass, kept)
        needed = ctx.needs_input_grad[1:]
        return None, *(gradient if need else None for gradient, need in zip(gradients_in, needed, strict=True))


def run_forward(engine: Engine, tensors: Sequence[Tensor], *, context: int = 0) -> tuple[tuple[Tensor, ...], Kept]:
    """O and LSE of every rank, and what each keeps for backward; without a gradient.

    `context` is what ranks compare besides the call, such as the layer of a cache and its history.
    """
    tensors = [arrived(tensor) for tensor in tensors]
    device = tensors[0].device
    kernel = engine.kernel_for(device, lse_gradient=False)
    with without_autocast(device):
        if engine.single_call is not None:
            return engine.single_forward(device)(*tensors), []
        inputs = [_forward_inputs(*tensors[i : i + 3]) for i in range(0, len(tensors), 3)]
        results, kept = engine.run("forward", inputs, kernel, context=context)
    outs = (tensor for result in results for tensor in (_heads_first(result["o"]["o"]), result["o"]["lse"]))
    return tuple(outs), kept


def run_backward(
    engine: Engine,
    tensors: Sequence[Tensor],
    outs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    forward_pass: Tensor,
    kept: Kept | None = None,
) -> list[Tensor]:
    """dQ, dK and dV of every rank, from the inputs and results of forward and the gradients of the results.

    `forward_pass` is the number of that pass on its group: ranks may run backward of equal calls in different orders.
    """
    tensors = [arrived(tensor) for tensor in tensors]
    gradients = [None if gradient is None else arrived(gradient) for gradient in gradients]
    lse_gradient = any(gradient is not None for gradient in gradients[1::2])
    if lse_gradient and engine.captured is not None and engine.single_call is None:
        raise UsageError(
            "cuda_graphs=True does not support gradients of the LSE, because all ranks must capture the same passes; "
            "use a MeshAttention without cuda_graphs for a loss that depends on the LSE"
        )
    kernel = engine.kernel_for(tensors[0].device, lse_gradient=lse_gradient)
    with without_autocast(tensors[0].device):
        if engine.single_call is not None:
            return list(_single_backward(engine.single_call, kernel, tensors, outs, gradients))
        is_batched = torch._C._functorch.is_legacy_batchedtensor
        if any(is_batched(gradient) or is_transformed(gradient) for gradient in gradients if gradient is not None):
            raise UsageError(
                "batched gradients (is_grads_batched=True, vectorize=True) and derivatives of gradients are not "
                "supported; compute one gradient at a time"
            )
        inputs = [
            _backward_inputs(tensors[3 * i : 3 * i + 3], outs[2 * i : 2 * i + 2], gradients[2 * i : 2 * i + 2])
            for i in range(len(engine.comms))
        ]
        results, _ = engine.run("backward", inputs, kernel, kept=kept, forward_pass=forward_pass)
    return [
        _heads_first(field)
        for result in results
        for field in (result["dq"]["dq"], result["dkv"]["dk"], result["dkv"]["dv"])
    ]


def _single_backward(
    scores: Scores,
    kernel: Kernel,
    tensors: Sequence[Tensor],
    outs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
) -> Iterator[Tensor]:
    """dQ, dK and dV by the only kernel call."""
    q, k, v = map(_heads_first, tensors)
    (out, lse), (d_out, d_lse) = outs, gradients
    d_out = torch.zeros_like(out) if d_out is None else d_out
    row = RowGradient(_heads_first(d_out), lse, out=_heads_first(out))
    if d_lse is not None:
        row = row._replace(delta=delta_of(row) - d_lse, out=None)
    for gradient, tensor in zip(kernel.backward(q, k, v, row, scores), tensors, strict=True):
        yield _heads_first(gradient).to(tensor.dtype)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Kernels compute in the caller's dtypes."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _as_tensors(kept: Sequence[Mapping[Item, Buffer]]) -> tuple[list[Tensor], list[dict[Item, int]]]:
    """The bytes of kept buffers, for autograd to save, and which of them holds each item."""
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
            fmt = token_format(item.kind, engine.problem, compiled.plan.assignment.head_shares, False)
            made.setdefault(number, Buffer.over(fmt, raws[number]))
    return [{item: made[number] for item, number in held.items()} for held in places]


def _backward_inputs(
    tensors: Sequence[Tensor], outs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> dict[str, Fields]:
    """Inputs of the backward plan: Q, K, V, and dO with LSE and delta = rowsum(O∘dO) less the LSE's gradient."""
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
