"""Programs in offsets: ranks that do the same with other peers have one text between them, so pages stay small.

A number of the text is then an offset: in the ring of the Q group or the KV group, as the kind of the item says, or,
in an exchange, in the Ulysses group. The scripts turn offsets back into numbers; a program that does not fit this
(say, one edited by hand) is written as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from typing_extensions import assert_never

from mesh_attention.plan import steps
from mesh_attention.plan.assignment import Assignment, Axis
from mesh_attention.plan.program import Program
from mesh_attention.plan.text import format_step

AS_IT_IS = "="
"""First letter of a program's text whose numbers are not offsets."""


class _NotRelativeError(Exception):
    """A number is not an offset of this rank."""


def program_text(assignment: Assignment, program: Program) -> str:
    """One line for each step, in offsets if every number has one."""
    view = _View(assignment, program.rank)
    try:
        return "\n".join(view.text(step) for step in program.steps)
    except _NotRelativeError:
        return AS_IT_IS + "\n".join(map(format_step, program.steps))


@dataclass(frozen=True)
class _View:
    """The grid as one rank sees it."""

    assignment: Assignment
    rank: int

    @property
    def place(self) -> int:
        return self.assignment.place(self.rank)

    @cached_property
    def offsets(self) -> dict[Axis, dict[int, int]]:
        axes: tuple[Axis, ...] = ("row", "col")
        return {
            axis: {self.assignment.peer(axis, self.place, k): k for k in range(self.assignment.size(axis))}
            for axis in axes
        }

    def text(self, step: steps.Step) -> str:
        match step:
            case steps.Recv() | steps.Send():
                return format_step(self._transfer(step))
            case steps.Collective():
                return self._collective(step)
            case steps.Exchange():
                return self._exchange(step)
            case steps.Attend(rows, cols, grads):
                return format_step(steps.Attend(self._rising(rows), self._rising(cols), self._rising(grads)))
            case steps.Pack(before, after) | steps.Unpack(before, after):
                return format_step(type(step)(self._item(before), self._item(after)))
            case steps.Merge(item) | steps.Clear(item) | steps.Finish(item) | steps.Free(item):
                return format_step(type(step)(self._item(item)))
            case _:
                assert_never(step)

    def _transfer(self, step: steps.Recv | steps.Send) -> steps.Recv | steps.Send:
        item = self._item(step.item)
        if isinstance(step, steps.Recv):
            return steps.Recv(item, self._peer(step.item.kind, step.source))
        return steps.Send(item, self._peer(step.item.kind, step.dest))

    def _collective(self, step: steps.Collective) -> str:
        transfers: tuple[steps.Send | steps.Recv, ...] = (*step.sends, *step.recvs)
        axis = steps.AXIS_OF[transfers[0].item.kind] if transfers else "row"
        places = self.assignment.group(axis, self.place)
        head_slice = self.assignment.head_slice(self.rank)
        if step.group != tuple(self.assignment.rank(place, head_slice=head_slice) for place in places):
            raise _NotRelativeError
        moved = "; ".join(format_step(self._transfer(transfer)) for transfer in transfers)
        return f"{step.op} over {axis}: {moved}".rstrip()

    def _exchange(self, step: steps.Exchange) -> str:
        if step.group != tuple(self.assignment.ulysses_group(self.rank)):
            raise _NotRelativeError
        sends = tuple(steps.Send(self._piece(send.item), self._distance(send.dest)) for send in step.sends)
        recvs = tuple(steps.Recv(self._piece(recv.item), self._distance(recv.source)) for recv in step.recvs)
        return format_step(steps.Exchange(self._item(step.before), self._item(step.after), (0,), sends, recvs))

    # Numbers

    def _rising(self, items: tuple[steps.Item, ...]) -> tuple[steps.Item, ...]:
        """The items by offset. They must be in order of shard, so that the page can restore that order."""
        if any(a.shard > b.shard for a, b in pairwise(items)):
            raise _NotRelativeError
        return tuple(sorted(map(self._item, items), key=lambda item: item.shard))

    def _item(self, item: steps.Item) -> steps.Item:
        if item.form in ("home", "staged"):
            return item._replace(shard=self._own(item.shard))
        if item.form == "piece":
            raise _NotRelativeError
        source = None if item.source is None else self._peer(item.kind, item.source)
        return item._replace(shard=self._offset(item.kind, item.shard), source=source)

    def _piece(self, item: steps.Item) -> steps.Item:
        if item.form != "piece" or item.source is None:
            raise _NotRelativeError
        turned = (item.source - self.assignment.head_slice(self.rank)) % self.assignment.ulysses
        return item._replace(shard=self._distance(item.shard), source=turned)

    def _own(self, rank: int) -> int:
        if rank != self.rank:
            raise _NotRelativeError
        return 0

    def _offset(self, kind: steps.Kind, place: int) -> int:
        offset = self.offsets[steps.AXIS_OF[kind]].get(place)
        if offset is None:
            raise _NotRelativeError
        return offset

    def _peer(self, kind: steps.Kind, rank: int) -> int:
        """The offset of a rank that computes the same heads."""
        if self.assignment.head_slice(rank) != self.assignment.head_slice(self.rank):
            raise _NotRelativeError
        return self._offset(kind, self.assignment.place(rank))

    def _distance(self, rank: int) -> int:
        """The number of ranks by which a rank of the Ulysses group is ahead of this one."""
        group = self.assignment.ulysses_group(self.rank)
        if rank not in group:
            raise _NotRelativeError
        return (rank - self.rank) % len(group)
