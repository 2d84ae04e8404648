"""`StagedComm`: Gloo for tensors on a CUDA device. Every chunk goes through pinned host memory.

For groups without NCCL, and for several ranks on one GPU, which NCCL usually refuses. Tensors in host memory go the
same way, with plain copies. Where the group's backend can send them itself, use `torch_dist`, whose `comm_for` chooses.

*Out:* a chunk is copied to the host on a separate stream, after the work queued before the post. A thread waits for the
copy and sends it, in the order of posting, so that `post` never waits for the device. *In:* the receive is posted at
once, into host memory. `wait` copies it to the device on another stream, after the work queued before the post, and
makes the current stream wait for the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention.comm.base import Parcel, Sharing, Work
from mesh_attention.comm.torch_dist import (
    FIRST_TAG,
    START_AGAIN,
    GatheredTexts,
    Group,
    WeakGroup,
    backends,
    process_group,
    reason_of,
)
from mesh_attention.errors import ProblemError, TransportError


class StagedComm:
    """A rank's end of a Gloo group. Its thread starts with the first send and ends with the comm."""

    group = WeakGroup()
    is_capturable = False  # messages go through the host

    def __init__(self, group: Group | None = None) -> None:
        self.group = process_group(group)
        if backends(self.group).get("cpu") != "gloo":
            raise ProblemError(
                f"StagedComm needs a group with Gloo for the CPU, such as cpu:gloo,cuda:nccl, because it sends from "
                f"host memory; got {dist.get_backend_config(self.group)}"
            )
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self._stages: dict[torch.device, HostStage] = {}
        self._fault = _Fault()
        self._sender = ThreadPoolExecutor(1, f"mesh-attention sends of rank {self.rank}")

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        self._fault.check()
        devices = [chunk.device for parcel in (*recvs, *sends) for chunk in parcel.chunks]
        if not devices:
            return _StagedWork([], [], None, self._fault)
        stage = self._stage(devices[0])  # a rank computes on one device
        queued = stage.mark()
        # Receives first: Gloo is full duplex only that way.
        arrivals = [self._expect(chunk, parcel, stage, queued) for parcel in recvs for chunk in parcel.chunks]
        departures = [self._dispatch(chunk, parcel, stage, queued) for parcel in sends for chunk in parcel.chunks]
        return _StagedWork(arrivals, departures, stage, self._fault)

    def share(self, text: str) -> Sharing:
        return GatheredTexts(text, self.group, self.size)

    def _stage(self, device: torch.device) -> HostStage:
        if device not in self._stages:
            self._stages[device] = CudaStage(device) if device.type == "cuda" else HostStage()
        return self._stages[device]

    def _expect(self, chunk: Tensor, parcel: Parcel, stage: HostStage, queued: Any) -> _Arrival:
        host = stage.landing(chunk)
        name = f"{parcel.label} from rank {parcel.peer}"
        receive = partial(dist.irecv, host, group=self.group, tag=FIRST_TAG + parcel.tag, group_src=parcel.peer)
        request = self._fault.attempt(name, receive)
        return _Arrival(name, request, host, chunk, queued)

    def _dispatch(self, chunk: Tensor, parcel: Parcel, stage: HostStage, queued: Any) -> _Departure:
        host, wait_for_copy = stage.copy_out(chunk, queued)
        name = f"{parcel.label} to rank {parcel.peer}"
        send = partial(dist.isend, host, group=self.group, tag=FIRST_TAG + parcel.tag, group_dst=parcel.peer)
        return _Departure(name, self._sender.submit(_send, chunk, name, wait_for_copy, send, self._fault), self._fault)


def _send(
    chunk: Tensor, name: str, wait_for_copy: Callable[[], None], send: Callable[[], Any], fault: _Fault
) -> Any | None:
    """In the thread, which keeps the chunk alive until it is copied: the request; None if there is a fault."""

    def send_copy() -> Any:
        wait_for_copy()
        return send()

    with suppress(TransportError):  # whoever waits asks for the fault
        return fault.attempt(name, send_copy)
    return None


class _Fault:
    """The first error. Nothing is sent or waited for after it: ends that are out of step would never meet.

    Kept as text: the exception would hold its frames, and those would hold the group.
    """

    message: str | None = None

    def check(self) -> None:
        if self.message is not None:
            raise TransportError(self.message)

    def note(self, transfer: str, error: Exception) -> None:
        self.message = self.message or f"{transfer}: {reason_of(error)}; {START_AGAIN}"

    def attempt(self, transfer: str, call: Callable[[], Any]) -> Any:
        """The result of the call. If it fails, so does everything after it."""
        self.check()
        try:
            return call()
        except Exception as error:
            self.note(transfer, error)
        return self.check()


class _Arrival(NamedTuple):
    """A receive into host memory, and the chunk its bytes go to from there."""

    name: str
    request: Any
    host: Tensor
    chunk: Tensor
    queued: Any


@dataclass(frozen=True)
class _Departure:
    """A chunk that the thread sends, and that the work of its post waits for."""

    name: str
    sent: Future[Any]
    fault: _Fault

    def wait(self) -> None:
        request = self.sent.result()
        self.fault.check()
        request.wait()


class _StagedWork:
    """The transfers of one post. They count as done only after `wait`, because Gloo reports nothing before."""

    def __init__(
        self, arrivals: list[_Arrival], departures: list[_Departure], stage: HostStage | None, fault: _Fault
    ) -> None:
        self.arrivals, self.departures, self.stage, self.fault = arrivals, departures, stage, fault

    def is_done(self) -> bool:
        return self.stage is None

    def wait(self) -> None:
        if self.stage is None:
            return
        try:
            for arrival in self.arrivals:
                self.fault.attempt(arrival.name, arrival.request.wait)
                self.stage.copy_in(arrival.host, arrival.chunk, arrival.queued)
        finally:
            self.stage.settle()  # after an error too: the chunks may be freed while copies are in flight
        for departure in self.departures:
            self.fault.attempt(departure.name, departure.wait)
        self.arrivals, self.departures, self.stage = [], [], None


class HostStage:
    """Moves chunks between a device and the host. Here the device is the host itself, and copies are made at once."""

    def mark(self) -> Any:
        """A marker for everything queued so far."""
        return None

    def copy_out(self, chunk: Tensor, queued: Any) -> tuple[Tensor, Callable[[], None]]:
        """A host copy, made once `queued` is over, and a function that waits for the copy."""
        return chunk.clone(), lambda: None

    def landing(self, chunk: Tensor) -> Tensor:
        """Host memory to receive a chunk in."""
        return torch.empty_like(chunk)

    def copy_in(self, host: Tensor, chunk: Tensor, queued: Any) -> None:
        """Copy into the chunk once `queued` is over. The host memory may be released at once."""
        chunk.copy_(host)

    def settle(self) -> None:
        """Make everything queued from now on wait for all copies in."""


class CudaStage(HostStage):
    """Chunks on a CUDA device, with a stream for each direction, so that copies overlap each other and compute.

    torch caches pinned memory, and reuses it only after the copies queued on it are over.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.outward, self.inward = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return event

    def copy_out(self, chunk: Tensor, queued: torch.cuda.Event) -> tuple[Tensor, Callable[[], None]]:
        host = self.landing(chunk)
        self.outward.wait_event(queued)
        with torch.cuda.stream(self.outward):
            host.copy_(chunk, non_blocking=True)
        # blocking=True: the thread sleeps instead of spinning.
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record(self.outward)
        return host, copied.synchronize

    def landing(self, chunk: Tensor) -> Tensor:
        return torch.empty(chunk.shape, dtype=chunk.dtype, device="cpu", pin_memory=True)

    def copy_in(self, host: Tensor, chunk: Tensor, queued: torch.cuda.Event) -> None:
        self.inward.wait_event(queued)
        with torch.cuda.stream(self.inward):
            chunk.copy_(host, non_blocking=True)

    def settle(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.inward)
