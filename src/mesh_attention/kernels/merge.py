"""Merging a partial into a running sum, in place. Sums are float32, or float64 for float64; their LSE is float64.

The protocol, and an implementation in plain torch that runs anywhere. Outputs are (batch, heads, tokens, dim), with any
strides; LSE has the same shape without the last dimension.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Merging(Protocol):
    """An implementation of merging. It may be faster than plain torch, but not less exact."""

    name: str

    def supports(self, device: torch.device) -> str | None:
        """None if it works on the device; otherwise the reason."""

    def start_output(self, total: Tensor, total_lse: Tensor, partial: Tensor, lse: Tensor) -> None:
        """Start a sum with its first partial; the old contents of the sum are not read."""

    def merge_output(self, total: Tensor, total_lse: Tensor, partial: Tensor, lse: Tensor) -> None:
        """Merge an output and its LSE into the running ones. Rows that saw nothing have LSE -inf and weight 0.

        The weights of the other rows add up to 1, however large the LSEs are. NaN outputs stay NaN.
        """

    def copy(self, dest: Tensor, source: Tensor) -> None:
        """Copy between any two dtypes: the first partial of a gradient, packing, rounding a sum."""

    def add(self, total: Tensor, partial: Tensor) -> None:
        """Add another partial of a gradient."""


class TorchMerging:
    """Torch's own operations."""

    name = "torch"

    def supports(self, device: torch.device) -> str | None:
        return None

    def start_output(self, total: Tensor, total_lse: Tensor, partial: Tensor, lse: Tensor) -> None:
        total.copy_(partial)
        total_lse.copy_(lse)

    def merge_output(self, total: Tensor, total_lse: Tensor, partial: Tensor, lse: Tensor) -> None:
        # sigmoid(a - b) instead of exp(a - joint): the joint LSE is rounded, and its error would be in both weights.
        joint = torch.logaddexp(total_lse, lse)
        blind = joint == -torch.inf  # -inf - -inf is NaN
        lead = (total_lse - lse).to(total.dtype)
        total.mul_(lead.sigmoid().masked_fill_(blind, 0.0)[..., None])
        total.add_(partial * lead.neg_().sigmoid_().masked_fill_(blind, 0.0)[..., None])
        total_lse.copy_(joint)

    def copy(self, dest: Tensor, source: Tensor) -> None:
        dest.copy_(source)

    def add(self, total: Tensor, partial: Tensor) -> None:
        total.add_(partial)
