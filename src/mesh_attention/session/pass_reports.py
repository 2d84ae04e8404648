"""Reports of what each rank of a group is doing, and the verdict on why one of them waits for too long.

Values and functions without clocks or transports; `session.watchdog` collects the reports.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from mesh_attention.session.agreement import find_difference, lengths_advice

DIFFERENT_CALLS = "every rank must make the same calls in the same order"


@dataclass(frozen=True)
class Report:
    """One rank's account of itself. `passes` and `sharings` are how many it has begun on the group.

    `hashes` are those of passes under way and of the latest ones, by number; ranks in the same calls have equal ones.
    `at` names the step it waits at, in the pass `number`, for the ranks `waits_for`; it is empty if the rank does not
    wait. `call` is what must match of the call that it began last, `holds` its token counts there, and `refusal` why it
    refuses that call. `gone` are ranks on its host whose processes were killed or are stopped. `has_left` says that it
    has come to its end, and `failure` why it gave up, in words that any rank can repeat.
    """

    rank: int
    passes: int = 0
    sharings: int = 0
    hashes: Mapping[int, int] = field(default_factory=dict)
    number: int = 0
    at: str = ""
    waits_for: tuple[int, ...] = ()
    call: Mapping[str, str] = field(default_factory=dict)
    holds: Mapping[str, int] = field(default_factory=dict)
    refusal: str = ""
    host: str = ""
    pid: int = 0
    gone: tuple[int, ...] = ()
    has_left: bool = False
    failure: str = ""

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Report:
        fields = json.loads(text)
        fields["hashes"] = {int(number): value for number, value in fields["hashes"].items()}
        return cls(**{**fields, "waits_for": tuple(fields["waits_for"]), "gone": tuple(fields["gone"])})


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
    gone = {rank for report in (own, *others.values()) for rank in report.gone}
    if missing := gone or silent:
        verb = "does not answer: its process has" if len(missing) == 1 else "do not answer: their processes have"
        return Verdict(f"{_ranks(missing)} {verb} ended or stopped", here, bool(gone))
    if late := [rank for rank, other in others.items() if own.number > other.passes]:
        verb = "has" if len(late) == 1 else "have"
        return Verdict(f"{_ranks(late)} {verb} not begun pass {own.number}", here, False)
    if absent := [rank for rank, other in others.items() if not own.number and own.sharings > other.sharings]:
        return Verdict(f"{_ranks(absent)} did not take part when ranks compared their calls", here, False)
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
            different = f"{_ranks(minority)} {verb} a different call from {_ranks(majority)} in pass {number}"
            return different + _difference(
                {rank: report for rank, report in reports.items() if report.passes == number}
            )
    for ahead in reports.values():
        for other in reports.values():
            if ahead.sharings > other.sharings and ahead.passes < other.passes:
                if ahead.refusal:
                    return f"rank {ahead.rank} refused the call: {ahead.refusal}"
                agreeing = f"rank {ahead.rank} is agreeing on a new call"
                return f"{agreeing}, but rank {other.rank} is running one that it already knows{_difference(reports)}"
    return None


def _difference(reports: Mapping[int, Report]) -> str:
    """The first argument that differs between the calls of some ranks, as the end of a sentence."""
    known = {rank: report for rank, report in sorted(reports.items()) if report.call}
    if (difference := find_difference({rank: report.call for rank, report in known.items()})) is None:
        return ""
    advice = lengths_advice([report.call for report in known.values()], [report.holds for report in known.values()])
    return f": {difference}{advice if len(known) == len(reports) else ''}"


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
