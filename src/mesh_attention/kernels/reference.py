"""The reference: plain torch for any dtype and any mask. Computes in float32, or float64 for float64."""

from __future__ import annotations

import torch
from torch import Tensor

from mesh_attention.kernels.base import Demand, Gradients, RowGradient, Scores
from mesh_attention.kernels.rows import delta_of


class ReferenceKernel:
    name = "reference"

    def supports(self, demand: Demand) -> str | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        q, k, v = _widen(q), _share(_widen(k), q), _share(_widen(v), q)
        bent, _ = _scored(q, k, scores)
        lse = bent.logsumexp(-1)
        # Not exp(bent - lse): the LSE is rounded, and weights would not add up to 1 for large scores.
        weights = bent.softmax(-1).masked_fill((lse == -torch.inf)[..., None], 0.0)
        return weights @ v, lse

    def backward(self, q: Tensor, k: Tensor, v: Tensor, row: RowGradient, scores: Scores) -> Gradients:
        groups = q.shape[1] // k.shape[1]
        q, k, v, do = _widen(q), _share(_widen(k), q), _share(_widen(v), q), _widen(row.do)
        bent, slope = _scored(q, k, scores)
        weights = (bent - row.lse.clamp_min(torch.finfo(row.lse.dtype).min)[..., None]).exp()
        d_scores = weights * (do @ v.mT - delta_of(row)[..., None]) * slope * scores.scale
        return Gradients(d_scores @ k, _unshare(d_scores.mT @ q, groups), _unshare(weights.mT @ do, groups))


def _scored(q: Tensor, k: Tensor, scores: Scores) -> tuple[Tensor, Tensor | float]:
    """Masked scores, and the slope of the softcap at each."""
    found = q @ k.mT * scores.scale
    slope: Tensor | float = 1.0
    if scores.softcap:
        bent = torch.tanh(found / scores.softcap)
        found, slope = scores.softcap * bent, 1 - bent * bent
    if scores.mask.form != "full":
        found = found.masked_fill(~scores.mask.dense(q.device), -torch.inf)
    return found, slope


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _unshare(gradient: Tensor, groups: int) -> Tensor:
    """Gradients summed over the query heads that share each KV head."""
    batch, heads, tokens, dim = gradient.shape
    return gradient.reshape(batch, heads // groups, groups, tokens, dim).sum(2)


def _share(x: Tensor, q: Tensor) -> Tensor:
    """Every KV head repeated for each query head that reads it."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)
