"""The watch on groups whose transfers run on a device: who is named, after how long, and what becomes of the passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from mesh_attention.errors import TransportError
from mesh_attention.session import watchdog
from mesh_attention.session.agreement import Statement
from mesh_attention.session.pass_ids import CheckedComm
from mesh_attention.session.pass_reports import Report, judge
from mesh_attention.session.poison import Poison
from mesh_attention.session.session import GroupState
from mesh_attention.session.watchdog import STORE_IS_SILENT, Watchdog, WatchedPass

RANKS = 4
SOON_S = 30.0
"""Far more than anything takes, so that nothing is late on a busy machine."""


# What follows from reports

hashes = st.dictionaries(st.integers(1, 4), st.integers(0, 1), max_size=3)
reports = st.builds(
    Report,
    rank=st.just(0),
    passes=st.integers(0, 4),
    sharings=st.integers(0, 3),
    hashes=hashes,
    number=st.integers(0, 4),
    at=st.sampled_from(["", "forward pass 3, step 0 'recv kv2 from 2'"]),
    waits_for=st.lists(st.integers(0, RANKS - 1), max_size=2).map(tuple),
    failure=st.sampled_from(["", "rank 3 failed: out of memory"]),
)
settings_of_all = st.lists(reports, min_size=RANKS, max_size=RANKS).map(
    lambda found: {rank: Report(**{**vars(report), "rank": rank}) for rank, report in enumerate(found)}
)


@given(settings_of_all)
def test_a_report_survives_the_store(found: dict[int, Report]) -> None:
    for report in found.values():
        assert Report.from_text(report.to_text()) == report


@given(settings_of_all, st.sets(st.integers(1, RANKS - 1)))
def test_a_verdict_says_the_reason_first_and_then_where_this_rank_is(
    found: dict[int, Report], silent: set[int]
) -> None:
    others = {rank: report for rank, report in found.items() if rank not in {0, *silent}}
    verdict = judge(found[0], others, silent)
    assert verdict.text.startswith(f"{verdict.reason}. Rank 0 ")
    if found[0].at:
        assert found[0].at in verdict.text
    failures = [other.failure for other in others.values() if other.failure]
    if failures:
        assert verdict.reason == failures[0]
        assert verdict.is_certain


@given(settings_of_all)
def test_a_reason_does_not_grow_as_ranks_repeat_it(found: dict[int, Report]) -> None:
    first = judge(found[0], {1: found[1]}, ())
    told = Report(0, failure=first.reason)
    second = judge(found[1], {0: told}, ())
    third = judge(found[2], {1: Report(1, failure=second.reason)}, ())
    assert third.reason == first.reason


def here(rank: int, number: int = 5, **more: Any) -> Report:
    """A rank that waits in a pass that all ranks before it know as well."""
    return Report(rank, passes=number, hashes={number: 7}, number=number, at=f"forward pass {number}, step 2", **more)


# Watches over one store


class Ranks:
    """Watches of four ranks over one store, of passes that a test ends."""

    def __init__(self, silent: tuple[int, ...] = ()) -> None:
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
        self.silent = silent
        self.over, self.begun, self.sharings = [0] * RANKS, [0] * RANKS, [0] * RANKS
        self.failures: list[str | None] = [None] * RANKS
        self.have_failed = [False] * RANKS
        self.done: list[list[str]] = [[] for _ in range(RANKS)]
        self.patience_s = SOON_S
        self.decided_at_abort: list[int] = []
        self.watches = {rank: self._watch(rank) for rank in range(RANKS) if rank not in silent}

    def _watch(self, rank: int) -> Watchdog:
        def abort() -> None:
            self.done[rank].append("abort")
            self.decided_at_abort.append(sum(watch.verdict is not None for watch in self.watches.values()))

        group = SimpleNamespace(
            rank=rank,
            size=RANKS,
            store=self.store,
            kind="Gloo",
            slack_s=0.0,
            settle_s=SOON_S,
            meeting=lambda: None,
            latest_call=lambda: (Statement(), ""),
            patience_s=lambda: self.patience_s,
            passes_over=lambda: self.over[rank],
            counts=lambda: (self.sharings[rank], self.begun[rank]),
            poison=lambda reason: self.done[rank].append("poison"),
            abort=abort,
            has_failed=lambda: self.have_failed[rank],
            failure=lambda: self.failures[rank],
            is_alive=lambda: True,
        )
        return Watchdog(group)  # type: ignore[arg-type]

    def begin(self, *ranks: int, history: int = 7) -> None:
        for rank in ranks:
            self.begun[rank] += 1
            source = (rank - 1) % RANKS
            made = WatchedPass(self.begun[rank], history, "forward", lambda _, at=source: (f"step 0 from {at}", (at,)))
            made.posts = [(time.monotonic(), [Pending()])]
            self.watches[rank].begin(made)

    def reasons(self, *ranks: int) -> list[str]:
        """What each of some ranks, or of all, says when it gives up."""
        watches = [self.watches[rank] for rank in ranks or self.watches]
        assert all(watch.decided.wait(SOON_S) for watch in watches)
        return [watch.verdict.text for watch in watches if watch.verdict is not None]

    def close(self) -> None:
        for watch in self.watches.values():
            watch.is_over.set()
        for watch in self.watches.values():
            watch.stop()


class Pending:
    def is_completed(self) -> bool:
        return False


def wait_until(happens: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON_S
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ranks]]:
    for name, seconds in {"TICK_S": 0.05, "STALL_S": 0.2, "SILENT_S": SOON_S}.items():
        monkeypatch.setattr(watchdog, name, seconds)
    made: list[Ranks] = []

    def start(*given: Any) -> Ranks:
        made.append(Ranks(*given))
        return made[-1]

    yield start
    for ranks in made:
        ranks.close()


def test_passes_that_end_in_time_are_nobodys_business(started: Callable[..., Ranks]) -> None:
    ranks = started()
    ranks.begin(0, 1, 3)
    wait_until(lambda: all(ranks.watches[rank].exchange.is_asking for rank in (0, 1, 3)))
    ranks.begin(2)
    ranks.over = [1] * RANKS
    wait_until(lambda: not any(watch.exchange.is_asking for watch in ranks.watches.values()))
    ranks.patience_s = 0.0
    time.sleep(0.3)  # several looks
    assert ranks.done == [[]] * RANKS


def test_a_late_rank_is_named_by_all_and_told(started: Callable[..., Ranks]) -> None:
    ranks = started()
    ranks.patience_s = 0.5
    ranks.begin(0, 1, 3)
    reasons = ranks.reasons()
    assert [reason.split(".")[0] for reason in reasons] == ["rank 2 has not begun pass 1"] * RANKS
    assert reasons[0].endswith(". Rank 0 waits in forward pass 1, step 0 from 3")
    wait_until(lambda: ranks.done == [["poison", "abort"], ["poison", "abort"], ["poison"], ["poison", "abort"]])


def test_ranks_abort_once_all_have_given_up(started: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "TICK_S", 0.3)
    monkeypatch.setattr(watchdog, "STALL_S", SOON_S)  # so that only one rank asks
    ranks = started()
    ranks.begin(0, 1, 3)
    ranks.begin(2, history=8)
    assert ranks.watches[0].explain("could not be posted") is not None
    wait_until(lambda: len(ranks.decided_at_abort) == RANKS)
    assert ranks.decided_at_abort == [RANKS] * RANKS


SILENT_S = 1.5


@pytest.mark.parametrize("have_failed", [False, True], ids=["in time", "soon once transfers have failed"])
def test_a_silent_rank_is_named_by_all(
    started: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch, have_failed: bool
) -> None:
    monkeypatch.setattr(watchdog, "SILENT_S", SILENT_S)
    ranks = started((2,))
    ranks.patience_s = SOON_S if have_failed else SILENT_S + 0.5
    ranks.begin(0, 1, 3)
    ranks.have_failed = [have_failed] * RANKS
    start = time.monotonic()
    reasons = ranks.reasons()
    assert have_failed or time.monotonic() - start > SILENT_S  # it may still come
    assert [reason.split(":")[0] for reason in reasons] == ["rank 2 does not answer"] * 3
    assert ("at or after step 0 from 3" in reasons[0]) == have_failed


def test_another_call_is_named_as_soon_as_all_have_answered(started: Callable[..., Ranks]) -> None:
    ranks = started()
    ranks.begin(0, 1, 3)
    ranks.begin(2, history=8)
    reasons = ranks.reasons()
    assert [reason.split(";")[0] for reason in reasons] == [
        "rank 2 makes a different call from ranks 0, 1, 3 in pass 1"
    ] * 4


def test_another_call_is_named_after_it_is_over_and_nothing_is_aborted(started: Callable[..., Ranks]) -> None:
    ranks = started()
    ranks.begin(0, 1, 3)
    ranks.begin(2, history=8)
    ranks.over = [1] * RANKS
    ranks.begin(0, 1, 2, 3, history=9)
    ranks.over = [2] * RANKS
    said = ranks.watches[1].explain("results are NaN")
    assert said is not None
    assert said.startswith("rank 2 makes a different call from ranks 0, 1, 3 in pass 1")
    exchanges = [watch.exchange for watch in ranks.watches.values()]
    wait_until(lambda: all(ranks.done) and not any(exchange.is_settling for exchange in exchanges))
    assert ranks.done == [["poison"]] * RANKS


def test_what_a_rank_saw_itself_is_said_if_nobody_knows_more(started: Callable[..., Ranks]) -> None:
    ranks = started()
    ranks.begin(0, 1, 2, 3)
    ranks.over = [1] * RANKS
    said = ranks.watches[1].explain("ranks made different calls")
    assert said == "ranks made different calls. Rank 1 is in pass 1"


def test_an_error_of_one_rank_is_told_to_those_that_wait(started: Callable[..., Ranks]) -> None:
    ranks = started()
    ranks.begin(0, 1, 2, 3)
    ranks.over[2], ranks.failures[2] = 1, "OutOfMemoryError: no memory"
    reasons = ranks.reasons(0, 1, 3)
    assert [reason.split(".")[0] for reason in reasons] == ["rank 2 failed: OutOfMemoryError: no memory"] * 3


@pytest.mark.parametrize("how", ["by itself", "killed a little later"])
def test_a_rank_whose_process_ends_after_an_error_has_told_the_others(started: Callable[..., Ranks], how: str) -> None:
    ranks = started()
    ranks.failures[2] = "OutOfMemoryError: no memory"
    ended = ranks.watches.pop(2)
    if how == "by itself":
        ended.stop()
    else:
        assert ended.exchange.has_told.wait(SOON_S)
        ended.exchange.is_over.set()
        ended.is_over.set()
    ranks.begin(0, 1, 3)
    reasons = ranks.reasons()
    assert [reason.split(".")[0] for reason in reasons] == ["rank 2 failed: OutOfMemoryError: no memory"] * 3


def test_a_post_that_torch_refused_is_where_a_rank_waits() -> None:
    class Refusing:
        rank, size, is_capturable = 0, 2, True

        def post(self, sends: Any, recvs: Any) -> Any:
            raise TransportError("refused")

    watched = WatchedPass(3, 7, "backward", lambda index: (f"post {index}", (1,)))
    marked = CheckedComm(Refusing(), GroupState(forgets_failures=False), watched=watched)  # type: ignore[arg-type]
    marked.open(torch.zeros(2, dtype=torch.int64), 7)
    with pytest.raises(TransportError):
        marked.post((), ())
    waiting = watched.waiting(has_failed=False)
    assert waiting is not None
    assert waiting.where()[0] == "backward pass 3, post 0"


def test_a_store_that_does_not_answer_is_named(started: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "SILENT_S", 0.3)
    ranks = started()
    ranks.begin(0)
    for watch in ranks.watches.values():
        watch.exchange.store = None  # nobody connects
    ranks.watches[0].exchange._turn = _refuse  # type: ignore[method-assign]
    ranks.patience_s = 0.5
    (reason,) = ranks.reasons(0)
    assert reason.startswith(STORE_IS_SILENT)


def _refuse(store: Any) -> None:
    raise ConnectionError("the store is gone")


# What the host and the device tell each other


def test_results_are_poisoned_once_a_rank_gave_up() -> None:
    alarm, same = Poison(torch.device("cpu")), torch.tensor([5, -5])
    before, after = torch.ones(3), torch.ones(3, dtype=torch.bfloat16)
    alarm.check(same, [before], counts=True)
    alarm.give_up()
    alarm.check(same, [after], counts=True)
    assert before.isfinite().all()
    assert after.isnan().all()
    assert alarm.passes_over() == 2
    assert alarm.verdict() is None  # ranks made the same calls; why it gave up is known to its watch
