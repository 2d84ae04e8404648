"""torch.distributed: any process group or one axis of a DeviceMesh, Gloo or NCCL, for tensors its backend can send.

Gloo cannot send CUDA tensors; `staged` is for those. On NCCL, posts run on the device strictly one after the other, in
the order of posting (they share one stream), and `wait` makes the current stream wait, not the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from mesh_attention.comm.base import Parcel, Sharing, Work
from mesh_attention.errors import ProblemError

Group = ProcessGroup | DeviceMesh


class TorchComm:
    """A rank's end of a torch.distributed group. With NCCL, `device` is the device of its chunks."""

    def __init__(self, group: Group | None = None, device: torch.device | None = None) -> None:
        self.group = process_group(group)
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self.is_capturable = device is not None and backends(self.group).get(device.type) == "nccl"
        self._connection = GroupConnection(device, is_due=device is not None and device.type != "cpu")

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
        return GatheredTexts(text, self.group, self.size, self._connection)


def process_group(group: Group | None) -> ProcessGroup:
    """The process group of a group, of a one-axis DeviceMesh, or the default one."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ProblemError(f"got a DeviceMesh with {group.ndim} axes; expected one axis, such as device_mesh['cp']")
        return group.get_group()
    if not dist.is_initialized():
        raise ProblemError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
    chosen = group if group is not None else dist.group.WORLD
    assert chosen is not None  # the default group exists once torch.distributed is initialised
    return chosen


def backends(group: ProcessGroup) -> dict[str, str]:
    """The backends of a group by type of device, such as {"cpu": "gloo", "cuda": "nccl"}."""
    config = dist.get_backend_config(group)
    return {device: backend for device, _, backend in (pair.partition(":") for pair in config.split(","))}


class _Works:
    """The requests of one post. Waited for once: a second wait in Gloo would wait for another message."""

    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def is_done(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        works, self.works = self.works, []
        for work in works:
            work.wait()


@dataclass
class GroupConnection:
    """The first operation of all ranks on their devices, which connects the group.

    NCCL connects a group in its first operation on a device, and all ranks must take part in that. A plan may leave a
    rank without transfers, and texts may travel over the group's CPU backend. So ranks whose device is not the CPU meet
    on it when they share their first text.
    """

    device: torch.device | None = None
    is_due: bool = False

    def connect(self, group: ProcessGroup) -> None:
        dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        self.is_due = False


class GatheredTexts:
    """The texts of all ranks. Blocks in `wait`: torch gathers objects only synchronously."""

    def __init__(self, text: str, group: ProcessGroup, size: int, connection: GroupConnection | None = None) -> None:
        self.text, self.group, self.size = text, group, size
        self.connection = GroupConnection() if connection is None else connection
        self.texts: list[str] | None = None

    def is_done(self) -> bool:
        return self.texts is not None

    def wait(self) -> None:
        if self.texts is not None:
            return
        gathered: list[Any] = [None] * self.size
        with _current(self.connection.device):
            dist.all_gather_object(gathered, (self.text, self.connection.is_due), group=self.group)
            # Only if all are due: ranks with tensors on another device would not take part. They are refused later.
            if all(is_due for _, is_due in gathered):
                self.connection.connect(self.group)
        self.texts = [text for text, _ in gathered]

    def result(self) -> list[str]:
        self.wait()
        assert self.texts is not None  # gathered by now
        return self.texts


def _current(device: torch.device | None) -> AbstractContextManager[object]:
    """torch gathers objects on the *current* CUDA device, which need not be the one this rank computes on."""
    return torch.cuda.device(device) if device is not None and device.type == "cuda" else nullcontext()
