"""Warm-up: a dry run of a pass, before its first run on NCCL, so that every kernel is loaded.

The first launch of a kernel loads it, and loading may wait until the device is idle. In a real pass that can deadlock:
this rank's device waits for data from another rank, whose host waits in a first launch of its own. So a rank first
walks the same steps with a transport that carries nothing. It makes each kind of kernel call and merge once, on
whatever is in memory, and skips the kinds that an earlier dry run has made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from threading import local
from typing import Any

import torch
from torch import Tensor

from mesh_attention.comm.base import AllOf, Parcel, Sharing, Work
from mesh_attention.kernels.base import Demand, Gradients, Kernel, Merging, RowGradient, Scores
from mesh_attention.kernels.intervals import is_ascending
from mesh_attention.kernels.windowed import windows

_LOCAL = local()
_MADE: set[Hashable] = set()
"""Calls made so far, by thread and form: some of what a first call sets up belongs to its thread."""
MOST_MADE = 65536


def this_thread() -> Hashable:
    """A token of the calling thread. Thread ids would not do: Python reuses them."""
    if not hasattr(_LOCAL, "token"):
        _LOCAL.token = object()
    token: Hashable = _LOCAL.token
    return token


class DryComm:
    """A transport that carries nothing; nobody waits."""

    is_capturable = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        return AllOf(())

    def share(self, text: str) -> Sharing:
        raise AssertionError("there is nobody to share with")


class DryKernel:
    """Makes one call of each form and skips the rest."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.name = kernel, kernel.name

    def unsupported_reason(self, demand: Demand) -> str | None:
        return self.kernel.unsupported_reason(demand)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        if _is_new(self.name, "forward", scores, q, k, v):
            return self.kernel.forward(q, k, v, scores)
        self._prepare(q, v, scores)
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        return out, q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))

    def backward(self, q: Tensor, k: Tensor, v: Tensor, row: RowGradient, scores: Scores) -> Gradients:
        if _is_new(self.name, "backward", scores, q, k, v, row.do):
            return self.kernel.backward(q, k, v, row, scores)
        self._prepare(q, v, scores)
        return Gradients(*map(torch.empty_like, (q, k, v)))

    def _prepare(self, q: Tensor, v: Tensor, scores: Scores) -> None:
        """Load what kernels cache for this mask, also for a skipped call: a copy from the host waits for the device."""
        scores.mask.load(q.device)
        if hasattr(self.kernel, "prepare"):
            self.kernel.prepare(q, v, scores.mask)


class DryMerging:
    """Makes each operation once for each form of tensors and skips the rest."""

    def __init__(self, merging: Merging) -> None:
        self.merging, self.name = merging, merging.name

    def unsupported_reason(self, device: torch.device) -> str | None:
        return self.merging.unsupported_reason(device)

    def start_output(self, *tensors: Tensor) -> None:
        self._once(self.merging.start_output, *tensors)

    def merge_output(self, *tensors: Tensor) -> None:
        self._once(self.merging.merge_output, *tensors)

    def copy(self, *tensors: Tensor) -> None:
        self._once(self.merging.copy, *tensors)

    def add(self, *tensors: Tensor) -> None:
        self._once(self.merging.add, *tensors)

    def _once(self, operation: Callable[..., None], *tensors: Tensor) -> None:
        if _is_new(self.name, operation.__name__, None, *tensors):
            operation(*tensors)


def _form_of(scores: Scores) -> Hashable:
    """What kernels distinguish in masks and scores; lengths are those of the tensors."""
    cuts = windows(scores.mask) if scores.mask.form == "positions" else None
    sizes = None if cuts is None else tuple((len(cut.q), len(cut.kv), cut.left, cut.right) for cut in cuts)
    return scores.mask.form, sizes, is_ascending(scores.mask), scores.scale < 0, scores.softcap


def _is_new(name: str, what: str, scores: Scores | None, *tensors: Tensor) -> bool:
    forms: list[Any] = [(tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % 16) for tensor in tensors]
    key = (this_thread(), tensors[0].device, name, what, scores and _form_of(scores), *forms)
    if key in _MADE:
        return False
    if len(_MADE) >= MOST_MADE:
        _MADE.clear()
    _MADE.add(key)
    return True
