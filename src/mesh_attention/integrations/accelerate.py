"""accelerate's data loaders, for sequences spread over ranks: ranks that share a sequence get the same batches.

    model, optimizer = accelerator.prepare(model, optimizer)
    with shared_batches(accelerator, attention):
        loader = accelerator.prepare(loader)
    for batch in loader:
        local = shard_batch(attention, batch)
        accelerator.backward(batch_loss(model(**local).loss, local, group=None))

accelerate's own context parallelism is not used: it would cut the batches a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mesh_attention.api import MeshAttention
from mesh_attention.comm.torch_dist import torch_group
from mesh_attention.errors import UsageError


@contextmanager
def shared_batches(accelerator: Accelerator, attention: MeshAttention) -> Iterator[None]:
    """Inside, ``accelerator.prepare(loader)`` gives the ranks of the attention's group the same batches.

    Groups get different batches, as ranks of data parallelism do. `batch_size` of the loader is that of a group. If the
    loader shuffles, it gets a `SeedableRandomSampler`: seed all ranks alike, and call `set_epoch`.
    """
    refuse_parallelism(accelerator)
    with batches_of(accelerator, make_mesh(attention, accelerator.device.type)):
        yield


def refuse_parallelism(accelerator: Any) -> None:
    """Refuse a parallelism_config that would cut batches or models in other ways at the same time."""
    for name in ("cp_size", "sp_size", "tp_size"):
        size = getattr(accelerator.parallelism_config, name, 1)
        if size > 1:
            raise UsageError(
                f"parallelism_config has {name}={size}, which cannot be combined with mesh attention; leave it out: "
                "the ranks that share a sequence are those of the MeshAttention"
            )


def make_mesh(attention: MeshAttention, device_type: str) -> DeviceMesh:
    """All ranks as (data parallelism, context parallelism), by accelerate's names."""
    if attention.is_local:
        raise UsageError("attention is of a local group; expected one rank per process: a torch.distributed group")
    ours = dist.get_process_group_ranks(torch_group(attention.comms[0]))
    ranks, size = dist.get_world_size(), len(ours)
    start = ours[0] // size * size
    if ours != list(range(start, start + size)) or ranks % size:
        raise UsageError(
            f"mesh attention runs over ranks {ours} of {ranks}; expected groups of consecutive ranks that make up "
            'all ranks: init_device_mesh(device, (dp, cp), mesh_dim_names=("dp", "cp"))["cp"]'
        )
    return init_device_mesh(device_type, (ranks // size, size), mesh_dim_names=("dp_replicate", "cp"))


@contextmanager
def batches_of(accelerator: Any, mesh: DeviceMesh) -> Iterator[None]:
    """Inside, accelerate deals batches over the first axis of `mesh`, and shuffles by a seed, the same on all ranks."""
    state, config = accelerator.state, accelerator.dataloader_config
    if config.dispatch_batches:
        raise UsageError(
            "dispatch_batches=True is not supported: accelerate would split batches over all ranks; leave it out"
        )
    kept = state.device_mesh, config.dispatch_batches, config.use_seedable_sampler
    state.device_mesh, config.dispatch_batches, config.use_seedable_sampler = mesh, False, True
    try:
        yield
    finally:
        state.device_mesh, config.dispatch_batches, config.use_seedable_sampler = kept
