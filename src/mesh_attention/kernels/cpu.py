"""torch's CPU flash kernels, which return the LSE and accept one in backward."""

from __future__ import annotations

import torch
from torch import Tensor

from mesh_attention.kernels.base import CallMask, Demand, Gradients, RowGradient, Scores
from mesh_attention.kernels.merging import output_of
from mesh_attention.kernels.reference import REFERENCE, of_rows

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


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
        out, lse = _forward(q, k, v, 0.0, scores.mask.form == "causal", attn_mask=bias, scale=scores.scale)
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
        grads = _backward(do, q, k, v, out, lse, 0.0, is_causal, attn_mask=bias, scale=scores.scale)
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
