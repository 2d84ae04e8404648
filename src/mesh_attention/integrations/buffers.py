"""Buffers that hold a rank's tokens inside a `with` block and the whole sequence outside of it, in place.

A buffer is any per-token tensor: ids, labels, positions, a table of rotary frequencies. The tensor object stays and
gets other memory, so that strides, and whatever else shares its memory, are as before when it comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mesh_attention.errors import UsageError


@dataclass(frozen=True, slots=True, eq=False)
class SequenceBuffer:
    """A tensor, its dim of tokens, and whether it is to be whole again afterwards."""

    tensor: Tensor
    dim: int
    is_restored: bool

    @property
    def tokens(self) -> int:
        return self.tensor.shape[self.dim]


def sequence_buffers(
    buffers: Sequence[Tensor] | None, seq_dims: Sequence[int] | None, no_restore: Collection[Tensor] | None
) -> list[SequenceBuffer]:
    """The arguments of a context as values, checked; a tensor that was given twice is there once."""
    buffers, seq_dims, no_restore = list(buffers or ()), list(seq_dims or ()), list(no_restore or ())
    if len(buffers) != len(seq_dims):
        raise UsageError(
            f"{len(buffers)} buffers and {len(seq_dims)} buffer_seq_dims came; expected one dim for each buffer"
        )
    # By identity: == on tensors compares elements.
    if not all(any(buffer is kept for buffer in buffers) for kept in no_restore):
        raise UsageError("no_restore_buffers holds a tensor that is not among buffers; expected some of them")
    made: list[SequenceBuffer] = []
    for number, (tensor, dim) in enumerate(zip(buffers, seq_dims, strict=True)):
        _check(number, tensor, dim)
        is_restored = not any(tensor is kept for kept in no_restore)
        new = SequenceBuffer(tensor, dim % tensor.dim(), is_restored)
        twin = next((known for known in made if known.tensor is tensor), None)
        if twin is None:
            made.append(new)
        elif twin.dim != new.dim:
            raise UsageError(f"buffer {number} came twice, with dims {twin.dim} and {new.dim}; expected one of them")
    return made


def _check(number: int, tensor: object, dim: object) -> None:
    if not isinstance(tensor, Tensor):
        raise UsageError(f"buffer {number} is a {type(tensor).__name__}; expected a tensor")
    if isinstance(tensor, DTensor) or tensor.layout is not torch.strided or tensor.is_nested:
        raise UsageError(
            f"buffer {number} is a {type(tensor).__name__} ({tensor.layout}); expected a plain, dense tensor"
        )
    if tensor.requires_grad:
        raise UsageError(
            f"buffer {number} requires a gradient, which a change in place would lose; shard it inside the context, "
            "with `MeshAttention.shard`, which is differentiable"
        )
    if type(dim) is not int or not -tensor.dim() <= dim < tensor.dim():
        raise UsageError(f"buffer {number} has shape {tuple(tensor.shape)}; its seq dim {dim!r} is none of its dims")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise UsageError(f"buffer {number} was made in inference mode, and cannot be changed outside of it; clone it")


@contextmanager
def sharded(buffers: Sequence[SequenceBuffer], shard: Callable[[Tensor, int], Tensor]) -> Iterator[None]:
    """Buffers as ``shard(tensor, dim)`` inside; as they were outside, but for those that are not restored."""
    with torch.no_grad():
        shards = [shard(buffer.tensor, buffer.dim) for buffer in buffers]  # all of them, before any is changed
        wholes = [buffer.tensor.detach() if buffer.is_restored else None for buffer in buffers]
    try:
        _set(buffers, shards)
        yield
    finally:
        _set(buffers, wholes)


def _set(buffers: Sequence[SequenceBuffer], contents: Sequence[Tensor | None]) -> None:
    """Let each buffer be another tensor's memory. Autograd notices, so a graph that saved it refuses to go on."""
    with torch.no_grad():
        for buffer, content in zip(buffers, contents, strict=True):
            if content is not None:
                buffer.tensor.set_(content)  # type: ignore[call-overload]
