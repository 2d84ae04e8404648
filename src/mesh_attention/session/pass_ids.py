"""Pass ids: how ranks notice that they are in different calls.

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

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mesh_attention.comm.base import PASS_ID, AllOf, Parcel, Work, Wrapper, innermost
from mesh_attention.comm.torch_dist import TorchComm
from mesh_attention.errors import DisagreementError
from mesh_attention.session.pass_reports import DIFFERENT_CALLS
from mesh_attention.session.watchdog import Post, WatchedPass

if TYPE_CHECKING:
    from mesh_attention.session.session import GroupState

ID_TAG = 1
FIRST_PASS_TAG, TAGS = 2, 65521
"""Tags of a pass's transfers. Passes that differ rarely share one, so Gloo does not let their messages meet."""
NEW_GROUP = "make a new group (torch.distributed.new_group, on all ranks) and a new MeshAttention on it"


Describe = Callable[[int], tuple[str, Sequence[int]]]
"""The step of a pass's post, and the ranks that it waits for."""


@dataclass
class CheckedComm(Wrapper):
    """A transport that sends the pass id beside a pass's first transfer to each rank, and checks those it receives.

    Over NCCL it compares ids once, at the end of the pass. It adds nothing to transfers outside `open` and `close`.
    """

    state: GroupState
    pass_id: Tensor | None = None
    tag: int = 0
    informed: set[int] = field(default_factory=set)
    """Ranks that have been sent this pass's id."""
    landings: dict[int, _Landing] = field(default_factory=dict)
    """Ids under way to this rank, by sender."""
    watched: WatchedPass | None = None
    posts: list[Post] | None = None

    def watch(self, device: torch.device, history: int, direction: str, describe: Describe) -> None:
        """Watch the pass that begins now. Not one that the caller captures."""
        if is_capturing(device):
            return
        watchdog = self.state.watchdog(self.inner, device)
        if watchdog is not None:
            is_driven = not self.is_capturable
            self.watched = WatchedPass(self.state.passes, history, direction, describe, is_driven=is_driven)
            watchdog.begin(self.watched)

    def open(self, pass_id: Tensor, history: int) -> None:
        """Begin a pass with this id, which on NCCL is on the device, and this hash."""
        if self.watched is not None and not is_capturing(pass_id.device):
            self.posts = self.watched.posts = []
        self.pass_id = pass_id.view(-1)
        self.tag = FIRST_PASS_TAG + history % TAGS
        self.informed, self.landings = set(), {}

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        if self.posts is None:
            return self._post(sends, recvs)
        index, now = len(self.posts), time.monotonic()
        self.posts.append((now, None))  # first, because posting may block or raise
        work = self._post(sends, recvs)
        self.posts[index] = (now, getattr(work, "works", ()))
        assert self.watched is not None
        return _Awaited(work, self.watched, index) if self.watched.is_driven else work

    def _post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        if self.pass_id is None or self.is_capturable:
            return self.inner.post(sends, recvs)
        sends, recvs = ([parcel._replace(tag=self.tag) for parcel in parcels] for parcels in (sends, recvs))
        dests, sources = {parcel.peer for parcel in sends}, {parcel.peer for parcel in recvs}
        new_dests, new_sources = sorted(dests - self.informed), sorted(sources - self.landings.keys())
        rest: list[Work] = []
        if new_sources:
            ids = {rank: torch.empty_like(self.pass_id) for rank in new_sources}
            arrival = self.inner.post([], [_id_parcel(pass_id, rank) for rank, pass_id in ids.items()])
            self.landings |= dict.fromkeys(new_sources, _Landing(arrival, {self.rank: self.pass_id, **ids}))
        if new_dests:
            self.informed.update(new_dests)
            rest.append(self.inner.post([_id_parcel(self.pass_id, rank) for rank in new_dests], []))
        rest.insert(0, self.inner.post(sends, recvs))
        # Wait for ids first, also for those of earlier posts: in a different call, the data may never arrive.
        expected = (self.landings.get(rank) for rank in (*sources, *dests))
        landings = {id(landing): landing for landing in expected if landing is not None and not landing.is_over}
        works = [*landings.values(), *rest]
        return AllOf(works) if len(works) > 1 else works[0]

    def close(self, results: Sequence[Tensor]) -> None:
        """End a pass. On NCCL, poison its results if some rank's id differs."""
        assert self.pass_id is not None
        pass_id, comm = self.pass_id, innermost(self.inner)
        if self.watched is not None:
            self.watched.closed = time.monotonic()
            self.state.passes_over += self.watched.is_driven
        if self.is_capturable and isinstance(comm, TorchComm):
            comm.reduce_to_largest(pass_id)
            self.state.poison(pass_id.device).check(pass_id, results, counts=self.watched is not None)
        self.pass_id, self.landings, self.posts = None, {}, None


class _Awaited:
    """A post of a pass; the host tells the watchdog when it waits for it."""

    def __init__(self, work: Work, watched: WatchedPass, index: int) -> None:
        self.work, self.watched, self.index = work, watched, index

    def is_done(self) -> bool:
        return self.work.is_done()

    def wait(self) -> None:
        self.watched.awaited = self.index, time.monotonic()
        self.work.wait()
        self.watched.awaited = None


def _id_parcel(pass_id: Tensor, rank: int) -> Parcel:
    return Parcel([pass_id.view(torch.uint8)], rank, PASS_ID, ID_TAG)


def make_pass_id(passes: int, history: int, device: torch.device | None, forward_pass: int | Tensor = 0) -> Tensor:
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
    pass_id = torch.arange(known, -known - 1, -2 * known, device=device).view(1, 1, 2)
    if isinstance(forward_pass, Tensor):
        pass_id += torch.stack((forward_pass, -forward_pass))
    return pass_id


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _Landing:
    """Ids on their way, by rank; the first is this rank's. They are compared once, by the first thread that waits."""

    def __init__(self, work: Work, ids: Mapping[int, Tensor]) -> None:
        self.work, self.ids, self.is_over = work, ids, False
        self.lock = Lock()

    def is_done(self) -> bool:
        return self.is_over or self.work.is_done()

    def wait(self) -> None:
        with self.lock:
            if self.is_over:
                return
            self.work.wait()
            _compare({rank: pass_id.tolist() for rank, pass_id in self.ids.items()})
            self.is_over = True


def _compare(ids: Mapping[int, list[int]]) -> None:
    own = next(iter(ids))
    for rank, (number, history) in ids.items():
        if (number, history) == tuple(ids[own]):
            continue
        what = f"ranks {own} and {rank} made different calls on this group, in this call or an earlier one"
        if number != ids[own][0]:
            what = f"rank {own} is in pass {ids[own][0]} on this group, but rank {rank} is in pass {number}"
        raise DisagreementError(f"{what}; {DIFFERENT_CALLS}. To go on, {NEW_GROUP}")
