"""Attention as torch operators, for tools that look at operators: compilers, selective activation checkpointing, fake
tensors, FLOP counters.

`mesh_attention::attend` and `mesh_attention::attend_backward` take one rank's tensors, the call's options, and the
number of the caller's `Calls`. They run the same engines as a plain call; their results are contiguous and share no
memory. Only tensors go from forward to backward: O, LSE and the number of the forward pass. So plans that keep
something for backward are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, get_type_hints
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # unlike torch.compiler.disable, it loads no compiler until it is called

from mesh_attention.arguments import Boundaries, CallOptions
from mesh_attention.errors import UsageError
from mesh_attention.execution.autograd import NO_SECOND_DERIVATIVES, run_backward, run_forward
from mesh_attention.execution.call import Calls
from mesh_attention.execution.engine import Engine

SCHEMA_TYPES: dict[Any, str] = {
    bool: "bool",
    float: "float",
    float | None: "float?",
    int | None: "SymInt?",
    tuple[int, int]: "SymInt[]",
    Boundaries: "Tensor?",
}
SCHEMA = ", ".join(f"{SCHEMA_TYPES[hint]} {name}" for name, hint in get_type_hints(CallOptions).items())
SCHEMA = f"{SCHEMA}, bool gradient, SymInt calls"
"""The arguments of an operator besides its tensors, its *operands*."""
CALLS: WeakValueDictionary[int, Calls] = WeakValueDictionary()
"""By number, because an operator takes tensors and numbers only."""
_NUMBERS = count(1)


def number_of(calls: Calls) -> int:
    """A number for the calls of a MeshAttention, valid as long as they exist."""
    number = next(_NUMBERS)
    CALLS[number] = calls
    return number


def calls_of(number: int) -> Calls:
    calls = CALLS.get(number)
    if calls is None:
        raise UsageError(
            "the MeshAttention that this operator was traced with no longer exists; keep it as long as the compiled "
            "code that uses it"
        )
    return calls


@_disable_dynamo
def untraced(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Call a function that has no operator: a compiler ends its graph here and begins another one after it."""
    return function(*given, **named)


TAGS = (torch.Tag.cudagraph_unsafe,)
"""A compiler must not replay these in a CUDA graph of its own: the host counts passes, and every pass has its id."""


@torch.library.custom_op(
    "mesh_attention::attend",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> (Tensor, Tensor, Tensor)",
    tags=TAGS,
)
def attend_operator(q: Tensor, k: Tensor, v: Tensor, *operands: Any) -> tuple[Tensor, Tensor, Tensor]:
    """O and LSE of this rank, and the number of the pass; tensors are (batch, tokens, heads, dim)."""
    engine = _engine((q, k, v), operands)
    (out, lse), _ = run_forward(engine, (q, k, v))
    forward_pass = torch.full((), engine.session.state.passes, device=q.device)
    return out.contiguous(), lse.contiguous(), forward_pass


@attend_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *operands: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, heads, _ = q.shape
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    out, lse = q.new_empty((batch, tokens, heads, v.shape[3])), q.new_empty((batch, heads, tokens), dtype=wide)
    return out, lse, q.new_empty((), dtype=torch.int64)


@torch.library.custom_op(
    "mesh_attention::attend_backward",
    mutates_args=(),
    schema="(Tensor? d_out, Tensor? d_lse, Tensor out, Tensor lse, Tensor forward_pass, Tensor q, Tensor k, Tensor v, "
    f"{SCHEMA}) -> (Tensor, Tensor, Tensor)",
    tags=TAGS,
)
def backward_operator(
    d_out: Tensor | None, d_lse: Tensor | None, out: Tensor, lse: Tensor, forward_pass: Tensor, *given: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV of this rank."""
    tensors = given[:3]
    dq, dk, dv = run_backward(_engine(tensors, given[3:]), tensors, (out, lse), (d_out, d_lse), forward_pass)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@backward_operator.register_fake
def _(
    d_out: Tensor | None, d_lse: Tensor | None, out: Tensor, lse: Tensor, forward_pass: Tensor, *given: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (tensor.new_empty(tensor.shape) for tensor in given[:3])
    return dq, dk, dv


def _engine(tensors: Sequence[Tensor], operands: Sequence[Any]) -> Engine:
    *options, gradient, calls = operands
    engine = calls_of(calls).engine([tensors], CallOptions(*options), gradient=gradient, may_keep=False)
    plan = engine.programs("forward")[0].plan
    if plan.schedule.keep:
        raise UsageError(
            f"{plan!r} keeps {', '.join(plan.schedule.keep)} for backward, which torch.compile and selective "
            "checkpointing cannot hand over; leave out keep or memory_limit"
        )
    return engine


# Refusals


def refused(reason: str, like: object, calls: int) -> Tensor:
    """Refuse a call when the compiled graph runs: a compiler that meets an error tells no other rank of it."""
    tensor = like if isinstance(like, Tensor) else torch.empty(0, device="cpu")
    refusal: Tensor = torch.ops.mesh_attention.refuse(tensor, reason, calls)
    return refusal


@torch.library.custom_op(
    "mesh_attention::refuse", mutates_args=(), schema="(Tensor like, str reason, SymInt calls) -> Tensor"
)
def _refuse(like: Tensor, reason: str, calls: int) -> Tensor:
    with calls_of(calls).session.telling():
        raise UsageError(reason)


@_refuse.register_fake
def _(like: Tensor, reason: str, calls: int) -> Tensor:
    return like.new_empty(like.shape)


# A graph for training is traced with its backward, which then never runs.
_refuse.register_autograd(lambda ctx, gradient: (gradient, None, None))


# Gradients


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *(given if isinstance(given, Tensor) else None for given in inputs))
    ctx.others = tuple(None if isinstance(given, Tensor) else given for given in inputs)
    # Backward finds its calls by the same number. (While tracing, nothing can be said about what will run when.)
    ctx.calls = CALLS.get(inputs[-1]) if type(inputs[-1]) is int else None


def _gradients(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    out, lse, forward_pass, *saved = ctx.saved_tensors
    inputs = [other if tensor is None else tensor for tensor, other in zip(saved, ctx.others, strict=True)]
    gradients_in = torch.ops.mesh_attention.attend_backward(d_out, d_lse, out, lse, forward_pass, *inputs)
    needed = zip(gradients_in, ctx.needs_input_grad[:3], strict=True)
    return *(gradient if need else None for gradient, need in needed), *([None] * (len(inputs) - 3))


def _refuse_second(ctx: Any, *gradients: Tensor | None) -> None:
    raise UsageError(NO_SECOND_DERIVATIVES)


attend_operator.register_autograd(_gradients, setup_context=_set_up)
backward_operator.register_autograd(_refuse_second)
