"""torch's `context_parallel`, over a mesh: change the import, and the rest of a training script stays as it is.

    from mesh_attention.integrations.context_parallel import context_parallel, context_parallel_unshard

    with context_parallel(device_mesh, buffers=[ids, labels, freqs], buffer_seq_dims=[1, 1, 0]):
        loss = model(ids, labels)      # scaled_dot_product_attention inside it spans all ranks
        loss.backward()

Runs on CPU with Gloo as well. Any length: shards may be uneven. Which method runs, and which layout buffers are sharded
by, is that of a MeshAttention; options of torch's own method (`set_rotate_method`) have no counterpart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import lru_cache
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mesh_attention.api import MeshAttention
from mesh_attention.comm.torch_dist import Group, TorchComm, process_group
from mesh_attention.errors import UsageError
from mesh_attention.integrations.buffers import sequence_buffers, sharded
from mesh_attention.integrations.sdpa import MeshSdpa


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
    """scaled_dot_product_attention spans the mesh inside, and buffers hold this rank's tokens; in place, as in torch.

    Changes made to buffers inside are lost when they are restored. `attention` is a MeshAttention of the same mesh, to
    choose method, tile, cluster or layout; the default is ``MeshAttention(mesh)``. Whole lengths are those of the
    buffers, and `seq_lens` for what was sharded already; of any other tensor all ranks hold the same number of tokens.
    """
    chosen = _checked(attention, mesh) if attention is not None else _default(_group(mesh), "zigzag")
    ours = sequence_buffers(buffers, buffer_seq_dims, no_restore_buffers)
    lengths = [*(buffer.tokens for buffer in ours), *map(_whole_length, seq_lens)]
    chunked = chosen if attention is not None else _default(_group(mesh), "chunks")
    mode = MeshSdpa(chosen, lengths=lengths, chunked=chunked)
    with sharded(ours, lambda tensor, dim: chosen.shard(tensor, dim=dim)), mode:
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
    """The whole sequences, on every rank, out of everybody's tokens. `attention` is the one the context was given."""
    if load_balancer is not None:
        raise UsageError(
            f"load_balancer={load_balancer!r} came; shards are those of a MeshAttention's layout: give `attention`"
        )
    if len(buffers) != len(seq_dims):
        raise UsageError(f"{len(buffers)} buffers and {len(seq_dims)} seq_dims came; expected one dim for each buffer")
    chosen = _checked(attention, mesh) if attention is not None else _default(_group(mesh), "zigzag")
    for buffer, dim in zip(buffers, seq_dims, strict=True):
        if not isinstance(buffer, Tensor) or isinstance(buffer, DTensor) or not -buffer.dim() <= dim < buffer.dim():
            raise UsageError(f"{type(buffer).__name__} with seq dim {dim}; expected a plain tensor that has this dim")
    return [chosen.unshard(buffer, dim=dim) for buffer, dim in zip(buffers, seq_dims, strict=True)]


@lru_cache(maxsize=64)
def _default(group: Group, layout: Literal["zigzag", "chunks"]) -> MeshAttention:
    """Kept, with its plans: a context is entered in every step of a training."""
    return MeshAttention(group, layout=layout, tensor_format="bhsd")


def _group(mesh: DeviceMesh) -> dist.ProcessGroup:
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(f"mesh is a {type(mesh).__name__}; expected a DeviceMesh of one axis")
    if mesh.ndim == 1 and mesh.get_coordinate() is None:
        raise UsageError(f"this process is not part of {mesh}")
    return process_group(mesh)


def _checked(attention: MeshAttention, mesh: DeviceMesh) -> MeshAttention:
    group = _group(mesh)
    comm = attention.comms[0] if isinstance(attention, MeshAttention) else None
    due = dist.get_process_group_ranks(group)
    ours = dist.get_process_group_ranks(comm.group) if isinstance(comm, TorchComm) else None
    if ours != due:
        raise UsageError(
            f"attention is {attention!r} of the ranks {ours}; expected a MeshAttention of the mesh's: {due}"
        )
    return attention


def _whole_length(tokens: object) -> int:
    if type(tokens) is not int or tokens < 1:
        raise UsageError(f"seq_lens has {tokens!r}; expected whole lengths in tokens")
    return tokens
