"""Mutations of plans: random changes of steps, moves and fields, many of them made on both ends of a transfer.

A mutation that breaks a plan in one place is easy to notice. Those that keep the plan consistent, and change its
meaning, are the ones that test the rules, so most kinds here are aimed at one rule and respect the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from itertools import pairwise
from random import Random
from typing import Any

from mesh_attention.masks import Mask, causal, full, window
from mesh_attention.plan import steps
from mesh_attention.plan.assignment import Assignment, Tile, divisors, tiles_of
from mesh_attention.plan.buffer_sizes import held_nbytes
from mesh_attention.plan.layout import (
    LAYOUTS,
    Cached,
    Chunks,
    Contiguous,
    Layout,
    Listed,
    Past,
    Replicated,
    Striped,
    Undivided,
    Zigzag,
)
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.program import Program
from mesh_attention.plan.schedule import KEEPABLE, ROUTES, Fetch, GroupMove, Meet, Return
from mesh_attention.plan.steps import INPUTS, KINDS, OUTPUTS, Item, Step, effects

Programs = list[list[Any]]
HUGE = 1 << 40
"""A stated peak that no small plan reaches: mutations are judged by the other rules."""
MOST_TRIES = 12


def mutated(plan: Plan, rng: Random) -> Plan:
    """The plan with one to three random changes; the constructors may refuse it with a `UsageError`."""
    if rng.random() < 0.1:
        plan = _other_fields(plan, rng)
    if plan.programs is None and rng.random() < 0.1:
        return _other_moves(plan, rng)
    programs = [list(program.steps) for program in _programs(plan)]
    edit = _Edit(plan, programs, rng)
    wanted = rng.choice((1, 1, 1, 2, 2, 3))
    edits = OVER_CACHE if plan.matrix.is_over_cache else EDITS
    for _ in range(MOST_TRIES):  # an edit may find nothing to change
        before = [list(program) for program in programs]
        rng.choice(edits)(edit)
        wanted -= programs != before
        if not wanted:
            break
    if rng.random() < 0.03:
        insert_nonsense(edit)  # last: the others expect steps that make sense
    return _with_steps(plan, programs, rng)


def _with_steps(plan: Plan, programs: Programs, rng: Random) -> Plan:
    peaks = [HUGE] * len(programs)
    if rng.random() < 0.2:
        peaks = [_peak(plan, rank, program) - (rng.random() < 0.1) for rank, program in enumerate(programs)]
    made = zip(_programs(plan), programs, peaks, strict=True)
    return plan.with_programs(tuple(replace(p, steps=tuple(s), peak_nbytes=peak) for p, s, peak in made))


@lru_cache(maxsize=8)
def _programs(plan: Plan) -> tuple[Program, ...]:
    return tuple(plan.all_programs())


def _peak(plan: Plan, rank: int, program: list[Any]) -> int:
    kept = plan.matrix.kept(plan.schedule.keep, rank)
    try:
        held = held_nbytes(program, plan.matrix, kept=kept, has_kept=plan.direction == "backward")
    except Exception:  # steps that make no sense have no size
        return HUGE
    return max(held, default=0)


class _Edit:
    """All programs of a plan, and what a mutation may draw."""

    def __init__(self, plan: Plan, programs: Programs, rng: Random) -> None:
        self.plan, self.programs, self.rng = plan, programs, rng
        self.ranks, self.places = plan.problem.ranks, plan.assignment.places

    def rank(self) -> int:
        return self.rng.randrange(self.ranks)

    def heads(self, rank: int) -> int:
        return self.plan.assignment.head_slice(rank)

    def at(self, *kinds: type) -> tuple[int, int] | None:
        """The rank and index of a random step, of these kinds if any are given."""
        found = [
            (rank, index)
            for rank, program in enumerate(self.programs)
            for index, step in enumerate(program)
            if not kinds or isinstance(step, kinds)
        ]
        return self.rng.choice(found) if found else None

    def items(self, program: Sequence[Any] | None = None) -> list[Item]:
        """Those of a program, or of all."""
        done = (effects(s) for p in (self.programs if program is None else [program]) for s in p if _is_step(s))
        return sorted({item for one in done for items in one for item in items}, key=str)

    def item(self) -> Item:
        """An item of the plan, perhaps with a field changed."""
        found = self.items()
        item = self.rng.choice(found) if found else Item("q", 0)
        return self.other(item) if self.rng.random() < 0.3 else item

    def other(self, item: Item) -> Item:
        rng = self.rng
        kinds = INPUTS[self.plan.direction] + OUTPUTS[self.plan.direction]
        match rng.randrange(4):
            case 0:
                return item._replace(kind=rng.choice(kinds if rng.random() < 0.9 else KINDS))
            case 1:
                return item._replace(shard=rng.randrange(max(self.places, 1) + (rng.random() < 0.1)))
            case 2:
                forms = (
                    ("whole", "home", "total")
                    if self.plan.matrix.is_over_cache
                    else ("whole", "running", "home", "piece")
                )
                return item._replace(form=rng.choice(forms))
            case _:
                return item._replace(source=rng.choice((None, *range(self.ranks))))

    def pair(self) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """Both ends of a random transfer: the send's rank and index, then the receive's."""
        at = self.at(steps.Send)
        if at is None:
            return None
        rank, index = at
        send = self.programs[rank][index]
        if not isinstance(send.dest, int) or not 0 <= send.dest < self.ranks:
            return None
        for other, step in enumerate(self.programs[send.dest]):
            if isinstance(step, steps.Recv) and step.source == rank and step.item[:3] == send.item[:3]:
                return at, (send.dest, other)
        return None

    def rename(self, rank: int, names: dict[Item, Item]) -> None:
        self.programs[rank] = [renamed(step, names) for step in self.programs[rank]]


_STEPS = (
    steps.Recv,
    steps.Send,
    steps.Collective,
    steps.Exchange,
    steps.Pack,
    steps.Attend,
    steps.Decode,
    steps.Combine,
    steps.Merge,
    steps.Clear,
    steps.Finish,
    steps.Free,
)


def _is_step(step: Any) -> bool:
    return isinstance(step, _STEPS)


def renamed(step: Any, names: dict[Item, Item]) -> Any:
    """The step with items replaced by others."""
    match step:
        case steps.Recv(item, peer):
            return steps.Recv(names.get(item, item), peer)
        case steps.Send(item, peer):
            return steps.Send(names.get(item, item), peer)
        case steps.Collective(op, group, sends, recvs):
            return steps.Collective(op, group, *(tuple(renamed(e, names) for e in side) for side in (sends, recvs)))
        case steps.Exchange(before, after, group, sends, recvs):
            ends = (tuple(renamed(end, names) for end in side) for side in (sends, recvs))
            return steps.Exchange(names.get(before, before), names.get(after, after), group, *ends)
        case steps.Pack(before, after):
            return steps.Pack(names.get(before, before), names.get(after, after))
        case steps.Attend(rows, cols, grads):
            return steps.Attend(*(tuple(names.get(i, i) for i in side) for side in (rows, cols, grads)))
        case steps.Decode(rows, cache, partials):
            rows, partials = (tuple(names.get(i, i) for i in side) for side in (rows, partials))
            return steps.Decode(rows, names.get(cache, cache), partials)
        case steps.Combine(partials, total):
            return steps.Combine(tuple(names.get(i, i) for i in partials), names.get(total, total))
        case steps.Merge(item) | steps.Clear(item) | steps.Finish(item) | steps.Free(item):
            return type(step)(names.get(item, item))
        case _:
            return step


# One step


def swap(edit: _Edit) -> None:
    """Two steps of one rank: neighbours, any two, or two sends or receives."""
    kinds = edit.rng.choice(((), (), (steps.Send,), (steps.Recv,)))
    if at := edit.at(*kinds):
        program, one = edit.programs[at[0]], at[1]
        same = [index for index, step in enumerate(program) if not kinds or isinstance(step, kinds)]
        other = edit.rng.choice((min(one + 1, len(program) - 1), edit.rng.choice(same)))
        program[one], program[other] = program[other], program[one]


def drop(edit: _Edit) -> None:
    if at := edit.at():
        del edit.programs[at[0]][at[1]]


def duplicate(edit: _Edit) -> None:
    if at := edit.at():
        program = edit.programs[at[0]]
        program.insert(edit.rng.choice((at[1], edit.rng.randrange(len(program) + 1))), program[at[1]])


def move(edit: _Edit) -> None:
    """Move a step a little or far, or to another rank. Receives, frees and the like are often moved without harm."""
    rng = edit.rng
    common = (steps.Recv, steps.Send, steps.Free, steps.Finish, steps.Merge, steps.Pack, steps.Attend)
    if at := edit.at(*rng.choice(((), *((kind,) for kind in common)))):
        step = edit.programs[at[0]].pop(at[1])
        program = edit.programs[at[0] if rng.random() < 0.75 else edit.rank()]
        near = min(len(program), max(0, at[1] + rng.randint(-8, 8)))
        program.insert(rng.choice((near, near, rng.randrange(len(program) + 1))), step)


def change_a_peer(edit: _Edit) -> None:
    if at := edit.at(steps.Send, steps.Recv):
        step, peer = edit.programs[at[0]][at[1]], edit.rng.randrange(-1, edit.ranks + 1)
        field = {"dest": peer} if isinstance(step, steps.Send) else {"source": peer}
        edit.programs[at[0]][at[1]] = replace(step, **field)


def insert_a_step(edit: _Edit) -> None:
    """A step of the plan with another item, or one that goes with an item."""
    rng, program = edit.rng, edit.programs[edit.rank()]
    item, at, ranks = edit.item(), edit.at(*_STEPS), range(edit.ranks)
    own, whole, total = (item._replace(form=form, source=None) for form in ("home", "whole", "running"))
    made: list[Step] = [steps.Clear(total), steps.Finish(own), steps.Finish(whole), steps.Merge(item), steps.Free(item)]
    made += [steps.Recv(item, rng.choice(ranks)), steps.Send(item, rng.choice(ranks)), steps.Pack(own, whole)]
    made += [
        steps.Pack(whole, item),
        steps.Attend((edit.item(),), (item,)),
        steps.Collective("gather", (*ranks,), (), ()),
    ]
    made += [steps.Decode((edit.item(),), item, (edit.item(),))]
    made += [steps.Combine(tuple(item._replace(source=rank) for rank in ranks), edit.item())]
    if at is not None:
        step = edit.programs[at[0]][at[1]]
        made += [renamed(step, {old: item}) for old in edit.items([step])]
    program.insert(rng.randrange(len(program) + 1), rng.choice(made))


NONSENSE: tuple[Any, ...] = (
    *(None, -1, 10**6, 10**30, "1", 1.0, True, "q0", "free kv0", "scatter", (), (None,), ("q", 0, "whole", None)),
    *(Item("x", 0), Item("q", -1), Item("o", 0, "lost"), Item("o", 0, "whole", True), [Item("q", 0)]),  # type: ignore[arg-type]
)


def insert_nonsense(edit: _Edit) -> None:
    """A step with a field that makes no sense, or no step at all."""
    rng, program, at = edit.rng, edit.programs[edit.rank()], edit.at(*_STEPS)
    made = rng.choice(NONSENSE)
    if at is not None and rng.random() < 0.9:
        step = edit.programs[at[0]][at[1]]
        made = replace(step, **{rng.choice(fields(step)).name: made})
    program.insert(rng.randrange(len(program) + 1), made)


# Several steps at once, so that most rules still hold


def rename(edit: _Edit) -> None:
    """Another name for an item: in one step, wherever one rank speaks of it, or everywhere. Partials are preferred."""
    if at := edit.at(*_STEPS):
        (rank, index), scope = at, edit.rng.choice(("step", "rank", "rank", "all"))
        program = edit.programs[rank]
        found = edit.items([program[index]] if scope == "step" else program) or [edit.item()]
        item = edit.rng.choice([item for item in found if item.source is not None] or found)
        names = {item: edit.other(item)}
        if scope == "step":
            program[index] = renamed(program[index], names)
        for other in {"step": (), "rank": (rank,), "all": range(edit.ranks)}[scope]:
            edit.rename(other, names)


def relabel_a_partial(edit: _Edit) -> None:
    """A partial under another sender's name, and merged once more."""
    if at := edit.at(steps.Merge):
        partial = edit.programs[at[0]][at[1]].partial
        label = partial._replace(source=edit.rng.choice((None, *range(edit.ranks))))
        edit.rename(at[0], {partial: label})
        edit.programs[at[0]].insert(at[1], steps.Merge(label))


def exchange_two_names(edit: _Edit) -> None:
    """Two items of one kind change places: in one program, in the sends and receives alone, or everywhere."""
    found = edit.items()
    kind = edit.rng.choice(KINDS)
    same = [item for item in found if item.kind == kind]
    if len(same) < 2:
        return
    one, two = edit.rng.sample(same, 2)
    names = {one: two, two: one}
    ranks = [edit.rank()] if edit.rng.random() < 0.7 else range(edit.ranks)
    attends, merges = (steps.Attend, steps.Decode), (steps.Merge, steps.Combine, steps.Free)
    kinds = edit.rng.choice(((steps.Send, steps.Recv, steps.Collective), attends, merges, _STEPS))
    for rank in ranks:
        edit.programs[rank] = [renamed(s, names) if isinstance(s, kinds) else s for s in edit.programs[rank]]


def drop_a_transfer(edit: _Edit) -> None:
    if pair := edit.pair():
        (rank, index), (other, at) = pair
        del edit.programs[rank][index]
        del edit.programs[other][at]


def repeat_a_transfer(edit: _Edit) -> None:
    """Send and receive something again, perhaps after freeing it."""
    if pair := edit.pair():
        (rank, index), (other, at) = pair
        send, recv = edit.programs[rank][index], edit.programs[other][at]
        edit.programs[rank].insert(index, send)
        frees = [i for i, step in enumerate(edit.programs[other]) if step == steps.Free(recv.item)]
        where = frees[0] + 1 if frees and edit.rng.random() < 0.7 else at
        again = [recv, steps.Merge(recv.item)] if recv.item.source is not None and edit.rng.random() < 0.5 else [recv]
        if where != at:
            again.append(steps.Free(recv.item))
        edit.programs[other][where:where] = again


def move_a_transfer(edit: _Edit) -> None:
    """Make a transfer earlier or later at both ends, which keeps the order between the two ranks or not."""
    if pair := edit.pair():
        for rank, index in pair:
            step = edit.programs[rank].pop(index)
            edit.programs[rank].insert(max(0, index + edit.rng.choice((-6, -3, -2, -1, 1, 2, 3, 6))), step)


def relay(edit: _Edit) -> None:
    """A shard goes to its receiver by way of a third rank, or from another holder."""
    pair = edit.pair()
    if pair is None or edit.ranks < 3:
        return
    (rank, index), (dest, at) = pair
    item = edit.programs[rank][index].item
    third = edit.rng.choice([other for other in range(edit.ranks) if other not in (rank, dest)])
    edit.programs[dest][at] = replace(edit.programs[dest][at], source=third)
    held = [i for i, s in enumerate(edit.programs[third]) if isinstance(s, _STEPS) and item in effects(s).writes]
    if held:
        del edit.programs[rank][index]
        edit.programs[third].insert(held[0] + 1, steps.Send(item, dest))
    else:
        edit.programs[rank][index] = steps.Send(item, third)
        passing = [steps.Recv(item, rank), steps.Send(item, dest), steps.Free(item)]
        where = edit.rng.randrange(len(edit.programs[third]) + 1)
        edit.programs[third][where:where] = passing


def split_a_turn(edit: _Edit) -> None:
    """Put a harmless step between transfers that were posted together."""
    if at := edit.at(steps.Send, steps.Recv):
        program = edit.programs[at[0]]
        others = [i for i, step in enumerate(program) if isinstance(step, steps.Free | steps.Attend | steps.Pack)]
        if others:
            index = edit.rng.choice(others)
            step = program.pop(index)
            program.insert(at[1] - (index < at[1]) + edit.rng.randrange(2), step)


def delay_all_receives(edit: _Edit) -> None:
    """One rank posts every receive just before its item is first read."""
    rank = edit.rank()
    program = edit.programs[rank]
    for recv in [step for step in program if isinstance(step, steps.Recv)]:
        program.remove(recv)
        reads = (i for i, s in enumerate(program) if isinstance(s, _STEPS) and recv.item in effects(s).reads)
        program.insert(next(reads, len(program)), recv)


def free_at_once(edit: _Edit) -> None:
    """Free sent items right after their last use, so that the rank waits for its sends there."""
    rank = edit.rank() if edit.rng.random() < 0.5 else None
    for program in edit.programs if rank is None else [edit.programs[rank]]:
        for free in [step for step in program if isinstance(step, steps.Free)]:
            program.remove(free)
            uses = [
                i for i, s in enumerate(program) if isinstance(s, _STEPS) and any(free.item in e for e in effects(s))
            ]
            program.insert(uses[-1] + 1 if uses else 0, free)


def cut_an_attend(edit: _Edit) -> None:
    if at := edit.at(steps.Attend):
        program, step = edit.programs[at[0]], edit.programs[at[0]][at[1]]
        if len(step.rows) > 1:
            parts = [replace(step, rows=(r,), grads=step.grads[i : i + 1]) for i, r in enumerate(step.rows)]
        else:
            parts = [replace(step, cols=(col,)) for col in step.cols]
        edit.rng.shuffle(parts)
        program[at[1] : at[1] + 1] = parts


def join_attends(edit: _Edit) -> None:
    """Two attends of one rank with the same rows, or the same columns, become one."""
    rank = edit.rank()
    program = edit.programs[rank]
    found = [index for index, step in enumerate(program) if isinstance(step, steps.Attend)]
    if len(found) < 2:
        return
    first, second = sorted(edit.rng.sample(found, 2))
    one, two = program[first], program[second]
    joined = steps.Attend(
        tuple(dict.fromkeys(one.rows + two.rows)),
        tuple(dict.fromkeys(one.cols + two.cols)),
        tuple(dict.fromkeys(one.grads + two.grads)),
    )
    program[second] = joined
    del program[first]


def reorder_an_attend(edit: _Edit) -> None:
    if at := edit.at(steps.Attend):
        step = edit.programs[at[0]][at[1]]
        order = edit.rng.sample(range(len(step.rows)), len(step.rows))
        grads = step.grads
        if edit.rng.random() < 0.7 and len(grads) == len(step.rows):
            grads = tuple(grads[index] for index in order)
        cols = tuple(edit.rng.sample(step.cols, len(step.cols)))
        edit.programs[at[0]][at[1]] = steps.Attend(tuple(step.rows[index] for index in order), cols, grads)


def hand_an_attend_over(edit: _Edit) -> None:
    """Another rank attends a block; it may or may not have what that takes."""
    if at := edit.at(steps.Attend):
        step = edit.programs[at[0]].pop(at[1])
        names = {item: item._replace(form="whole") for item in (*step.rows, *step.cols, *step.grads)}
        program = edit.programs[edit.rank()]
        program.insert(edit.rng.randrange(len(program) + 1), renamed(step, names))


def attend_elsewhere(edit: _Edit) -> None:
    """Another rank is sent what an attend takes, attends it, and sends its partials to their homes."""
    at = edit.at(steps.Attend)
    others = [r for r in range(edit.ranks) if at and r != at[0] and edit.heads(r) == edit.heads(at[0])]
    if at is None or not others:
        return
    rank, other = at[0], edit.rng.choice(others)
    attend = edit.programs[rank][at[1]]
    given: list[Any] = []
    wanted = [item._replace(form="whole") for item in (*attend.rows, *attend.cols, *attend.grads)]
    for item, whole in zip((*attend.rows, *attend.cols, *attend.grads), wanted, strict=True):
        send = steps.Send(whole, other)
        given += [steps.Pack(item, whole), send, steps.Free(whole)] if item.form == "home" else [send]
    edit.programs[rank][at[1] : at[1] + 1] = given
    whole_attend = renamed(
        attend, {item: item._replace(form="whole") for item in (*attend.rows, *attend.cols, *attend.grads)}
    )
    made: list[Any] = [*(steps.Recv(item, rank) for item in wanted), whole_attend, *map(steps.Free, wanted)]
    program = edit.programs[other]
    sums = set(effects(whole_attend).adds)
    has = {total for step in program if isinstance(step, _STEPS) for total in effects(step).adds}
    here, places = edit.plan.assignment.place(other), range(edit.places)
    homeless = sorted((t for t in sums - has if t.shard != here and t.shard in places), key=str)
    for total in homeless:
        home = edit.plan.assignment.rank(total.shard, head_slice=edit.heads(other))
        partial = total._replace(form="whole")
        made += [steps.Finish(partial), steps.Send(partial, home), steps.Free(partial)]
        label = partial._replace(source=other)
        finishes = [
            i for i, s in enumerate(edit.programs[home]) if isinstance(s, steps.Finish) and s.item[:2] == total[:2]
        ]
        where = finishes[-1] if finishes else len(edit.programs[home])
        edit.programs[home][where:where] = [steps.Recv(label, other), steps.Merge(label), steps.Free(label)]
    finishes = [i for i, s in enumerate(program) if isinstance(s, steps.Finish)]
    where = edit.rng.randint(0, finishes[0] if finishes else len(program))
    program[where:where] = made


def read_at_home(edit: _Edit) -> None:
    """An own input is read from the caller's tensors instead of its packed copy, or the other way round."""
    if at := edit.at(steps.Attend):
        step = edit.programs[at[0]][at[1]]
        item = edit.rng.choice((*step.rows, *step.cols, *step.grads))
        form = "whole" if item.form == "home" else "home"
        edit.programs[at[0]][at[1]] = renamed(step, {item: item._replace(form=form)})


def pack_again(edit: _Edit) -> None:
    rank = edit.rank()
    program = edit.programs[rank]
    kind = edit.rng.choice(INPUTS[edit.plan.direction])
    own = Item(kind, rank)
    where = sorted(edit.rng.randrange(len(program) + 1) for _ in range(2))
    program.insert(where[1], steps.Free(own))
    program.insert(where[0], steps.Pack(own._replace(form="home"), own))


def clear_and_finish(edit: _Edit) -> None:
    """Make a result of zeros: this rank's own again, or another's."""
    rank = edit.rank()
    program = edit.programs[rank]
    kind = edit.rng.choice(OUTPUTS[edit.plan.direction])
    shard = edit.rng.choice((rank, edit.rng.randrange(edit.ranks)))
    made: list[Any] = [steps.Clear(Item(kind, shard, "running"))]
    made.append(steps.Finish(Item(kind, shard, edit.rng.choice(("home", "whole")))))
    if edit.rng.random() < 0.5:
        made.append(steps.Free(Item(kind, shard)))
    if edit.rng.random() < 0.3:
        made.pop(0)
    where = edit.rng.choice((0, len(program), edit.rng.randrange(len(program) + 1)))
    program[where:where] = made


def send_a_partial_twice(edit: _Edit) -> None:
    """A result goes to two ranks, or to one rank under two names, and is merged each time."""
    if at := edit.at(steps.Send):
        send = edit.programs[at[0]][at[1]]
        if send.item.kind not in OUTPUTS[edit.plan.direction] or edit.ranks < 2:
            return
        dest = edit.rng.choice([other for other in range(edit.ranks) if other != at[0]])
        edit.programs[at[0]].insert(at[1] + 1, steps.Send(send.item, dest))
        label = send.item._replace(source=edit.rng.randrange(edit.ranks))
        made: list[Any] = [steps.Recv(label, at[0]), steps.Merge(label), steps.Free(label)]
        if edit.rng.random() < 0.3:
            made.pop(1)
        program = edit.programs[dest]
        merges = [i for i, s in enumerate(program) if isinstance(s, steps.Merge | steps.Finish)]
        where = edit.rng.choice(merges) if merges else edit.rng.randrange(len(program) + 1)
        program[where:where] = made


def retarget_a_merge(edit: _Edit) -> None:
    if at := edit.at(steps.Merge):
        partial = edit.programs[at[0]][at[1]].partial
        edit.programs[at[0]][at[1]] = steps.Merge(edit.other(partial))


def change_a_collective(edit: _Edit) -> None:
    if at := edit.at(steps.Collective, steps.Exchange):
        rank, index = at
        step, rng = edit.programs[rank][index], edit.rng
        side = rng.choice(("sends", "recvs"))
        ends = list(getattr(step, side))
        match rng.randrange(6):
            case 0 if ends:
                ends.pop(rng.randrange(len(ends)))
            case 1 if ends:
                ends.append(rng.choice(ends))
            case 2:
                rng.shuffle(ends)
            case 3 if ends:
                which = rng.randrange(len(ends))
                ends[which] = renamed(ends[which], {ends[which].item: edit.other(ends[which].item)})
            case 4:
                group = tuple(rng.sample(range(edit.ranks), rng.randint(1, edit.ranks)))
                step = replace(step, group=rng.choice((group, tuple(reversed(step.group)), step.group * 2)))
            case _ if isinstance(step, steps.Collective):
                step = replace(step, op="reduce" if step.op == "gather" else "gather")
        edit.programs[rank][index] = replace(step, **{side: tuple(ends)})


def drop_from_collectives(edit: _Edit) -> None:
    """Leave out, or repeat, both ends of one transfer of a collective."""
    if at := edit.at(steps.Collective, steps.Exchange):
        rank, index = at
        step = edit.programs[rank][index]
        if not step.sends:
            return
        send = edit.rng.choice(step.sends)
        times = edit.rng.choice((0, 2))
        sends = tuple(s for s in step.sends for _ in range(times if s == send else 1))
        edit.programs[rank][index] = replace(step, sends=sends)
        program = edit.programs[send.dest] if 0 <= send.dest < edit.ranks else []
        for other, theirs in enumerate(program):
            if isinstance(theirs, type(step)) and theirs.group == step.group:
                recvs = tuple(
                    r
                    for r in theirs.recvs
                    for _ in range(times if (r.source, r.item[:2]) == (rank, send.item[:2]) else 1)
                )
                program[other] = replace(theirs, recvs=recvs)


def collective_as_transfers(edit: _Edit) -> None:
    """The transfers of one collective, or of its whole group, as plain receives and sends."""
    if at := edit.at(steps.Collective):
        group = edit.programs[at[0]][at[1]].group
        ranks = [at[0]] if edit.rng.random() < 0.3 else group
        for rank in ranks:
            if not 0 <= rank < edit.ranks:
                continue
            for index, step in enumerate(edit.programs[rank]):
                if isinstance(step, steps.Collective) and step.group == group:
                    ends = [*step.recvs, *step.sends] if edit.rng.random() < 0.7 else [*step.sends, *step.recvs]
                    edit.programs[rank][index : index + 1] = ends
                    break


def swap_programs(edit: _Edit) -> None:
    one, two = edit.rank(), edit.rank()
    edit.programs[one], edit.programs[two] = edit.programs[two], edit.programs[one]


def shift_ranks(edit: _Edit) -> None:
    """Rename ranks in every peer, so that programs speak of others."""
    shift = edit.rng.randrange(edit.ranks)

    def moved(step: Any) -> Any:
        match step:
            case steps.Send(item, dest) if isinstance(dest, int):
                return steps.Send(item, (dest + shift) % edit.ranks)
            case steps.Recv(item, source) if isinstance(source, int):
                return steps.Recv(item, (source + shift) % edit.ranks)
            case _:
                return step

    edit.programs[:] = [[moved(step) for step in program] for program in edit.programs]


EDITS: tuple[Callable[[_Edit], None], ...] = (
    *(swap, swap, swap, drop, duplicate, move, move, move, move, rename, rename, rename, change_a_peer, insert_a_step),
    *(exchange_two_names, drop_a_transfer, repeat_a_transfer, move_a_transfer, relay, split_a_turn, delay_all_receives),
    *(free_at_once, cut_an_attend, join_attends, reorder_an_attend, hand_an_attend_over, attend_elsewhere),
    *(attend_elsewhere, read_at_home, pack_again, clear_and_finish, send_a_partial_twice, relabel_a_partial),
    *(retarget_a_merge, change_a_collective, drop_from_collectives, collective_as_transfers, swap_programs),
    shift_ranks,
)


# Over a cache


def change_a_decode(edit: _Edit) -> None:
    """Leave a row out, swap two, take another rank's cache, make partials under other names, or decode in two parts."""
    if at := edit.at(steps.Decode):
        (rank, index), rng = at, edit.rng
        step = edit.programs[rank][index]
        rows, partials = list(step.rows), list(step.partials)
        if not rows or len(rows) != len(partials):
            return
        one, other = (rng.randrange(len(rows)) for _ in range(2))
        match rng.randrange(7):
            case 0:
                del rows[one], partials[one]
            case 6:  # the second part appends what the first has seen already
                first = replace(step, rows=step.rows[:one], partials=step.partials[:one])
                edit.programs[rank].insert(index, first)
                index, rows, partials = index + 1, rows[one:], partials[one:]
            case 1:
                rows[one], rows[other] = rows[other], rows[one]
            case 2:
                partials[one], partials[other] = partials[other], partials[one]
            case 3:
                step = replace(step, cache=Item("kv", edit.rank(), "home"))
            case 4:
                del rng.choice((rows, partials))[one]
            case _:
                label = rng.choice((None, rank, edit.rank()))
                partials = [partial._replace(source=label) for partial in partials]
                if rng.random() < 0.5:
                    edit.rename(rank, dict(zip(step.partials, partials, strict=True)))
        edit.programs[rank][index] = replace(step, rows=tuple(rows), partials=tuple(partials))


def change_a_combine(edit: _Edit) -> None:
    """Partials left out, taken twice or in another order, of another shard, or into another result."""
    if at := edit.at(steps.Combine):
        (rank, index), rng = at, edit.rng
        step = edit.programs[rank][index]
        partials, total = list(step.partials), step.total
        match rng.randrange(6):
            case 0:
                lost = partials.pop(rng.randrange(len(partials)))
                if rng.random() < 0.5:  # and it is not freed
                    edit.programs[rank] = [s for s in edit.programs[rank] if s != steps.Free(lost)]
                    index = edit.programs[rank].index(step)
            case 1:
                partials.append(rng.choice(partials))
            case 2:
                rng.shuffle(partials)
            case 3:
                partials[rng.randrange(len(partials))] = rng.choice(partials)
            case 4:
                shard = edit.rank()
                partials = [partial._replace(shard=shard) for partial in partials]
            case _:
                total = edit.other(total)
        edit.programs[rank][index] = steps.Combine(tuple(partials), total)


def send_a_result(edit: _Edit) -> None:
    """A rank's result goes to another one, perhaps instead of its own, or in place of a partial."""
    rank, dest = edit.rank(), edit.rank()
    held = [item for item in edit.items() if item.form == "total"]
    if not held or rank == dest:
        return
    item = edit.rng.choice(held)
    arrived = edit.rng.choice((item, edit.other(item), Item("o", item.shard, source=rank)))
    edit.programs[rank].append(steps.Send(item, dest))
    program = edit.programs[dest]
    where = edit.rng.choice((len(program), edit.rng.randrange(len(program) + 1)))
    program.insert(where, steps.Recv(arrived, rank))
    if edit.rng.random() < 0.7:  # and it is nowhere else
        changed: list[Any] = []
        for index, step in enumerate(program):
            if isinstance(step, steps.Collective):
                step = replace(step, recvs=tuple(r for r in step.recvs if r.item != item))
            if index == where or arrived not in effects(step).writes:
                changed.append(step)
        edit.programs[dest] = changed


def keep_to_oneself(edit: _Edit) -> None:
    """Each rank that wants the only rows attends to its own part of the past, and takes that for the result."""
    for rank, program in enumerate(edit.programs):
        decodes = [step for step in program if isinstance(step, steps.Decode) and len(step.partials) == 1]
        wanted = {item.shard for step in program for item in _totals(step)}
        program[:] = [s for s in program if isinstance(s, steps.Pack) and s.before == Item("q", rank, "home")]
        for step in decodes if wanted else ():
            program.append(replace(step, partials=(Item("o", step.rows[0].shard, "total"),)))
            program += [steps.Free(row) for row in step.rows if row.form == "whole"]


def _totals(step: Any) -> list[Item]:
    return [item for item in effects(step).writes if item.form == "total"] if isinstance(step, _STEPS) else []


OVER_CACHE: tuple[Callable[[_Edit], None], ...] = (
    *(swap, swap, drop, duplicate, move, move, rename, rename, rename, insert_a_step, pack_again, exchange_two_names),
    *(change_a_collective, drop_from_collectives, collective_as_transfers, collective_as_transfers, swap_programs),
    *(shift_ranks, move_a_transfer, relay, free_at_once, drop_a_transfer, change_a_decode, change_a_decode),
    *(change_a_decode, change_a_combine, change_a_combine, change_a_combine, send_a_result, send_a_result),
    keep_to_oneself,
)
"""Edits of plans over a cache."""


# Moves and fields


def _other_moves(plan: Plan, rng: Random) -> Plan:
    moves = list(plan.schedule.moves)
    tile = plan.assignment.tile
    kinds = INPUTS[plan.direction] + OUTPUTS[plan.direction]
    for _ in range(rng.choice((1, 1, 2))):
        where = rng.randrange(len(moves) + 1)
        match rng.randrange(4):
            case 0 if moves:
                moves.pop(where % len(moves))
            case 1 if moves:
                moves.insert(where, rng.choice(moves))
            case 2 if moves:
                moves.insert(where, moves.pop(rng.randrange(len(moves))))
            case _:
                kind, offset = rng.choice(kinds), rng.randrange(max(tile.rows, tile.cols))
                sides = (rng.randrange(tile.rows),), (rng.randrange(tile.cols),)
                over_cache = ("gather", "reduce", "combine", "combine")
                op = rng.choice(over_cache if plan.matrix.is_over_cache else ("gather", "reduce", "exchange"))
                made = (Fetch(kind, offset), Return(kind, offset), Meet(*sides), GroupMove(op, kind))  # type: ignore[arg-type]
                moves.insert(where, rng.choice(made))
    return replace(plan, schedule=replace(plan.schedule, moves=tuple(moves)))


def _other_fields(plan: Plan, rng: Random) -> Plan:
    """Another layout, grid, problem, direction, route or keep under the same steps, or the same moves."""
    if rng.random() < 0.5:
        plan = plan.unrolled()
    problem, schedule = plan.problem, plan.schedule
    if plan.matrix.is_over_cache and rng.random() < 0.6:
        return replace(plan, layout=_other_cache(plan, rng))
    match rng.randrange(7):
        case 0:
            return replace(plan, layout=rng.choice(tuple(LAYOUTS.values())))
        case 1:
            return replace(plan, assignment=rng.choice(tuple(_assignments(problem.ranks, problem.kv_heads))))
        case 2:
            return replace(plan, problem=replace(problem, mask=_other_mask(rng, problem.mask)))
        case 3:
            field = rng.choice(("seq_q", "seq_kv", "batch", "heads", "head_dim_qk", "ranks"))
            changed = {field: max(1, getattr(problem, field) + rng.choice((-1, 1, 2)))}
            return replace(plan, problem=replace(problem, mask=replace(problem.mask, documents=None), **changed))
        case 4:
            return replace(plan, direction="backward" if plan.direction == "forward" else "forward")
        case 5:
            route, partials = rng.choice(ROUTES), rng.choice(ROUTES)
            return replace(plan, schedule=replace(schedule, route=route, partials=partials))
        case _:
            return replace(plan, schedule=replace(schedule, keep=rng.choice(KEEPABLE)))


def _other_cache(plan: Plan, rng: Random) -> Layout:
    """Queries on other ranks, or everywhere, over a cache; or a cache that the plan knows all about."""
    problem = plan.problem
    starts = sorted((0, problem.seq_q, *(rng.randint(0, problem.seq_q) for _ in range(problem.ranks - 1))))
    runs = [(range(a, b),) if a < b else () for a, b in pairwise(starts)]
    if rng.random() < 0.2:
        rng.shuffle(runs)
    q: Layout = rng.choice((Contiguous(), Undivided(), Chunks(), Listed(tuple(runs)), Zigzag(), Striped(), Past()))
    kv: Layout = Past() if rng.random() < 0.9 else Contiguous()
    return Cached(Replicated(q) if rng.random() < 0.6 else q, kv)


def _assignments(ranks: int, kv_heads: int) -> Iterator[Assignment]:
    for ulysses in (u for u in divisors(ranks) if kv_heads % u == 0):
        for tile in tiles_of(ranks // ulysses):
            for inner in (Tile(a, b) for a in divisors(tile.rows) for b in divisors(tile.cols)):
                yield Assignment(tile, ulysses, inner)


def _other_mask(rng: Random, mask: Mask) -> Mask:
    return rng.choice((full(), causal(), window(rng.randrange(4), rng.randrange(4)), replace(mask, documents=None)))
