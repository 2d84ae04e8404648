"""Attention sinks: a score per head that every query attends to, and that has no value."""

from __future__ import annotations

import torch
from torch import Tensor


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The output if every row also attends to a sink: scaled by e^lse / (e^lse + e^sink).

    `out` is (batch, tokens, heads, dim), `lse` (batch, heads, tokens), and `sinks` has one score per head.
    """
    share = torch.sigmoid(lse - sinks.to(lse.dtype)[None, :, None])
    return (out * share.transpose(1, 2)[..., None]).to(out.dtype)
