"""DTensors in and out: attention over a sequence that is one dim of DTensors, sharded over one axis of their mesh.

A DTensor's shards are `torch.chunk`'s: runs of tokens in order, the last ones shorter or empty. A token's position is
its index in the DTensor, so the layout is `Chunks`; a zigzag layout cannot be a DTensor. Other axes of the mesh may
hold copies, or shard the batch or the heads; they are not involved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Size, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from mesh_attention.api import MeshAttention
from mesh_attention.comm.torch_dist import TorchComm
from mesh_attention.errors import UsageError
from mesh_attention.kernels.base import dense_strides
from mesh_attention.plan.layout import Chunks

DIMS = {"bshd": ("batch", "seq", "heads", "dim"), "bhsd": ("batch", "heads", "seq", "dim")}
PACKED_DIMS = ("seq", "heads", "dim")


def attend_dtensor(attention: MeshAttention, q: DTensor, k: DTensor, v: DTensor, **call: Any) -> Any:
    """The output as a DTensor with the placements of the inputs; with `return_lse` also the LSE. Differentiable.

    Arguments are those of a call of `attention`, without the whole lengths, which DTensors know.
    """
    with attention.session.telling():
        dims = _check_tensors(attention, q, k, v)
        for name in ("seq_len", "seq_len_k"):
            if name in call:
                raise UsageError(
                    f"{name} cannot be combined with DTensors, which know their whole length; leave it out"
                )
        axis = _sequence_axis(q, dims)
        _check_other_axes(q, k, dims, axis)
        _check_group(attention, q.device_mesh, axis)
        seq = dims.index("seq")
        for tensor in (q, k):
            _check_layout(attention, tensor.shape[seq])
    result = attention(*(x.to_local() for x in (q, k, v)), seq_len=q.shape[seq], seq_len_k=k.shape[seq], **call)
    out, lse = result if isinstance(result, tuple) else (result, None)
    whole = _placed(out, q, q.placements, (*q.shape[:-1], v.shape[-1]))
    if lse is None:
        return whole
    lse_dims = [name for name in ("batch", "heads", "seq") if name in dims]
    shape = [q.shape[dims.index(name)] for name in lse_dims]
    return whole, _placed(lse, q, [_moved(p, dims, lse_dims) for p in q.placements], shape)


def _check_tensors(attention: MeshAttention, q: Any, k: Any, v: Any) -> Sequence[str]:
    """Names of the dims of the inputs."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, DTensor):
            raise UsageError(f"{name} is a {type(tensor).__name__}; expected q, k and v to be DTensors, all or none")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.device_mesh != q.device_mesh or tensor.placements != q.placements:
            raise UsageError(
                f"q is placed {q.placements} on {q.device_mesh} and {name} is placed {tensor.placements} on "
                f"{tensor.device_mesh}; expected the same"
            )
    if {q.dim(), k.dim(), v.dim()} not in ({3}, {4}):
        raise UsageError(f"q, k and v have {q.dim()}, {k.dim()} and {v.dim()} dimensions; expected all 4, or all 3")
    return PACKED_DIMS if q.dim() == 3 else DIMS[attention.tensor_format]


def _sequence_axis(q: DTensor, dims: Sequence[str]) -> int:
    axes = [axis for axis, placement in enumerate(q.placements) if _sharded_dim(placement, dims) == "seq"]
    if len(axes) != 1:
        raise UsageError(
            f"DTensors are placed {q.placements}; expected one axis of the mesh to be Shard({dims.index('seq')}), the "
            f"dim of tokens of {', '.join(dims)}"
        )
    return axes[0]


def _check_other_axes(q: DTensor, k: DTensor, dims: Sequence[str], seq_axis: int) -> None:
    for axis, placement in enumerate(q.placements):
        dim = _sharded_dim(placement, dims)
        if axis == seq_axis or isinstance(placement, Replicate):
            continue
        if dim not in ("batch", "heads"):
            raise UsageError(
                f"axis {axis} of the mesh is {placement!r}; expected Replicate(), or Shard of the batch or the heads: "
                "redistribute first"
            )
        size = q.device_mesh.size(axis)
        for name, tensor in (("q", q), ("k", k)):
            if tensor.shape[dims.index(dim)] % size:
                raise UsageError(
                    f"{name} has shape {tuple(tensor.shape)}, and {size} ranks of axis {axis} share its {dim}; "
                    f"expected a multiple of {size}"
                )


def _sharded_dim(placement: Placement, dims: Sequence[str]) -> str | None:
    # Subclasses do not count: a strided shard does not consist of runs in order.
    return dims[placement.dim] if type(placement) is Shard else None


def _check_group(attention: MeshAttention, mesh: DeviceMesh, axis: int) -> None:
    """Check that the group numbers its ranks like the axis, which determines each rank's chunk."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UsageError(f"this process is not part of {mesh}; only its ranks can attend to its DTensors")
    row: list[Any] = list(coordinate)
    row[axis] = slice(None)
    due, ours = mesh.mesh[tuple(row)].tolist(), ranks_of(attention)
    if ours != due:
        raise UsageError(
            f"the sequence is sharded over ranks {due} in this order (axis {axis} of the mesh), but the "
            f"MeshAttention has {'no process group' if ours is None else f'{ours}'}; make it from that axis"
        )


def ranks_of(attention: MeshAttention) -> list[int] | None:
    """The ranks of its process group, in order; None for a local group."""
    comm = attention.comms[0]
    return dist.get_process_group_ranks(comm.group) if isinstance(comm, TorchComm) else None


def _check_layout(attention: MeshAttention, tokens: int) -> None:
    ranks, layout = attention.ranks, attention.layout
    for rank in range(ranks):
        if layout.segments(rank, seq_len=tokens, ranks=ranks) != Chunks().segments(rank, seq_len=tokens, ranks=ranks):
            raise UsageError(
                f"DTensors of {tokens} tokens over {ranks} ranks are sharded like torch.chunk, but the MeshAttention "
                f'expects a {layout.name} layout; make it with layout="chunks"'
            )


def _placed(local: Tensor, like: DTensor, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """A DTensor of this rank's part, with strides in the same order."""
    strides = dense_strides(local.stride(), tuple(shape))
    whole: DTensor = DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=Size(shape), stride=strides
    )
    return whole


def _moved(placement: Placement, dims: Sequence[str], to: Sequence[str]) -> Placement:
    """The placement of the same dim, with dims in another order."""
    dim = _sharded_dim(placement, dims)
    return placement if dim is None else Shard(to.index(dim))
