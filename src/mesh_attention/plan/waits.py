"""How a program is walked: one stop a step or a turn of posts, and what must be over before it.

A receive is only posted; whoever reads what it brings waits for it. What is freed may not be on its way any more, in or
out. The executor waits at these stops, and the simulator counts what it waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mesh_attention.plan.steps import Item, Recv, Send, Step, effects
from mesh_attention.plan.turns import turns


class Stop(NamedTuple):
    """A step, or the steps of a turn. `arrivals` must be here before it, sends of `departures` must be over."""

    span: range
    is_turn: bool
    arrivals: tuple[Item, ...]
    departures: tuple[Item, ...]


def stops(steps: Sequence[Step]) -> list[Stop]:
    """All of them, in order."""
    turn_at = {turn.start: turn for turn in turns(steps)}
    in_flight: set[Item] = set()
    leaving: set[Item] = set()
    found = []
    index = 0
    while index < len(steps):
        span = turn_at.get(index, range(index, index + 1))
        here = steps[span.start : span.stop]
        done = [effects(step) for step in here]
        # What is freed unread is waited for as well: its buffer must not go while something may land in it.
        arrivals = tuple(i for one in done for i in (*one.reads, *one.frees) if i in in_flight)
        departures = tuple(item for one in done for item in one.frees if item in leaving)
        in_flight.difference_update(arrivals)
        leaving.difference_update(departures)
        in_flight.update(step.item for step in here if isinstance(step, Recv))
        leaving.update(step.item for step in here if isinstance(step, Send))
        found.append(Stop(span, index in turn_at, tuple(dict.fromkeys(arrivals)), departures))
        index = span.stop
    return found
