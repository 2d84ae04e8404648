"""PyTorch's own tools around attention: selective checkpointing, the FLOP counter, autocast; and attention sinks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from mesh_attention.arguments import CallOptions
from mesh_attention.execution.operators import calls_of
from mesh_attention.problem import flops_per_pair


def saved_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of ``checkpoint(layer, x, use_reentrant=False, context_fn=saved_attention)``.

    A layer then holds its input and, for each of its attention calls, O and LSE; backward recomputes everything except
    attention. No transfer is repeated. Plain ``checkpoint`` recomputes attention too, and repeats all its transfers.
    """
    saved = [torch.ops.mesh_attention.attend.default]
    forward, again = create_selective_checkpoint_contexts(saved)  # type: ignore[no-untyped-call]
    return forward, again


# FLOPs


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """Formulas for torch's counter: ``FlopCounterMode(custom_mapping=flop_formulas())``.

    They count as torch counts its own attention: without masks, and with the scores recomputed in backward. A rank
    counts its queries against the whole sequence.
    """
    attend, backward = torch.ops.mesh_attention.attend, torch.ops.mesh_attention.attend_backward
    formulas: dict[Any, Callable[..., int]] = {attend: _forward, backward: _backward}
    for formula in formulas.values():
        formula._get_raw = True  # type: ignore[attr-defined] # tensors, not their shapes
    return formulas


def _forward(q: Tensor, k: Tensor, v: Tensor, *operands: Any, out_val: Any = None) -> int:
    return _pairs(q, k, operands) * flops_per_pair("forward", qk=q.shape[3], v=v.shape[3])


def _backward(*arguments: Any, out_val: Any = None) -> int:
    q, k, v, *operands = arguments[5:]  # after dO, dLSE, O, LSE and the number of the pass
    return _pairs(q, k, operands) * flops_per_pair("backward", qk=q.shape[3], v=v.shape[3])


def _pairs(q: Tensor, k: Tensor, operands: Sequence[Any]) -> int:
    *fields, _, calls = operands
    options = CallOptions(*fields)
    whole = options.seq_len_k or options.seq_len or k.shape[1] * calls_of(calls).session.size
    return q.shape[0] * q.shape[2] * q.shape[1] * whole


# For adapters


def as_autocast(*tensors: Tensor) -> list[Tensor]:
    """The tensors in autocast's dtype where autocast is on, as for matrix products; float64 stays.

    torch does not apply autocast to operators that it does not know.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The output if every query also attends to a sink, a score without a value: scaled by e^lse / (e^lse + e^sink).

    `out` is (batch, tokens, heads, dim), `lse` (batch, heads, tokens), and `sinks` has one score per head.
    """
    share = torch.sigmoid(lse - sinks.to(lse.dtype)[None, :, None])
    return (out * share.transpose(1, 2)[..., None]).to(out.dtype)
