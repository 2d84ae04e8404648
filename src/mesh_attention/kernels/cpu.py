"""torch's CPU flash kernels, which return the LSE and accept one in backward."""

from __future__ import annotations

import torch
from torch import Tensor

from mesh_attention.kernels.base import CallMask, Demand, Gradients, RowGradient, Scores
from mesh_attention.kernels.reference import ReferenceKernel
from mesh_attention.kernels.rows import output_of

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_REFERENCE = ReferenceKernel()


class CpuFlashKernel:
    name = "cpu flash"

    def supports(self, demand: Demand) -> str | None:
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
            return _REFERENCE.forward(q, k, v, scores)
        bias, blind = _bias(scores.mask, q)
        q, k, v = (_in_one_piece(x) for x in (q, k, v))
        out, lse = _forward(q, k, v, 0.0, scores.mask.form == "causal", attn_mask=bias, scale=scores.scale)
        # For rows that see nothing the kernel returns LSE 0, as if they had seen one key.
        return out, lse if blind is None else lse.masked_fill(blind, -torch.inf)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, row: RowGradient, scores: Scores) -> Gradients:
        if _is_empty(q, k):
            return _REFERENCE.backward(q, k, v, row, scores)
        bias, _ = _bias(scores.mask, q)
        lse = row.lse.masked_fill(row.lse == -torch.inf, 0.0)  # masked everywhere; -inf - -inf would be NaN
        q, k, v, do, out = (_in_one_piece(x) for x in (q, k, v, row.do, output_of(row)))
        is_causal = scores.mask.form == "causal"
        grads = _backward(do, q, k, v, out, lse, 0.0, is_causal, attn_mask=bias, scale=scores.scale)
        return Gradients(*grads)


def _is_empty(q: Tensor, k: Tensor) -> bool:
    """True without queries or keys: torch's kernel then divides by zero, which ends the process."""
    return not q.shape[2] or not k.shape[2]


def _in_one_piece(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if its last axis is not contiguous: torch's kernel takes that stride to be 1."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _bias(mask: CallMask, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The additive mask for the kernel, and the rows that see nothing."""
    if mask.form != "positions":
        return None, None
    seen = mask.dense(q.device)
    bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, -torch.inf)
    return bias, ~seen.any(-1)
