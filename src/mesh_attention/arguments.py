"""What a call may be asked for: the arguments of `MeshAttention` and of its calls, checked and as values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from mesh_attention.errors import ProblemError, UsageError
from mesh_attention.execution.buffers import DTYPES
from mesh_attention.execution.executor import Softmax
from mesh_attention.masks import Mask, boundaries, causal, documents, full, window

NO_WINDOW = (-1, -1)
REFUSED = {
    "dropout_p": "dropout",
    "attn_mask": "a dense mask",
    "attn_bias": "an attention bias",
    "alibi_slopes": "ALiBi",
    "block_table": "a paged KV cache",
    "q_descale": "scaled low-precision inputs",
}
"""Arguments of other attention functions that have a meaning we do not compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """What a call asks for besides its tensors; the names are flash-attn's."""

    causal: bool = False
    softmax_scale: float | None = None
    window_size: tuple[int, int] = (-1, -1)
    cu_seqlens_q: tuple[int, ...] | None = None
    cu_seqlens_k: tuple[int, ...] | None = None
    softcap: float = 0.0
    deterministic: bool = False
    seq_len: int | None = None
    seq_len_k: int | None = None

    def mask(self) -> Mask:
        mask = full() if tuple(self.window_size) == (-1, -1) else window(*self.window_size)
        if self.causal:
            mask &= causal()
        if self.cu_seqlens_q is not None:
            mask &= documents(self.cu_seqlens_q, self.cu_seqlens_k)
        elif self.cu_seqlens_k is not None:
            raise UsageError(
                "cu_seqlens_k came without cu_seqlens_q; give both, or cu_seqlens_q alone for one sequence"
            )
        return mask


SIMPLE_ARGUMENTS = (
    "causal",
    "softmax_scale",
    "window_size",
    "softcap",
    "deterministic",
    "seq_len",
    "seq_len_k",
    "return_lse",
)
CALL_ARGUMENTS = (*SIMPLE_ARGUMENTS, "cu_seqlens_q", "cu_seqlens_k")


def call_options(
    is_causal: object,
    softmax_scale: object,
    window_size: object,
    softcap: object,
    deterministic: object,
    seq_len: int | None,
    seq_len_k: int | None,
    return_lse: object,
    cu_seqlens_q: Sequence[int] | Tensor | None = None,
    cu_seqlens_k: Sequence[int] | Tensor | None = None,
) -> CallOptions:
    flag("return_lse", return_lse)
    return CallOptions(
        causal=flag("causal", is_causal),
        softmax_scale=None if softmax_scale is None else _number("softmax_scale", softmax_scale),
        window_size=_window(window_size),
        cu_seqlens_q=_boundaries("cu_seqlens_q", cu_seqlens_q),
        cu_seqlens_k=_boundaries("cu_seqlens_k", cu_seqlens_k),
        softcap=_number("softcap", softcap),
        deterministic=flag("deterministic", deterministic),
        seq_len=seq_len,
        seq_len_k=seq_len_k,
    )


def form_of(simple: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> tuple[object, ...]:
    """All that tells one call from another; types as well, since True is 1. Written out: a small call waits for it."""
    return (
        *(simple, *map(type, simple), *window_types(simple[2])),
        *(type(q), q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device),
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu"),
        torch.are_deterministic_algorithms_enabled(),
    )


def window_types(sides: object) -> tuple[type, ...]:
    return () if sides is NO_WINDOW or not isinstance(sides, tuple) else tuple(map(type, sides))


def check_dimensions(ranks: Sequence[Sequence[Tensor]]) -> None:
    dimensions = {tensor.dim() for rank in ranks for tensor in rank}
    if len(dimensions) > 1:
        raise ProblemError(f"q, k and v have {sorted(dimensions)} dimensions: expected the same, 3 or 4")


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, ours, theirs in (("k", q, k), ("v", q, v)):
        if ours.dtype != theirs.dtype or ours.device != theirs.device:
            raise ProblemError(
                f"q is {ours.dtype} on {ours.device} and {name} is {theirs.dtype} on {theirs.device}; expected the same"
            )
    if k.shape[:3] != v.shape[:3]:
        raise ProblemError(f"k is {tuple(k.shape)} and v is {tuple(v.shape)}: batch, tokens and heads must be the same")
    if q.shape[0] != k.shape[0]:
        raise ProblemError(f"q has batch {q.shape[0]} and k has batch {k.shape[0]}: expected the same")
    if q.shape[3] != k.shape[3]:
        raise ProblemError(f"q has head size {q.shape[3]} and k has {k.shape[3]}: expected the same (v may differ)")


def needs_gradient(tensors: Sequence[Sequence[Tensor]]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for rank in tensors for tensor in rank)


def check_softmax(scale: float, softcap: float) -> Softmax:
    if not math.isfinite(scale) or not (math.isfinite(softcap) and softcap >= 0):
        raise UsageError(
            f"softmax_scale={scale}, softcap={softcap}: expected finite numbers, softcap 0 (none) or above"
        )
    return Softmax(scale=float(scale), softcap=float(softcap))


def whole_length(given: int | None, cuts: tuple[int, ...] | None, tensor: Tensor, ranks: int) -> int:
    if given is not None:
        return given
    return cuts[-1] if cuts is not None else int(tensor.shape[1]) * ranks


def dtype_name(tensor: Tensor) -> str:
    for name, dtype in DTYPES.items():
        if tensor.dtype == dtype:
            return name
    raise ProblemError(f"q is {tensor.dtype}: expected one of {', '.join(DTYPES)}")


def _boundaries(name: str, cuts: Sequence[int] | Tensor | None) -> tuple[int, ...] | None:
    return None if cuts is None else boundaries(name, cuts)


def _window(sides: object) -> tuple[int, int]:
    if isinstance(sides, tuple | list) and len(sides) == 2 and all(type(side) is int for side in sides):
        return sides[0], sides[1]
    raise UsageError(f"window_size={sides!r}: expected (left, right) in tokens, -1 for unbounded")


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{name}={value!r}: expected True or False")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name}={value!r}: expected a number")
    return float(value)


def describe(tensor: object) -> str:
    return f"a tensor of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else f"{type(tensor).__name__}"


def refuse_known(others: dict[str, Any]) -> None:
    for name, meaning in REFUSED.items():
        value = others.get(name)
        if value is not None and not (isinstance(value, int | float) and value == 0):
            raise UsageError(f"{name} came, but {meaning} is not supported; leave {name} out")


def refuse_unknown(
    given: dict[str, Any], known: Sequence[str], *, of: str, allowed: dict[str, str] | None = None
) -> None:
    for name in given:
        if name not in known and name not in (allowed or {}):
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"unknown argument {name!r} of {of}; {hint}expected some of {', '.join(known)}")
