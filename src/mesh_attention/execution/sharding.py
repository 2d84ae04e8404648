"""Sharding tensors: a rank's tokens of a whole sequence, the whole again from all ranks, and position ids."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import torch
from torch import Tensor

from mesh_attention.comm.base import Parcel
from mesh_attention.errors import ProblemError, TransportError, UsageError
from mesh_attention.execution.autograd import without_autocast
from mesh_attention.plan.layout import Layout, inverse_permutation
from mesh_attention.plan.layout import position_ids as positions
from mesh_attention.session.agreement import Statement, find_difference
from mesh_attention.session.session import Session


def position_ids(layout: Layout, rank: int, *, seq_len: int, ranks: int, device: torch.device | None = None) -> Tensor:
    """The position in the whole sequence of each of a rank's tokens."""
    try:
        count = index(seq_len)
    except TypeError:
        count = -1
    if count < 0:
        raise ProblemError(f"seq_len={seq_len!r}: expected a whole number of at least 0")
    return torch.tensor(positions(layout, rank, seq_len=count, ranks=ranks), dtype=torch.long, device=device)


def shard(whole: Tensor, layout: Layout, rank: int, *, ranks: int, dim: int = 1) -> Tensor:
    """A rank's tokens of a whole sequence; differentiable."""
    check_shard(whole, dim)
    ids = position_ids(layout, rank, seq_len=whole.shape[dim], ranks=ranks, device=whole.device)
    return whole.index_select(dim, ids)


def unshard(local: Tensor, layout: Layout, session: Session, *, dim: int = 1) -> Tensor:
    """The whole sequence, on every rank, from all ranks' tokens. Not differentiable: for inspecting results.

    Ranks compare their shards each time, because a transport need not notice a message of the wrong length.
    """
    with session.telling():
        check_shard(local, dim)
        ours = local.detach().movedim(dim, 0).contiguous()
        session.comms_on(ours.device)
    must_match = {"operation": "unshard", "layout": layout.name, "dim": str(dim % local.dim()), **_form(local, dim)}
    statement = Statement(must_match=must_match, holds={"tokens": ours.shape[0]})
    lengths = [rank.holds["tokens"] for rank in session.agree(statement, device=ours.device)]
    _check_lengths(lengths, layout)
    shards = gather(ours, lengths, session, label="unshard")
    return join_shards([shard.movedim(0, dim) for shard in shards], layout, dim=dim)


def gather(ours: Tensor, lengths: Sequence[int], session: Session, *, label: str) -> list[Tensor]:
    """The contiguous tensors of all ranks, whose first dimensions are known; ranks have agreed on them."""
    comm = session.comms_on(ours.device)[0]
    every = [ours if rank == comm.rank else ours.new_empty((n, *ours.shape[1:])) for rank, n in enumerate(lengths)]
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    with session.call(), session.state.meet(Statement(must_match={"operation": label}), at=label):
        try:
            comm.post(
                [Parcel([ours.view(-1)], rank, label) for rank in others if ours.numel()],
                [Parcel([every[rank].view(-1)], rank, label) for rank in others if every[rank].numel()],
            ).wait()
        except Exception as error:
            raise TransportError(f"rank {comm.rank}, {label}: waited for the other ranks: {error}") from error
    return every


def join_shards(shards: Sequence[Tensor], layout: Layout, *, dim: int = 1) -> Tensor:
    """The whole sequence from all shards; differentiable."""
    for shard in shards:
        check_shard(shard, dim)
    if difference := find_difference({rank: _form(shard, dim) for rank, shard in enumerate(shards)}):
        raise ProblemError(f"shards differ: {difference}")
    lengths = [shard.shape[dim] for shard in shards]
    _check_lengths(lengths, layout)
    order = torch.tensor(inverse_permutation(layout, seq_len=sum(lengths), ranks=len(shards)), device=shards[0].device)
    with without_autocast(order.device):  # which refuses to concatenate a 16-bit dtype other than its own
        return torch.cat(list(shards), dim).index_select(dim, order)


def check_shard(local: object, dim: object) -> None:
    if not isinstance(local, Tensor) or hasattr(local, "device_mesh"):
        raise UsageError(f"got a {type(local).__name__}; expected a plain tensor of tokens")
    if type(dim) is not int or not -local.dim() <= dim < local.dim():
        raise UsageError(
            f"got a tensor of shape {tuple(local.shape)}, which has no dim {dim!r}; give the dim of tokens"
        )


def _form(shard: Tensor, dim: int) -> dict[str, str]:
    """What all shards of a sequence have in common."""
    others = [str(size) if at != dim % shard.dim() else "tokens" for at, size in enumerate(shard.shape)]
    return {"dtype": str(shard.dtype), "device": shard.device.type, "shape": f"({', '.join(others)})"}


def _check_lengths(lengths: Sequence[int], layout: Layout) -> None:
    ranks = len(lengths)
    due = [len(positions(layout, rank, seq_len=sum(lengths), ranks=ranks)) for rank in range(ranks)]
    if list(lengths) != due:
        raise ProblemError(f"ranks hold {list(lengths)} tokens; expected {due}, the shards of a {layout.name} sequence")
