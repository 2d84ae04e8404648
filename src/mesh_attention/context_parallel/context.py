"""torch's `context_parallel`, over a mesh: change the import, and the rest of a training script stays as it is.

    from mesh_attention.context_parallel import context_parallel, context_parallel_unshard

    with context_parallel(device_mesh, buffers=[ids, labels, freqs], buffer_seq_dims=[1, 1, 0]):
        loss = model(ids, labels)      # scaled_dot_product_attention inside it spans all ranks
        loss.backward()

Also runs on CPU with Gloo, and takes any length: shards may be uneven. A MeshAttention determines the method and the
layout; options of torch's own method (`set_rotate_method`) have no counterpart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mesh_attention.api import MeshAttention, attention_of
from mesh_attention.comm.torch_dist import process_group
from mesh_attention.context_parallel.dispatch import is_inside
from mesh_attention.context_parallel.dtensors import ranks_of
from mesh_attention.context_parallel.sdpa import MeshSdpa
from mesh_attention.errors import UsageError


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: AbstractSet[Tensor] | None = None,
    attention: MeshAttention | None = None,
    seq_lens: Sequence[int] = (),
) -> Iterator[None]:
    """Inside, scaled_dot_product_attention spans the mesh, and `buffers` hold this rank's tokens, in place as in torch.

    Changes made to `buffers` inside are lost when they are restored. To run backward after the context, name them in
    `no_restore_buffers`: autograd refuses buffers that were restored. `attention` is a MeshAttention of the same mesh,
    to choose method, tile, cluster or layout; the default is ``MeshAttention(mesh)``. Whole lengths are those of
    `buffers`, and `seq_lens` for tensors that are sharded already; of any other tensor all ranks hold the same number
    of tokens.
    """
    chosen = _attention(attention, mesh)
    with chosen.session.telling():
        if is_inside():
            raise UsageError("context_parallel was entered inside another one; use one context, with all buffers")
        tensors = _sharded_tensors(buffers, buffer_seq_dims, no_restore_buffers)
        lengths = [*(tensor.tokens for tensor in tensors), *map(_whole_length, seq_lens)]
    context = MeshSdpa(chosen, lengths=lengths)
    with _sharded(tensors, lambda tensor, dim: chosen.shard(tensor, dim=dim)), context.entered():
        yield


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    load_balancer: None = None,
    *,
    attention: MeshAttention | None = None,
) -> list[Tensor]:
    """The whole sequences, gathered on every rank. `attention` is the one that the context was given."""
    if load_balancer is not None:
        raise UsageError(
            f"load_balancer={load_balancer!r} is not supported: a MeshAttention's layout determines the shards; "
            "use attention= instead"
        )
    if len(buffers) != len(seq_dims):
        raise UsageError(f"got {len(buffers)} buffers and {len(seq_dims)} seq_dims; expected one dim for each buffer")
    chosen = _attention(attention, mesh)
    return [chosen.unshard(buffer, dim=dim) for buffer, dim in zip(buffers, seq_dims, strict=True)]


def _attention(attention: MeshAttention | None, mesh: DeviceMesh) -> MeshAttention:
    """The attention that was given, checked, or the default one."""
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(f"mesh is a {type(mesh).__name__}; expected a DeviceMesh of one axis")
    if mesh.ndim == 1 and mesh.get_coordinate() is None:
        raise UsageError(f"this process is not part of {mesh}")
    group = process_group(mesh)
    if attention is None:
        return attention_of(group, layout="zigzag", tensor_format="bhsd")
    due = dist.get_process_group_ranks(group)
    ours = ranks_of(attention) if isinstance(attention, MeshAttention) else None
    if ours != due:
        raise UsageError(
            f"attention is {attention!r} over ranks {ours}; expected a MeshAttention over the mesh's ranks {due}"
        )
    return attention


def _whole_length(tokens: object) -> int:
    if type(tokens) is not int or tokens < 1:
        raise UsageError(f"seq_lens has {tokens!r}; expected whole lengths in tokens")
    return tokens


# Tensors sharded in place


@dataclass(frozen=True, slots=True, eq=False)
class ShardedTensor:
    """A per-token tensor (ids, labels, positions, rotary frequencies) that is sharded in place inside the context.

    The tensor object stays and gets other memory, so that its strides, and other tensors that share its memory, are the
    same again afterwards.
    """

    tensor: Tensor
    dim: int
    is_restored: bool

    @property
    def tokens(self) -> int:
        return self.tensor.shape[self.dim]


def _sharded_tensors(
    buffers: Sequence[Tensor] | None, seq_dims: Sequence[int] | None, no_restore: Collection[Tensor] | None
) -> list[ShardedTensor]:
    """The arguments of a context as values, checked and without duplicates."""
    buffers, seq_dims, no_restore = list(buffers or ()), list(seq_dims or ()), list(no_restore or ())
    if len(buffers) != len(seq_dims):
        raise UsageError(
            f"got {len(buffers)} buffers and {len(seq_dims)} buffer_seq_dims; expected one dim for each buffer"
        )
    # By identity: == on tensors compares elements.
    if not all(any(buffer is kept for buffer in buffers) for kept in no_restore):
        raise UsageError("no_restore_buffers has a tensor that is not in buffers; expected a subset of buffers")
    tensors: list[ShardedTensor] = []
    for number, (tensor, dim) in enumerate(zip(buffers, seq_dims, strict=True)):
        _check_tensor(number, tensor, dim)
        is_restored = not any(tensor is kept for kept in no_restore)
        new = ShardedTensor(tensor, dim % tensor.dim(), is_restored)
        twin = next((other for other in tensors if other.tensor is tensor), None)
        if twin is None:
            tensors.append(new)
        elif twin.dim != new.dim:
            raise UsageError(f"buffers[{number}] is given twice, with dims {twin.dim} and {new.dim}; expected one dim")
    return tensors


def _check_tensor(number: int, tensor: object, dim: object) -> None:
    if not isinstance(tensor, Tensor):
        raise UsageError(f"buffers[{number}] is a {type(tensor).__name__}; expected a tensor")
    if isinstance(tensor, DTensor) or tensor.layout is not torch.strided or tensor.is_nested:
        raise UsageError(
            f"buffers[{number}] is a {type(tensor).__name__} ({tensor.layout}); expected a plain, dense tensor"
        )
    if tensor.requires_grad:
        raise UsageError(
            f"buffers[{number}] requires a gradient, which a change in place would lose; shard it inside the context "
            "with MeshAttention.shard, which is differentiable"
        )
    if type(dim) is not int or not -tensor.dim() <= dim < tensor.dim():
        raise UsageError(f"buffers[{number}] has shape {tuple(tensor.shape)}, which has no dim {dim!r}")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise UsageError(f"buffers[{number}] was made in inference mode and cannot be changed outside of it; clone it")


@contextmanager
def _sharded(tensors: Sequence[ShardedTensor], shard: Callable[[Tensor, int], Tensor]) -> Iterator[None]:
    """Shards the tensors inside; restores them afterwards, except those that are not to be restored."""
    with torch.no_grad():
        shards = [shard(buffer.tensor, buffer.dim) for buffer in tensors]  # all of them, before any is changed
        wholes = [buffer.tensor.detach() if buffer.is_restored else None for buffer in tensors]
    try:
        _set(tensors, shards)
        yield
    finally:
        _set(tensors, wholes)


def _set(tensors: Sequence[ShardedTensor], contents: Sequence[Tensor | None]) -> None:
    """Give each tensor the memory of another. Autograd notices, so backward through a graph that saved it raises."""
    with torch.no_grad():
        for buffer, content in zip(tensors, contents, strict=True):
            if content is not None:
                buffer.tensor.set_(content)  # type: ignore[call-overload]
