"""`record`: measured timelines of real passes, in the form that `simulate` forecasts them.

    with record(attention) as recording:
        out = attention(q, k, v, causal=True)
        out.sum().backward()
    for recorded in recording.passes():        # on every rank of the group: they share what they noted
        print(recorded.timeline.name, recorded.timeline.time_s)

Spans have the simulator's names. Times are seconds since the first rank began the pass. *compute* is a step at work:
its kernel calls and copies, and posting. *wait* is a step that cannot begin, or a collective that is not over. *send*
and *recv* last from when a transfer was posted until it was seen to be done. That says when it was in flight, not how
long its bytes took: the other end may have posted later, and transfers posted together are seen to be done together.

On a CPU under torch.distributed, each post has a thread that waits for it, so its end is noted at once. In a local
group, where one thread drives all ranks, and on CUDA, where times are those of the device's stream, the end is noted
when a step waits for it. Ranks of one machine share a clock. The clocks of several machines are aligned when ranks
leave a common meeting, which is as exact as a small message is short.

Nothing is noted, and nothing costs time, outside of `with record(...)`. A backward pass of a call made inside is noted
whenever it runs; that of an operator (under torch.compile or saved attention), only if it runs inside as well.

The executor needs no change for this. It walks instructions that note when they are read, posts to a transport that
notes its parcels, and is driven through a generator that notes how long it waits; spans are made of these notes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from platform import node
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch

from mesh_attention.comm.base import Comm, Parcel, Sharing, Work
from mesh_attention.errors import UsageError
from mesh_attention.execution.call import Calls
from mesh_attention.execution.compiled import Compiled, Instruction
from mesh_attention.execution.engine import Engine
from mesh_attention.plan.counts import program_flops
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.program import Program
from mesh_attention.plan.steps import Free, Recv, Send, transfers
from mesh_attention.plan.text import format_end, format_step
from mesh_attention.session.agreement import Statement
from mesh_attention.session.session import Session
from mesh_attention.timeline import Lane, RankTimes, Span, Timeline
from mesh_attention.topology import LinkClass

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Recordable(Protocol):
    """A `MeshAttention`, as far as a recording needs it."""

    calls: Calls


@contextmanager
def record(attention: Recordable) -> Iterator[Recording]:
    """Note when each step of every pass inside the block happens. `Recording.passes` gives the timelines."""
    calls = attention.calls
    if calls.session.size == 1:
        raise UsageError("record() needs two or more ranks: on one rank a call is a single kernel without steps")
    recording = Recording(calls.session)
    calls.observers.append(recording.observed)
    try:
        yield recording
    finally:
        calls.observers.remove(recording.observed)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPass:
    plan: Plan
    timeline: Timeline


@dataclass
class Recording:
    """The notes of the ranks that this process plays."""

    session: Session
    _engines: dict[int, tuple[Engine, Engine]] = field(default_factory=dict)
    _observers: list[Observer] = field(default_factory=list)
    _device: torch.device | None = None

    def observed(self, engine: Engine, device: torch.device) -> Engine:
        """An engine that runs the same passes and notes them."""
        if engine.captured is not None:
            raise UsageError("record() cannot look into CUDA graphs; use a MeshAttention without cuda_graphs")
        if id(engine) not in self._engines:
            self._engines[id(engine)] = engine, self._observed(engine, device)
        return self._engines[id(engine)][1]

    def _observed(self, engine: Engine, device: torch.device) -> Engine:
        if not self._observers:  # one for each rank, shared by all engines
            self._observers = [Observer(is_alone=len(engine.comms) == 1) for _ in engine.comms]
            self._device = device
        observers = self._observers
        return replace(
            engine,
            comms=[WatchedComm(comm, observer) for comm, observer in zip(engine.comms, observers, strict=True)],
            programs=lambda direction: [
                observer.watched(compiled, device)
                for compiled, observer in zip(engine.programs(direction), observers, strict=True)
            ],
            observed=lambda ranks: engine.observed([o.steps(rank) for rank, o in zip(ranks, observers, strict=True)]),
        )

    def passes(self) -> tuple[RecordedPass, ...]:
        """Every pass that ran to its end, in order, with the spans of all ranks. All ranks must call this."""
        meeting = Statement(must_match={"operation": "a recording's passes"})
        self.session.agree(*[meeting] * len(self.session.comms), device=self._device)
        now_s = time.perf_counter()
        notes = [_whole(observer) for observer in self._observers] or [[] for _ in self.session.comms]
        own = [
            _RankReport(machine=_machine(), now_s=now_s, passes=[asdict(_pass_spans(of_pass)) for of_pass in mine])
            for mine in notes
        ]
        statements = [Statement(must_match=meeting.must_match, payload=asdict(report)) for report in own]
        reports = [_RankReport(**rank.payload) for rank in self.session.agree(*statements, device=self._device)]
        counts = {len(report.passes) for report in reports}
        if len(counts) > 1:
            raise UsageError(f"ranks recorded {sorted(counts)} passes; record the same calls on every rank")
        plans = [of_pass.compiled.plan for of_pass in notes[0]]
        return tuple(
            RecordedPass(plan=plan, timeline=_timeline(plan, reports, number)) for number, plan in enumerate(plans)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PassSpans:
    """One pass of one rank. Spans are in seconds of the rank's own clock."""

    rank: int
    start_s: float
    stop_s: float
    spans: list[Span]
    sent: dict[int, int]
    flops: int
    peak_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankReport:
    """The passes of one rank, its clock when all ranks met, and the machine it runs on."""

    machine: str
    now_s: float
    passes: list[dict[str, Any]]


def _whole(observer: Observer) -> list[PassNotes]:
    return [notes for notes in observer.passes if notes.is_whole]


def _machine() -> str:
    """An id of this machine; processes with the same id share a clock."""
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else node()


# From notes to spans


def _pass_spans(notes: PassNotes) -> _PassSpans:
    compiled = notes.compiled
    start_s, stop_s = (notes.clock.seconds(notes.moments[at].mark) for at in (0, -1))
    program = Program(rank=compiled.rank, steps=compiled.steps, peak_nbytes=compiled.peak_nbytes)
    sent: dict[int, int] = {}
    for posted in notes.posts:
        for (_, send), nbytes in zip(posted.sends, posted.sent_nbytes, strict=True):
            sent[send.dest] = sent.get(send.dest, 0) + nbytes
    return _PassSpans(
        rank=compiled.rank,
        start_s=start_s,
        stop_s=stop_s,
        spans=[*_lane_spans(notes), *(span for posted in notes.posts for span in _transfer_spans(posted, notes))],
        sent=sent,
        flops=program_flops(compiled.plan, program),
        peak_nbytes=compiled.device_nbytes,
    )


def _lane_spans(notes: PassNotes) -> list[Span]:
    """Compute and wait, without gaps. A step that waits before it has posted anything has not begun its work."""
    spans: list[Span] = []
    steps, rank = notes.compiled.steps, notes.compiled.rank
    index, at, is_work, has_posted = 0, 0.0, False, False

    def close(lane: Lane, until: float) -> None:
        if until <= at:
            return
        if spans and spans[-1].lane == lane == "wait" and (spans[-1].stop_s, spans[-1].step) == (at, index):
            spans[-1] = spans[-1]._replace(stop_s=until)
        else:
            spans.append(Span(rank, lane, at, until, format_step(steps[index]), step=index))

    for moment in notes.moments:
        now = notes.clock.seconds(moment.mark)
        if moment.what == "post":
            has_posted = True
            continue
        if moment.what == "wait":
            if not has_posted:
                continue  # so the wait begins where the step began, or where the wait before ended
            close("compute", now)
        elif moment.what == "go":
            close("wait", now)
        elif is_work:
            close("compute", now)
        if moment.instruction is not None:
            index = moment.instruction.index
            is_work, has_posted = not isinstance(moment.instruction.step, Free), False
        at = now
    return spans


def _transfer_spans(posted: Posted, notes: PassNotes) -> Iterator[Span]:
    rank = notes.compiled.rank
    start = notes.clock.seconds(posted.posted)
    stop = notes.clock.seconds(notes.moments[-1].mark if posted.seen is None else posted.seen)
    for (index, send), nbytes in zip(posted.sends, posted.sent_nbytes, strict=True):
        yield Span(rank, "send", start, max(start, stop), format_end(send), nbytes, index)
    for (index, recv), nbytes in zip(posted.recvs, posted.received_nbytes, strict=True):
        yield Span(rank, "recv", start, max(start, stop), format_end(recv), nbytes, index)


# From all ranks' spans to a timeline


def _timeline(plan: Plan, reports: Sequence[_RankReport], number: int) -> Timeline:
    passes = [_PassSpans(**report.passes[number]) for report in reports]
    is_one_machine = len({report.machine for report in reports}) == 1
    shifts = [0.0 if is_one_machine else -report.now_s for report in reports]
    zero_s = min(rank.start_s + shift for rank, shift in zip(passes, shifts, strict=True))
    spans = [
        span._replace(start_s=span.start_s + shift - zero_s, stop_s=span.stop_s + shift - zero_s)
        for rank, shift in zip(passes, shifts, strict=True)
        for span in map(Span._make, rank.spans)
    ]
    sent: dict[LinkClass, int] = {"inside": 0, "between": 0}
    for rank, report in zip(passes, reports, strict=True):
        for dest, nbytes in rank.sent.items():
            sent["inside" if report.machine == reports[int(dest)].machine else "between"] += nbytes
    return Timeline(
        name=f"{plan.method} {plan.assignment} {plan.direction}",
        ranks=tuple(
            _times(rank.rank, spans, rank.stop_s + shift - zero_s) for rank, shift in zip(passes, shifts, strict=True)
        ),
        sent_nbytes=sent,
        peak_nbytes=max(rank.peak_nbytes for rank in passes),
        flops=sum(rank.flops for rank in passes),
        spans=tuple(sorted(spans, key=lambda span: (span.rank, span.start_s))),
    )


def _times(rank: int, spans: Sequence[Span], stop_s: float) -> RankTimes:
    """Totals of one rank. `link_s` is the time during which anything was in flight."""
    compute_s = sum(span.stop_s - span.start_s for span in spans if (span.rank, span.lane) == (rank, "compute"))
    under_way = [
        _covered_s(span for span in spans if (span.rank, span.lane) == (rank, lane)) for lane in ("send", "recv")
    ]
    return RankTimes(rank=rank, stop_s=stop_s, compute_s=compute_s, wait_s=stop_s - compute_s, link_s=max(under_way))


def _covered_s(spans: Iterator[Span]) -> float:
    covered_s, free_s = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.start_s):
        covered_s += max(0.0, span.stop_s - max(span.start_s, free_s))
        free_s = max(free_s, span.stop_s)
    return covered_s


Result = TypeVar("Result")
Mark = Any
"""A moment of a clock: a number, or an event of a device whose time is known later."""


class Clock(Protocol):
    def mark(self) -> Mark:
        """Now."""

    def seconds(self, mark: Mark) -> float:
        """The time of a mark, on the monotonic clock of this machine."""


class HostClock:
    """The clock of ranks that compute on a CPU, where a call is done when it returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        return mark


class DeviceClock:
    """The clock of ranks on a CUDA device: times are those of its current stream, not of the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.synchronize(device)
        self.zero = self.mark()
        self.zero.synchronize()
        self.zero_s = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        mark.synchronize()
        return self.zero_s + float(self.zero.elapsed_time(mark)) * 1e-3


def clock_of(device: torch.device) -> Clock:
    return DeviceClock(device) if device.type == "cuda" else HostClock()


class Moment(NamedTuple):
    """`step`: an instruction begins. `post`: it has posted. `wait`, `go`: it waits, and resumes. `end`: all is done."""

    what: Literal["step", "post", "wait", "go", "end"]
    mark: Mark
    instruction: Instruction | None = None


@dataclass
class Posted:
    """Transfers posted at once, each with the index of its step, and when all of them were first seen done."""

    sends: Sequence[tuple[int, Send]]
    recvs: Sequence[tuple[int, Recv]]
    sent_nbytes: Sequence[int]
    received_nbytes: Sequence[int]
    posted: Mark
    seen: Mark | None = None


@dataclass
class PassNotes:
    """One pass of one rank. A pass that was interrupted has no `end`.

    With `has_waiters`, each post has a thread that waits for it.
    """

    compiled: Compiled
    clock: Clock
    has_waiters: bool
    moments: list[Moment] = field(default_factory=list)
    posts: list[Posted] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return bool(self.moments) and self.moments[-1].what == "end"


class Observer:
    """Notes what one rank does, pass after pass. `is_alone` says that this process plays no other rank."""

    def __init__(self, *, is_alone: bool) -> None:
        self.is_alone = is_alone
        self.passes: list[PassNotes] = []

    def watched(self, compiled: Compiled, device: torch.device) -> Compiled:
        """The same program, which is noted as it is walked."""
        return replace(compiled, instructions=_Watched(compiled, self, device))  # type: ignore[arg-type]

    def steps(self, rank: Generator[Work, None, Result]) -> Generator[Work, None, Result]:
        """The same generator, which notes how long it waits. Errors thrown in are passed on."""
        reply: BaseException | None = None
        while True:
            try:
                work = next(rank) if reply is None else rank.throw(reply)
            except StopIteration as stop:
                self.note("end")
                result: Result = stop.value
                return result
            self.note("wait")
            reply = None
            try:
                yield work
            except Exception as error:
                reply = error
            self.note("go")

    def begin(self, compiled: Compiled, device: torch.device) -> None:
        # On CUDA, a wait acts on the stream of the thread that waits; ranks of one thread must not block it.
        has_waiters = self.is_alone and device.type == "cpu"
        self.passes.append(PassNotes(compiled, clock_of(device), has_waiters))

    def note(self, what: Literal["step", "post", "wait", "go", "end"], instruction: Instruction | None = None) -> None:
        now = self.passes[-1]
        now.moments.append(Moment(what, now.clock.mark(), instruction))

    def posting(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Posted:
        """Note what the current step is about to post; parcels are in the order of the step. Sends and receives may be
        posted apart."""
        now = self.passes[-1]
        at = next(moment.instruction for moment in reversed(now.moments) if moment.instruction is not None)
        ends = [*enumerate(map(transfers, at.turn or (at.step,)), at.index)]
        posted = Posted(
            [(index, send) for index, (sent, _) in ends for send in sent if sends],
            [(index, recv) for index, (_, received) in ends for recv in received if recvs],
            [_nbytes(parcel) for parcel in sends],
            [_nbytes(parcel) for parcel in recvs],
            now.clock.mark(),
        )
        now.posts.append(posted)
        return posted


class _Watched:
    """The instructions of a program; walking them begins a pass."""

    def __init__(self, compiled: Compiled, observer: Observer, device: torch.device) -> None:
        self.compiled, self.observer, self.device = compiled, observer, device

    def __iter__(self) -> Iterator[Instruction]:
        self.observer.begin(self.compiled, self.device)
        for instruction in self.compiled.instructions:
            self.observer.note("step", instruction)
            yield instruction

    def __getitem__(self, index: int) -> Instruction:
        return self.compiled.instructions[index]

    def __len__(self) -> int:
        return len(self.compiled.instructions)


class WatchedComm:
    """A transport that notes what is posted, and when it is seen to be done."""

    def __init__(self, inner: Comm, observer: Observer) -> None:
        self.inner, self.observer = inner, observer
        self.rank, self.size, self.is_capturable = inner.rank, inner.size, inner.is_capturable

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        posted = self.observer.posting(sends, recvs)
        work = self.inner.post(sends, recvs)
        self.observer.note("post")
        now = self.observer.passes[-1]
        kind = _ThreadedWork if now.has_waiters else _WatchedWork
        return kind(work, posted, now.clock)

    def share(self, text: str) -> Sharing:
        return self.inner.share(text)


class _WatchedWork:
    """A post that is noted as done when it is first asked or waited for."""

    def __init__(self, work: Work, posted: Posted, clock: Clock) -> None:
        self.work, self.posted, self.clock = work, posted, clock

    def is_done(self) -> bool:
        return self.work.is_done() and self._seen()

    def wait(self) -> None:
        self.work.wait()
        self._seen()

    def _seen(self) -> bool:
        if self.posted.seen is None:
            self.posted.seen = self.clock.mark()
        return True


class _ThreadedWork:
    """A post with a thread that waits for it: Gloo reports only to a waiting thread, and a good plan waits late."""

    def __init__(self, work: Work, posted: Posted, clock: Clock) -> None:
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._watch, args=(work, posted, clock), daemon=True)
        self.thread.start()

    def _watch(self, work: Work, posted: Posted, clock: Clock) -> None:
        try:
            work.wait()
            posted.seen = clock.mark()
        except Exception as error:
            self.error = error

    def is_done(self) -> bool:
        return not self.thread.is_alive()

    def wait(self) -> None:
        self.thread.join()
        if self.error is not None:
            raise self.error


def _nbytes(parcel: Parcel) -> int:
    return sum(chunk.numel() * chunk.element_size() for chunk in parcel.chunks)
