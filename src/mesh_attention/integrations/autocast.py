"""What autocast does to attention's arguments, which calls that torch does not know have to do themselves."""

from __future__ import annotations

import torch
from torch import Tensor


def as_autocast(*tensors: Tensor) -> list[Tensor]:
    """In autocast's dtype, where it is on, as matrix products would be; float64 stays, as everywhere in torch."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]
