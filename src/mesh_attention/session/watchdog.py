"""The watchdog of a group whose transfers run on a device, as with NCCL, where the host does not see that a rank waits.

The device counts finished passes in host memory, so watching costs a pass nothing. If a pass does not finish for a
while, this rank asks the others, through the group's store, what they are doing. Each of them answers from a thread of
its own, even if its calls hang. A rank that has waited for too long, or learns that waiting cannot help, gives up: it
logs why, tells the others, makes the results of the passes under way NaN, and aborts the group's transfers. Later calls
raise. All this happens before the group's timeout, at which torch would end the process without naming a rank.

Ranks that give up abort together: torch holds up the end of a process by a minute if its transfers failed because
another rank aborted first.
"""

from __future__ import annotations

import atexit
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Event, Thread
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch._C._distributed_c10d import PrefixStore

from mesh_attention.comm.base import Comm
from mesh_attention.comm.torch_dist import has_failed, is_destroyed, patience_s, sharings_of, torch_group
from mesh_attention.session.pass_reports import Report, Verdict, describe, judge

if TYPE_CHECKING:
    from mesh_attention.session.session import GroupState

logger = logging.getLogger(__name__)
TICK_S = 0.5
STALL_S = 2.0
"""Seconds without progress after which a rank asks the others."""
SILENT_S = 3.0
"""Seconds without an answer after which a rank counts as silent."""
SETTLE_S = 1.2
"""Seconds for which a rank that gives up waits for the others to give up too, before it aborts."""
MOST_HASHES = 16
"""Hashes in a report: of this many passes under way, and of as many begun last."""
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

    index: int = 0
    """Its place among the passes that are watched."""
    posts_over: int = 0
    """Posts that were seen to be over; they end in order."""

    def waiting(self, *, has_failed: bool) -> Waiting | None:
        """The first post that is not over; None if this rank waits for none.

        Once transfers of the group have failed, torch calls all of them completed.
        """
        here = f"{self.direction} pass {self.number}"
        if self.posts is None:
            return Waiting(self.number, here, (), self.began)
        while not has_failed and self.posts_over < len(self.posts) and _is_over(self.posts[self.posts_over]):
            self.posts_over += 1
        if self.posts_over < len(self.posts):
            step, peers = self.describe(self.posts_over)
            where = f"{here}, at or after {step}" if has_failed else f"{here}, {step}"
            return Waiting(self.number, where, tuple(peers), self.posts[self.posts_over][0])
        return None if self.closed is None else Waiting(self.number, f"{here}, at its end", (), self.closed)


def _is_over(post: Post) -> bool:
    return post[1] is not None and all(work.is_completed() for work in post[1])


@dataclass(frozen=True)
class Waiting:
    """Where this rank waits, for whom, and since when."""

    number: int
    at: str
    waits_for: tuple[int, ...]
    since: float


class Watchdog:
    """Watches the passes of one group on one device for as long as the group exists."""

    def __init__(self, group: WatchedGroup) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self.begun = 0
        self.passes: deque[WatchedPass] = deque()
        self.latest: deque[tuple[int, int]] = deque(maxlen=MOST_HASHES)
        self.verdict: Verdict | None = None
        self.decided, self.is_over = Event(), Event()
        self.trouble: str | None = None
        """An error of this rank's transfers: the others are asked at once, and nobody waits for the patience."""
        self.exchange = ReportExchange(group.rank, group.size, group.store)
        self._progress = (0, time.monotonic())
        self._asked: float | None = None
        self._has_told = False
        self._threads = [Thread(target=self._run, daemon=True), Thread(target=self.exchange.run, daemon=True)]
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
        self.decided.wait(STALL_S + 2 * SILENT_S)  # time to ask the others, and to find some of them silent
        return None if self.verdict is None else self.verdict.text

    @property
    def is_in_a_pass(self) -> bool:
        return self.group.passes_over() < self.begun

    def stop(self) -> None:
        """End it. If this rank's calls failed, the others are told first: its process may be about to end."""
        atexit.unregister(self.stop)
        self.is_over.set()
        if not self._has_told and self._tell_failure():
            self.exchange.has_told.wait(2 * TICK_S)
        self.exchange.is_over.set()
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
        self.exchange.is_over.wait(SILENT_S)  # so that the others hear why
        self.exchange.is_over.set()
        atexit.unregister(self.stop)  # or it would keep all this until the process ends

    def _look(self, now: float) -> None:
        over = self.group.passes_over()
        if over != self._progress[0] or over >= self.begun:  # a rank without passes under way is not stalled
            self._progress = (over, now)
        has_failed = over < self.begun and self.group.has_failed()
        waiting = self._oldest(over, has_failed=has_failed)
        is_stalled = has_failed or now - self._progress[1] > STALL_S
        self.exchange.report = self._report(waiting)
        if not self._has_told:
            self._tell_failure()
        self.exchange.is_asking = (waiting is not None and is_stalled) or self.trouble is not None
        others = self.exchange.others
        if any(other.failure for other in others.reports.values()):
            self._give_up(judge(self.exchange.report, others.reports, ()))
        elif self.exchange.is_asking:
            self._judge(waiting, others, now, has_failed=has_failed or self.trouble is not None)
        else:
            self._asked = None

    def _judge(self, waiting: Waiting | None, others: OtherRanks, now: float, *, has_failed: bool) -> None:
        is_late = waiting is not None and now - waiting.since > self.group.patience_s()
        asked = self._asked = self._asked or now
        have_answered = len(others.heard) == self.size - 1 and min(others.heard.values()) > asked
        if now - asked < SILENT_S and not is_late and not have_answered:
            return
        if now - self.exchange.heard > SILENT_S:  # then silence of other ranks says nothing about them
            if has_failed or is_late:
                self._give_up(Verdict(STORE_IS_SILENT, describe(self.exchange.report), True))
            return
        silent = [rank for rank, heard in others.heard.items() if now - max(heard, asked) > SILENT_S]
        verdict = judge(self.exchange.report, others.reports, silent)
        if self.trouble is not None and waiting is None and not verdict.is_certain and not silent:
            verdict = Verdict(self.trouble, verdict.here, True)  # nobody knows more
        if verdict.is_certain or is_late or (has_failed and (silent or now - asked > SILENT_S)):
            self._give_up(verdict, silent)

    def _oldest(self, over: int, *, has_failed: bool) -> Waiting | None:
        for watched in list(self.passes):
            if watched.index >= over and (waiting := watched.waiting(has_failed=has_failed)):
                return waiting
        return None

    def _report(self, waiting: Waiting | None) -> Report:
        sharings, passes = self.group.counts()
        error = self.group.failure()
        own_failure = "" if error is None else f"rank {self.rank} failed: {error}"
        return Report(
            rank=self.rank,
            passes=passes,
            sharings=sharings,
            hashes={watched.number: watched.history for watched in list(self.passes)[:MOST_HASHES]}
            | dict(list(self.latest)),
            number=0 if waiting is None else waiting.number,
            at="" if waiting is None else waiting.at,
            waits_for=() if waiting is None else waiting.waits_for,
            failure=self.verdict.reason if self.verdict else own_failure,
        )

    def _tell_failure(self) -> bool:
        """Tell the others of an error of this rank's calls, although nobody asks yet; False if there is none."""
        self._has_told = self.group.failure() is not None
        if self._has_told:
            self.exchange.report = self._report(None)
            self.exchange.tell()
        return self._has_told

    def _give_up(self, verdict: Verdict, silent: Sequence[int] = ()) -> None:
        self.verdict = verdict
        logger.error("%s. Results of this pass and later ones are NaN", verdict.text)
        self.exchange.report = self._report(None)
        self.exchange.is_settling = True
        self.exchange.tell()
        self.group.poison()
        self.decided.set()
        end = time.monotonic() + SETTLE_S
        while time.monotonic() < end and not self.exchange.have_given_up(silent):
            time.sleep(0.01)
        self.exchange.is_settling = False
        if self.is_in_a_pass:
            with suppress(Exception):
                self.group.abort()


class WatchedGroup:
    """A group as its watchdog sees it: what is known of its passes on one device, and how to end them.

    Refers to the process group weakly, because the watchdog's threads must not keep it alive.
    """

    def __init__(self, comm: Comm, store: Any, device: torch.device, state: GroupState) -> None:
        self.rank, self.size, self.store = comm.rank, comm.size, store
        self._group, self._device, self._state = ref(torch_group(comm)), device, state
        self.passes_over, self.poison = state.poison(device).passes_over, state.poison(device).give_up

    def patience_s(self) -> float:
        """How long a rank may wait."""
        return math.inf if (group := self._group()) is None else patience_s(group, self._device, spare_s=3.0)

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


@dataclass
class OtherRanks:
    """The latest report of each other rank, and when it last answered."""

    reports: dict[int, Report] = field(default_factory=dict)
    heard: dict[int, float] = field(default_factory=dict)


class ReportExchange:
    """Asks the other ranks for reports, and answers when they ask. A thread of its own: the store may not answer."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank, self.size, self.store = rank, size, store
        self.report = Report(rank)
        self.is_asking, self.is_settling = False, False
        self.heard = time.monotonic()
        self.others = OtherRanks()
        self.is_over, self.has_told, self._wake = Event(), Event(), Event()
        self._beat, self._asked_by_others = 0, 0
        self._texts: dict[int, bytes] = {}

    def run(self) -> None:
        store = None
        while not self.is_over.is_set():
            # Every rank reads the reports of all: in a large group they take turns less often, to spare the store.
            self._wake.wait((0.01 if self.is_settling else TICK_S) * max(1.0, self.size / 64))
            self._wake.clear()
            try:
                store = store or _own_store(self.store)
                self._turn(store)
                self.heard = time.monotonic()
            except Exception:
                logger.debug("the store does not answer", exc_info=True)
                time.sleep(TICK_S)

    def tell(self) -> None:
        """Answer at once, although nobody asked."""
        self._asked_by_others = -1  # never the store's count, so the next turn answers
        self._wake.set()

    def have_given_up(self, silent: Sequence[int]) -> bool:
        """True if every rank that ever answered, and is not silent, has given up."""
        return all(other.failure for rank, other in self.others.reports.items() if rank not in silent)

    def _turn(self, store: Any) -> None:
        asked = store.add("asked", 1 if self.is_asking else 0)
        if asked == self._asked_by_others and not self.is_settling:
            return
        self._asked_by_others = asked
        self._beat += 1
        report = self.report
        store.set(_key(self.rank), f"{self._beat} {report.to_text()}")
        if report.failure:
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
            reports[rank] = Report.from_text(text.decode().partition(" ")[2])
            if self._texts.get(rank) != text:
                self._texts[rank], heard[rank] = text, now
        self.others = OtherRanks(reports, heard)


def _key(rank: int) -> str:
    return f"report of rank {rank}"


def _own_store(store: Any) -> Any:
    """A second connection to the store: torch may be waiting for something on the caller's."""
    own_store = PrefixStore("mesh-attention watchdog", store.clone())
    own_store.set_timeout(timedelta(seconds=SILENT_S))
    return own_store
