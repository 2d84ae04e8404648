"""The rule of forms: each step uses things that exist, of the right kind, in the right form, with the right ranks.

It looks at one step at a time, without regard to the items held or to other ranks. The other rules rely on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mesh_attention.plan import steps
from mesh_attention.plan.format import format_item, format_numbers, format_step
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.program import Program
from mesh_attention.plan.steps import AXIS_OF, INPUTS, OUTPUTS, Form, Item, Kind, Recv, Send, Step, effects, transfers
from mesh_attention.verification.evidence import Breach, Evidence


def missing(plan: Plan, program: Program) -> Iterator[Breach]:
    """Steps that speak of kinds, shards or ranks that the plan does not have."""
    known: set[Item] = set()
    if program.peak_nbytes < 0:
        yield Breach("form", program.rank, None, f"a peak of {program.peak_nbytes} bytes: expected 0 or more")
    for index, step in enumerate(program.steps):
        sends, recvs = transfers(step)
        ranks = [*(send.dest for send in sends), *(recv.source for recv in recvs), *getattr(step, "group", ())]
        for rank in ranks:
            if not 0 <= rank < plan.problem.ranks:
                yield Breach("form", program.rank, index, f"rank {rank} does not exist")
        items = {send.item for send in sends}.union((recv.item for recv in recvs), *effects(step)) - known
        known |= items
        for item in sorted(items, key=str):
            if not _exists(plan, item):
                yield Breach("form", program.rank, index, f"this plan has no {format_item(item)}")


def _exists(plan: Plan, item: Item) -> bool:
    """True for kinds of this direction, and shards and sources among the ranks; whole shards are of places."""
    ranks, places, ulysses = plan.problem.ranks, plan.assignment.places, plan.assignment.ulysses_degree
    is_piece = item.form == "piece"
    return (
        item.kind in INPUTS[plan.direction] + OUTPUTS[plan.direction]
        and 0 <= item.shard < (ranks if item.form in ("piece", "home", "staged") else places)
        and item.part in plan.assignment.parts(AXIS_OF[item.kind])
        and (item.source is None or 0 <= item.source < (ulysses if is_piece else ranks))
    )


def form(evidence: Evidence) -> Iterator[Breach]:
    for program in evidence.programs:
        for index, step in enumerate(program.steps):
            for flaw in _flaws(evidence, program.rank, step):
                yield Breach("form", program.rank, index, flaw)


OVER_CACHE = (steps.Decode, steps.Combine)
"""Steps of a pass over a cache alone."""
NEVER_OVER_CACHE = (steps.Exchange, steps.Unpack, steps.Attend, steps.Merge, steps.Clear, steps.Finish)
"""Steps of other passes alone."""


def _flaws(evidence: Evidence, rank: int, step: Step) -> Iterator[str]:
    outputs, is_over_cache = OUTPUTS[evidence.plan.direction], evidence.matrix.is_over_cache
    if isinstance(step, NEVER_OVER_CACHE if is_over_cache else OVER_CACHE):
        yield f"a pass {'over a' if is_over_cache else 'without a'} cache has no step '{format_step(step)}'"
        return
    match step:
        case steps.Decode():
            yield from _flaws_of_decode(evidence, rank, step)
        case steps.Combine():
            yield from _flaws_of_combine(evidence, step)
        case steps.Pack(before, after) if is_over_cache and before.kind in outputs:
            if before.form != "whole" or before.source is not None or after != before._replace(source=rank):
                yield "a partial is packed to take its place among those of other ranks; expected this rank's own"
        case steps.Pack(before) if is_over_cache and (before.kind != "q" or evidence.matrix.is_replicated):
            yield f"{format_item(before)} stays where it is: over a cache, only queries of one rank alone are packed"
        case steps.Attend():
            yield from _flaws_of_attend(evidence, step)
        case Send() | Recv():
            yield from _flaws_of_transfer(evidence, rank, step)
        case steps.Collective(_, group, sends, recvs):
            yield from _flaws_of_group(rank, group, sends, recvs)
            ends: tuple[Send | Recv, ...] = (*sends, *recvs)
            for end in ends:
                yield from _flaws_of_transfer(evidence, rank, end)
        case steps.Pack(before, after):
            yield from _flaws_of_conversion(evidence, rank, before, after)
            expected = "kept" if evidence.plan.assignment.ulysses_degree > 1 else "home"
            if (before.form, after.form) != (expected, "whole") or before.kind in outputs:
                yield "only inputs are packed: the caller's, or with Ulysses kept ones"
        case steps.Unpack(before, after):
            yield from _flaws_of_conversion(evidence, rank, before, after)
            if evidence.plan.assignment.ulysses_degree == 1 or before.kind not in outputs or after.form != "home":
                yield "only results are unpacked, to the caller's tensors, and only with Ulysses"
        case steps.Exchange():
            yield from _flaws_of_exchange(evidence, rank, step)
        case steps.Merge(partial):
            if partial.kind not in outputs or partial.form != "whole" or partial.source is None:
                yield f"{format_item(partial)} is not a partial that arrived"
        case steps.Finish(item):
            yield from _flaws_of_finish(evidence, rank, item)
        case steps.Clear(item):
            if item.kind not in outputs or item.form != "running" or item.source is not None:
                yield f"{format_item(item)} is not a running sum"
        case steps.Free(item):
            if item.form in ("running", "home", "kept", "total"):
                why = "must be finished, not freed" if item.form == "running" else "belongs to the caller"
                yield f"{format_item(item)} {why}"


def _flaws_of_attend(evidence: Evidence, attend: steps.Attend) -> Iterator[str]:
    rows, cols, grads = attend.rows, attend.cols, attend.grads
    expected = tuple(row.shard for row in rows) if evidence.plan.direction == "backward" else ()
    if not rows or not cols or tuple(grad.shard for grad in grads) != expected:
        dos = "the dO of each row, in order" if evidence.plan.direction == "backward" else "no dO"
        yield f"a {evidence.plan.direction} attend needs at least one row, at least one column and {dos}"
    if any(item.kind != kind for items, kind in ((rows, "q"), (cols, "kv"), (grads, "do")) for item in items):
        yield "an attend takes q as rows, kv as columns and do after 'with'"
    forms = ("whole", "kept") if evidence.plan.assignment.ulysses_degree > 1 else ("whole", "home")
    if any(item.form not in forms or item.source is not None for item in (*rows, *cols, *grads)):
        yield f"an attend reads shards in the form {' or '.join(forms)}"
    parted = (*rows, *grads, *(cols if evidence.plan.assignment.cut == "heads" else ()))
    if len({item.part for item in parted}) > 1:
        yield "an attend takes items of one part"
    for side in (rows, cols, grads):
        if len(side) > 1 and any(item.form != "whole" for item in side):
            yield "a shard in a buffer of its own must be attended by itself; shards attended together share a buffer"


def _flaws_of_decode(evidence: Evidence, rank: int, decode: steps.Decode) -> Iterator[str]:
    """A cache takes all new tokens at once: queries must see the keys of those before them, wherever they are kept."""
    matrix = evidence.matrix
    form: Form = "home" if matrix.is_replicated else "whole"
    shards = [shard for shard in range(matrix.problem.ranks) if matrix.has_shard("row", shard)]
    if decode.rows != tuple(Item("q", shard, form) for shard in shards):
        yield "a decode takes the queries of all shards, in order"
    if decode.cache != Item("kv", rank, "home"):
        yield f"{format_item(decode.cache)} is not this rank's cache"
    partials = tuple(Item("o", shard) for shard in shards)
    allowed = [partials]
    if len(shards) == 1:  # in one piece also where it is merged, or where the result is
        allowed += [(partials[0]._replace(source=rank),), (partials[0]._replace(form="total"),)]
    if decode.partials not in allowed:
        yield "a decode gives this rank's partial of every row, in order; one alone perhaps where it is merged"


def _flaws_of_combine(evidence: Evidence, combine: steps.Combine) -> Iterator[str]:
    """Everybody merges in the order of ranks, so that results that several ranks merge are equal to the last bit."""
    total, sources = combine.total, range(evidence.plan.problem.ranks)
    if total.form != "total" or combine.partials != tuple(Item("o", total.shard, source=rank) for rank in sources):
        yield f"{format_item(total)} must be made of the partials of all ranks, in order"


def _flaws_of_transfer(evidence: Evidence, rank: int, end: Send | Recv) -> Iterator[str]:
    """A partial is labelled with its sender where it arrives; nothing else that travels has a label."""
    assignment, item = evidence.plan.assignment, end.item
    is_partial = item.kind in OUTPUTS[evidence.plan.direction] and item.form == "whole"
    peer, label = (end.dest, None) if isinstance(end, Send) else (end.source, end.source if is_partial else None)
    if isinstance(end, Send) and is_partial and item.source == rank:  # made in its place among those of other ranks
        label = rank
    if item.form not in ("whole", "total"):
        yield f"{format_item(item)} does not travel"
    elif item.source != label:
        expected = format_item(item._replace(source=label))
        yield f"{format_item(item)} is {'sent' if isinstance(end, Send) else 'received'}; expected {expected}"
    if peer == rank:
        yield f"{format_item(item)} is sent from a rank to itself"
    elif assignment.head_slice(peer) != assignment.head_slice(rank):
        yield f"{format_item(item)}: rank {peer} works on other heads"


def _flaws_of_finish(evidence: Evidence, rank: int, item: Item) -> Iterator[str]:
    is_result = item.kind in OUTPUTS[evidence.plan.direction] and item.source is None
    if not is_result or item.form not in ("whole", "home"):
        yield f"{format_item(item)} is not a result to finish"
    elif item.form == "home" and item.shard != rank:
        yield f"{format_item(item)} is the result of another rank"
    elif item.form == "home" and evidence.plan.assignment.ulysses_degree > 1:
        yield f"{format_item(item)} has all heads, but a sum has only some; finish it as a partial, then exchange it"


def _flaws_of_group(
    rank: int, group: tuple[int, ...], sends: tuple[steps.Send, ...], recvs: tuple[steps.Recv, ...]
) -> Iterator[str]:
    strangers = {rank, *(s.dest for s in sends), *(r.source for r in recvs)} - set(group)
    if strangers:
        yield f"rank(s) {format_numbers(sorted(strangers))} are not in the group {format_numbers(group)}"
    if len(set(group)) < len(group):
        yield f"the group {format_numbers(group)} names a rank twice"


def _flaws_of_conversion(evidence: Evidence, rank: int, before: Item, after: Item) -> Iterator[str]:
    """Flaws of a pack, an unpack or an exchange: items that are not of this rank, or not of the same wave."""
    kind, part = before.kind, before.part if before.form == "home" else after.part
    allowed = {("home", "whole"), ("home", "kept"), ("kept", "whole"), ("whole", "home"), ("whole", "staged")}
    if (before.form, after.form) not in allowed or any(item.source is not None for item in (before, after)):
        yield f"{format_item(after)} cannot be made of {format_item(before)}"
        return
    assignment = evidence.plan.assignment
    whole = Item(kind, assignment.place(rank), part=assignment.part(AXIS_OF[kind], rank, part))
    if before.form == "kept":
        whole = whole._replace(part=part)
    for item in (before, after):
        is_shard = item.form in ("whole", "kept")
        expected = whole._replace(form=item.form) if is_shard else Item(kind, rank, item.form, part=part)
        if item != expected:
            yield f"{format_item(after)} cannot be made of {format_item(before)} here: expected {format_item(expected)}"


def _flaws_of_exchange(evidence: Evidence, rank: int, step: steps.Exchange) -> Iterator[str]:
    """Flaws of an exchange: wrong items, wrong group, or missing and surplus pieces."""
    flaws = list(_flaws_of_conversion(evidence, rank, step.before, step.after))
    assignment, kind = evidence.plan.assignment, step.before.kind
    inward = kind in INPUTS[evidence.plan.direction]
    if flaws or step.before.form != ("home" if inward else "whole") or step.after.form == "home":
        yield from flaws or ("inputs are exchanged from home, results into staged pieces",)
        return
    if step.group != tuple(assignment.ulysses_group(rank)):
        yield f"heads must be traded within {format_numbers(assignment.ulysses_group(rank))}"
    wave = step.before.part if inward else step.after.part
    # Before the grid, a rank gives its tokens and gets its heads; after it, it gives its heads and gets its tokens.
    expected: Counter[Send | Recv] = Counter()
    for other in assignment.ulysses_group(rank):
        if other != rank:
            expected.update(Send(piece, other) for piece in _pieces(evidence, kind, (rank, other), wave, inward))
            expected.update(Recv(piece, other) for piece in _pieces(evidence, kind, (other, rank), wave, inward))
    made: Counter[Send | Recv] = Counter([*step.sends, *step.recvs])
    for end in sorted((expected - made) | (made - expected), key=str):
        yield f"the exchange {'lacks' if expected[end] > made[end] else 'has no use for'} {format_item(end.item)}"


def _pieces(evidence: Evidence, kind: Kind, ends: tuple[int, int], wave: int, inward: bool) -> Iterator[Item]:
    """The piece that goes from one rank to another in a wave, if there is one."""
    assignment, matrix, axis = evidence.plan.assignment, evidence.matrix, AXIS_OF[kind]
    tokens_of, heads_of = ends if inward else ends[::-1]
    part, place = assignment.part(axis, heads_of, wave), assignment.place(heads_of)
    is_used = not inward or matrix.is_wanted(axis, place, part)
    if tokens_of in assignment.members(axis, place, part) and matrix.has_tokens(kind, tokens_of) and is_used:
        yield Item(kind, tokens_of, "piece", assignment.head_slice(heads_of), part)
