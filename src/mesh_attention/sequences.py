"""Rows of a whole batch before it is sharded: where documents begin, what is padding, which position a token has.

Everything here describes the whole sequence, before it is sharded, so that it is the same on every rank. It does not
depend on models and sends nothing. A *real token* is one that is not padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mesh_attention.errors import MaskError, UsageError
from mesh_attention.masks import boundaries, shorten_boundaries

CUTS = ("cu_seq_lens_q", "cu_seq_lens_k")
LENGTHS = ("max_length_q", "max_length_k")
"""transformers' names for packed documents: boundaries in the flattened batch, and the longest document."""


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One row of a batch: the boundaries of its documents, and the run of its tokens that are not padding."""

    cuts: tuple[int, ...]
    real: tuple[int, int]

    def boundaries(self, *, is_causal: bool) -> tuple[int, ...]:
        """Boundaries at which to cut the row so that no real token sees padding.

        With a causal mask no token sees later ones, so padding at the end needs no cut.
        """
        start, stop = self.real
        if start == stop:
            return self.cuts  # only padding: no token of it counts
        extra = (start,) if is_causal else (start, stop)
        return tuple(sorted({*self.cuts, *extra}))


def real_tokens(attention_mask: Tensor) -> tuple[tuple[int, int], ...]:
    """The run of real tokens in each row of a 2D padding mask, as (start, stop); it waits for the device once."""
    seq_len = attention_mask.shape[1]
    real = attention_mask != 0
    count = real.sum(1)
    start = real.int().argmax(1)  # the first real token
    stop = seq_len - real.flip(1).int().argmax(1)
    runs = torch.stack([start, stop, count], dim=1).tolist()
    for row, (first, end, tokens) in enumerate(runs):
        if tokens and end - first != tokens:
            raise MaskError(
                f"row {row} of attention_mask has {end - first - tokens} masked tokens between real ones; expected "
                "padding only at the start and at the end"
            )
    return tuple((first, end) if tokens else (0, 0) for first, end, tokens in runs)


def read_documents(
    arguments: Mapping[str, Any], *, batch: int, seq_len: int | None
) -> tuple[tuple[int, ...], ...] | None:
    """The boundaries in each row from `cu_seq_lens_q/k`, checked against `max_length_q/k` and the whole length, if that
    is known; None if there are none."""
    q, k = (arguments.get(name) for name in CUTS)
    if q is None and k is None:
        return None
    if q is None or k is None:
        raise UsageError(f"{CUTS[0] if q is None else CUTS[1]} is missing; give both cu_seq_lens_q and cu_seq_lens_k")
    cuts = boundaries(CUTS[0], q)
    if boundaries(CUTS[1], k) != cuts:
        raise UsageError(
            "cu_seq_lens_q and cu_seq_lens_k differ; expected the same, because each token is both query and key"
        )
    for name in LENGTHS:
        length = arguments.get(name)
        if length is not None and int(length) < longest_document(cuts):
            raise UsageError(f"{name}={int(length)} is less than the longest document, {longest_document(cuts)} tokens")
    rows = split_rows(cuts, batch=batch)
    if seq_len not in (None, rows[0][-1]):
        raise MaskError(
            f"cu_seq_lens has {rows[0][-1]} tokens per row, but the batch or attention_mask has {seq_len}; expected "
            "all to be of the whole sequence"
        )
    return rows


def split_rows(cuts: tuple[int, ...], *, batch: int) -> tuple[tuple[int, ...], ...]:
    """Boundaries in each row, from those in the flattened batch."""
    total = cuts[-1]
    seq_len, rest = divmod(total, batch)
    ends = {row * seq_len for row in range(batch + 1)}
    if rest or not ends <= set(cuts):
        raise MaskError(
            f"cu_seq_lens {shorten_boundaries(cuts)} does not fit a batch of {batch}: expected boundaries in the "
            f"flattened batch, with one at the end of every row; the last is {batch} times the whole length"
        )
    return (
        tuple(
            tuple(sorted({cut - start for cut in cuts if start <= cut <= start + seq_len}))
            for start in range(0, total, max(1, seq_len))
        )
        or ((0, 0),) * batch
    )


def join_rows(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Boundaries in the flattened batch, from those of each row; the inverse of `split_rows`."""
    seq_len = rows[0][-1]
    return tuple(sorted({row * seq_len + cut for row, cuts in enumerate(rows) for cut in cuts}))


def longest_document(cuts: tuple[int, ...]) -> int:
    return max((b - a for a, b in pairwise(cuts)), default=0)


def cuts_of_restarts(position_ids: Tensor) -> tuple[tuple[int, ...], ...]:
    """Boundaries in each row of whole position ids: wherever a position is not the previous one plus one."""
    seq_len = position_ids.shape[1]
    jumps = (position_ids.diff(dim=1) != 1).nonzero().tolist()
    return tuple(
        (0, *(column + 1 for place, column in jumps if place == row), seq_len) for row in range(position_ids.shape[0])
    )


def find_misplaced(position_ids: Tensor, positions: Tensor, rows: Sequence[BatchRow]) -> int | None:
    """The first row whose real tokens have wrong position ids, if any; it waits for the device once.

    `positions` are those of the tokens in the whole sequence. Position ids must equal these, or the distance from the
    start of the document. Those of padding are not checked.
    """
    if position_ids.shape[0] not in (1, len(rows)):
        raise UsageError(
            f"position_ids have {position_ids.shape[0]} rows, but the batch has {len(rows)}; expected as many, or one"
        )
    verdicts = []
    for number, row in enumerate(rows):
        ids = position_ids[number if position_ids.shape[0] > 1 else 0]
        cuts = torch.tensor(row.boundaries(is_causal=False), device=positions.device)
        start = cuts[torch.bucketize(positions, cuts[1:-1], right=True)]
        padding = (positions < row.real[0]) | (positions >= row.real[1])
        plain, restarted = ((ids == expected) | padding for expected in (positions, positions - start))
        verdicts.append(plain.all() | restarted.all())
        if position_ids.shape[0] == 1 and len(set(rows)) == 1:
            break
    wrong = [row for row, right in enumerate(torch.stack(verdicts).tolist()) if not right]
    return wrong[0] if wrong else None
