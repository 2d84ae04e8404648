"""torch's CPU flash kernels: they give the LSE, and backward takes one from outside."""

from __future__ import annotations

import torch
from torch import Tensor

from mesh_attention.kernels.base import CallMask, Demand, Gradients

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


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

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: CallMask, scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        bias, blind = _bias(mask, q)
        out, lse = _forward(q, k, v, 0.0, mask.form == "causal", attn_mask=bias, scale=scale)
        # For rows that see nothing the kernel says 0, as if they had seen one key.
        return out, lse if blind is None else lse.masked_fill(blind, -torch.inf)

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        do: Tensor,
        lse: Tensor,
        delta: Tensor,
        *,
        mask: CallMask,
        scale: float,
        softcap: float,
    ) -> Gradients:
        bias, _ = _bias(mask, q)
        lse = lse.masked_fill(lse == -torch.inf, 0.0)  # such rows are masked everywhere; -inf - -inf would be NaN
        out = _stand_in_output(do, delta)
        grads = _backward(do, q, k, v, out, lse, 0.0, mask.form == "causal", attn_mask=bias, scale=scale)
        return Gradients(*grads)


def _bias(mask: CallMask, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The additive mask the kernel wants, and which rows see nothing."""
    if mask.form != "positions":
        return None, None
    seen = mask.dense(q.device)
    bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, -torch.inf)
    return bias, ~seen.any(-1)


def _stand_in_output(do: Tensor, delta: Tensor) -> Tensor:
    """Some O with rowsum(O∘dO) = delta: all that the kernel takes from O is that sum."""
    wide = do.to(delta.dtype)
    largest = wide.abs().amax(-1, keepdim=True)
    unit = wide / largest.clamp_min(torch.finfo(wide.dtype).tiny)  # so that squares of tiny gradients do not vanish
    norm = (unit * unit).sum(-1, keepdim=True)
    ratio = torch.where(largest > 0, delta[..., None] / (largest * norm), 0.0)
    return (unit * ratio).to(do.dtype)
