"""Merging: a partial into a running sum, in place. Sums are float32, or float64 for float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


def merge_output(total: Tensor, total_lse: Tensor, partial: Tensor, lse: Tensor) -> None:
    """Fold an output and its LSE into the running ones. Rows that saw nothing have LSE -inf and weigh nothing.

    Outputs are (..., dim), LSE has the same shape without the last dimension.
    """
    joint = torch.logaddexp(total_lse, lse)
    floor = joint.clamp_min(torch.finfo(joint.dtype).min)  # finite, so that -inf - floor is -inf and not NaN
    total.mul_((total_lse - floor).exp_()[..., None])
    total.add_(partial * (lse - floor).exp_()[..., None])
    total_lse.copy_(joint)


class Merging(NamedTuple):
    """A way of merging; others may be faster, none may be less exact."""

    merge_output: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    add_gradient: Callable[[Tensor, Tensor], None]


def add_gradient(total: Tensor, partial: Tensor) -> None:
    total.add_(partial)


TORCH_MERGING = Merging(merge_output, add_gradient)
