"""Turns: neighbouring sends and receives of a program, posted at once.

A transport may run its operations strictly in order (NCCL does, on one stream): a receive that is posted alone would
then hold up the send behind it, and two ranks that do so wait for each other. So receives and the sends that follow
them, with nothing but packing between, form one turn. A receive after a send begins the next turn, and so does a send
of something the turn itself receives: later transfers may depend on what others send in this turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from mesh_attention.plan.steps import Item, Pack, Recv, Send, Step


def turns(steps: Sequence[Step]) -> list[range]:
    """The indices of each turn. A turn begins and ends with a send or a receive."""
    found: list[range] = []
    received: set[Item] = set()
    start = stop = None
    has_sent = False
    for index, step in enumerate(steps):
        if (isinstance(step, Send) and step.item in received) or (isinstance(step, Recv) and has_sent):
            found, start, received = _closed(found, start, stop), None, set()
        if isinstance(step, Send | Recv):
            start, stop = index if start is None else start, index + 1
            has_sent = isinstance(step, Send)
            if isinstance(step, Recv):
                received.add(step.item)
        elif not isinstance(step, Pack):
            found, start, received, has_sent = _closed(found, start, stop), None, set(), False
    return _closed(found, start, stop)


def _closed(found: list[range], start: int | None, stop: int | None) -> list[range]:
    return found if start is None or stop is None else [*found, range(start, stop)]
