"""Merging a partial into a running sum, in place. Sums are float32, or float64 for float64.

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
        """Merge an output and its LSE into the running ones. Rows that saw nothing have LSE -inf and weight 0."""

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
        joint = torch.logaddexp(total_lse, lse)
        floor = joint.clamp_min(torch.finfo(joint.dtype).min)  # finite, so that -inf - floor is -inf and not NaN
        total.mul_((total_lse - floor).exp_()[..., None])
        total.add_(partial * (lse - floor).exp_()[..., None])
        total_lse.copy_(joint)

    def copy(self, dest: Tensor, source: Tensor) -> None:
        dest.copy_(source)

    def add(self, total: Tensor, partial: Tensor) -> None:
        total.add_(partial)
