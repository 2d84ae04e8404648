"""`Session`: the ranks of a group as one rank of them sees it. All talk between ranks goes through it.

It holds the transports of the local ranks, makes ranks agree on a call, tells the others about an error on this rank,
gives every pass its id, connects ranks before they need it, and refuses further calls after a failure.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import RLock, Thread, current_thread
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mesh_attention.comm.base import Comm, Work, drive, drive_together, innermost
from mesh_attention.comm.local import LocalComm, LocalGroup
from mesh_attention.comm.torch_dist import START_AGAIN, Group, TorchComm, backends, comm_for, store_of, torch_group
from mesh_attention.errors import DisagreementError, TransportError, UsageError
from mesh_attention.session.agreement import Statement, agree, reason_of, tell
from mesh_attention.session.pass_ids import NEW_GROUP, CheckedComm, Describe, make_pass_id
from mesh_attention.session.pass_reports import DIFFERENT_CALLS
from mesh_attention.session.poison import Poison
from mesh_attention.session.watchdog import Waiting, Watchdog, WatchedDevice, WatchedGroup

Result = TypeVar("Result")
IS_TOLD = "_mesh_attention_is_told"
"""Attribute of an error that the other ranks know of already."""


class Session:
    """One rank's end of all talk in a group; in a local group, the ends of all ranks.

    `comms` are the transports of the local ranks.
    """

    def __init__(self, group: Group | LocalGroup | Comm | Sequence[Comm] | None) -> None:
        self.comms: list[Comm]
        self.is_local = isinstance(group, LocalGroup | list | tuple)
        if isinstance(group, LocalGroup):
            self.comms = [group.comm(rank) for rank in range(group.size)]
        elif isinstance(group, list | tuple):
            self.comms = list(group)
            if not group or not all(hasattr(comm, "share") for comm in group):
                raise UsageError(f"group is {group!r}; expected a list of transports, one for each local rank")
        elif hasattr(group, "share"):
            self.comms = [group]  # type: ignore[list-item]
        else:
            self.comms = [TorchComm(group)]  # type: ignore[arg-type]
        self.state = state_of(self.comms[0], forgets_failures=self.is_local or self.size == 1)
        self._on: dict[torch.device, list[Comm]] = {}
        if not self.state.forgets_failures:
            self.state.watchdog(self.comms[0], None)  # already now, because it tells the others of this process

    @property
    def rank(self) -> int:
        """This rank's number in the group; 0 in a local group."""
        return self.comms[0].rank

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
            transport = comm_for(comm.group, device) if isinstance(comm, TorchComm) else comm
            self._on[device] = [transport if self.size == 1 else CheckedComm(transport, self.state)]
        return self._on[device]

    def drive(self, ranks: Sequence[Generator[Work, None, Result]]) -> list[Result]:
        """Advance one generator for each local rank until all have returned."""
        if not self.is_local:
            return [drive(ranks[0])]
        try:
            return drive_together(ranks)
        except BaseException:
            for comm in map(innermost, self.comms):
                if isinstance(comm, LocalComm):
                    comm.group.forget()  # what was posted before the error would meet the wrong transfers later
            raise

    # Agreement

    def agree(self, *statements: Statement, device: torch.device | None = None) -> list[Statement]:
        """Raise on every rank unless all state the same; otherwise, the statements of all ranks.

        There is one statement for each local rank. `device` is where the call's tensors are, if there are any; the
        first agreement with a device connects the group on it.
        """
        comms = self.comms if device is None else self.comms_on(device)
        try:
            with (
                self.call(UsageError, DisagreementError),
                self.state.meet(statements[0], at=f"an agreement on {_operation(statements[0])}"),
            ):
                told = self.drive([agree(comm, own) for comm, own in zip(comms, statements, strict=True)])
        except DisagreementError as error:
            setattr(error, IS_TOLD, True)
            raise
        return told[0]

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks about an error in the block before it is raised here, so that they do not wait.

        Everything a rank does between the beginning of a call and the agreement on it belongs in such a block.
        """
        try:
            yield
        except Exception as error:
            self.tell(error)
            raise

    def tell(self, error: Exception) -> None:
        """Tell the other ranks about an error, unless they know of it."""
        if self.is_local or self.size == 1 or getattr(error, IS_TOLD, False) or _is_faked():
            return
        setattr(error, IS_TOLD, True)
        # If they cannot be told, the error itself is still what matters here.
        comm, refused = self._newest_comm(), Statement(must_match={"operation": "a refused call"})
        with (
            suppress(Exception),
            self.call(),
            self.state.meet(refused, error, at="telling the others"),
            _disable_current_modes(),
        ):
            tell(comm, error)

    def _newest_comm(self) -> Comm:
        """The transport that other ranks listen on: NCCL shares texts on the device of their tensors."""
        return next(reversed(self._on.values()))[0] if self._on else self.comms[0]

    # Calls

    @property
    def failure(self) -> str | None:
        """Why nothing more is sent on this group; None while all is well, as far as the host knows."""
        state = self.state
        for poison in state.poisons.values():
            state.failure = state.failure or poison.verdict()
        for watchdog in state.watchdogs.values():
            state.failure = state.failure or (watchdog.verdict and watchdog.verdict.text)
        return state.failure

    @contextmanager
    def call(self, *refusals: type[Exception]) -> Iterator[None]:
        """Talk to other ranks: one thread at a time, and none after a failure.

        An error other than `refusals` leaves the group failed: messages of the failed call may still be under way, and
        would be taken for those of the next one.
        """
        state = self.state
        if os.getpid() != state.pid and not isinstance(innermost(self.comms[0]), LocalComm):
            raise UsageError(
                "the group belongs to the process that this one was forked from, and only that one can send on it; "
                "attend there, or start processes with spawn and give each its own group"
            )
        torch_group(self.comms[0])  # raises if it was destroyed
        with state.lock:
            self._check_thread()
            if self.failure is not None:
                raise TransportError(
                    f"an earlier call on this group failed: {state.failure}. Its messages may still be under way, so "
                    f"nothing more is sent on this group; {NEW_GROUP}"
                )
            try:
                yield
            except refusals:
                raise
            except BaseException as error:
                if state.forgets_failures:
                    raise
                why = self._explanation(error)
                state.failure = why or f"{type(error).__name__}: {error}"
                if why is not None and isinstance(error, DisagreementError):
                    raise DisagreementError(f"{why}. To go on, {NEW_GROUP}") from error
                if why is not None:
                    raise TransportError(f"{why}; {START_AGAIN}") from error
                raise

    def _explanation(self, error: BaseException) -> str | None:
        """Why a transfer failed, as far as the other ranks know; None if nobody was asked."""
        if not isinstance(error, TransportError | DisagreementError):
            return None
        watchdogs_to_ask = [dog for dog in self.state.watchdogs.values() if dog.verdict is not None or dog.is_busy]
        why = next((why for dog in watchdogs_to_ask if (why := dog.explain(str(error)))), None)
        # An error of different calls says more than that ranks wait for each other.
        return why if isinstance(error, TransportError) or DIFFERENT_CALLS in (why or "") else None

    def _check_thread(self) -> None:
        """Refuse calls from a second thread: the threads' order may differ between ranks, and no id would show it."""
        state = self.state
        is_backward = torch._C._current_graph_task_id() != -1  # autograd has threads of its own
        if state.forgets_failures or is_backward:
            return
        now = current_thread()
        if state.thread is None or not state.thread.is_alive():
            state.thread = now
        if state.thread is not now:
            state.failure = state.failure or f"threads {state.thread.name} and {now.name} both made calls on it"
            raise UsageError(
                f"threads {state.thread.name} and {now.name} both make calls on one group, and their order would "
                "differ from rank to rank; give each thread its own group and MeshAttention"
            )

    def count_cache(self) -> int:
        """Count a new KV cache of the group. Its number is the same on all ranks and part of its passes' ids."""
        self.state.caches += 1
        return self.state.caches

    def begin_pass(
        self,
        call_id: int,
        device: torch.device,
        *,
        forward_pass: int | Tensor = 0,
        describe: Describe | None = None,
        direction: str = "forward",
        call: Statement | None = None,
    ) -> Tensor | None:
        """The id of the pass that begins now, for its transport to compare; None where nothing needs comparing.

        `call_id` covers whatever must be equal on all ranks. The pass's id also covers all passes before it, and for a
        backward pass the `forward_pass` it belongs to. With `describe`, the watchdog watches the pass; `call` is what
        it tells other ranks of it.
        """
        comm, state = self.comms_on(device)[0], self.state
        if not isinstance(comm, CheckedComm):
            return None
        on_device = device if comm.is_capturable else None
        state.passes += 1
        state.call = call or Statement()
        known = int(forward_pass) if on_device is None else 0  # reading it from a device would wait
        state.history = hash((state.history, call_id, known))  # of whole numbers, so it is the same in every process
        pass_id = make_pass_id(state.passes, state.history, on_device, forward_pass)
        comm.watched = None  # or the pass before this one would be taken for it
        if describe is not None:
            comm.watch(device, state.history, direction, describe)
        return pass_id

    def run_pass(
        self,
        ranks: Sequence[Generator[Work, None, Result]],
        pass_id: Tensor | None,
        device: torch.device,
        results_of: Callable[[Result], Sequence[Tensor]],
    ) -> list[Result]:
        """Advance the local ranks through a pass, whose id travels beside their transfers.

        On NCCL, results of a pass in which ids differ become NaN.
        """
        if pass_id is None:
            return self.drive(ranks)
        comm = self.comms_on(device)[0]
        assert isinstance(comm, CheckedComm)
        comm.open(pass_id, self.state.history)
        results = self.drive(ranks)
        comm.close(results_of(results[0]))
        return results

    def needs_warm_up(self, device: torch.device) -> bool:
        """True if a first pass must not load kernels or connect ranks, because its waits are on the device."""
        comm = self.comms_on(device)[0]
        return isinstance(comm, CheckedComm) and comm.is_capturable

    def connect(self, device: torch.device, dests: Collection[int], sources: Collection[int]) -> None:
        """Connect with the ranks of a pass, where a transport has to; all ranks, before they first run it."""
        comm = innermost(self.comms_on(device)[0])
        if self.needs_warm_up(device) and isinstance(comm, TorchComm):
            comm.reach(dests, sources)


def _operation(call: Statement) -> str:
    return call.must_match.get("operation", "a call")


def _is_faked() -> bool:
    """True if tensors are fake: then no rank sends anything."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


# What the sessions on one group share


@dataclass
class GroupState:
    """The calls made on a group so far, and why it failed.

    In a local group, threads take turns, and a failure does not last: all ranks fail together and drop their
    transfers.
    """

    forgets_failures: bool
    pid: int = field(default_factory=os.getpid)
    lock: RLock = field(default_factory=RLock)
    passes: int = 0
    history: int = 0
    """A hash of the ids of all calls so far."""
    failure: str | None = None
    caches: int = 0
    """KV caches made so far."""
    poisons: dict[torch.device, Poison] = field(default_factory=dict)
    watchdogs: dict[torch.device | None, Watchdog] = field(default_factory=dict)
    """Those of devices over NCCL; by None the one of Gloo, for all devices."""
    thread: Thread | None = None
    passes_over: int = 0
    """Passes whose transfers the host has waited for."""
    call: Statement = field(default_factory=Statement)
    """What was begun last on this rank."""
    refusal: str = ""
    """Why this rank refuses it, while it tells the others."""
    meeting: Waiting | None = None
    """Where this rank waits for the others outside of passes."""

    @contextmanager
    def meet(self, call: Statement, error: Exception | None = None, *, at: str) -> Iterator[None]:
        """Let the watchdog see that this rank waits outside of passes: in an agreement, to tell the others of an error,
        or for their shards."""
        self.call, self.refusal = call, "" if error is None else reason_of(error)
        self.meeting = Waiting(0, time.monotonic(), lambda: (at, ()))
        try:
            yield
        finally:
            self.meeting, self.refusal = None, ""

    def poison(self, device: torch.device) -> Poison:
        if device not in self.poisons:
            self.poisons[device] = Poison(device)
        return self.poisons[device]

    def watchdog(self, comm: Comm, device: torch.device | None) -> Watchdog | None:
        """The watchdog of this transport's group; over NCCL, of its passes on a device.

        None if the transport has no group, or the group no store in which ranks can ask each other.
        """
        key = device if comm.is_capturable else None
        if key not in self.watchdogs and (group := torch_group(comm)) is not None:
            store, is_gloo = store_of(group), backends(group).get("cpu") == "gloo"
            if store is not None and device is not None and comm.is_capturable:
                self.watchdogs[key] = Watchdog(WatchedDevice(comm, store, self, device))
                self.poison(device).watchdog = self.watchdogs[key]
            elif store is not None and is_gloo:
                self.watchdogs[key] = Watchdog(WatchedGroup(comm, store, self))
        return self.watchdogs.get(key)


_STATES: WeakKeyDictionary[Any, GroupState] = WeakKeyDictionary()


def state_of(comm: Comm, *, forgets_failures: bool) -> GroupState:
    """The state of a transport's group, the same for all transports on that group."""
    comm, state = innermost(comm), GroupState(forgets_failures)
    try:
        return _STATES.setdefault(getattr(comm, "group", comm), state)
    except TypeError:  # a transport that cannot be hashed or referred to weakly
        return state
