"""The stops of a program: one for each step or turn of posts, and the transfers that must be over before it.

A receive is only posted; the first step that reads the item waits for it. An item may be freed only when no transfer of
it is under way, in or out. The executor waits at these stops, and the simulator counts the waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mesh_attention.plan.steps import Item, Recv, Send, Step, effects
from mesh_attention.plan.turns import turns


class Stop(NamedTuple):
    """A step, or the steps of a turn. It waits for the receives of `arrivals` and the sends of `departures`."""

    span: range
    is_turn: bool
    arrivals: tuple[Item, ...]
    departures: tuple[Item, ...]


def stops(steps: Sequence[Step]) -> list[Stop]:
    """All stops of a program, in order."""
    turn_at = {turn.start: turn for turn in turns(steps)}
    in_flight: set[Item] = set()
    leaving: set[Item] = set()
    found = []
    index = 0
    while index < len(steps):
        span = turn_at.get(index, range(index, index + 1))
        here = steps[span.start : span.stop]
        done = [effects(step) for step in here]
        # An item that is freed unread is waited for too: its buffer must not go while data may still arrive in it.
        arrivals = tuple(i for one in done for i in (*one.reads, *one.frees) if i in in_flight)
        departures = tuple(item for one in done for item in one.frees if item in leaving)
        in_flight.difference_update(arrivals)
        leaving.difference_update(departures)
        in_flight.update(step.item for step in here if isinstance(step, Recv))
        leaving.update(step.item for step in here if isinstance(step, Send))
        found.append(Stop(span, index in turn_at, tuple(dict.fromkeys(arrivals)), departures))
        index = span.stop
    return found
