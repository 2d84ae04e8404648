"""Autocast for attention's arguments, which torch does not apply to calls it does not know."""

from __future__ import annotations

import torch
from torch import Tensor


def as_autocast(*tensors: Tensor) -> list[Tensor]:
    """The tensors in autocast's dtype where autocast is on, as for matrix products; float64 stays."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]
