"""torch's scaled_dot_product_attention over a mesh: what a call inside a context means, and what is refused.

Nothing is patched: calls are answered where they reach torch's dispatcher (`dispatch`), so it does not matter who made
them, and other threads are not affected. A TorchFunctionMode refuses what does not reach it as attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import eq
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from mesh_attention.api import MeshAttention
from mesh_attention.arguments import describe, flag
from mesh_attention.context_parallel.dispatch import (
    answered_by,
    is_other_attention,
    passed_on,
    recompute_under,
    refusal,
)
from mesh_attention.errors import UsageError
from mesh_attention.integrations.pytorch import as_autocast


class MeshSdpa:
    """Answers scaled_dot_product_attention by a MeshAttention. `lengths` are whole lengths that ranks may hold parts
    of; if none of them fits a part, all ranks have equal parts."""

    def __init__(self, attention: MeshAttention, *, lengths: Iterable[int]) -> None:
        self.attention = attention
        lengths = tuple(sorted(set(lengths)))
        layout, ranks = attention.layout, attention.ranks
        self._parts = parts = {
            n: [sum(map(len, layout.segments(rank, seq_len=n, ranks=ranks))) for rank in range(ranks)] for n in lengths
        }
        self._wholes = {part[attention.rank]: n for n, part in parts.items()}
        # Compiled code has the whole lengths in it. Dynamo guards on the types of modes, so each context has its own.
        kinds = _MODES.setdefault(attention, {})
        self._mode = kinds.setdefault(lengths, type("_Refusals", (_Refusals,), {}))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, this thread's attention is answered here, or refused."""
        with answered_by(self), self._mode(self.telling):
            yield

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
        with torch._C.DisableTorchFunction(), passed_on():
            with self.telling():
                _check_arguments(attn_mask, dropout_p)
                causal, shares_heads = flag("is_causal", is_causal), flag("enable_gqa", enable_gqa)
                _check_tensors(query, key, value, shares_heads)
                recompute_under(self.entered)
                seq_q, seq_k = (self._whole_length(int(x.shape[-2])) for x in (query, key))
            call = {"softmax_scale": scale, "seq_len": seq_q, "seq_len_k": seq_k, **_causal_call(causal, seq_q, seq_k)}
            query, key, value = as_autocast(query, key, value)
            tensors = [_four_dims(x) for x in (query, key, value)]
            if self.attention.tensor_format == "bhsd":
                out = self.attention(*tensors, **call)
            else:
                out = self.attention(*(x.transpose(1, 2) for x in tensors), **call).transpose(1, 2)
            return out.reshape(*query.shape[:-1], value.shape[-1])  # type: ignore[no-any-return]

    def _whole_length(self, part: int) -> int:
        """The whole length, from the length of this rank's part."""
        whole = self._wholes.get(part, part * self.attention.ranks)
        ours = self._parts.get(whole)
        for other, theirs in self._parts.items():
            # Every rank gets the same answer, no matter on which rank the parts coincide.
            if ours is not None and other != whole and any(map(eq, ours, theirs)):
                raise UsageError(
                    f"{part} tokens may be this rank's part of {whole} or of {other}: buffers of both lengths were "
                    "given; give buffers of one length, or pad them to lengths that differ by the number of ranks"
                )
            if ours is None and part in theirs:
                raise UsageError(
                    f"{part} tokens are another rank's part of {other}, but not this rank's; if all ranks hold these "
                    "tokens, give them in buffers= too, which shards them, or pad them to another length"
                )
        return whole

    def telling(self) -> AbstractContextManager[None]:
        """Lets the other ranks know of a refusal; a compiler that traces sends nothing."""
        return self.attention.session.telling() if detect_fake_mode() is None else nullcontext()


class _Refusals(TorchFunctionMode):
    """Refuses what attends and never reaches the dispatcher as attention: weights that nn.MultiheadAttention returns,
    flex attention, operators that were registered late. With a mode, torch's modules also take no fused path."""

    def __init__(self, telling: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self.telling = telling

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with nullcontext() if torch.compiler.is_compiling() else self.telling():
                _check_multi_head(func, args, kwargs)
        elif is_other_attention(func):
            with nullcontext() if torch.compiler.is_compiling() else self.telling():
                raise refusal(func.__name__)
        return func(*args, **kwargs)


_MODES: WeakKeyDictionary[MeshAttention, dict[tuple[int, ...], type[_Refusals]]] = WeakKeyDictionary()


def _check_arguments(attn_mask: object, dropout_p: object) -> None:
    # Each rank judges its part: where one masks something, all raise, because that rank tells the others.
    if attn_mask is not None:
        if not isinstance(attn_mask, Tensor):
            raise UsageError(f"attn_mask is {describe(attn_mask)}; expected a tensor")
        if detect_fake_mode() is not None or attn_mask.requires_grad or isinstance(attn_mask, DTensor):
            raise UsageError(
                "attn_mask cannot be read while a compiler traces, or as a DTensor, and cannot have a gradient under "
                "context_parallel; leave it out if it masks nothing"
            )
        is_bool = attn_mask.dtype == torch.bool
        if not (attn_mask.all() if is_bool else attn_mask.is_floating_point() and not attn_mask.any()):
            raise UsageError(
                "attn_mask masks tokens, which is not supported under context_parallel: a rank's part of a dense mask "
                "does not define the whole. For a causal mask use is_causal=True instead; cut padding off, or pack the "
                "sequences and call MeshAttention with cu_seqlens_q; it has windows too"
            )
    if dropout_p != 0:
        raise UsageError(f"dropout_p={dropout_p} is not supported under context_parallel: expected 0")


def _check_tensors(query: Any, key: Any, value: Any, shares_heads: bool) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if isinstance(tensor, DTensor):
            raise UsageError(
                f"{name} is a DTensor; call attend_dtensor instead, outside of context_parallel, or give its to_local()"
            )
        if not isinstance(tensor, Tensor) or tensor.dim() < 2 or tensor.is_nested:
            raise UsageError(
                f"{name} is {describe(tensor)}; expected a dense tensor (batch, heads, seq, dim) under context_parallel"
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
