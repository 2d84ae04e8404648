"""A hash of a tensor, by which ranks notice that they were given different ones."""

from __future__ import annotations

import torch
from torch import Tensor

PER_PLACE, PER_NUMBER, MIXED = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB
"""Large odd numbers."""
AT_ONCE = 1 << 22
"""Elements hashed together: embeddings of a long prompt would otherwise need several times their own memory."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> Tensor:
    """A hash of a tensor's elements in their order, of 40 bits, on its device. Floats are hashed by their bits."""
    flat = tensor.detach().flatten()
    numbers = flat.view(INTEGERS[flat.element_size()]) if flat.is_floating_point() else flat
    found = torch.zeros((), dtype=torch.long, device=flat.device)
    for start in range(0, numbers.numel(), AT_ONCE):
        part = numbers[start : start + AT_ONCE].long()
        places = torch.arange(start + 1, start + 1 + part.numel(), device=flat.device)
        # Overflow is fine. Both are mixed before the sum: a sum of products does not tell [5, 7] from [7, 6].
        mixed = part * PER_NUMBER + places * PER_PLACE
        mixed = (mixed ^ (mixed >> 32)) * MIXED
        found = found + (mixed ^ (mixed >> 29)).sum()
    return found & 0xFFFFFFFFFF
