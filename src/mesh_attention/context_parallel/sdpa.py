"""torch's scaled_dot_product_attention over a mesh: a mode that intercepts the calls of this thread.

Nothing is patched: calls are seen even if the function was imported by name, and other threads are not affected. Other
attention functions of torch (fused kernels, flex attention) would attend to this rank's tokens alone, so they are
refused, and so are calls that a mode does not see (`unseen`). Kernels that are not operators of torch go
unnoticed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from mesh_attention.api import MeshAttention
from mesh_attention.arguments import flag
from mesh_attention.context_parallel.dtensors import attend_dtensor
from mesh_attention.context_parallel.unseen import (
    answered_by,
    attends,
    is_called_by_us,
    passed_on,
    recompute_under,
    refusal,
    refusing_unseen,
)
from mesh_attention.errors import UsageError
from mesh_attention.integrations.pytorch import as_autocast

SDPA = (
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)


class MeshSdpa(TorchFunctionMode):
    """Sends scaled_dot_product_attention to a MeshAttention. `lengths` are whole lengths that ranks may hold parts of.

    `chunked` is the MeshAttention for DTensors, which have another layout.
    """

    def __init__(self, attention: MeshAttention, *, lengths: Iterable[int], chunked: MeshAttention) -> None:
        super().__init__()
        self.attention, self.chunked = attention, chunked
        self.lengths = WholeLengths(attention, lengths)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The mode, with help for functions that torch takes as arguments, and the refusal of what it does not see."""
        with refusing_unseen(self), self, _FunctionsOfFunctions():
            yield

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        role = _role(func)
        if role == "sdpa":
            return self.attend(*args, **kwargs)
        if role == "multi-head":
            return self._multi_head(func, args, kwargs)
        if role == "fused" and not is_called_by_us():
            with self._telling():
                raise refusal(func.__name__)
        return func(*args, **kwargs)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """scaled_dot_product_attention, with its arguments, over the whole sequence."""
        # Outer modes must not see what we run: our kernels have names that they refuse.
        with torch._C.DisableTorchFunction(), nullcontext() if torch.compiler.is_compiling() else passed_on():
            with self._telling():
                _check_arguments(attn_mask, dropout_p)
                causal, shares_heads = flag("is_causal", is_causal), flag("enable_gqa", enable_gqa)
                _check_tensors(query, key, value, shares_heads)
                recompute_under(self)
                seq_q, seq_k = self._whole_lengths(query, key, value)
            call = {"softmax_scale": scale, **_causal_call(causal, seq_q, seq_k)}
            query, key, value = as_autocast(query, key, value)
            if any(isinstance(x, DTensor) for x in (query, key, value)):
                return self._attend_dtensors(query, key, value, call)
            out = self._attend(query, key, value, call | {"seq_len": seq_q, "seq_len_k": seq_k})
            return out.reshape(*query.shape[:-1], value.shape[-1])

    def _telling(self) -> AbstractContextManager[None]:
        """Lets the other ranks know of a refusal. What a compiler cannot trace is refused when it runs."""
        return nullcontext() if torch.compiler.is_compiling() else self.attention.session.telling()

    def _whole_lengths(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int]:
        """The whole lengths of queries and keys."""
        if not any(isinstance(x, DTensor) for x in (query, key, value)):
            return self.lengths.of(query.shape[-2]), self.lengths.of(key.shape[-2])
        if {x.dim() for x in (query, key, value)} != {4}:
            raise UsageError(f"query is a DTensor of shape {tuple(query.shape)}; expected (batch, heads, seq, dim)")
        return query.shape[-2], key.shape[-2]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, call: dict[str, Any]) -> Tensor:
        tensors = [_four_dims(x) for x in (query, key, value)]
        if self.attention.tensor_format == "bhsd":
            return self.attention(*tensors, **call)  # type: ignore[no-any-return]
        return self.attention(*(x.transpose(1, 2) for x in tensors), **call).transpose(1, 2)  # type: ignore[no-any-return]

    def _attend_dtensors(self, query: Any, key: Any, value: Any, call: dict[str, Any]) -> Tensor:
        if self.chunked.tensor_format == "bhsd":
            return attend_dtensor(self.chunked, query, key, value, **call)  # type: ignore[no-any-return]
        tensors = (x.transpose(1, 2) for x in (query, key, value))
        return attend_dtensor(self.chunked, *tensors, **call).transpose(1, 2)  # type: ignore[no-any-return]

    def _multi_head(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """nn.MultiheadAttention: torch's own function, with its inner attention call sent here."""
        with self._telling():
            _check_multi_head(func, args, kwargs)
        # A function that torch hands to a mode runs without the mode, so the mode would not see its inner call.
        with answered_by(self.attend):
            return func(*args, **kwargs)


class _FunctionsOfFunctions(TorchFunctionMode):
    """Lets the compiler see the mode below in functions given to an operator, such as a checkpoint or torch.cond.

    Dynamo gives such an operator to the modes of the stack, one after the other, and each is off while it handles it,
    so that in the end all of them are off inside the functions. Here the operator is called with modes disabled, and
    they are enabled inside: leaving a guard restores, while tracing, what was the case when the guard was made. Where
    that does not hold, attention in the functions is refused (see `unseen`).
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling() or _role(func) != "higher-order":
            return func(*args, **kwargs)
        enabled = torch._C.DisableTorchFunction()

        def followed(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                with enabled:
                    pass
                return function(*args, **kwargs)

            return run

        with torch._C.DisableTorchFunction():
            return func(*(followed(arg) if callable(arg) else arg for arg in args), **kwargs)


class WholeLengths:
    """Finds the whole length from the length of a rank's part; if none fits, all ranks have equal parts."""

    def __init__(self, attention: MeshAttention, lengths: Iterable[int]) -> None:
        self.ranks, layout = attention.ranks, attention.layout
        parts = {
            n: [sum(map(len, layout.segments(rank, tokens=n, ranks=self.ranks))) for rank in range(self.ranks)]
            for n in sorted(set(lengths))
        }
        own = attention.comms[0].rank
        self._wholes = {part[own]: n for n, part in parts.items()}
        # Every rank gets the same answer, no matter on which rank the parts coincide.
        self._alike = {
            n: [m for m in parts if m != n and any(a == b for a, b in zip(parts[n], parts[m], strict=True))]
            for n in parts
        }

    def of(self, part: int) -> int:
        whole = self._wholes.get(part, part * self.ranks)
        for other in self._alike.get(whole, ()):
            raise UsageError(
                f"{part} tokens may be this rank's part of {whole} or of {other}: buffers of both lengths were given; "
                "give buffers of one length, or pad them to lengths that differ by the number of ranks"
            )
        return whole


def _check_arguments(attn_mask: object, dropout_p: object) -> None:
    if attn_mask is not None:
        raise UsageError(
            "attn_mask is not supported under context_parallel: a rank's part of a dense mask does not define the "
            "whole; use is_causal=True instead, or call MeshAttention, which has windows and documents"
        )
    if dropout_p != 0:
        raise UsageError(f"dropout_p={dropout_p} is not supported under context_parallel: expected 0")


def _check_tensors(query: Any, key: Any, value: Any, shares_heads: bool) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or tensor.dim() < 2 or tensor.is_nested:
            raise UsageError(
                f"{name} is {_kind(tensor)}; expected a dense tensor (batch, heads, seq, dim) under context_parallel"
            )
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise UsageError(f"query, key and value have shapes {shapes}; expected the same batch: nothing is broadcast")
    heads, kv_heads = (x.shape[-3] if x.dim() > 2 else 1 for x in (query, key))
    if heads != kv_heads and not shares_heads:
        raise UsageError(
            f"query has {heads} heads and key has {kv_heads}; expected the same, or enable_gqa=True for heads that "
            "share keys"
        )


def _check_multi_head(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.arguments["need_weights"]:
        raise UsageError(
            "nn.MultiheadAttention cannot return its weights (need_weights=True, the default) under "
            "context_parallel, because no rank has them for the whole sequence; use need_weights=False"
        )
    if bound.arguments["bias_k"] is not None or bound.arguments["add_zero_attn"]:
        raise UsageError(
            "nn.MultiheadAttention with add_bias_kv or add_zero_attn adds a token on every rank under "
            "context_parallel, instead of one to the sequence; leave these arguments out"
        )


def _kind(tensor: object) -> str:
    return f"a tensor of {tensor.dim()} dims" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"


def _four_dims(tensor: Tensor) -> Tensor:
    """The tensor as (batch, heads, seq, dim); all dims before the heads are batch."""
    if tensor.dim() > 4:
        return tensor.flatten(0, -4)
    return tensor[(None,) * (4 - tensor.dim())]


def _causal_call(causal: bool, seq_q: int, seq_k: int) -> dict[str, Any]:
    """Arguments for torch's causal alignment, which aligns the *first* query with the first key. MeshAttention aligns
    the last query with the last key, as flash-attn does."""
    if not causal or seq_q == seq_k:
        return {"causal": causal}
    if seq_q > seq_k:
        return {"window_size": (-1, seq_q - seq_k)}
    # Keys beyond the last query form a separate document without queries.
    return {"causal": True, "cu_seqlens_q": (0, seq_q, seq_q), "cu_seqlens_k": (0, seq_q, seq_k)}


def _role(func: Any) -> Literal["other", "sdpa", "multi-head", "fused", "higher-order"]:
    """How to treat a function of torch."""
    name = getattr(func, "__name__", "").partition(".")[0]
    if not attends(name):
        return "higher-order" if isinstance(func, HigherOrderOperator) else "other"
    if func in SDPA:
        return "sdpa"
    if func is F.multi_head_attention_forward:
        return "multi-head"
    is_ours = (getattr(func, "__module__", None) or "").endswith(".mesh_attention")
    return "other" if is_ours else "fused"


# torch.compile cannot trace function names, so this is evaluated once, while tracing.
_role._dynamo_marked_constant = True  # type: ignore[attr-defined]
