"""torch.distributed: any process group or one axis of a DeviceMesh, Gloo or NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from mesh_attention.comm.base import Parcel, Sharing, Work
from mesh_attention.errors import ProblemError

Group = ProcessGroup | DeviceMesh


class TorchComm:
    """A rank's end of a torch.distributed group."""

    def __init__(self, group: Group | None = None) -> None:
        self.group = process_group(group)
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        # One batch, so that NCCL starts them together; receives first, since Gloo is full duplex only that way.
        posts = [
            dist.P2POp(op, chunk, group=self.group, group_peer=parcel.peer)
            for op, parcels in ((dist.irecv, recvs), (dist.isend, sends))
            for parcel in parcels
            for chunk in parcel.chunks
        ]
        return _Works(dist.batch_isend_irecv(posts) if posts else [])

    def share(self, text: str) -> Sharing:
        return _Sharing(text, self.group, self.size)


def process_group(group: Group | None) -> ProcessGroup:
    """The process group of a group, of a one-axis DeviceMesh, or the default one."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ProblemError(
                f"a DeviceMesh with {group.ndim} axes came; expected one axis, such as device_mesh['cp']"
            )
        return group.get_group()
    if not dist.is_initialized():
        raise ProblemError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
    chosen = group if group is not None else dist.group.WORLD
    assert chosen is not None  # there is a default group once torch.distributed is initialised
    return chosen


class _Works:
    """The requests of one post. Waited for once: Gloo would wait for another message the second time."""

    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def is_done(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        works, self.works = self.works, []
        for work in works:
            work.wait()


class _Sharing:
    """Blocks in `wait`: torch gathers objects only synchronously."""

    def __init__(self, text: str, group: ProcessGroup, size: int) -> None:
        self.text, self.group = text, group
        self.texts: list[str] = [""] * size
        self.gathered = False

    def is_done(self) -> bool:
        return self.gathered

    def wait(self) -> None:
        if not self.gathered:
            dist.all_gather_object(self.texts, self.text, group=self.group)
            self.gathered = True

    def result(self) -> list[str]:
        self.wait()
        return self.texts
