"""torch's own attention, through aten operators: flash on CPU; cuDNN's kernel and flash-attn 2's on NVIDIA GPUs.

On CPU, torch's flash returns the LSE and accepts one in backward.

cuDNN is about twice as fast on Hopper, takes unmasked and aligned causal calls, and builds a plan for every new shape.
flash-attn 2 takes any window and any shape. By default neither backward gives the same bits twice: both add up dQ in
the order in which blocks finish. Through torch, only flash-attn's can be made deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mesh_attention.kernels.base import (
    CallMask,
    Demand,
    Gradients,
    RowGradient,
    Scores,
    aligned,
    dense_strides,
    tokens_first,
)
from mesh_attention.kernels.merging import output_of
from mesh_attention.kernels.reference import REFERENCE, of_rows
from mesh_attention.kernels.windowed import FlashRow, Window, WindowedKernel, fix_empty_row_lse

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_cudnn_forward = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
_flash_forward = torch.ops.aten._flash_attention_forward.default
_flash_backward = torch.ops.aten._flash_attention_backward.default


# On CPU


class CpuFlashKernel:
    name = "cpu flash"

    def unsupported_reason(self, demand: Demand) -> str | None:
        if demand.device != "cpu":
            return f"runs on cpu, not on {demand.device}"
        if demand.head_dim_qk != demand.head_dim_v:
            return f"needs one head size, not {demand.head_dim_qk} and {demand.head_dim_v}"
        if demand.softcap:
            return "has no softcap"
        if demand.lse_gradient:
            return "cannot take a gradient into the LSE in rows where dO is zero"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        if _is_empty(q, k):
            return REFERENCE.forward(q, k, v, scores)
        bias, blind = _bias(scores.mask, q)
        q, k, v = (_in_one_piece(x) for x in (q, k, v))
        out, lse = _cpu_forward(q, k, v, 0.0, scores.mask.form == "causal", attn_mask=bias, scale=scores.scale)
        if blind is not None:
            lse = lse.masked_fill(blind, -torch.inf)
        return _without_false_zeros(q, k, v, scores, out, lse)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, row: RowGradient, scores: Scores) -> Gradients:
        if _is_empty(q, k):
            return REFERENCE.backward(q, k, v, row, scores)
        bias, _ = _bias(scores.mask, q)
        lse = row.lse.masked_fill(row.lse == -torch.inf, 0.0)  # masked everywhere; -inf - -inf would be NaN
        q, k, v, do, out = (_in_one_piece(x) for x in (q, k, v, row.do, output_of(row)))
        is_causal = scores.mask.form == "causal"
        grads = _cpu_backward(do, q, k, v, out, lse, 0.0, is_causal, attn_mask=bias, scale=scores.scale)
        return Gradients(*grads)


def _without_false_zeros(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Results with the rows in doubt computed again.

    Where no score is above -inf, torch's kernel gives output 0 and LSE 0, as if there had been one key: in rows that
    see nothing, but also in those whose scores all overflow to -inf or are NaN. An LSE may be 0 for good reasons, too.
    """
    if torch.count_nonzero(lse) == lse.numel():  # one operator: small calls notice a second one
        return out, lse
    doubtful = (lse == 0.0).flatten(0, 1).any(0).nonzero()
    rows = slice(int(doubtful[0]), int(doubtful[-1]) + 1)
    again, lse_again = REFERENCE.forward(q[:, :, rows], k, v, of_rows(scores, rows))
    is_doubtful = lse[:, :, rows] == 0.0
    out[:, :, rows] = torch.where(is_doubtful[..., None], again.to(out.dtype), out[:, :, rows])
    lse[:, :, rows] = torch.where(is_doubtful, lse_again, lse[:, :, rows])
    return out, lse


def _is_empty(q: Tensor, k: Tensor) -> bool:
    """True without queries or keys: torch's kernel then divides by zero, which ends the process."""
    return not q.shape[2] or not k.shape[2]


def _in_one_piece(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if its last axis is not contiguous or another stride is shorter than a row.

    torch's kernel takes the last stride to be 1, and that of its output too, which it lays out like Q: with another
    stride of 0 or 1, even one over an axis of length 1, the last axis of that output may not be contiguous.
    """
    *outer, last = tensor.stride()
    return tensor if last == 1 and min(outer) >= tensor.shape[-1] else tensor.contiguous()


def _bias(mask: CallMask, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The additive mask for the kernel, and the rows that see nothing."""
    if mask.form != "positions":
        return None, None
    seen = mask.dense(q.device)
    bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, -torch.inf)
    return bias, ~seen.any(-1)


# On NVIDIA GPUs


_FEWEST_FOR_CUDNN = 64
"""Below this many queries or keys cuDNN is not faster, and it refuses a single key."""

_FIRST_SOUND_CUDNN = 91501
"""Up to 9.15.0, lengths that are not a multiple of 128 read past their end; torch has the same limit."""


_OUR_PLANS = -0.0
"""Dropout probability: zero, but with other bytes than 0.0, by which torch looks up cuDNN plans."""


@dataclass(frozen=True, slots=True, eq=False)
class TorchFlashOp:
    """torch's copy of flash-attn 2: grouped heads without copies, one head size, any window.

    With `is_deterministic`, backward gives the same bits every time, by torch's process-wide switch.
    """

    is_deterministic: bool = False

    def unsupported_reason(self, window: Window, head_dim_qk: int, head_dim_v: int) -> str | None:
        if head_dim_qk != head_dim_v:
            return f"torch's flash kernel needs one head size, not {head_dim_qk} and {head_dim_v}"
        if not torch.backends.cuda.is_flash_attention_available():
            return "torch was built without flash attention"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, window: Window, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = (aligned(x).transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = _flash_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, False, False, scale=scale, **_reaches(window)
        )
        return out.transpose(1, 2), fix_empty_row_lse(lse)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, row: FlashRow, window: Window, scale: float) -> Gradients:
        q, k, v, do, out = (aligned(x).transpose(1, 2) for x in (q, k, v, row.do, row.out))
        seed = _no_dropout(q.device)
        with _same_bits() if self.is_deterministic else nullcontext():
            grads = _flash_backward(
                *(do, q, k, v, out, row.lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0, False, seed, seed),
                scale=scale,
                **_reaches(window),
            )
        return Gradients(*(gradient.transpose(1, 2) for gradient in grads))


class CudnnOp:
    """cuDNN, for windows that are unmasked, or causal with as many queries as keys, and not tiny."""

    def unsupported_reason(self, window: Window, head_dim_qk: int, head_dim_v: int) -> str | None:
        if not window.is_full and not window.is_causal:
            return "cuDNN needs an unmasked or aligned causal window"
        if min(len(window.q), len(window.kv)) < _FEWEST_FOR_CUDNN:
            return f"cuDNN needs {_FEWEST_FOR_CUDNN} queries and keys or more"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, window: Window, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = aligned(q), aligned(k), aligned(v)
        out, lse, *_ = _cudnn_forward(q, k, v, None, True, 0.0, window.is_causal, False, scale=scale)
        return out, lse.squeeze(-1)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, row: FlashRow, window: Window, scale: float) -> Gradients:
        q, k, v = aligned(q), aligned(k), aligned(v)
        if 0 in q.stride():  # expanded: strides like Q's would leave the last axis of O not contiguous
            q = tokens_first(q)
        # torch looks up cuDNN's backward plans by the strides of Q, K and V alone: with other strides of O or dO a plan
        # gives wrong gradients. So our O and dO always have the same strides, and we do not share plans with torch's
        # own attention.
        out, do = (_laid_as(x, q) for x in (row.out, row.do))
        seed, lse = _no_dropout(q.device), row.lse.contiguous()[..., None]
        lengths = q.shape[2], k.shape[2]
        grads = _cudnn_backward(
            *(do, q, k, v, out, lse, seed, seed, None, None, None, *lengths, _OUR_PLANS, window.is_causal), scale=scale
        )
        return Gradients(*grads)


class TorchFlashKernel(WindowedKernel):
    """torch's copy of flash-attn 2; with `is_deterministic`, gradients have the same bits every time."""

    def __init__(self, *, is_deterministic: bool = False) -> None:
        name = "torch flash, deterministic" if is_deterministic else "torch flash"
        super().__init__(name, (TorchFlashOp(is_deterministic),), is_deterministic=is_deterministic)

    def _further_reason(self, demand: Demand) -> str | None:
        if demand.head_dim_qk != demand.head_dim_v:
            return f"needs one head size, not {demand.head_dim_qk} and {demand.head_dim_v}"
        return _torch_unsupported_reason(torch.backends.cuda.can_use_flash_attention, demand)


class CudnnKernel(WindowedKernel):
    """cuDNN where possible, torch's flash for windows; the fastest in plain torch on Hopper and Blackwell.

    If deterministic, cuDNN runs forward only and torch's flash backward, since cuDNN's gradients vary between runs.
    """

    def __init__(self, *, is_deterministic: bool = False) -> None:
        name, flash = "cudnn, deterministic" if is_deterministic else "cudnn", TorchFlashOp(is_deterministic)
        backward_ops = (flash,) if is_deterministic else None
        super().__init__(name, (CudnnOp(), flash), backward_ops=backward_ops, is_deterministic=is_deterministic)

    def _further_reason(self, demand: Demand) -> str | None:
        reason = _cudnn_unsupported_reason()
        if reason is not None:
            return reason
        if demand.deterministic and demand.head_dim_qk != demand.head_dim_v:
            return f"needs one head size to be deterministic, not {demand.head_dim_qk} and {demand.head_dim_v}"
        return _torch_unsupported_reason(torch.backends.cuda.can_use_cudnn_attention, demand)


def _cudnn_unsupported_reason() -> str | None:
    major, minor = torch.cuda.get_device_capability()
    if major not in (9, 10):
        return f"runs better than flash on compute capability 9 and 10 only, not on {major}.{minor}"
    version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if version is None or version < _FIRST_SOUND_CUDNN:
        return f"needs cuDNN {_FIRST_SOUND_CUDNN} or later for lengths that are not a multiple of 128, not {version}"
    return None


def _torch_unsupported_reason(can_use: Callable[[Any], bool], demand: Demand) -> str | None:
    """torch's own answer for these head sizes, forward and backward, on the current device."""
    with torch.enable_grad():  # without gradients, torch answers for forward alone
        q, v = (
            torch.empty((1, 1, 2 * _FEWEST_FOR_CUDNN, dim), dtype=demand.dtype, device=demand.device).requires_grad_()
            for dim in (demand.head_dim_qk, demand.head_dim_v)
        )
        if can_use(torch.backends.cuda.SDPAParams(q, q, v, None, 0.0, False, False)):
            return None
    return (
        f"cannot do {demand.dtype} with head sizes {demand.head_dim_qk} and {demand.head_dim_v} here, according to "
        f"torch.backends.cuda.{getattr(can_use, '__name__', 'can_use')}"
    )


def _laid_as(tensor: Tensor, q: Tensor) -> Tensor:
    """The tensor, or a copy of it, with the strides cuDNN gives O for this Q: dense, dims in Q's order."""
    expected = dense_strides(q.stride(), tensor.shape)
    is_laid = all(size == 1 or a == b for size, a, b in zip(tensor.shape, tensor.stride(), expected, strict=True))
    if is_laid and not tensor.data_ptr() % 16:
        return tensor
    return tensor.new_empty_strided(tensor.shape, expected).copy_(tensor)


def _reaches(window: Window) -> dict[str, int | None]:
    return {"window_size_left": window.left, "window_size_right": window.right}


@lru_cache(maxsize=64)
def _no_dropout(device: torch.device) -> Tensor:
    """The random state that the backward operators require but, without dropout, do not read."""
    return torch.zeros((), dtype=torch.int64, device=device)


@contextmanager
def _same_bits() -> Iterator[None]:
    """torch's deterministic mode, without filling fresh memory; restores the previous mode."""
    memory: Any = torch.utils.deterministic
    mode, fill = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = fill
