"""Reports of what each rank of a group is doing, and the verdict on why one of them waits for too long.

Values and functions without clocks or transports; `session.watchdog` collects the reports.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

DIFFERENT_CALLS = "every rank must make the same calls in the same order"


@dataclass(frozen=True)
class Report:
    """One rank's account of itself. `passes` and `sharings` are how many it has begun on the group.

    `hashes` are those of passes under way and of the latest ones, by number; ranks in the same calls have equal ones.
    `at` names the step it waits at, in the pass `number`, for the ranks `waits_for`; it is empty if the rank does not
    wait. `failure` is why it gave up, in words that any rank can repeat.
    """

    rank: int
    passes: int = 0
    sharings: int = 0
    hashes: Mapping[int, int] = field(default_factory=dict)
    number: int = 0
    at: str = ""
    waits_for: tuple[int, ...] = ()
    failure: str = ""

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Report:
        fields = json.loads(text)
        fields["hashes"] = {int(number): value for number, value in fields["hashes"].items()}
        return cls(**{**fields, "waits_for": tuple(fields["waits_for"])})


class Verdict(NamedTuple):
    """Why a rank waits, in words that other ranks can repeat, and where it waits.

    If it `is_certain`, waiting longer cannot help.
    """

    reason: str
    here: str
    is_certain: bool

    @property
    def text(self) -> str:
        return f"{self.reason}. {self.here[:1].upper()}{self.here[1:]}"


def judge(own: Report, others: Mapping[int, Report], silent: Collection[int]) -> Verdict:
    """Why this rank waits, from its own report, those of the ranks that answer, and the ranks that do not."""
    here = describe(own)
    if failed := next((other for other in others.values() if other.failure), None):
        return Verdict(failed.failure, here, True)
    if different := find_different_calls({own.rank: own, **others}):
        return Verdict(f"{different}; {DIFFERENT_CALLS}", here, True)
    if silent:
        verb = "does not answer: its process has" if len(silent) == 1 else "do not answer: their processes have"
        return Verdict(f"{_ranks(silent)} {verb} ended or stopped", here, False)
    if late := [rank for rank, other in others.items() if own.number > other.passes]:
        verb = "has" if len(late) == 1 else "have"
        return Verdict(f"{_ranks(late)} {verb} not begun pass {own.number}", here, False)
    if slow := sorted(_waited_for(own, others)):
        verb = "is" if len(slow) == 1 else "are"
        return Verdict(f"{_ranks(slow)} {verb} in pass {own.number} too, but not as far", here, False)
    return Verdict(f"all ranks are in pass {own.passes} and wait for each other", here, False)


def describe(own: Report) -> str:
    """Where a rank is."""
    return f"rank {own.rank} waits in {own.at}" if own.at else f"rank {own.rank} is in pass {own.passes}"


def find_different_calls(reports: Mapping[int, Report]) -> str | None:
    """Say which ranks are in different calls; None if all may still be in the same."""
    for number in sorted({number for report in reports.values() for number in report.hashes}):
        calls: dict[int, list[int]] = {}
        for rank, report in reports.items():
            if number in report.hashes:
                calls.setdefault(report.hashes[number], []).append(rank)
        if len(calls) > 1:
            minority, *_, majority = sorted(calls.values(), key=lambda ranks: (len(ranks), [-rank for rank in ranks]))
            verb = "makes" if len(minority) == 1 else "make"
            return f"{_ranks(minority)} {verb} a different call from {_ranks(majority)} in pass {number}"
    for ahead in reports.values():
        for other in reports.values():
            if ahead.sharings > other.sharings and ahead.passes < other.passes:
                agreeing = f"rank {ahead.rank} is agreeing on a new call"
                return f"{agreeing}, but rank {other.rank} is running one that it already knows"
    return None


def _waited_for(own: Report, others: Mapping[int, Report]) -> set[int]:
    """The ranks that this one waits for, directly or through ranks that wait too, and that do not wait themselves."""
    seen, to_visit = {own.rank}, list(own.waits_for)
    while to_visit:
        rank = to_visit.pop()
        if rank not in seen:
            seen.add(rank)
            to_visit += others[rank].waits_for if rank in others else ()
    return {rank for rank in seen - {own.rank} if rank in others and not others[rank].at}


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, sorted(ranks)))}"
