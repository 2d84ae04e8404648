"""Notes of a pass as it runs: when each step begins, when it waits, what it posts and when that was seen to be done.

The executor needs no change for this. It walks instructions that note when they are read, posts to a transport that
notes its parcels, and is driven through a generator that notes how long it waits. `recorder` makes spans of the notes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch

from mesh_attention.comm.base import Comm, Parcel, Sharing, Work
from mesh_attention.execution.compiled import Compiled, Instruction
from mesh_attention.plan.steps import Recv, Send, transfers

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
class Notes:
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
        self.passes: list[Notes] = []

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
        self.passes.append(Notes(compiled, clock_of(device), has_waiters))

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
