"""Turns: neighbouring sends and receives of a program, posted at once.

A transport may run what it is given strictly in order (NCCL does, on one stream): a receive that is posted alone would then
hold up the send behind it, and two ranks that do so wait for each other. So the posts that stand side by side in a program,
with nothing but packing between them, form one turn; a send of something that the turn itself receives begins the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from mesh_attention.plan.steps import Item, Pack, Recv, Send, Step


def turns(steps: Sequence[Step]) -> list[range]:
    """The indices of each turn. A turn begins and ends with a send or a receive."""
    found: list[range] = []
    received: set[Item] = set()
    start = stop = None
    for index, step in enumerate(steps):
        if isinstance(step, Send) and step.item in received:
            found, start, received = _closed(found, start, stop), None, set()
        if isinstance(step, Send | Recv):
            start, stop = index if start is None else start, index + 1
            if isinstance(step, Recv):
                received.add(step.item)
        elif not isinstance(step, Pack):
            found, start, received = _closed(found, start, stop), None, set()
    return _closed(found, start, stop)


def _closed(found: list[range], start: int | None, stop: int | None) -> list[range]:
    return found if start is None or stop is None else [*found, range(start, stop)]
