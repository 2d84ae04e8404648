"""The transport of a replay: one rank of many runs alone, and every transfer is a real copy of the same size.

Receives are copies from pinned host memory to the device, sends are copies from the device to pinned host memory. Each
direction has its own stream and copy engine, and keeps the order of posting, so kernels, memory and links are as busy
as they would be. The bytes that arrive are noise, never a result. Other ranks being late and other traffic on the
network are left out. On CPU the copies are made while they are posted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from mesh_attention.comm.base import AllOf, Parcel, Work
from mesh_attention.execution.warm_up import DryComm


class ReplayComm(DryComm):
    """The transport of the rank that is played."""

    is_capturable = True

    def __init__(self, rank: int, size: int, *, device: torch.device) -> None:
        super().__init__(rank, size)
        self.device = device
        self._host = {"in": torch.empty(0, dtype=torch.uint8), "out": torch.empty(0, dtype=torch.uint8)}
        self._streams = (
            {way: torch.cuda.Stream(device) for way in self._host} if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        )

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        into, from_ = ([chunk for parcel in side for chunk in parcel.chunks] for side in (recvs, sends))
        self.reserve(max((chunk.numel() for chunk in chain(into, from_)), default=0))
        if self._streams is None:
            self._copy_in(into)
            self._copy_out(from_)
            return AllOf(())
        compute = torch.cuda.current_stream(self.device)
        posted = compute.record_event()
        done = []
        try:
            for way, chunks, copy in (("in", into, self._copy_in), ("out", from_, self._copy_out)):
                if chunks:
                    stream = self._streams[way]
                    stream.wait_event(posted)
                    torch.cuda.set_stream(stream)
                    copy(chunks)
                    done.append(stream.record_event())
        finally:
            torch.cuda.set_stream(compute)
        return _Copied(tuple(done), self.device)

    def reserve(self, nbytes: int) -> None:
        """Make room for messages of this size. Pinning memory is slow, so do it before anything is timed."""
        if nbytes <= self._host["in"].numel():
            return
        if self._streams is not None:
            torch.cuda.synchronize(self.device)  # copies may still be reading the memory that is replaced
        # Normally distributed bfloat16; read in pairs as float32, the numbers are nearly the same.
        noise = torch.randn(-(-nbytes // 2)).to(torch.bfloat16).view(torch.uint8)[:nbytes]
        is_pinned = self._streams is not None
        self._host = {"in": noise.pin_memory() if is_pinned else noise}
        self._host["out"] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_pinned)

    def _copy_in(self, chunks: list[Tensor]) -> None:
        for chunk in chunks:
            chunk.copy_(self._host["in"][: chunk.numel()], non_blocking=True)

    def _copy_out(self, chunks: list[Tensor]) -> None:
        for chunk in chunks:
            self._host["out"][: chunk.numel()].copy_(chunk, non_blocking=True)


class JoinedComm(ReplayComm):
    """One copy in each direction for everything that is posted together, for messages that are adjacent in memory.

    The bytes go from and to memory of its own. What it costs to send to many peers instead of one is left out.
    """

    def __init__(self, rank: int, size: int, *, device: torch.device) -> None:
        super().__init__(rank, size, device=device)
        self._own = {way: torch.empty(0, dtype=torch.uint8, device=device) for way in ("in", "out")}

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        return super().post(self._joined("out", sends), self._joined("in", recvs))

    def _joined(self, way: str, parcels: Sequence[Parcel]) -> list[Parcel]:
        nbytes = sum(chunk.numel() for parcel in parcels for chunk in parcel.chunks)
        if nbytes > self._own[way].numel():
            self._own[way] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return [Parcel([self._own[way][:nbytes]], 0, "")] if nbytes else []


class _Copied:
    """Copies in flight; waiting makes the current stream wait, not the host."""

    def __init__(self, events: tuple[torch.cuda.Event, ...], device: torch.device) -> None:
        self.events, self.device = events, device

    def is_done(self) -> bool:
        return all(event.query() for event in self.events)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        for event in self.events:
            torch.cuda.current_stream(self.device).wait_event(event)
