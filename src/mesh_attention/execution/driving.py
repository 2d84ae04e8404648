"""Driving: how the ranks that this process plays are advanced, over which transports, and by one call at a time.

A rank's work is a generator that yields what it waits for. `drive` advances one and blocks; `drive_together` advances
several on one thread, moving on to the next when one has to wait. (Threads would not do: autograd runs all CUDA
backward work of a process on one thread, so ranks that wait for each other there would wait for ever.)
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import RLock, Thread, current_thread
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mesh_attention.comm.base import Comm, Work, innermost
from mesh_attention.comm.local import LocalComm, LocalGroup
from mesh_attention.comm.marked import NEW_GROUP, Marked, make_mark
from mesh_attention.comm.staged import comm_for
from mesh_attention.comm.torch_dist import START_AGAIN, Group, TorchComm
from mesh_attention.errors import DisagreementError, StalledError, TransportError, UsageError
from mesh_attention.execution.agreement import exchange, tell
from mesh_attention.execution.alarm import Alarm

Result = TypeVar("Result")


class Ledger:
    """The calls on one group so far. Locked while a call talks to other ranks.

    Where one process plays all ranks, it forgives failures, because they fail together and drop what they posted, and
    threads take turns.
    """

    def __init__(self, *, forgives: bool = False) -> None:
        self.forgives = forgives
        self.lock = RLock()
        self.passes = 0
        self.history = 0
        self.failure: str | None = None
        self.alarms: dict[torch.device, Alarm] = {}
        self.thread: Thread | None = None

    @contextmanager
    def talking(self, *refusals: type[Exception]) -> Iterator[None]:
        """One thread at a time, and none after a failure: an error other than `refusals` leaves the group failed.

        Messages of a call that failed may still be under way. They would be taken for those of the next one.
        """
        with self.lock:
            self._check_thread()
            for alarm in self.alarms.values():
                self.failure = self.failure or alarm.verdict()
            if self.failure is not None:
                raise TransportError(
                    f"an earlier call on this group failed: {self.failure}. Its messages may still be under way, so "
                    f"nothing more is sent on this group; {NEW_GROUP}"
                )
            try:
                yield
            except refusals:
                raise
            except BaseException as error:
                if self.forgives:
                    raise
                why = self._explanation(error)
                self.failure = why or f"{type(error).__name__}: {error}"
                if why is not None:
                    raise TransportError(f"{why}; {START_AGAIN}") from error
                raise

    def _explanation(self, error: BaseException) -> str | None:
        """Why a transfer failed, as far as the other ranks know; None if nobody was asked."""
        if not isinstance(error, TransportError):
            return None
        watches = [alarm.watch for alarm in self.alarms.values() if alarm.watch is not None]
        due = [watch for watch in watches if watch.verdict is not None or watch.is_in_a_pass]
        return next((why for watch in due if (why := watch.explain(str(error)))), None)

    def _check_thread(self) -> None:
        """Refuse a second thread: which of them goes first would differ from rank to rank, and no mark would tell."""
        is_backward = torch._C._current_graph_task_id() != -1  # autograd has threads of its own
        if self.forgives or is_backward:
            return
        now = current_thread()
        if self.thread is None or not self.thread.is_alive():
            self.thread = now
        if self.thread is not now:
            self.failure = self.failure or f"threads {self.thread.name} and {now.name} both made calls on it"
            raise UsageError(
                f"threads {self.thread.name} and {now.name} both make calls on one group, and their order would differ "
                "from rank to rank; give each thread its own group and MeshAttention"
            )

    def mark(self, call: int, device: torch.device | None, forward_pass: int | Tensor = 0) -> Tensor:
        """The mark of the next pass, which is of the call with this number; for the device that will compare it.

        `forward_pass` is the number of the pass that a backward pass belongs to.
        """
        self.passes += 1
        known = int(forward_pass) if device is None else 0  # reading it from a device would wait
        self.history = hash((self.history, call, known))  # of whole numbers, so it is the same in every process
        return make_mark(self.passes, self.history, device, forward_pass)

    def alarm(self, device: torch.device) -> Alarm:
        if device not in self.alarms:
            self.alarms[device] = Alarm(device)
        return self.alarms[device]


_LEDGERS: WeakKeyDictionary[Any, Ledger] = WeakKeyDictionary()


def ledger_of(comm: Comm, *, forgives: bool) -> Ledger:
    """The ledger of a transport's group, the same for all transports on that group."""
    comm, made = innermost(comm), Ledger(forgives=forgives)
    try:
        return _LEDGERS.setdefault(getattr(comm, "group", comm), made)
    except TypeError:  # a transport that cannot be hashed or referred to weakly
        return made


IS_TOLD = "_mesh_attention_told"
"""An attribute of errors that the other ranks know of."""


class Telling:
    """Tells the other ranks about an error inside its block, so that they do not wait; then the error is raised here.

    For whatever a rank does between the beginning of a call and the agreement on it. `comm` is None if all ranks are
    played in this process. An error is told once, however many blocks it passes through.
    """

    def __init__(self, comm: Comm | None, ledger: Ledger) -> None:
        self.comm, self.ledger = comm, ledger

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self.tell(error)

    def tell(self, error: Exception) -> None:
        """Tell the other ranks about an error, unless they know of it."""
        if getattr(error, IS_TOLD, False):
            return
        if self.comm is not None and self.comm.size > 1 and not _is_faked():
            setattr(error, IS_TOLD, True)
            # If they cannot be told, the error itself is still what matters here.
            with suppress(Exception), self.ledger.talking(), _disable_current_modes():
                tell(self.comm, error)


def _is_faked() -> bool:
    """True if tensors are fake: then no rank sends anything."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


class PlayedRanks:
    """The ranks that this process plays: one under torch.distributed, all of them in a local group."""

    def __init__(self, group: Group | LocalGroup | Comm | Sequence[Comm] | None) -> None:
        self.comms: list[Comm]
        self.is_local = isinstance(group, LocalGroup | list | tuple)
        if isinstance(group, LocalGroup):
            self.comms = [group.comm(rank) for rank in range(group.size)]
        elif isinstance(group, list | tuple):
            self.comms = list(group)
            if not group or not all(hasattr(comm, "share") for comm in group):
                raise UsageError(f"group is {group!r}; expected a list of transports, one for each rank played here")
        elif hasattr(group, "share"):
            self.comms = [group]  # type: ignore[list-item]
        else:
            self.comms = [TorchComm(group)]  # type: ignore[arg-type]
        self.ledger = ledger_of(self.comms[0], forgives=self.is_local or self.size == 1)
        self._on: dict[torch.device, list[Comm]] = {}
        self.telling = Telling(None if self.is_local else self.comms[0], self.ledger)
        """Wraps what this rank does before ranks agree on a call: the other ranks are told about an error inside it."""

    @property
    def size(self) -> int:
        """Ranks in the whole group."""
        return self.comms[0].size

    def comms_on(self, device: torch.device) -> list[Comm]:
        """Transports for tensors on a device: Gloo cannot send from a GPU, so those go through host memory."""
        if self.is_local:
            return self.comms
        if device not in self._on:
            (comm,) = self.comms
            found = comm_for(comm.group, device) if isinstance(comm, TorchComm) else comm
            self._on[device] = [found if self.size == 1 else Marked(found, self.ledger)]
            self.telling = Telling(self._on[device][0], self.ledger)
        return self._on[device]

    def meet(self, asked: Mapping[str, str], says: Any = None) -> list[Any]:
        """Raise on every rank unless all ask for the same; outside a call, where each process plays one rank.

        Returns what each rank says, any JSON.
        """
        with self.ledger.talking(UsageError, DisagreementError):
            return drive(exchange(self.comms[0], asked=asked, says=says))

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
        for comm in map(innermost, self.comms):
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
