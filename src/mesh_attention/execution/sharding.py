"""Sharding: a rank's tokens of a whole sequence, the whole sequence from all shards, and position ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mesh_attention.comm.base import Comm, Parcel
from mesh_attention.errors import ProblemError
from mesh_attention.plan.layout import Layout, inverse_permutation
from mesh_attention.plan.layout import position_ids as positions


def position_ids(layout: Layout, rank: int, *, tokens: int, ranks: int, device: torch.device | None = None) -> Tensor:
    """The position in the whole sequence of each of a rank's tokens."""
    return torch.tensor(positions(layout, rank, tokens=tokens, ranks=ranks), dtype=torch.long, device=device)


def shard(whole: Tensor, layout: Layout, rank: int, *, ranks: int, dim: int = 1) -> Tensor:
    """A rank's tokens of a whole sequence; differentiable."""
    ids = position_ids(layout, rank, tokens=whole.shape[dim], ranks=ranks, device=whole.device)
    return whole.index_select(dim, ids)


def unshard(local: Tensor, layout: Layout, comm: Comm, *, dim: int = 1) -> Tensor:
    """The whole sequence, on every rank, from all ranks' tokens. Not differentiable: for inspecting results."""
    ours = local.detach().movedim(dim, 0).contiguous()
    # Ranks share their sizes, because a transport need not notice a message of the wrong length.
    sharing = comm.share(str(ours.shape[0]))
    sharing.wait()
    lengths = [int(text) for text in sharing.result()]
    due = [len(positions(layout, rank, tokens=sum(lengths), ranks=comm.size)) for rank in range(comm.size)]
    if lengths != due:
        raise ProblemError(f"ranks hold {lengths} tokens; expected {due}, the shards of a {layout.name} sequence")
    shards = [ours if rank == comm.rank else ours.new_empty((n, *ours.shape[1:])) for rank, n in enumerate(lengths)]
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    comm.post(
        [Parcel([ours.view(-1)], rank, "unshard") for rank in others if ours.numel()],
        [Parcel([shards[rank].view(-1)], rank, "unshard") for rank in others if shards[rank].numel()],
    ).wait()
    return join_shards([shard.movedim(0, dim) for shard in shards], layout, dim=dim)


def join_shards(shards: Sequence[Tensor], layout: Layout, *, dim: int = 1) -> Tensor:
    """The whole sequence from all shards; differentiable."""
    tokens = sum(shard.shape[dim] for shard in shards)
    order = torch.tensor(inverse_permutation(layout, tokens=tokens, ranks=len(shards)), device=shards[0].device)
    return torch.cat(list(shards), dim).index_select(dim, order)
