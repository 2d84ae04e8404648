"""What all sessions on one group share: the passes made on it so far, why it failed, and who watches them.

Over NCCL the host does not wait for the device, so the two tell each other about passes through `Poison`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import RLock, Thread
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from mesh_attention.comm.base import Comm, innermost
from mesh_attention.comm.torch_dist import has_failed, is_destroyed, sharings_of, store_of, timeout_s, torch_group
from mesh_attention.kernels import merging
from mesh_attention.kernels.launching import triton_unsupported_reason
from mesh_attention.session.pass_reports import DIFFERENT_CALLS
from mesh_attention.session.watchdog import Watchdog


@dataclass
class GroupState:
    """The calls made on a group so far, and why it failed.

    In a local group, threads take turns, and a failure does not last: all ranks fail together and drop their
    transfers.
    """

    forgets_failures: bool
    lock: RLock = field(default_factory=RLock)
    passes: int = 0
    history: int = 0
    """A hash of the ids of all calls so far."""
    failure: str | None = None
    caches: int = 0
    """KV caches made so far."""
    poisons: dict[torch.device, Poison] = field(default_factory=dict)
    thread: Thread | None = None

    def poison(self, device: torch.device) -> Poison:
        if device not in self.poisons:
            self.poisons[device] = Poison(device)
        return self.poisons[device]

    def watchdog(self, comm: Comm, device: torch.device) -> Watchdog | None:
        """The watchdog of the passes on a device, by this transport's group.

        None if the transport has no group, or the group no store in which ranks can ask each other.
        """
        poison = self.poison(device)
        if poison.watchdog is None:
            group = torch_group(comm)
            store = None if group is None else store_of(group)
            poison.watchdog = None if store is None else Watchdog(WatchedGroup(comm, store, device, self))
        return poison.watchdog


_STATES: WeakKeyDictionary[Any, GroupState] = WeakKeyDictionary()


def state_of(comm: Comm, *, forgets_failures: bool) -> GroupState:
    """The state of a transport's group, the same for all transports on that group."""
    comm, state = innermost(comm), GroupState(forgets_failures)
    try:
        return _STATES.setdefault(getattr(comm, "group", comm), state)
    except TypeError:  # a transport that cannot be hashed or referred to weakly
        return state


class Poison:
    """What host and device of a rank tell each other about passes on NCCL, where the host does not wait.

    Results of a pass whose ids differ, or whose transfers will bring nothing any more, are made NaN on the device. The
    host is told through two numbers: NaN once ids differed and 0 before, and how many passes are over.

    `seen` is a copy of them in host memory, with a third number, which the device reads: NaN once this rank gave up.
    Giving up must not need the device, where another thread may be waiting.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):  # later passes need not be in inference mode
            is_cuda = device.type == "cuda"
            self.state = torch.zeros(2, device=device, dtype=torch.float64)
            self.poisoned, self.over = self.state.unbind()
            self.seen = torch.zeros(3, device="cpu", dtype=torch.float64, pin_memory=is_cuda)
        self._seen = self.seen.numpy()
        self.watchdog: Watchdog | None = None

    def check(self, largest: Tensor, results: Sequence[Tensor], *, counts: bool = False) -> None:
        """Make all results NaN unless the largest hash and -hash of all ranks add up to 0; count the pass as over."""
        if largest.is_cuda and triton_unsupported_reason(largest.device) is None:
            merging.poison_if_different(largest, self.state, self.seen, results, counts=counts)
            return
        self.poisoned.masked_fill_(largest.sum() != 0, torch.nan)
        poisoned = self.poisoned + self.seen[2].to(self.poisoned.device, non_blocking=True)
        for result in results:
            result.add_(poisoned)
        self.over.add_(int(counts))
        self.seen[:2].copy_(self.state, non_blocking=True)

    def passes_over(self) -> int:
        return int(self._seen[1])

    def give_up(self) -> None:
        """Make the results of all passes under way NaN: from now on, their transfers bring nothing."""
        self._seen[2] = math.nan

    def verdict(self) -> str | None:
        """Why the results of some pass are NaN; None if none are, as far as the host knows."""
        watchdog, different = self.watchdog, bool(self._seen[0] != self._seen[0])
        if watchdog is not None and watchdog.verdict is not None:
            return watchdog.verdict.text
        if not different:
            return None
        reason = f"ranks made different calls, and results are NaN; {DIFFERENT_CALLS}"
        return reason if watchdog is None else watchdog.explain(reason) or reason


class WatchedGroup:
    """A group as its watchdog sees it: what is known of its passes on one device, and how to end them.

    Refers to the process group weakly, because the watchdog's threads must not keep it alive.
    """

    def __init__(self, comm: Comm, store: Any, device: torch.device, state: GroupState) -> None:
        self.rank, self.size, self.store = comm.rank, comm.size, store
        self._group, self._device, self._state = ref(torch_group(comm)), device, state
        self.passes_over, self.poison = state.poison(device).passes_over, state.poison(device).give_up

    def patience_s(self) -> float:
        """How long a rank may wait: a little less than the group's timeout, which may be changed."""
        seconds = math.inf if (group := self._group()) is None else timeout_s(group, self._device)
        return seconds - min(seconds / 2, max(seconds / 10, 3.0))

    def counts(self) -> tuple[int, int]:
        """The sharings and passes that this rank has begun on the group."""
        group, counted = self._group(), (-1, -1)
        while group is not None and counted[0] != sharings_of(group):  # both from one moment
            counted = sharings_of(group), self._state.passes
        return counted

    def abort(self) -> None:
        """End the transfers of the passes under way; may take long."""
        if (group := self._group()) is not None:
            group._get_backend(self._device).abort()

    def has_failed(self) -> bool:
        """True if the backend has given up on the transfers."""
        return (group := self._group()) is not None and has_failed(group, self._device)

    def failure(self) -> str | None:
        """An error of this rank's calls."""
        return self._state.failure

    def is_alive(self) -> bool:
        return (group := self._group()) is not None and not is_destroyed(group)
