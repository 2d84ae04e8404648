"""The watchdog of a group: finds out why ranks wait for each other, and ends it where waiting cannot help.

If a rank waits for more than a moment, in a pass or in an agreement, it asks the others, through the group's store,
what they are doing. Each of them answers from a thread of its own, even if its calls hang. A rank that learns that
waiting cannot help, because ranks are in different calls or a process has ended, gives up: it tells the others and
aborts the group's transfers. Later calls raise. A rank that is busy elsewhere is waited for, as long as the group's
timeout says.

Over NCCL the host does not see that a rank waits: the device counts finished passes in host memory, so watching costs a
pass nothing. A rank that gives up makes the results of the passes under way NaN, and it also gives up shortly before
the group's timeout, at which torch would end the process without naming a rank.

Ranks that give up abort together: torch holds up the end of a process by a minute if its transfers failed because
another rank aborted first.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch._C._distributed_c10d import PrefixStore

from mesh_attention.comm.base import Comm
from mesh_attention.comm.torch_dist import has_failed, is_destroyed, patience_s, sharings_of, torch_group
from mesh_attention.session.agreement import MAX_REFUSAL_LENGTH, MAX_VALUE_LENGTH, Statement, truncated
from mesh_attention.session.pass_reports import Report, Verdict, describe, judge

if TYPE_CHECKING:
    from mesh_attention.session.session import GroupState

logger = logging.getLogger(__name__)
TICK_S = 0.25
STALL_S = 1.0
"""Seconds without progress after which a rank asks the others."""
SILENT_S = 2.0
"""Seconds without an answer after which a rank counts as silent."""
MOST_HASHES = 16
"""Hashes in a report: of this many passes under way, and of as many begun last."""
ABORT_TAG = 999_999
"""Of a receive that nobody sends to."""
STORE_IS_SILENT = "the group's store does not answer: the process that keeps it, often rank 0, has ended or stopped"
Post = tuple[float, Sequence[Any] | None]
"""When transfers were posted, and torch's handles of them: None until torch returns them, or for ever if it raises."""


@dataclass
class WatchedPass:
    """One pass on its way. `describe` names the step of a post, and the ranks it waits for."""

    number: int
    history: int
    direction: str
    describe: Callable[[int], tuple[str, Sequence[int]]]
    began: float = field(default_factory=time.monotonic)
    posts: list[Post] | None = None
    """None in a CUDA graph, whose transfers cannot be told apart."""
    closed: float | None = None
    """When all transfers were posted."""
    is_driven: bool = False
    """True if the host waits for its transfers, as over Gloo."""
    awaited: tuple[int, float] | None = None
    """Then, the post that it waits for now, and since when."""

    index: int = 0
    """Its place among the passes that are watched."""
    posts_over: int = 0
    """Posts that were seen to be over; they end in order."""

    def waiting(self, *, has_failed: bool) -> Waiting | None:
        """The first post that is not over; None if this rank waits for none.

        Once transfers of the group have failed, torch calls all of them completed.
        """
        here = f"{self.direction} pass {self.number}"
        if self.is_driven:
            awaited = self.awaited
            return None if awaited is None else self._waiting_for(awaited[0], f"{here},", awaited[1])
        if self.posts is None:
            return Waiting(self.number, self.began, lambda: (here, ()))
        while not has_failed and self.posts_over < len(self.posts) and _is_over(self.posts[self.posts_over]):
            self.posts_over += 1
        if self.posts_over < len(self.posts):
            here = f"{here}, at or after" if has_failed else f"{here},"
            return self._waiting_for(self.posts_over, here, self.posts[self.posts_over][0])
        return None if self.closed is None else Waiting(self.number, self.closed, lambda: (f"{here}, at its end", ()))

    def _waiting_for(self, index: int, here: str, since: float) -> Waiting:
        def where() -> tuple[str, Sequence[int]]:
            step, peers = self.describe(index)
            return f"{here} {step}", peers

        return Waiting(self.number, since, where)


def _is_over(post: Post) -> bool:
    return post[1] is not None and all(work.is_completed() for work in post[1])


@dataclass(frozen=True)
class Waiting:
    """Where this rank waits, for whom, and since when."""

    number: int
    since: float
    where: Callable[[], tuple[str, Sequence[int]]]
    """The step, and the ranks that it waits for; to say so may take milliseconds."""


class Watchdog:
    """Watches the passes and agreements of one group for as long as the group exists; over NCCL, on one device."""

    def __init__(self, group: WatchedGroup) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self.begun = 0
        self.passes: deque[WatchedPass] = deque()
        self.latest: deque[tuple[int, int]] = deque(maxlen=MOST_HASHES)
        self.verdict: Verdict | None = None
        self.decided, self.is_over = Event(), Event()
        self.trouble: str | None = None
        """An error of this rank's transfers: the others are asked at once, and nobody waits for the patience."""
        self.gone: tuple[int, ...] = ()
        self.has_left = self._has_told = False
        self.exchange = ReportExchange(group.rank, group.size, group.store, group.kind, self.report)
        self._progress = (0, time.monotonic())
        self._asked: float | None = None
        self._lock = Lock()
        targets = (self._run, self.exchange.run)
        self._threads = [Thread(target=target, name="mesh-attention watchdog", daemon=True) for target in targets]
        for thread in self._threads:
            thread.start()
        atexit.register(self.stop)

    def begin(self, watched: WatchedPass) -> None:
        """Watch a pass that begins. Every pass calls this, so it must be quick."""
        over = self.group.passes_over()
        while self.passes and self.passes[0].index < over:
            self.passes.popleft()
        watched.index = self.begun
        self.passes.append(watched)
        self.latest.append((watched.number, watched.history))
        self.begun += 1

    def explain(self, error: str) -> str | None:
        """Why a pass of this rank failed, as far as the others know; None if nothing was found out in time."""
        self.trouble = self.trouble or error
        self.decided.wait(STALL_S + 2 * self._silent_s)  # time to ask the others, and to find some of them silent
        return None if self.verdict is None else self.verdict.text

    @property
    def _silent_s(self) -> float:
        return SILENT_S + self.group.slack_s

    @property
    def is_busy(self) -> bool:
        """True in a pass, and where ranks meet outside of passes."""
        return self.group.passes_over() < self.begun or self.group.meeting() is not None

    def stop(self) -> None:
        """End it. If this rank's calls failed, the others are told first: its process may be about to end."""
        atexit.unregister(self.stop)
        self.is_over.set()
        self._leave()
        self.exchange.has_told.wait(SILENT_S / 2)
        self.exchange.stop()
        for thread in self._threads:
            thread.join(2 * TICK_S)

    # The thread

    def _run(self) -> None:
        while not self.is_over.wait(TICK_S):
            try:
                self._look(time.monotonic())
            except Exception:
                # It looks again at the next tick; if this thread ended, nobody would watch the group.
                logger.debug("the watchdog could not look", exc_info=True)
            if self.verdict is not None or not self.group.is_alive():
                break
        if self.is_over.is_set():
            return  # `stop` tells the others
        if self.verdict is not None:
            self.exchange.is_over.wait(SILENT_S)  # so that the others hear why
        else:
            self._leave()
            self.exchange.has_told.wait(SILENT_S)
        self.exchange.stop()
        atexit.unregister(self.stop)  # or it would keep all this until the process ends

    def _look(self, now: float) -> None:
        over = self.group.passes_over()
        if over != self._progress[0] or over >= self.begun:  # a rank without passes under way is not stalled
            self._progress = (over, now)
        has_failed, waiting = self._waiting()
        progress = waiting.since if waiting is not None and waiting.number == 0 else self._progress[1]
        is_stalled = has_failed or now - progress > STALL_S + self.group.slack_s
        if not self._has_told and self.group.failure() is not None:
            self._has_told = True
            self.exchange.tell()  # although nobody asks yet
        self.exchange.is_asking = (waiting is not None and is_stalled) or self.trouble is not None
        others = self.exchange.others
        if any(other.failure for other in others.reports.values()):
            self._give_up(judge(self.report(), others.reports, ()))
        elif self.exchange.is_asking:
            self._judge(waiting, others, now, has_failed=has_failed or self.trouble is not None)
        else:
            self._asked = None

    def _judge(self, waiting: Waiting | None, others: OtherRanks, now: float, *, has_failed: bool) -> None:
        is_late = waiting is not None and now - waiting.since > self.group.patience_s()
        asked = self._asked = self._asked or now
        have_answered = len(others.heard) == self.size - 1 and min(others.heard.values()) > asked
        if now - asked < self._silent_s and not is_late and not have_answered:
            return
        is_store_silent = (
            now - self.exchange.heard > self._silent_s
        )  # then silence of other ranks says nothing about them
        silent = [rank for rank, heard in others.heard.items() if now - max(heard, asked) > self._silent_s]
        self.gone = tuple(rank for rank, other in others.reports.items() if _is_gone(other, is_silent=rank in silent))
        if is_store_silent:
            if has_failed or is_late or self.gone:
                self._give_up(Verdict(STORE_IS_SILENT, describe(self.report()), True))
            return
        verdict = judge(self.report(), others.reports, silent)
        if self.trouble is not None and waiting is None and not verdict.is_certain and not silent:
            verdict = Verdict(self.trouble, verdict.here, True)  # nobody knows more
        if verdict.is_certain or is_late or (has_failed and (silent or now - asked > self._silent_s)):
            self._give_up(verdict, silent)

    def _waiting(self) -> tuple[bool, Waiting | None]:
        """Whether this rank's transfers have failed, and where it waits."""
        over = self.group.passes_over()
        has_failed = over < self.begun and self.group.has_failed()
        if (meeting := self.group.meeting()) is not None:
            return has_failed, meeting
        with self._lock:
            under_way = (watched for watched in list(self.passes) if watched.index >= over)
            waiting = (watched.waiting(has_failed=has_failed) for watched in under_way)
            return has_failed, next((found for found in waiting if found is not None), None)

    def report(self) -> Report:
        """What this rank is doing now."""
        _, waiting = self._waiting()
        at, waits_for = ("", ()) if waiting is None else waiting.where()
        sharings, passes = self.group.counts()
        call, refusal = self.group.latest_call()
        error = self.group.failure()
        own_failure = "" if error is None else f"rank {self.rank} failed: {error}"
        return Report(
            rank=self.rank,
            passes=passes,
            sharings=sharings,
            hashes={watched.number: watched.history for watched in list(self.passes)[:MOST_HASHES]}
            | dict(list(self.latest)),
            number=0 if waiting is None else waiting.number,
            at=at,
            waits_for=tuple(waits_for),
            call={name: truncated(value, MAX_VALUE_LENGTH) for name, value in call.must_match.items()},
            holds=call.holds,
            refusal=truncated(refusal, MAX_REFUSAL_LENGTH),
            host=this_host(),
            pid=os.getpid(),
            gone=self.gone,
            has_left=self.has_left,
            failure=self.verdict.reason if self.verdict else own_failure,
        )

    def _leave(self) -> None:
        """Tell the others that this rank makes no more calls, and of its failure if there was one."""
        self.has_left = True
        self.exchange.tell()

    def _give_up(self, verdict: Verdict, silent: Sequence[int] = ()) -> None:
        self.verdict = verdict
        self.exchange.is_settling = True
        self.exchange.tell()
        self.group.poison(verdict.text)
        self.decided.set()
        end = time.monotonic() + self.group.settle_s
        while time.monotonic() < end and not self.exchange.have_given_up(silent):
            time.sleep(0.01)
        self.exchange.is_settling = False
        if self.is_busy:
            with suppress(Exception):
                self.group.abort()


class WatchedGroup:
    """A group as its watchdog sees it: what is known of its passes, and how to end them. This is one over Gloo.

    Refers to the process group weakly, because the watchdog's threads must not keep it alive.
    """

    kind = "Gloo"
    slack_s = 0.0
    """Seconds that ranks have besides, before they ask and before they count as silent."""
    settle_s = 0.3
    """Seconds for which a rank that gives up waits for the others to give up too, before it aborts."""

    def __init__(self, comm: Comm, store: Any, state: GroupState) -> None:
        self.rank, self.size, self.store = comm.rank, comm.size, store
        self._group, self._state = ref(torch_group(comm)), state

    def passes_over(self) -> int:
        return self._state.passes_over

    def patience_s(self) -> float:
        """How long a rank may wait."""
        return math.inf  # Gloo raises at the group's timeout

    def meeting(self) -> Waiting | None:
        """Where this rank waits for the others outside of passes."""
        return self._state.meeting

    def latest_call(self) -> tuple[Statement, str]:
        """The call that this rank began last, and why it refuses it, if it does."""
        return self._state.call, self._state.refusal

    def counts(self) -> tuple[int, int]:
        """The sharings and passes that this rank has begun on the group."""
        group, counted = self._group(), (-1, -1)
        while group is not None and counted[0] != sharings_of(group):  # both from one moment
            counted = sharings_of(group), self._state.passes
        return counted

    def abort(self) -> None:
        """End the transfers under way; may take long."""
        if (group := self._group()) is None:
            return
        for peer in range(self.size):
            # Gloo closes all connections of a group if one receive times out. One whose other end is closed does not.
            if peer != self.rank:
                nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
                with suppress(Exception):
                    group.recv([nothing], peer, ABORT_TAG).wait(timedelta(milliseconds=1))

    def poison(self, reason: str) -> None:
        """Make the results of passes under way unusable. Over Gloo, these raise."""

    def has_failed(self) -> bool:
        """True if the backend has given up on the transfers; Gloo's raise then."""
        return False

    def failure(self) -> str | None:
        """An error of this rank's calls."""
        return self._state.failure

    def is_alive(self) -> bool:
        return (group := self._group()) is not None and not is_destroyed(group)


class WatchedDevice(WatchedGroup):
    """A group over NCCL, and its passes on one device."""

    kind = "NCCL"
    slack_s = 1.0  # first launches of kernels hold Python's global lock
    settle_s = 1.2

    def __init__(self, comm: Comm, store: Any, state: GroupState, device: torch.device) -> None:
        super().__init__(comm, store, state)
        self._device, self._poison = device, state.poison(device)

    def passes_over(self) -> int:
        return self._poison.passes_over()

    def patience_s(self) -> float:
        return math.inf if (group := self._group()) is None else patience_s(group, self._device, spare_s=3.0)

    def meeting(self) -> Waiting | None:
        return None  # its host waits with a patience of its own

    def abort(self) -> None:
        if (group := self._group()) is not None:
            group._get_backend(self._device).abort()

    def poison(self, reason: str) -> None:
        logger.error("%s. Results of this pass and later ones are NaN", reason)
        self._poison.give_up()

    def has_failed(self) -> bool:
        return (group := self._group()) is not None and has_failed(group, self._device)


@dataclass
class OtherRanks:
    """The latest report of each other rank, and when it last answered."""

    reports: dict[int, Report] = field(default_factory=dict)
    heard: dict[int, float] = field(default_factory=dict)


class ReportExchange:
    """Asks the other ranks for reports, and answers when they ask. A thread of its own: the store may not answer."""

    def __init__(self, rank: int, size: int, store: Any, kind: str, report: Callable[[], Report]) -> None:
        self.rank, self.size, self.store, self.kind, self.report = rank, size, store, kind, report
        self.is_asking, self.is_settling = False, False
        self.heard = time.monotonic()
        self.others = OtherRanks()
        self.is_over, self.has_told, self._wake = Event(), Event(), Event()
        self._beat, self._first_ask = 0, 0
        self._asked_by_others = -1  # never the store's count, so the first turn tells who this is
        self._texts: dict[int, bytes] = {}
        self._wake.set()  # to say at once who this is

    def run(self) -> None:
        store = None
        while not self.is_over.is_set():
            # Every rank reads the reports of all: in a large group they take turns less often, to spare the store.
            self._wake.wait((0.01 if self.is_settling else TICK_S) * max(1.0, self.size / 64))
            self._wake.clear()
            try:
                store = store or _own_store(self.store, self.kind)
                self._turn(store)
                self.heard = time.monotonic()
            except Exception:
                logger.debug("the store does not answer", exc_info=True)
                time.sleep(TICK_S)

    def stop(self) -> None:
        self.is_over.set()
        self._wake.set()

    def tell(self) -> None:
        """Answer at once, although nobody asked."""
        self._asked_by_others = -1
        self._wake.set()

    def have_given_up(self, silent: Sequence[int]) -> bool:
        """True if every rank that ever answered, and is not silent, has given up."""
        return all(other.failure for rank, other in self.others.reports.items() if rank not in silent)

    def _turn(self, store: Any) -> None:
        asked = store.add("asked", 1 if self.is_asking else 0)
        self._first_ask = (self._first_ask or asked) if self.is_asking else 0
        knows_all = len(self.others.reports) == self.size - 1
        if asked == self._asked_by_others and knows_all and not self.is_settling:
            return
        self._asked_by_others = asked
        self._beat += 1
        report = self.report()
        store.set(_key(self.rank), f"{asked} {self._beat} {report.to_text()}")
        if report.failure or report.has_left:
            self.has_told.set()
        self._read(store)

    def _read(self, store: Any) -> None:
        ranks = [rank for rank in range(self.size) if rank != self.rank]
        if not store.check([_key(rank) for rank in ranks]):
            ranks = [rank for rank in ranks if store.check([_key(rank)])]
        now = time.monotonic()
        texts = store.multi_get([_key(rank) for rank in ranks]) if ranks else []
        reports, heard = {}, {rank: self.others.heard.get(rank, 0.0) for rank in range(self.size) if rank != self.rank}
        for rank, text in zip(ranks, texts, strict=True):
            asked, _, report = text.decode().split(" ", 2)
            reports[rank] = Report.from_text(report)
            if self._texts.get(rank) != text and int(asked) >= self._first_ask:  # not said before this rank asked
                self._texts[rank], heard[rank] = text, now
        self.others = OtherRanks(reports, heard)


def _key(rank: int) -> str:
    return f"report of rank {rank}"


@cache
def this_host() -> str:
    """The same for processes that see each other's process ids."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _is_gone(report: Report, *, is_silent: bool) -> bool:
    """True if a rank on this host will not go on: its process has ended, or is stopped and does not answer."""
    if report.has_left or not report.host or report.host != this_host():
        return False
    try:
        state = Path(f"/proc/{report.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX" or (is_silent and state in "Tt")


def _own_store(store: Any, kind: str) -> Any:
    """A second connection to the store: torch may be waiting for something on the caller's."""
    own_store = PrefixStore(f"mesh-attention watchdog, {kind}", store.clone())
    own_store.set_timeout(timedelta(seconds=SILENT_S))
    return own_store
