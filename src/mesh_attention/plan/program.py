"""The program of one rank: its steps, which transfers are posted together, and what each step waits for.

A *turn* is a set of adjacent sends and receives, posted together. A transport may run its operations strictly in order
(NCCL does, on one stream): a receive that is posted alone would then hold up the send behind it, and two ranks that do
so wait for each other. So receives and the sends that follow them, with nothing but packing between, form one turn. A
receive after a send begins the next turn, and so does a send of something the turn itself receives: later transfers may
depend on what others send in this turn.

A *stop* is a step or a turn. Transfers are only posted; the first step that reads what arrives waits for it. An item
may be freed only when no transfer of it is under way, in or out. The executor waits at these stops, and the simulator
counts the waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mesh_attention.plan.format import format_step
from mesh_attention.plan.steps import Effects, Item, Pack, Recv, Send, Step, effects, in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One rank's steps, and the peak buffer bytes that it states for them, without the inputs of the call."""

    rank: int
    steps: tuple[Step, ...]
    peak_nbytes: int

    def __str__(self) -> str:
        lines = (f"program {self.rank} peak {self.peak_nbytes}", *(f"  {format_step(step)}" for step in self.steps))
        return "\n".join(lines)


class Stop(NamedTuple):
    """A step, or the steps of a turn. It waits for the receives of `arrivals` and the sends of `departures`."""

    span: range
    is_turn: bool
    arrivals: tuple[Item, ...]
    departures: tuple[Item, ...]


def stops(steps: Sequence[Step], *, done: Sequence[Effects] | None = None) -> list[Stop]:
    """The stops of a program, in order. `done` are the effects, if known."""
    every = list(map(effects, steps)) if done is None else done
    turn_at = {turn.start: turn for turn in turns(steps)}
    arriving: set[Item] = set()
    leaving: set[Item] = set()
    program_stops = []
    index = 0
    while index < len(steps):
        span = turn_at.get(index, range(index, index + 1))
        here = steps[span.start : span.stop]
        changes = every[span.start : span.stop]
        # An item that is freed unread is waited for too: its buffer must not go while data may still arrive in it.
        arrivals = tuple([i for change in changes for i in (*change.reads, *change.frees) if i in arriving])
        departures = tuple([item for change in changes for item in change.frees if item in leaving])
        arriving.difference_update(arrivals)
        leaving.difference_update(departures)
        for step in here:
            coming, going = in_flight(step)
            arriving.update(coming)
            leaving.update(going)
        program_stops.append(Stop(span, index in turn_at, tuple(dict.fromkeys(arrivals)), departures))
        index = span.stop
    return program_stops


def turns(steps: Sequence[Step]) -> list[range]:
    """The indices of each turn. A turn begins and ends with a send or a receive."""
    closed: list[range] = []
    received: set[Item] = set()
    start = stop = None
    has_sent = False
    for index, step in enumerate(steps):
        if (isinstance(step, Send) and step.item in received) or (isinstance(step, Recv) and has_sent):
            closed, start, received = _closed(closed, start, stop), None, set()
        if isinstance(step, Send | Recv):
            start, stop = index if start is None else start, index + 1
            has_sent = isinstance(step, Send)
            if isinstance(step, Recv):
                received.add(step.item)
        elif not isinstance(step, Pack):
            closed, start, received, has_sent = _closed(closed, start, stop), None, set(), False
    return _closed(closed, start, stop)


def _closed(turns: list[range], start: int | None, stop: int | None) -> list[range]:
    return turns if start is None or stop is None else [*turns, range(start, stop)]
