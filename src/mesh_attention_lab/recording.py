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
notes its parcels, and is driven through a generator that notes how long it waits. A note is a span whose ends are marks
of a clock, because the times of a device are known later.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from platform import node
from typing import Any, TypeVar

import torch

from mesh_attention.api import MeshAttention
from mesh_attention.comm.base import Parcel, Work, Wrapper
from mesh_attention.errors import UsageError
from mesh_attention.execution.compiled import Compiled, Instruction
from mesh_attention.execution.engine import Engine
from mesh_attention.plan.format import format_end, format_step
from mesh_attention.plan.plan import Plan, program_flops
from mesh_attention.plan.program import Program
from mesh_attention.plan.steps import Free, Recv, Send, transfers
from mesh_attention.session.agreement import Statement
from mesh_attention.session.session import Session
from mesh_attention.timeline import Lane, RankTimes, Span, Timeline
from mesh_attention.topology import LinkClass

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def record(attention: MeshAttention) -> Iterator[Recording]:
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


class Recording:
    """The notes of the ranks that this process plays."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.notes: list[list[PassNotes]] = [[] for _ in session.comms]
        self.device: torch.device | None = None

    def observed(self, engine: Engine, device: torch.device) -> Engine:
        """An engine that runs the same passes and notes them."""
        if engine.captured is not None:
            raise UsageError("record() cannot look into CUDA graphs; use a MeshAttention without cuda_graphs")
        self.device = device
        # On CUDA, a wait acts on the stream of the thread that waits; ranks of one thread must not block it.
        has_waiters = len(engine.comms) == 1 and device.type == "cpu"
        ranks = [
            WatchedRank(comm, notes, device, has_waiters) for comm, notes in zip(engine.comms, self.notes, strict=True)
        ]
        return replace(
            engine,
            comms=ranks,
            programs=lambda direction: [
                rank.program(compiled) for rank, compiled in zip(ranks, engine.programs(direction), strict=True)
            ],
            observed=lambda passes: engine.observed(
                [rank.driven(own) for rank, own in zip(ranks, passes, strict=True)]
            ),
        )

    def passes(self) -> tuple[RecordedPass, ...]:
        """Every pass that ran to its end, in order, with the spans of all ranks. All ranks must call this."""
        meeting = Statement(must_match={"operation": "a recording's passes"})
        self.session.agree(*[meeting] * len(self.notes), device=self.device)
        sync_s, machine = time.perf_counter(), _machine()
        ended = [[notes for notes in rank if notes.stop is not None] for rank in self.notes]
        statements = [
            replace(meeting, payload=[asdict(notes.result(machine, sync_s)) for notes in rank]) for rank in ended
        ]
        ranks = [rank.payload for rank in self.session.agree(*statements, device=self.device)]
        counts = set(map(len, ranks))
        if len(counts) > 1:
            raise UsageError(f"ranks recorded {sorted(counts)} passes; record the same calls on every rank")
        return tuple(
            RecordedPass(
                plan=notes.compiled.plan, timeline=_timeline(notes.compiled.plan, [_RankPass(**own) for own in passes])
            )
            for notes, *passes in zip(ended[0], *ranks, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankPass:
    """One pass of one rank, in seconds of the rank's own clock, which showed `sync_s` when all ranks met."""

    rank: int
    machine: str
    sync_s: float
    start_s: float
    stop_s: float
    spans: list[Span]
    sent: dict[int, int]
    flops: int
    peak_nbytes: int


def _machine() -> str:
    """An id of this machine; processes with the same id share a clock."""
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else node()


# From all ranks' spans to a timeline


def _timeline(plan: Plan, passes: Sequence[_RankPass]) -> Timeline:
    is_one_machine = len({rank.machine for rank in passes}) == 1
    shifts = [0.0 if is_one_machine else -rank.sync_s for rank in passes]
    zero_s = min(rank.start_s + shift for rank, shift in zip(passes, shifts, strict=True))
    spans = [
        span._replace(start_s=span.start_s + shift - zero_s, stop_s=span.stop_s + shift - zero_s)
        for rank, shift in zip(passes, shifts, strict=True)
        for span in map(Span._make, rank.spans)
    ]
    sent: dict[LinkClass, int] = {"inside": 0, "between": 0}
    for rank in passes:
        for dest, nbytes in rank.sent.items():
            sent["inside" if rank.machine == passes[int(dest)].machine else "between"] += nbytes
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
    return RankTimes(rank=rank, stop_s=stop_s, compute_s=compute_s, link_s=max(under_way))


def _covered_s(spans: Iterator[Span]) -> float:
    covered_s, free_s = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.start_s):
        covered_s += max(0.0, span.stop_s - max(span.start_s, free_s))
        free_s = max(free_s, span.stop_s)
    return covered_s


# Notes of one rank


Result = TypeVar("Result")
Mark = Any
"""A moment of a clock: a number, or an event of a device whose time is known later."""


class HostClock:
    """The clock of ranks that compute on a CPU, where a call is done when it returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, mark: Mark) -> float:
        """The time of a mark, on the monotonic clock of this machine."""
        return float(mark)


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

    def seconds(self, mark: Mark) -> float:
        mark.synchronize()
        return self.zero_s + float(self.zero.elapsed_time(mark)) * 1e-3


@dataclass
class Note:
    """A span whose times are marks. A transfer has its end, and no `stop` if it was never seen to be done."""

    lane: Lane
    start: Mark
    stop: Mark | None
    step: int
    end: Send | Recv | None = None
    nbytes: int = 0


class PassNotes:
    """One pass of one rank. A pass that was interrupted has no `stop`."""

    def __init__(self, compiled: Compiled, device: torch.device) -> None:
        self.compiled = compiled
        self.clock = DeviceClock(device) if device.type == "cuda" else HostClock()
        self.notes: list[Note] = []
        self.instruction: Instruction | None = None
        self.has_posted = False
        self.start = self.since = self.clock.mark()
        self.stop: Mark | None = None

    def step(self, instruction: Instruction) -> None:
        """The last step is done, and this one begins."""
        self._close("compute")
        self.instruction, self.has_posted = instruction, False

    def wait(self) -> None:
        """The step begins to wait. Before it has posted anything, it had not begun its work."""
        if self.has_posted:
            self._close("compute")

    def resume(self) -> None:
        self._close("wait")

    def end(self) -> None:
        self._close("compute")
        self.stop = self.since

    def _close(self, lane: Lane) -> None:
        """End the span that began at the last mark. Freeing memory does not count as work."""
        now, at = self.clock.mark(), self.instruction
        if at is not None and (lane == "wait" or not isinstance(at.step, Free)):
            self.notes.append(Note(lane, self.since, now, at.index))
        self.since = now

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> list[Note]:
        """Transfers of the current step; parcels are in its order. Sends and receives may be posted apart."""
        assert self.instruction is not None
        now, steps = self.clock.mark(), self.instruction.turn or (self.instruction.step,)
        ends = [*enumerate(map(transfers, steps), self.instruction.index)]
        sent = [(index, send) for index, (sent, _) in ends for send in sent if sends]
        received = [(index, recv) for index, (_, received) in ends for recv in received if recvs]
        posted = [Note("send", now, None, *end, _nbytes(parcel)) for end, parcel in zip(sent, sends, strict=True)]
        posted += [Note("recv", now, None, *end, _nbytes(parcel)) for end, parcel in zip(received, recvs, strict=True)]
        self.notes += posted
        return posted

    def result(self, machine: str, sync_s: float) -> _RankPass:
        compiled = self.compiled
        program = Program(rank=compiled.rank, steps=compiled.steps, peak_nbytes=compiled.peak_nbytes)
        sent: dict[int, int] = defaultdict(int)
        for note in self.notes:
            if isinstance(note.end, Send):
                sent[note.end.dest] += note.nbytes
        return _RankPass(
            rank=compiled.rank,
            machine=machine,
            sync_s=sync_s,
            start_s=self.clock.seconds(self.start),
            stop_s=self.clock.seconds(self.stop),
            spans=self._spans(),
            sent=dict(sent),
            flops=program_flops(compiled.plan, program),
            peak_nbytes=compiled.device_nbytes,
        )

    def _spans(self) -> list[Span]:
        """Compute and wait are without gaps; what took no time is left out, and a step waits in one span."""
        spans: list[Span] = []
        for note in self.notes:
            start = self.clock.seconds(note.start)
            stop = self.clock.seconds(self.stop if note.stop is None else note.stop)
            name = format_step(self.compiled.steps[note.step]) if note.end is None else format_end(note.end)
            last = spans[-1] if spans else None
            if stop <= start and note.end is None:
                continue
            if last and (last.lane, last.stop_s, last.step) == ("wait", start, note.step) and note.lane == "wait":
                spans[-1] = last._replace(stop_s=stop)
                continue
            spans.append(Span(self.compiled.rank, note.lane, start, max(start, stop), name, note.nbytes, note.step))
        return spans


@dataclass
class WatchedRank(Wrapper):
    """One rank's transport, and its program and its pass, which note what they do.

    If it `has_waiters`, each post has a thread that waits for it.
    """

    notes: list[PassNotes]
    device: torch.device
    has_waiters: bool

    def program(self, compiled: Compiled) -> Compiled:
        """The same program, which is noted as it is walked."""
        return replace(compiled, instructions=_Watched(compiled, self))  # type: ignore[arg-type]

    def driven(self, own: Generator[Work, None, Result]) -> Generator[Work, None, Result]:
        """The same generator, which notes how long it waits. Errors thrown in are passed on."""
        reply: BaseException | None = None
        while True:
            try:
                work = next(own) if reply is None else own.throw(reply)
            except StopIteration as stop:
                self.notes[-1].end()
                result: Result = stop.value
                return result
            self.notes[-1].wait()
            reply = None
            try:
                yield work
            except Exception as error:
                reply = error
            self.notes[-1].resume()

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        notes = self.notes[-1]
        posted = notes.post(sends, recvs)
        work = _WatchedWork(super().post(sends, recvs), posted, notes.clock)
        notes.has_posted = True
        return _ThreadedWork(work) if self.has_waiters else work


class _Watched:
    """The instructions of a program; walking them begins a pass."""

    def __init__(self, compiled: Compiled, rank: WatchedRank) -> None:
        self.compiled, self.rank = compiled, rank

    def __iter__(self) -> Iterator[Instruction]:
        notes = PassNotes(self.compiled, self.rank.device)
        self.rank.notes.append(notes)
        for instruction in self.compiled.instructions:
            notes.step(instruction)
            yield instruction

    def __getitem__(self, index: int) -> Instruction:
        return self.compiled.instructions[index]


class _WatchedWork:
    """A post that is noted as done when it is first asked or waited for."""

    def __init__(self, work: Work, posted: Sequence[Note], clock: HostClock | DeviceClock) -> None:
        self.work, self.posted, self.clock = work, posted, clock

    def is_done(self) -> bool:
        return self.work.is_done() and self._seen()

    def wait(self) -> None:
        self.work.wait()
        self._seen()

    def _seen(self) -> bool:
        if self.posted and self.posted[0].stop is None:
            now = self.clock.mark()
            for note in self.posted:
                note.stop = now
        return True


class _ThreadedWork:
    """A post with a thread that waits for it: Gloo reports only to a waiting thread, and a good plan waits late."""

    def __init__(self, work: Work) -> None:
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._wait, args=(work,), daemon=True)
        self.thread.start()

    def _wait(self, work: Work) -> None:
        try:
            work.wait()
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
