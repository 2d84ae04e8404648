"""Attention as operators of torch, for those who look at operators: compilers, selective activation checkpointing,
fake tensors, FLOP counters.

`mesh_attention::attend` and `mesh_attention::attend_backward` take one rank's tensors, what the call asks for, and a
number under which the caller's engines are found. They run the same engines as a plain call; what they give is
contiguous and shares no memory. Nothing goes from forward to backward but tensors, so plans that keep are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # unlike torch.compiler.disable, it loads no compiler until it is called
from torch.utils._python_dispatch import _get_current_dispatch_mode

from mesh_attention.errors import UsageError
from mesh_attention.execution.autograd import Engine, run_backward, run_forward

SCHEMA = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, bool causal, float? softmax_scale, SymInt[] window_size, "
    "float softcap, bool deterministic, SymInt? seq_len, SymInt? seq_len_k, bool gradient, SymInt caller"
)


class Asked(NamedTuple):
    """What a call asks for besides its tensors: `SCHEMA` as a value."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    causal: bool
    softmax_scale: float | None
    window_size: Sequence[int]
    softcap: float
    deterministic: bool
    seq_len: int | None
    seq_len_k: int | None
    gradient: bool
    caller: int


class Caller(Protocol):
    """Finds the engine of a call."""

    @property
    def ranks(self) -> int: ...

    def engine_for(self, tensors: Sequence[Tensor], asked: Asked) -> Engine:
        """Agreed on with the group the first time."""


T = TypeVar("T")


class Numbered(Generic[T]):
    """Objects that operators refer to by number, because an operator takes tensors and numbers only; held weakly."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._objects: WeakValueDictionary[int, T] = WeakValueDictionary()

    def number(self, new: T) -> int:
        """A number for the object, valid as long as the object exists."""
        number = next(self._numbers)
        self._objects[number] = new
        return number

    def find(self, number: int) -> T | None:
        return self._objects.get(number)


CALLERS: Numbered[Caller] = Numbered()
number_of = CALLERS.number


def are_observed() -> bool:
    """True under torch.compile or a dispatch mode."""
    return torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None


@_disable_dynamo
def untraced(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """What a function gives, for what has no operator: a compiler ends its graph here and begins another after it."""
    return function(*given, **named)


@torch.library.custom_op(
    "mesh_attention::attend",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> (Tensor, Tensor)",
)
def attend_operator(q: Tensor, k: Tensor, v: Tensor, *asked: Any) -> tuple[Tensor, Tensor]:
    """O and LSE of this rank; tensors are (batch, tokens, heads, dim)."""
    engine = _engine((q, k, v), Asked(*asked))
    (out, lse), _ = run_forward(engine, (q, k, v))
    return out.contiguous(), lse.contiguous()


@attend_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *asked: Any) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = q.shape
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    return q.new_empty((batch, tokens, heads, v.shape[3])), q.new_empty((batch, heads, tokens), dtype=wide)


@torch.library.custom_op(
    "mesh_attention::attend_backward",
    mutates_args=(),
    schema="(Tensor? d_out, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
def backward_operator(d_out: Tensor | None, d_lse: Tensor | None, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV of this rank."""
    tensors, outs, asked = given[:3], given[3:5], Asked(*given[5:])
    dq, dk, dv = run_backward(_engine(tensors, asked), tensors, outs, (d_out, d_lse))
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@backward_operator.register_fake
def _(d_out: Tensor | None, d_lse: Tensor | None, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (tensor.new_empty(tensor.shape) for tensor in given[:3])
    return dq, dk, dv


def _engine(tensors: Sequence[Tensor], asked: Asked) -> Engine:
    engine = caller_of(asked.caller).engine_for(tensors, asked)
    plan = engine.programs("forward")[0].plan
    if plan.schedule.keep:
        raise UsageError(
            f"{plan!r} keeps {', '.join(plan.schedule.keep)} for backward, which under torch.compile and selective "
            "checkpointing cannot be handed over; leave keep or memory_limit out"
        )
    return engine


def caller_of(number: int) -> Caller:
    found = CALLERS.find(number)
    if found is None:
        raise UsageError(
            "the MeshAttention that this operator was traced with no longer exists; keep it as long as the compiled "
            "code that uses it"
        )
    return found


# Gradients


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:5], *output)  # Q, K, V, boundaries, O, LSE
    ctx.asked = inputs[5:]
    # Backward finds its engine by the same number. (While tracing there is no telling what will run when.)
    ctx.caller = CALLERS.find(inputs[-1]) if type(inputs[-1]) is int else None


def _gradients(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse = ctx.saved_tensors
    asked = (cu_seqlens_q, cu_seqlens_k, *ctx.asked)
    given = torch.ops.mesh_attention.attend_backward(d_out, d_lse, q, k, v, out, lse, *asked)
    needed = ctx.needs_input_grad[:3]
    return *(gradient if need else None for gradient, need in zip(given, needed, strict=True)), *([None] * len(asked))


def _refuse_second(ctx: Any, *gradients: Tensor | None) -> None:
    raise UsageError(
        "mesh attention was asked for a gradient of a gradient; only first derivatives exist; call backward without "
        "create_graph"
    )


attend_operator.register_autograd(_gradients, setup_context=_set_up)
backward_operator.register_autograd(_refuse_second)
