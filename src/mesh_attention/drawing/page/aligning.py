"""Which step of a program a span of a timeline belongs to.

A simulation that runs all ranks at once names what ranks compute after the first one's steps, and a measurement may
name things its own way; so names are tried first, and order and shape decide where they fail. A span that fits no step
keeps its own name.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence

from mesh_attention.plan.steps import Attend, Recv, Step, transfers
from mesh_attention.plan.text import format_step
from mesh_attention.plan.waits import stops
from mesh_attention.timeline import Span

_TRANSFER = re.compile(r"(?:send |recv )?([a-z]+)\d+(?:[@/]\d+)? (?:from|to) (\d+)")


def steps_of_spans(spans: Sequence[Span], own: Sequence[Step], first: Sequence[Step]) -> list[int | None]:
    """For each span of the compute and wait lanes of a rank, in order of time, the index of its step.

    `own` are the rank's steps, `first` those of the first rank.
    """
    places = list(_main_steps(own))
    for steps in (own, first):
        named = [format_step(steps[at]) for at in (places if steps is own else _main_steps(steps))]
        found = _in_order(spans, named)
        if len(named) == len(places) and None not in found:
            return [places[at] for at in found if at is not None]
    shapes = [_shape(format_step(own[at])) for at in places]
    renamed = [span._replace(name=_shape(span.name)) for span in spans]
    return [None if at is None else places[at] for at in _in_order(renamed, shapes)]


def transfers_of_spans(spans: Iterable[Span], steps: Sequence[Step]) -> list[int | None]:
    """For each span of the send (or recv) lane of a rank, the index of its transfer among all the program's sends (or
    receives). Transfers of one kind with one peer follow each other as the program posts them."""
    lanes: dict[str, dict[tuple[str, int], deque[int]]] = {"send": defaultdict(deque), "recv": defaultdict(deque)}
    sends = [send for step in steps for send in transfers(step)[0]]
    recvs = [recv for step in steps for recv in transfers(step)[1]]
    for index, send in enumerate(sends):
        lanes["send"][send.item.kind, send.dest].append(index)
    for index, recv in enumerate(recvs):
        lanes["recv"][recv.item.kind, recv.source].append(index)
    found: list[int | None] = []
    for span in spans:
        named = _TRANSFER.fullmatch(span.name)
        waiting = lanes[span.lane][named[1], int(named[2])] if named else None
        found.append(waiting.popleft() if waiting else None)
    return found


def _main_steps(steps: Sequence[Step]) -> Iterator[int]:
    """One a stop: the first attend or receive of a turn, else its first step."""
    for stop in stops(steps):
        yield next((at for at in stop.span if isinstance(steps[at], Attend | Recv)), stop.span.start)


def _in_order(spans: Sequence[Span], texts: Sequence[str]) -> list[int | None]:
    """Where each span's name comes among the texts. A stop is waited for, computed, and, if it holds, waited for."""
    found: list[int | None] = []
    at, has_computed = -1, False
    for span in spans:
        is_same = at >= 0 and texts[at] == span.name and not (has_computed and not _may_follow(span))
        if not is_same:
            later = next((i for i in range(at + 1, len(texts)) if texts[i] == span.name), None)
            if later is None:
                found.append(None)
                continue
            at, has_computed = later, False
        has_computed = has_computed or span.lane == "compute"
        found.append(at)
    return found


_HOLDING = ("gather ", "reduce ", "exchange ")


def _may_follow(span: Span) -> bool:
    """Whether a span may belong to a stop that has been computed: only a wait, of those that hold."""
    return span.lane == "wait" and span.name.startswith(_HOLDING)


def _shape(text: str) -> str:
    return re.sub(r"\d+", "#", text)
