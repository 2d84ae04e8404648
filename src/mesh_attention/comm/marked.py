"""Marks: how ranks notice that they are in different calls.

Ranks agree on a configuration once (`execution.agreement`). From then on nothing would notice that two ranks make
*different* calls at the same time. So beside the first transfer to each rank in a pass travels a mark of 16 bytes: the
number of the pass, and a hash of it and of all passes before it. A rank that receives another mark than its own raises
instead of returning a result.

That is where transfers go through the host, as with Gloo: a rank compares before it waits for anything else, so it
passes nothing on that it made from another call's data. On NCCL the host does not wait, and a rank may have passed such
data on before its device compares. So there all ranks compare at the end of a pass, in one small collective. If any
mark differs, every rank's results become NaN, and the host, which is told, raises at the next call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, ReduceOp

from mesh_attention.comm.base import MARK, Comm, Parcel, Sharing, Work, innermost
from mesh_attention.comm.reports import DIFFERENT_CALLS
from mesh_attention.comm.torch_dist import (
    START_AGAIN,
    TorchComm,
    has_failed,
    is_destroyed,
    reason_of,
    sharings_of,
    store_of,
    timeout_s,
)
from mesh_attention.comm.watch import NOT_POSTED, Post, Watch, WatchedPass
from mesh_attention.errors import DisagreementError, TransportError

MARK_TAG = 1
FIRST_PASS_TAG, TAGS = 2, 1009
"""Tags of a pass's transfers. Passes that differ rarely share one, so Gloo does not let their messages meet."""
_LARGEST = AllreduceOptions()
_LARGEST.reduceOp = ReduceOp(ReduceOp.MAX)
NEW_GROUP = "make a new group (torch.distributed.new_group, on all ranks) and a new MeshAttention on it"


class Alarm(Protocol):
    """What a device makes of the marks of a pass (`execution.alarm`)."""

    watch: Watch | None

    def check(self, largest: Tensor, results: Sequence[Tensor], *, counts: bool) -> None:
        """Make all results NaN unless the largest hash and -hash of all ranks add up to 0; count a pass that is over
        if it `counts`."""

    def passes_over(self) -> int: ...

    def give_up(self) -> None: ...


class Calls(Protocol):
    """The calls on a group: how many passes were begun on it, and why it failed."""

    passes: int
    failure: str | None

    def alarm(self, device: torch.device) -> Alarm: ...


@dataclass
class Marked:
    """A transport that sends a mark beside the first transfer of a pass to each rank, and compares those it receives.

    On NCCL it sends none, and compares at the end of the pass. A pass lasts from `open` to `close`; outside of one,
    nothing is added.
    """

    inner: Comm
    calls: Calls | None = None
    mark: Tensor | None = None
    tag: int = 0
    told: set[int] = field(default_factory=set)
    landed: dict[int, _Landing] = field(default_factory=dict)
    watched: WatchedPass | None = None
    posts: list[Post] | None = None

    def __post_init__(self) -> None:
        self.rank, self.size, self.is_capturable = self.inner.rank, self.inner.size, self.inner.is_capturable

    def share(self, text: str) -> Sharing:
        return self.inner.share(text)

    def reach(self, dests: Collection[int], sources: Collection[int]) -> None:
        """Connect with the ranks of a pass, where a transport has to (`TorchComm.reach`)."""
        comm = innermost(self.inner)
        if self.is_capturable and isinstance(comm, TorchComm):
            comm.reach(dests, sources)

    def watch(self, device: torch.device, history: int, direction: str, describe: Describe) -> None:
        """Watch the pass that begins now, if its transfers run on a device. Not one that the caller captures."""
        self.watched = None
        if not self.is_capturable or self.calls is None or is_capturing(device):
            return
        alarm = self.calls.alarm(device)
        if alarm.watch is None:
            alarm.watch = watch_group(self.inner, device, alarm, self.calls)
        if alarm.watch is not None:
            self.watched = WatchedPass(self.calls.passes, history, direction, describe)
            alarm.watch.begin(self.watched)

    def open(self, mark: Tensor, history: int) -> None:
        """Begin a pass with this mark, which on NCCL is on the device, and this hash."""
        if self.watched is not None and not is_capturing(mark.device):
            self.posts = self.watched.posts = []
        self.mark = mark.view(-1)
        self.tag = FIRST_PASS_TAG + history % TAGS
        self.told, self.landed = set(), {}

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        if self.mark is None or self.is_capturable:
            if self.posts is None:
                return self.inner.post(sends, recvs)
            self.posts.append((time.monotonic(), (NOT_POSTED,)))
            work = self.inner.post(sends, recvs)
            self.posts[-1] = (self.posts[-1][0], getattr(work, "works", ()))
            return work
        sends, recvs = ([parcel._replace(tag=self.tag) for parcel in parcels] for parcels in (sends, recvs))
        dests, sources = {parcel.peer for parcel in sends}, {parcel.peer for parcel in recvs}
        new_dests, new_sources = sorted(dests - self.told), sorted(sources - self.landed.keys())
        rest: list[Work] = []
        if new_sources:
            marks = {rank: torch.empty_like(self.mark) for rank in new_sources}
            landing = self.inner.post([], [_mark_parcel(mark, rank) for rank, mark in marks.items()])
            self.landed |= dict.fromkeys(new_sources, _Landing(landing, {self.rank: self.mark, **marks}))
        if new_dests:
            self.told.update(new_dests)
            rest.append(self.inner.post([_mark_parcel(self.mark, rank) for rank in new_dests], []))
        rest.insert(0, self.inner.post(sends, recvs))
        # Marks are waited for first, also those that an earlier post expects: the rest of a different call never
        # arrives.
        landings = {id(one): one for rank in (*sources, *dests) if (one := self.landed.get(rank)) and not one.is_over}
        return _MarkedWork(list(landings.values()), rest) if landings or len(rest) > 1 else rest[0]

    def close(self, results: Sequence[Tensor]) -> None:
        """End a pass. On NCCL, spoil its results if some rank's mark differs."""
        assert self.mark is not None
        mark, group = self.mark, torch_group(self.inner)
        if self.watched is not None:
            self.watched.closed = time.monotonic()
        if self.is_capturable and group is not None and self.calls is not None:
            self._compare_all(group, mark)
            self.calls.alarm(mark.device).check(mark, results, counts=self.watched is not None)
        self.mark, self.landed, self.posts = None, {}, None

    def _compare_all(self, group: Any, mark: Tensor) -> None:
        try:
            group._get_backend(mark.device).allreduce([mark], _LARGEST).wait()
        except Exception as error:
            raise TransportError(
                f"rank {self.rank}, at the end of the pass: {reason_of(error)}; {START_AGAIN}"
            ) from error


def _mark_parcel(mark: Tensor, rank: int) -> Parcel:
    return Parcel([mark.view(torch.uint8)], rank, MARK, MARK_TAG)


def make_mark(passes: int, history: int, device: torch.device | None, forward_pass: int | Tensor = 0) -> Tensor:
    """A mark in host memory: pass and hash. For a device: hash and -hash, whose largest of all ranks add up to 0 if
    no rank's differs.

    `forward_pass` is added to the hash of a device, which may know it when the host does not.
    """
    if device is None:
        return torch.tensor([[[passes, history]]], device="cpu")
    if isinstance(forward_pass, Tensor) and forward_pass.device.type == "cpu":
        forward_pass = int(forward_pass)
    known = 1 + (history % 2**60) + (forward_pass if isinstance(forward_pass, int) else 0)  # twice that fits in 64 bits
    # Made on the device, in one launch: a copy from the host would wait.
    mark = torch.arange(known, -known - 1, -2 * known, device=device).view(1, 1, 2)
    if isinstance(forward_pass, Tensor):
        mark += torch.stack((forward_pass, -forward_pass))
    return mark


def torch_group(comm: Any) -> Any:
    """The torch group beneath a transport and its wrappers; None if there is none."""
    comm = innermost(comm)
    return comm.group if isinstance(comm, TorchComm) else None


Describe = Callable[[int], tuple[str, Sequence[int]]]


def watch_group(comm: Comm, device: torch.device, alarm: Alarm, calls: Calls) -> Watch | None:
    """Watches the group beneath a transport. None if it has no group, or no store in which ranks can ask each other."""
    group = torch_group(comm)
    store = None if group is None else store_of(group)
    if store is None:
        return None
    weak = ref(group)

    def patience_s() -> float:
        """A little less than the group's timeout, which may be changed."""
        seconds = math.inf if (group := weak()) is None else timeout_s(group, device)
        return seconds - min(seconds / 2, max(seconds / 10, 3.0))

    def counts() -> tuple[int, int]:
        group, found = weak(), (-1, -1)
        while group is not None and found[0] != sharings_of(group):  # both from one moment
            found = sharings_of(group), calls.passes
        return found

    def abort() -> None:
        if (group := weak()) is not None:
            group._get_backend(device).abort()

    return Watch(
        rank=comm.rank,
        size=comm.size,
        store=store,
        patience_s=patience_s,
        passes_over=alarm.passes_over,
        counts=counts,
        spoil=alarm.give_up,
        abort=abort,
        has_failed=lambda: (group := weak()) is not None and has_failed(group, device),
        failure=lambda: calls.failure,
        is_alive=lambda: (group := weak()) is not None and not is_destroyed(group),
    )


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _Landing:
    """Marks on their way, by rank; the first is this rank's. They are compared once, by the first thread that waits."""

    def __init__(self, work: Work, marks: Mapping[int, Tensor]) -> None:
        self.work, self.marks, self.is_over = work, marks, False
        self.lock = Lock()

    def wait(self) -> None:
        with self.lock:
            if self.is_over:
                return
            self.work.wait()
            _compare({rank: mark.tolist() for rank, mark in self.marks.items()})
            self.is_over = True


class _MarkedWork:
    """Transfers that are waited for only after the marks of the ranks at their other ends."""

    def __init__(self, landings: Sequence[_Landing], rest: Sequence[Work]) -> None:
        self.landings, self.rest = landings, rest

    def is_done(self) -> bool:
        is_landed = all(landing.is_over or landing.work.is_done() for landing in self.landings)
        return is_landed and all(work.is_done() for work in self.rest)

    def wait(self) -> None:
        for landing in self.landings:
            landing.wait()
        for work in self.rest:
            work.wait()


def _compare(marks: Mapping[int, list[int]]) -> None:
    own = next(iter(marks))
    for rank, mark in marks.items():
        if mark == marks[own]:
            continue
        what = f"ranks {own} and {rank} made different calls on this group, in this call or an earlier one"
        if mark[0] != marks[own][0]:
            what = f"rank {own} is in pass {marks[own][0]} on this group, but rank {rank} is in pass {mark[0]}"
        raise DisagreementError(f"{what}; {DIFFERENT_CALLS}. To go on, {NEW_GROUP}")
