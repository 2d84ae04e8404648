"""`TorchComm`: a process group of torch or one axis of a DeviceMesh, Gloo or NCCL, for tensors its backend can send.

Also how these groups share texts (`GatheredTexts`), and who is named if a rank does not take part (`Attendance`).

Gloo cannot send CUDA tensors; `staged` is for those. On NCCL, posts run on the device strictly one after the other, in
the order of posting (they share one stream), and `wait` makes the current stream wait, not the host.
"""

from __future__ import annotations

import math
import re
import struct
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed import AllreduceOptions, ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _world

from mesh_attention.comm.base import Comm, Parcel, Sharing, Work, innermost
from mesh_attention.errors import ProblemError, TransportError

Group = ProcessGroup | DeviceMesh
T = TypeVar("T")
HEADER = struct.Struct("<Q?")
"""Before a text: its length in bytes, and whether this rank has yet to connect its device."""
ROOM = 4096
"""Bytes of every rank's first message of a sharing, header included. Longer texts take a second one."""
FIRST_TAG = 1_000_000
"""Gloo's tag of a parcel with tag 0. Smaller ones are left to the caller's own messages on the same group."""
_MAXIMUM_OF_RANKS = AllreduceOptions()
_MAXIMUM_OF_RANKS.reduceOp = ReduceOp(ReduceOp.MAX)
LOOK_UP_S = 2.0
"""Seconds to find out who is missing after a sharing failed; the store may be out of reach as well."""


DESTROYED = "the process group was destroyed; create a new one, and a MeshAttention on it"


class WeakGroup:
    """The attribute `group` of a transport. torch holds a group until it is destroyed; a transport must not keep its
    threads and connections longer than that.
    """

    def __set__(self, comm: Any, group: ProcessGroup) -> None:
        comm._group = ref(group)

    def __get__(self, comm: Any, owner: type | None = None) -> ProcessGroup:
        group: ProcessGroup | None = comm._group()
        if group is None or is_destroyed(group):
            raise TransportError(DESTROYED)
        return group


class TorchComm:
    """A rank's end of a torch.distributed group. With NCCL, `device` is the device of its chunks."""

    group = WeakGroup()

    def __init__(self, group: Group | None = None, device: torch.device | None = None) -> None:
        self.group = process_group(group)
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self.is_capturable = device is not None and backends(self.group).get(device.type) == "nccl"
        self.runs_side_by_side = device is not None and backends(self.group).get(device.type) == "gloo"
        self._starts_together = (
            device is not None and self.is_capturable and self.group._get_backend(device).supports_coalescing
        )
        self._reached: tuple[set[int], set[int]] = set(), set()
        self._connection = GroupConnection(device, is_due=device is not None and device.type != "cpu")

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        try:
            post = _post_together if self._starts_together else _post_one_by_one
            return _Works(post(self.group, sends, recvs))
        except Exception as error:
            raise TransportError(f"{reason_of(error)}; {START_AGAIN}") from error

    def reach(self, dests: Collection[int], sources: Collection[int]) -> None:
        """Connect with the ranks that a pass will send to and receive from; all ranks, before they first run it.

        NCCL connects two ranks when they first send, and the host waits for that. In the posts of a pass, ranks meet
        one after the other, so they could wait for each other in a circle. Here all of them meet at once.
        """
        dests, sources = sorted({*dests} - self._reached[0]), sorted({*sources} - self._reached[1])
        if not self._starts_together or not (dests or sources):
            return
        assert self._connection.device is not None  # where the backend is NCCL
        with _current(self._connection.device):
            byte = torch.zeros(1 + len(sources), dtype=torch.uint8, device=self._connection.device)
            sends = [Parcel([byte[:1]], rank, "") for rank in dests]
            self.post(sends, [Parcel([byte[at : at + 1]], rank, "") for at, rank in enumerate(sources, 1)]).wait()
        self._reached[0].update(dests)
        self._reached[1].update(sources)

    def reduce_to_largest(self, tensor: torch.Tensor) -> None:
        """Replace each number, in place, by the largest of all ranks."""
        try:
            backend: Any = self.group._get_backend(tensor.device)
            backend.allreduce([tensor], _MAXIMUM_OF_RANKS).wait()
        except Exception as error:
            raise TransportError(
                f"rank {self.rank}, at the end of the pass: {reason_of(error)}; {START_AGAIN}"
            ) from error

    def share(self, text: str) -> Sharing:
        return GatheredTexts(text, self.group, self.size, self._connection)


def process_group(group: Group | None) -> ProcessGroup:
    """The process group of a group, of a one-axis DeviceMesh, or the default one."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ProblemError(f"got a DeviceMesh with {group.ndim} axes; expected one axis, such as device_mesh['cp']")
        try:
            return group.get_group()
        except RuntimeError as error:  # a mesh knows its group by a name, which is gone
            raise ProblemError(DESTROYED) from error
    if not dist.is_initialized():
        raise ProblemError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
    chosen = group if group is not None else dist.group.WORLD
    if not isinstance(chosen, ProcessGroup):
        raise ProblemError(
            f"group is a {type(chosen).__name__}; expected a torch.distributed group that this process is in, one axis "
            "of a DeviceMesh, or None for the default group"
        )
    if is_destroyed(chosen):
        raise ProblemError(DESTROYED)
    return chosen


def comm_for(group: Group | None, device: torch.device) -> Comm:
    """A transport for tensors on a device: by the group's backend, or staged where that is Gloo and the device CUDA."""
    chosen = process_group(group)
    if device.type == "cuda" and backends(chosen).get("cuda", "gloo") == "gloo":
        from mesh_attention.comm.staged import StagedComm  # it builds on this module

        return StagedComm(chosen)
    return TorchComm(chosen, device)


def torch_group(comm: Any) -> Any:
    """The process group beneath a transport and its wrappers; None if there is none."""
    comm = innermost(comm)
    return comm.group if isinstance(comm, TorchComm) else None


def backends(group: ProcessGroup) -> dict[str, str]:
    """The backends of a group by type of device, such as {"cpu": "gloo", "cuda": "nccl"}."""
    config = dist.get_backend_config(group)
    return {device: backend for device, _, backend in (pair.partition(":") for pair in config.split(","))}


def _post_one_by_one(group: ProcessGroup, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> list[Any]:
    """Receives first: Gloo is full duplex only that way."""
    received = [
        dist.irecv(chunk, group=group, tag=FIRST_TAG + parcel.tag, group_src=parcel.peer)
        for parcel in recvs
        for chunk in parcel.chunks
    ]
    sent = [
        dist.isend(chunk, group=group, tag=FIRST_TAG + parcel.tag, group_dst=parcel.peer)
        for parcel in sends
        for chunk in parcel.chunks
    ]
    return [*received, *sent]


def _post_together(group: ProcessGroup, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> list[Any]:
    """All at once, so that NCCL starts them together: `batch_isend_irecv` without its checks, which take as long."""
    if not any(parcel.chunks for parcel in (*sends, *recvs)):
        return []
    backend: Any = group._get_backend(torch.device("cuda"))
    backend._start_coalescing()
    for parcel in recvs:
        for chunk in parcel.chunks:
            backend.recv([chunk], parcel.peer, 0)
    for parcel in sends:
        for chunk in parcel.chunks:
            backend.send([chunk], parcel.peer, 0)
    return [backend._end_coalescing()]


class _Works:
    """The requests of one post. Waited for once: a second wait in Gloo would wait for another message."""

    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def is_done(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        works, self.works = self.works, []
        try:
            for work in works:
                work.wait()
        except Exception as error:
            raise TransportError(f"{reason_of(error)}; {START_AGAIN}") from error


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
        assert self.device is not None  # it is due
        with _current(self.device):
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        self.is_due = False


class GatheredTexts:
    """The texts of all ranks, sent as bytes. Posted at once; if some text is long, `wait` posts the rest of them."""

    def __init__(self, text: str, group: ProcessGroup, size: int, connection: GroupConnection | None = None) -> None:
        self.group, self.size = group, size
        self.connection = GroupConnection() if connection is None else connection
        self.device = _text_device(group, self.connection.device)
        self.text = text.encode()
        self.texts: list[str] | None = None
        self.attendance = Attendance(group, is_told=self.device.type != "cpu")
        self.patience_s = patience_s(group, self.device, spare_s=3 * LOOK_UP_S)
        self.starts = self._attempt(self._begin)

    def is_done(self) -> bool:
        return self.texts is not None or self.starts.work.is_completed()

    def wait(self) -> None:
        if self.texts is None:
            self.texts = self._attempt(self._receive)

    def result(self) -> list[str]:
        self.wait()
        assert self.texts is not None  # gathered by now
        return self.texts

    def _begin(self) -> _AllGather:
        if self.device.type != "cpu":
            self.attendance.wait_for_all(self.size, self.patience_s)
        return self._gather(HEADER.pack(len(self.text), self.connection.is_due) + self.text[: ROOM - HEADER.size], ROOM)

    def _receive(self) -> list[str]:
        starts = self.starts.result()
        headers = [HEADER.unpack_from(start) for start in starts]
        room = ROOM - HEADER.size
        rest = max(length for length, _ in headers) - room
        ends = self._gather(self.text[room:], rest).result() if rest > 0 else [b""] * self.size
        # Only if all are due: ranks with tensors on another device would not take part. They are refused later.
        if all(is_due for _, is_due in headers):
            self.connection.connect(self.group)
        texts = [start[HEADER.size :] + end for start, end in zip(starts, ends, strict=True)]
        return [text[:length].decode() for text, (length, _) in zip(texts, headers, strict=True)]

    def _gather(self, content: bytes, room: int) -> _AllGather:
        with _current(self.device):
            ours = torch.frombuffer(bytearray(content.ljust(room, b"\0")), dtype=torch.uint8).to(self.device)
            rows = ours.new_empty((self.size, room))
            work = dist.all_gather(list(rows.unbind()), ours, group=self.group, async_op=True)
        return _AllGather(work, rows, self.patience_s)

    def _attempt(self, step: Callable[[], T]) -> T:
        try:
            return step()
        except Exception as error:
            who = self.attendance.describe(self.size)
            raise TransportError(f"{who}: {reason_of(error)}; {START_AGAIN}") from error


class _AllGather:
    """An all-gather of bytes that is under way."""

    def __init__(self, work: Any, rows: torch.Tensor, patience_s: float) -> None:
        self.work, self.rows, self.end = work, rows, time.monotonic() + patience_s

    def result(self) -> list[bytes]:
        while self.rows.device.type != "cpu" and not self.work.is_completed():
            if time.monotonic() > self.end:
                raise TimeoutError("no answer before the group's timeout")
            time.sleep(1e-4)
        self.work.wait()
        return [row.tobytes() for row in self.rows.cpu().numpy()]


class Attendance:
    """Counts the sharings that this rank has begun, and notes it in the group's store, so that ranks that did not can
    be named. Over Gloo that is left to the watchdog."""

    def __init__(self, group: ProcessGroup, *, is_told: bool) -> None:
        self.number = _SHARINGS[group] = _SHARINGS.get(group, 0) + 1
        self.store = store_of(group) if is_told else None
        self.rank = dist.get_rank(group)
        with suppress(Exception):  # a store that is out of reach is told of only if the sharing fails as well
            if self.store is not None:
                self.store.set(_key(self.rank), str(self.number))

    def wait_for_all(self, size: int, patience_s: float) -> None:
        """Wait until all ranks have begun their first sharing, in which NCCL connects: it would wait for ever."""
        if self.number == 1 and self.store is not None:
            self.store.wait([_key(rank) for rank in range(size)], timedelta(seconds=patience_s))

    def describe(self, size: int) -> str:
        """Say who was missing, as far as the store knows."""
        failed = f"rank {self.rank} could not compare its call with those of the other ranks"
        if self.store is None:
            return failed
        answers: list[list[int]] = []

        def look() -> None:
            with suppress(Exception):
                answers.append(self._missing(size))

        thread = Thread(target=look, daemon=True)  # a stopped store would not answer
        thread.start()
        thread.join(LOOK_UP_S)
        if not answers:
            why = "the group's store does not answer (the process that keeps it, often rank 0, may have ended)"
            return f"{failed}, and {why}"
        (missing,) = answers
        if not missing:
            return f"{failed}, although all had begun"
        who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
        return f"{who} did not take part when ranks compared their calls"

    def _missing(self, size: int) -> list[int]:
        """The ranks that have not begun this sharing. One that is about to begin is not missing."""
        end = time.monotonic() + LOOK_UP_S / 2
        while (missing := [rank for rank in range(size) if self._begun(rank) < self.number]) and time.monotonic() < end:
            time.sleep(0.05)
        return missing

    def _begun(self, rank: int) -> int:
        assert self.store is not None  # asked only then
        key = _key(rank)
        return int(self.store.get(key)) if self.store.check([key]) else 0


_SHARINGS: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()


def sharings_of(group: ProcessGroup) -> int:
    """How many sharings this rank has begun on a group."""
    return _SHARINGS.get(group, 0)


def store_of(group: ProcessGroup) -> Any:
    """The store by which the ranks of a group found each other; None if it was destroyed."""
    return _world.pg_map.get(group, (None, None))[1]


def has_failed(group: ProcessGroup, device: torch.device) -> bool:
    """True if a group's backend has given up on its transfers; only NCCL's tells."""
    backend = group._get_backend(device)
    error: Any = backend.get_error() if backends(group).get(device.type) == "nccl" else ErrorType.SUCCESS
    return bool(error != ErrorType.SUCCESS)


def is_destroyed(group: ProcessGroup) -> bool:
    return group not in _world.pg_map


START_AGAIN = "read the logs of the other ranks, and start the job again"


def reason_of(error: Exception) -> str:
    """The text of an error, without places in the sources of Gloo or torch, and without Gloo's and NCCL's advice."""
    if found := re.match(r"NCCL error in: \S+, (.*?)(?: \(run with .*?\))?, NCCL version", str(error)):
        last = str(error).partition("Last error:\n")[2].strip().partition(". If you believe")[0]
        return f"NCCL: {found[1]}" + (f" ({last})" if last else "")
    return re.sub(r"^\[\S*\] |\.? This is typically caused by.*", "", str(error))


def _key(rank: int) -> str:
    return f"mesh-attention sharings of rank {rank}"


def _text_device(group: ProcessGroup, device: torch.device | None) -> torch.device:
    """Where texts travel: on the CPU if the group can, otherwise on the device this rank computes on."""
    types = backends(group)
    if "cpu" in types or not types:
        return torch.device("cpu")
    if device is not None and device.type in types:
        return device
    kind = next(iter(types))
    return group.bound_device_id or torch.device(kind, torch.get_device_module(kind).current_device())


def patience_s(group: ProcessGroup, device: torch.device, *, spare_s: float) -> float:
    """Seconds to wait for work on a device; backends of the CPU raise at the group's timeout themselves.

    NCCL's watchdog ends the process then, and nothing is raised. So give up earlier, by `spare_s` or more, in time to
    see who is missing. The timeout may be changed at any time.
    """
    if device.type == "cpu":
        return math.inf
    options = getattr(group._get_backend(device), "options", None)
    seconds = float(getattr(options, "_timeout", timedelta(minutes=10)).total_seconds())
    return seconds - min(seconds / 2, max(seconds / 10, spare_s))


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Collectives of NCCL expect the device of their tensors to be the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
