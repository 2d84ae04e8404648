"""The reference: plain torch for any dtype and any mask. Computes in float32, or float64 for float64.

It takes the calls that no faster kernel takes: exact, slow, in bounded memory. `PerDocument` keeps documents apart.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mesh_attention.kernels.base import CallMask, Demand, Gradients, Kernel, RowGradient, Scores
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
        if len(slices) <= 1:
            return _forward(q, k, v, scores)
        outs, lses = zip(*(_forward(q[:, :, rows], k, v, of_rows(scores, rows)) for rows in slices), strict=True)
        return torch.cat(outs, 2), torch.cat(lses, 2)

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


class PerDocument:
    """A dense kernel, which gets each document of a call by itself: it multiplies what is masked by 0, and 0 · NaN is
    NaN, which would reach all other documents."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.name, self.unsupported_reason = kernel, kernel.name, kernel.unsupported_reason

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        documents = _documents(scores.mask)
        if documents is None:
            return self.kernel.forward(q, k, v, scores)
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros((*q.shape[:3], v.shape[-1]), dtype=wide)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide)
        for rows, cols, mask in documents:
            results = self.kernel.forward(_at(q, rows), _at(k, cols), _at(v, cols), scores._replace(mask=mask))
            _put((out, lse), results, (rows, rows))
        return out, lse

    def backward(self, q: Tensor, k: Tensor, v: Tensor, row: RowGradient, scores: Scores) -> Gradients:
        documents = _documents(scores.mask)
        if documents is None:
            return self.kernel.backward(q, k, v, row, scores)
        sums = Gradients(*(torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v)))
        for rows, cols, mask in documents:
            upstream = RowGradient(*(None if x is None else _at(x, rows) for x in row))  # type: ignore[arg-type]
            inputs = _at(q, rows), _at(k, cols), _at(v, cols), upstream
            _put(sums, self.kernel.backward(*inputs, scores._replace(mask=mask)), (rows, cols, cols))
        return sums


REFERENCE = PerDocument(ReferenceKernel())


@lru_cache(maxsize=4096)
def _documents(mask: CallMask) -> list[tuple[list[slice], list[slice], CallMask]] | None:
    """Each document's queries and keys in a call, and their mask; None if documents do not matter to the call."""
    cuts, found = mask.mask.documents, []
    if cuts is None or mask.form != "positions":
        return None
    for q_ends, kv_ends in zip(pairwise(cuts.q), pairwise(cuts.kv), strict=True):
        (q, rows), (kv, cols) = _between(mask.q, *q_ends), _between(mask.kv, *kv_ends)
        if q and kv:  # aligned as if the sequence ended here
            band = replace(mask.mask, documents=None)
            found.append((rows, cols, replace(mask, mask=band, q=q, kv=kv, seq_q=q_ends[1], seq_kv=kv_ends[1])))
    return found


def _between(segments: tuple[Segment, ...], low: int, high: int) -> tuple[tuple[Segment, ...], list[slice]]:
    """The segments from one position to another, and where they are in the call."""
    starts = accumulate(map(len, segments), initial=0)
    spans = [(s, at, bisect_left(s, low), bisect_left(s, high)) for s, at in zip(segments, starts, strict=False)]
    spans = [span for span in spans if span[2] < span[3]]
    return tuple(s[a:b] for s, _, a, b in spans), [slice(at + a, at + b) for _, at, a, b in spans]


def _at(whole: Tensor, places: list[slice]) -> Tensor:
    return whole[:, :, places[0]] if len(places) == 1 else torch.cat([whole[:, :, place] for place in places], 2)


def _put(wholes: tuple[Tensor, ...], parts: tuple[Tensor, ...], places: tuple[list[slice], ...]) -> None:
    for whole, part, of_part in zip(wholes, parts, places, strict=True):
        for place, run in zip(of_part, torch.split(part, [at.stop - at.start for at in of_part], 2), strict=True):
            whole[:, :, place] = run


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
