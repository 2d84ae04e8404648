"""Driving: how the ranks that this process plays are advanced, and over which transports.

A rank's work is a generator that yields what it waits for. `drive` advances one and blocks; `drive_together` advances
several on one thread, moving on to the next when one has to wait. (Threads would not do: autograd runs all CUDA
backward work of a process on one thread, so ranks that wait for each other there would wait for ever.)
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

import torch

from mesh_attention.comm.base import Comm, Work
from mesh_attention.comm.local import LocalComm, LocalGroup
from mesh_attention.comm.staged import comm_for
from mesh_attention.comm.torch_dist import Group, TorchComm
from mesh_attention.errors import StalledError

Result = TypeVar("Result")


class PlayedRanks:
    """The ranks that this process plays: one under torch.distributed, all of them in a local group."""

    def __init__(self, group: Group | LocalGroup | Comm | Sequence[Comm] | None) -> None:
        self.comms: list[Comm]
        self.is_local = isinstance(group, LocalGroup | list | tuple)
        if isinstance(group, LocalGroup):
            self.comms = [group.comm(rank) for rank in range(group.size)]
        elif isinstance(group, list | tuple):
            self.comms = list(group)
        elif hasattr(group, "share"):
            self.comms = [group]  # type: ignore[list-item]
        else:
            self.comms = [TorchComm(group)]  # type: ignore[arg-type]
        self._on: dict[torch.device, list[Comm]] = {}

    @property
    def size(self) -> int:
        """Ranks in the whole group."""
        return self.comms[0].size

    def comms_on(self, device: torch.device) -> list[Comm]:
        """Transports for tensors on a device: Gloo cannot send from a GPU, so those go through host memory."""
        if not isinstance(self.comms[0], TorchComm):
            return self.comms
        if device not in self._on:
            self._on[device] = [comm_for(self.comms[0].group, device)]
        return self._on[device]

    def drive(self, ranks: Sequence[Generator[Work, None, Result]]) -> list[Result]:
        """Advance one generator for each rank played here until all have returned."""
        if not self.is_local:
            return [drive(ranks[0])]
        try:
            return drive_together(ranks)
        except BaseException:
            self._forget_posted()
            raise

    def _forget_posted(self) -> None:
        """Drop what ranks posted before an error: it would meet the wrong transfers later."""
        for comm in self.comms:
            while hasattr(comm, "inner"):
                comm = comm.inner
            if isinstance(comm, LocalComm):
                comm.group.forget()


def drive(rank: Generator[Work, None, Result]) -> Result:
    """Advance one generator, blocking on each thing it waits for."""
    try:
        work = next(rank)
        while True:
            try:
                work.wait()
            except Exception as error:
                work = rank.throw(error)
            else:
                work = next(rank)
    except StopIteration as stop:
        result: Result = stop.value
        return result


def drive_together(ranks: Sequence[Generator[Work, None, Result]]) -> list[Result]:
    """Advance several generators on this thread until all have returned."""
    results: dict[int, Result] = {}
    waiting: dict[int, Work | None] = dict.fromkeys(range(len(ranks)))
    while waiting:
        moved = False
        for rank in list(waiting):
            work = waiting[rank]
            while work is None or work.is_done():
                moved = True
                try:
                    work = waiting[rank] = next(ranks[rank])
                except StopIteration as stop:
                    results[rank] = stop.value
                    del waiting[rank]
                    break
        if not moved and not any(_finishes(work) for work in waiting.values() if work is not None):
            raise StalledError(f"ranks {', '.join(map(str, waiting))} wait for each other and nothing moves")
    return [results[rank] for rank in range(len(ranks))]


def _finishes(work: Work) -> bool:
    """True if the work only needs time, as behind a delaying wrapper."""
    try:
        work.wait()
    except StalledError:
        return False
    return True
