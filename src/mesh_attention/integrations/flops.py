"""FLOPs of attention for torch's counter: ``FlopCounterMode(custom_mapping=flop_formulas())``.

Counted as torch counts its own attention: without regard to masks, and in backward with the scores computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mesh_attention.execution.operators import Operands, engines_of


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """A formula for each operator. A rank counts its even share: its queries against the whole sequence."""
    attend, backward = torch.ops.mesh_attention.attend, torch.ops.mesh_attention.attend_backward
    formulas: dict[Any, Callable[..., int]] = {attend: _forward, backward: _backward}
    for formula in formulas.values():
        formula._get_raw = True  # type: ignore[attr-defined] # tensors, not their shapes
    return formulas


def _forward(q: Tensor, k: Tensor, v: Tensor, *operands: Any, out_val: Any = None) -> int:
    return 2 * _pairs(q, k, operands) * (q.shape[3] + v.shape[3])


def _backward(*given: Any, out_val: Any = None) -> int:
    q, k, v, *operands = given[4:]  # behind dO, dLSE, O and LSE
    return int(2 * _pairs(q, k, operands) * (3 * q.shape[3] + 2 * v.shape[3]))


def _pairs(q: Tensor, k: Tensor, given: Sequence[Any]) -> int:
    options, _, engines = Operands.unpack(given)
    whole = options.seq_len_k or options.seq_len or k.shape[1] * engines_of(engines).ranks
    return q.shape[0] * q.shape[2] * q.shape[1] * whole
