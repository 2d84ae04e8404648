"""FLOPs of attention for torch's counter: ``FlopCounterMode(custom_mapping=flop_formulas())``.

Counted as torch counts its own attention: without masks, and with the scores recomputed in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mesh_attention.execution.operators import Operands, engines_of
from mesh_attention.problem import flops_per_pair


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """A formula for each operator. A rank counts its queries against the whole sequence."""
    attend, backward = torch.ops.mesh_attention.attend, torch.ops.mesh_attention.attend_backward
    formulas: dict[Any, Callable[..., int]] = {attend: _forward, backward: _backward}
    for formula in formulas.values():
        formula._get_raw = True  # type: ignore[attr-defined] # tensors, not their shapes
    return formulas


def _forward(q: Tensor, k: Tensor, v: Tensor, *operands: Any, out_val: Any = None) -> int:
    return _pairs(q, k, operands) * flops_per_pair("forward", qk=q.shape[3], v=v.shape[3])


def _backward(*given: Any, out_val: Any = None) -> int:
    q, k, v, *operands = given[5:]  # after dO, dLSE, O, LSE and the number of the pass
    return _pairs(q, k, operands) * flops_per_pair("backward", qk=q.shape[3], v=v.shape[3])


def _pairs(q: Tensor, k: Tensor, given: Sequence[Any]) -> int:
    options, _, engines = Operands.unpack(given)
    whole = options.seq_len_k or options.seq_len or k.shape[1] * engines_of(engines).ranks
    return q.shape[0] * q.shape[2] * q.shape[1] * whole
