"""The reference over a few queries at a time, for calls that no fast GPU kernel takes: exact, slow, bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mesh_attention.kernels.base import CallMask, Demand, Gradients, RowGradient, Scores
from mesh_attention.kernels.reference import ReferenceKernel
from mesh_attention.masks import Segment

_WHOLE = ReferenceKernel()


class SlicedReferenceKernel:
    """The scores of a slice take at most `nbytes`, or one query; about five tensors of that size exist at once."""

    name = "reference in slices"

    def __init__(self, *, nbytes: int = 200 * 2**20) -> None:
        self.nbytes = nbytes

    def supports(self, demand: Demand) -> str | None:
        return None if demand.device == "cuda" else f"runs on cuda, not on {demand.device}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        batch, heads, tokens, _ = q.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty((batch, heads, tokens, v.shape[-1]), dtype=wide, device=q.device)
        lse = torch.empty((batch, heads, tokens), dtype=wide, device=q.device)
        for rows in self._slices(q, k):
            part = of_rows(scores, rows)
            out[:, :, rows], lse[:, :, rows] = _WHOLE.forward(q[:, :, rows], k, v, part)
        return out, lse

    def backward(self, q: Tensor, k: Tensor, v: Tensor, row: RowGradient, scores: Scores) -> Gradients:
        wide = torch.promote_types(q.dtype, torch.float32)
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
        for rows in self._slices(q, k):
            upstream = RowGradient(*(None if x is None else x[:, :, rows] for x in row))  # type: ignore[arg-type]
            found = _WHOLE.backward(q[:, :, rows], k, v, upstream, of_rows(scores, rows))
            dq[:, :, rows] = found.dq
            dk += found.dk
            dv += found.dv
        return Gradients(dq, dk, dv)

    def _slices(self, q: Tensor, k: Tensor) -> Iterator[slice]:
        batch, heads, tokens, _ = q.shape
        one_row = batch * heads * max(1, k.shape[2]) * max(q.element_size(), 4)
        step = max(1, self.nbytes // one_row)
        for start in range(0, tokens, step):
            yield slice(start, min(start + step, tokens))


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
