"""The reference: plain torch for any dtype and any mask. Computes in float32, or float64 for float64.

It takes the calls that no faster kernel takes: exact, slow, in bounded memory.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mesh_attention.kernels.base import CallMask, Demand, Gradients, RowGradient, Scores
from mesh_attention.kernels.merging import delta_of
from mesh_attention.masks import Segment


class ReferenceKernel:
    """Takes queries in slices. The scores of a slice take at most `nbytes`, or it is one query; about five tensors of
    that size exist at once."""

    name = "reference"

    def __init__(self, *, nbytes: int = 200 * 2**20) -> None:
        self.nbytes = nbytes

    def unsupported_reason(self, demand: Demand) -> str | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        slices = self._slices(q, k)
        if len(slices) == 1:
            return _forward(q, k, v, scores)
        batch, heads, tokens, _ = q.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty((batch, heads, tokens, v.shape[-1]), dtype=wide, device=q.device)
        lse = torch.empty((batch, heads, tokens), dtype=wide, device=q.device)
        for rows in slices:
            out[:, :, rows], lse[:, :, rows] = _forward(q[:, :, rows], k, v, of_rows(scores, rows))
        return out, lse

    def backward(self, q: Tensor, k: Tensor, v: Tensor, row: RowGradient, scores: Scores) -> Gradients:
        slices = self._slices(q, k)
        if len(slices) == 1:
            return _backward(q, k, v, row, scores)
        wide = torch.promote_types(q.dtype, torch.float32)
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
        for rows in slices:
            upstream = RowGradient(*(None if x is None else x[:, :, rows] for x in row))  # type: ignore[arg-type]
            part = _backward(q[:, :, rows], k, v, upstream, of_rows(scores, rows))
            dq[:, :, rows] = part.dq
            dk += part.dk
            dv += part.dv
        return Gradients(dq, dk, dv)

    def _slices(self, q: Tensor, k: Tensor) -> list[slice]:
        batch, heads, tokens, _ = q.shape
        one_row = batch * heads * max(1, k.shape[2]) * max(q.element_size(), 4)
        step = max(1, self.nbytes // one_row)
        return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]


REFERENCE = ReferenceKernel()


def _forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    q, k, v = widen(q), _share(widen(k), q), _share(widen(v), q)
    bent, _ = _scored(q, k, scores)
    lse = bent.logsumexp(-1)
    # Not exp(bent - lse): the LSE is rounded, and weights would not add up to 1 for large scores.
    weights = bent.softmax(-1).masked_fill((lse == -torch.inf)[..., None], 0.0)
    return weights @ v, lse


def _backward(q: Tensor, k: Tensor, v: Tensor, row: RowGradient, scores: Scores) -> Gradients:
    groups = q.shape[1] // k.shape[1]
    q, k, v, do = widen(q), _share(widen(k), q), _share(widen(v), q), widen(row.do)
    bent, slope = _scored(q, k, scores)
    weights = (bent - row.lse.clamp_min(torch.finfo(row.lse.dtype).min)[..., None]).exp()
    d_scores = weights * (do @ v.mT - delta_of(row)[..., None]) * slope * scores.scale
    return Gradients(d_scores @ k, _unshare(d_scores.mT @ q, groups), _unshare(weights.mT @ do, groups))


def of_rows(scores: Scores, rows: slice) -> Scores:
    """The scores of some of a call's queries."""
    mask = scores.mask
    form = "positions" if mask.form == "causal" else mask.form  # causal needs as many queries as keys
    part: CallMask = replace(mask, form=form, q=_part(mask.q, rows.start, rows.stop))
    return scores._replace(mask=part)


def _part(segments: tuple[Segment, ...], start: int, stop: int) -> tuple[Segment, ...]:
    """The segments of the tokens start:stop."""
    ends = pairwise(accumulate(map(len, segments), initial=0))
    parts = (s[max(0, start - at) : max(0, stop - at)] for s, (at, _) in zip(segments, ends, strict=True))
    return tuple(part for part in parts if part)


def _scored(q: Tensor, k: Tensor, scores: Scores) -> tuple[Tensor, Tensor | float]:
    """Masked scores, and the slope of the softcap at each."""
    products = q @ k.mT * scores.scale
    slope: Tensor | float = 1.0
    if scores.softcap:
        bent = torch.tanh(products / scores.softcap)
        products, slope = scores.softcap * bent, 1 - bent * bent
    if scores.mask.form != "full":
        products = products.masked_fill(~scores.mask.dense(q.device), -torch.inf)
    return products, slope


def widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _unshare(gradient: Tensor, groups: int) -> Tensor:
    """Gradients summed over the query heads that share each KV head."""
    batch, heads, tokens, dim = gradient.shape
    return gradient.reshape(batch, heads // groups, groups, tokens, dim).sum(2)


def _share(x: Tensor, q: Tensor) -> Tensor:
    """Every KV head repeated for each query head that reads it."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)
