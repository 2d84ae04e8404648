"""Call ids: how ranks notice that they are in different calls.

Ranks agree on a new call once (`session.agreement`), and compare nothing before later calls like it. They could then
make *different* calls at the same time. So every pass has an id of 16 bytes: its number, and a hash of its call id and
of all passes before it.

Over Gloo, the id travels beside the first transfer of a pass to each rank. The receiver compares it before it waits for
anything else, and raises if it differs, so it never passes on results made from another call's data.

Over NCCL the host does not wait, so a rank could pass such results on before its device compares. There all ranks
compare ids at the end of a pass, in one small collective. If any id differs, all ranks' results become NaN, and the
next call raises.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor

from mesh_attention.comm.base import CALL_ID, Comm, Parcel, Sharing, Work, innermost
from mesh_attention.comm.torch_dist import (
    TorchComm,
    has_failed,
    is_destroyed,
    sharings_of,
    store_of,
    timeout_s,
    torch_group,
)
from mesh_attention.errors import DisagreementError
from mesh_attention.kernels import merging
from mesh_attention.kernels.launching import triton_unsupported_reason
from mesh_attention.session.reports import DIFFERENT_CALLS
from mesh_attention.session.watchdog import NOT_POSTED, Post, Watchdog, WatchedPass

ID_TAG = 1
FIRST_PASS_TAG, TAGS = 2, 65521
"""Tags of a pass's transfers. Passes that differ rarely share one, so Gloo does not let their messages meet."""
NEW_GROUP = "make a new group (torch.distributed.new_group, on all ranks) and a new MeshAttention on it"


Describe = Callable[[int], tuple[str, Sequence[int]]]
"""The step of a pass's post, and the ranks that it waits for."""


class GroupLog(Protocol):
    """The calls on a group: how many passes were begun on it, and why it failed (`session.session.GroupState`)."""

    passes: int
    failure: str | None

    def poison(self, device: torch.device) -> Poison: ...


@dataclass
class CheckedComm:
    """A transport that sends the pass id beside a pass's first transfer to each rank, and checks those it receives.

    Over NCCL it compares ids once, at the end of the pass. It adds nothing to transfers outside `open` and `close`.
    """

    inner: Comm
    calls: GroupLog | None = None
    call_id: Tensor | None = None
    tag: int = 0
    informed: set[int] = field(default_factory=set)
    """Ranks that have been sent this pass's id."""
    landings: dict[int, _Landing] = field(default_factory=dict)
    """Ids under way to this rank, by sender."""
    watched: WatchedPass | None = None
    posts: list[Post] | None = None

    def __post_init__(self) -> None:
        self.rank, self.size, self.is_capturable = self.inner.rank, self.inner.size, self.inner.is_capturable

    def share(self, text: str) -> Sharing:
        return self.inner.share(text)

    def watch(self, device: torch.device, history: int, direction: str, describe: Describe) -> None:
        """Watch the pass that begins now, if its transfers run on a device. Not one that the caller captures."""
        self.watched = None
        if not self.is_capturable or self.calls is None or is_capturing(device):
            return
        poison = self.calls.poison(device)
        if poison.watchdog is None:
            poison.watchdog = watch_group(self.inner, device, poison, self.calls)
        if poison.watchdog is not None:
            self.watched = WatchedPass(self.calls.passes, history, direction, describe)
            poison.watchdog.begin(self.watched)

    def open(self, call_id: Tensor, history: int) -> None:
        """Begin a pass with this id, which on NCCL is on the device, and this hash."""
        if self.watched is not None and not is_capturing(call_id.device):
            self.posts = self.watched.posts = []
        self.call_id = call_id.view(-1)
        self.tag = FIRST_PASS_TAG + history % TAGS
        self.informed, self.landings = set(), {}

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        if self.call_id is None or self.is_capturable:
            if self.posts is None:
                return self.inner.post(sends, recvs)
            self.posts.append((time.monotonic(), (NOT_POSTED,)))  # first, because posting may block or raise
            work = self.inner.post(sends, recvs)
            self.posts[-1] = (self.posts[-1][0], getattr(work, "works", ()))
            return work
        sends, recvs = ([parcel._replace(tag=self.tag) for parcel in parcels] for parcels in (sends, recvs))
        dests, sources = {parcel.peer for parcel in sends}, {parcel.peer for parcel in recvs}
        new_dests, new_sources = sorted(dests - self.informed), sorted(sources - self.landings.keys())
        rest: list[Work] = []
        if new_sources:
            ids = {rank: torch.empty_like(self.call_id) for rank in new_sources}
            arrival = self.inner.post([], [_id_parcel(call_id, rank) for rank, call_id in ids.items()])
            self.landings |= dict.fromkeys(new_sources, _Landing(arrival, {self.rank: self.call_id, **ids}))
        if new_dests:
            self.informed.update(new_dests)
            rest.append(self.inner.post([_id_parcel(self.call_id, rank) for rank in new_dests], []))
        rest.insert(0, self.inner.post(sends, recvs))
        # Wait for ids first, also for those of earlier posts: in a different call, the data may never arrive.
        expected = (self.landings.get(rank) for rank in (*sources, *dests))
        landings = {id(landing): landing for landing in expected if landing is not None and not landing.is_over}
        return _CheckedWork(list(landings.values()), rest) if landings or len(rest) > 1 else rest[0]

    def close(self, results: Sequence[Tensor]) -> None:
        """End a pass. On NCCL, spoil its results if some rank's id differs."""
        assert self.call_id is not None
        call_id, comm = self.call_id, innermost(self.inner)
        if self.watched is not None:
            self.watched.closed = time.monotonic()
        if self.is_capturable and isinstance(comm, TorchComm) and self.calls is not None:
            comm.reduce_to_largest(call_id)
            self.calls.poison(call_id.device).check(call_id, results, counts=self.watched is not None)
        self.call_id, self.landings, self.posts = None, {}, None


def _id_parcel(call_id: Tensor, rank: int) -> Parcel:
    return Parcel([call_id.view(torch.uint8)], rank, CALL_ID, ID_TAG)


def make_call_id(passes: int, history: int, device: torch.device | None, forward_pass: int | Tensor = 0) -> Tensor:
    """A pass id. In host memory it is number and hash; on a device, hash and -hash.

    The maxima of hash and of -hash over all ranks add up to 0 exactly if all hashes are equal: one collective compares
    them. `forward_pass` is added to the hash on a device, because the host may not know it.
    """
    if device is None:
        return torch.tensor([[[passes, history]]], device="cpu")
    if isinstance(forward_pass, Tensor) and forward_pass.device.type == "cpu":
        forward_pass = int(forward_pass)
    known = 1 + (history % 2**60) + (forward_pass if isinstance(forward_pass, int) else 0)  # twice that fits in 64 bits
    # Made on the device, in one launch: a copy from the host would wait.
    call_id = torch.arange(known, -known - 1, -2 * known, device=device).view(1, 1, 2)
    if isinstance(forward_pass, Tensor):
        call_id += torch.stack((forward_pass, -forward_pass))
    return call_id


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
            self.spoil, self.over = self.state.unbind()
            self.seen = torch.zeros(3, device="cpu", dtype=torch.float64, pin_memory=is_cuda)
        self._seen = self.seen.numpy()
        self.watchdog: Watchdog | None = None

    def check(self, largest: Tensor, results: Sequence[Tensor], *, counts: bool = False) -> None:
        """Make all results NaN unless the largest hash and -hash of all ranks add up to 0; count the pass as over."""
        if largest.is_cuda and triton_unsupported_reason(largest.device) is None:
            merging.poison_if_different(largest, self.state, self.seen, results, counts=counts)
            return
        self.spoil.masked_fill_(largest.sum() != 0, torch.nan)
        spoil = self.spoil + self.seen[2].to(self.spoil.device, non_blocking=True)
        for result in results:
            result.add_(spoil)
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


def watch_group(comm: Comm, device: torch.device, poison: Poison, calls: GroupLog) -> Watchdog | None:
    """Watch the group beneath a transport. None if it has no group, or no store in which ranks can ask each other."""
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
        group, counted = weak(), (-1, -1)
        while group is not None and counted[0] != sharings_of(group):  # both from one moment
            counted = sharings_of(group), calls.passes
        return counted

    def abort() -> None:
        if (group := weak()) is not None:
            group._get_backend(device).abort()

    return Watchdog(
        rank=comm.rank,
        size=comm.size,
        store=store,
        patience_s=patience_s,
        passes_over=poison.passes_over,
        counts=counts,
        spoil=poison.give_up,
        abort=abort,
        has_failed=lambda: (group := weak()) is not None and has_failed(group, device),
        failure=lambda: calls.failure,
        is_alive=lambda: (group := weak()) is not None and not is_destroyed(group),
    )


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _Landing:
    """Ids on their way, by rank; the first is this rank's. They are compared once, by the first thread that waits."""

    def __init__(self, work: Work, ids: Mapping[int, Tensor]) -> None:
        self.work, self.ids, self.is_over = work, ids, False
        self.lock = Lock()

    def wait(self) -> None:
        with self.lock:
            if self.is_over:
                return
            self.work.wait()
            _compare({rank: call_id.tolist() for rank, call_id in self.ids.items()})
            self.is_over = True


class _CheckedWork:
    """Transfers that are waited for only after the ids of the ranks at their other ends."""

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


def _compare(ids: Mapping[int, list[int]]) -> None:
    own = next(iter(ids))
    for rank, (number, history) in ids.items():
        if (number, history) == tuple(ids[own]):
            continue
        what = f"ranks {own} and {rank} made different calls on this group, in this call or an earlier one"
        if number != ids[own][0]:
            what = f"rank {own} is in pass {ids[own][0]} on this group, but rank {rank} is in pass {number}"
        raise DisagreementError(f"{what}; {DIFFERENT_CALLS}. To go on, {NEW_GROUP}")
