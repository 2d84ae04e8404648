"""The rule of forms: each step uses things of the right kind, in the right form, and deals with the right ranks.

It looks at one step at a time, without regard to the items held or to other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from mesh_attention.plan import steps
from mesh_attention.plan.steps import INPUTS, KINDS, OUTPUTS, Item, Step
from mesh_attention.plan.text import format_item, format_numbers
from mesh_attention.verification.evidence import Breach, Evidence
from mesh_attention.verification.rendezvous import Outcome


def form(evidence: Evidence, outcome: Outcome) -> Iterator[Breach]:
    for program in evidence.programs:
        for index, step in enumerate(program.steps):
            for flaw in _flaws(evidence, program.rank, step):
                yield Breach("form", program.rank, index, flaw)


def _flaws(evidence: Evidence, rank: int, step: Step) -> Iterator[str]:
    outputs = OUTPUTS[evidence.plan.direction]
    match step:
        case steps.Attend():
            yield from _flaws_of_attend(evidence, step)
        case steps.Send(item, peer) | steps.Recv(item, peer):
            yield from _flaws_of_transfer(evidence, rank, item, peer)
        case steps.Collective(_, group, sends, recvs):
            yield from _flaws_of_group(rank, group, sends, recvs)
            for item, peer in [(s.item, s.dest) for s in sends] + [(r.item, r.source) for r in recvs]:
                yield from _flaws_of_transfer(evidence, rank, item, peer)
        case steps.Pack() | steps.Exchange():
            yield from _flaws_of_conversion(evidence, rank, step)
        case steps.Merge(partial):
            if partial.kind not in outputs or partial.form != "whole" or partial.source is None:
                yield f"{format_item(partial)} is not a partial that arrived"
        case steps.Finish(item):
            if item.kind not in outputs or item.form not in ("whole", "home") or item.source is not None:
                yield f"{format_item(item)} is not a result to finish"
        case steps.Clear(item):
            if item.kind not in outputs or item.form != "running":
                yield f"{format_item(item)} is not a running sum"
        case steps.Free(item):
            if item.form in ("running", "home"):
                why = "must be finished, not freed" if item.form == "running" else "belongs to the caller"
                yield f"{format_item(item)} {why}"


def _flaws_of_attend(evidence: Evidence, attend: steps.Attend) -> Iterator[str]:
    rows, cols, grads = attend.rows, attend.cols, attend.grads
    due = tuple(row.shard for row in rows) if evidence.plan.direction == "backward" else ()
    if not rows or not cols or tuple(grad.shard for grad in grads) != due:
        dos = "the dO of each row, in order" if evidence.plan.direction == "backward" else "no dO"
        yield f"a {evidence.plan.direction} attend needs at least one row, at least one column and {dos}"
    if any(item.kind != kind for items, kind in ((rows, "q"), (cols, "kv"), (grads, "do")) for item in items):
        yield "an attend takes q as rows, kv as columns and do after 'with'"
    forms = ("whole",) if evidence.plan.assignment.ulysses > 1 else ("whole", "home")
    if any(item.form not in forms or item.source is not None for item in (*rows, *cols, *grads)):
        yield f"an attend reads shards in the form {' or '.join(forms)}"


def _flaws_of_transfer(evidence: Evidence, rank: int, item: Item, peer: int) -> Iterator[str]:
    assignment = evidence.plan.assignment
    if item.form != "whole" or item.kind not in KINDS:
        yield f"{format_item(item)} does not travel"
    if peer == rank:
        yield f"{format_item(item)} is sent from a rank to itself"
    elif peer not in range(evidence.plan.problem.ranks):
        yield f"there is no rank {peer}"
    elif assignment.head_slice(peer) != assignment.head_slice(rank):
        yield f"{format_item(item)}: rank {peer} works on other heads"


def _flaws_of_group(
    rank: int, group: tuple[int, ...], sends: tuple[steps.Send, ...], recvs: tuple[steps.Recv, ...]
) -> Iterator[str]:
    strangers = {rank, *(s.dest for s in sends), *(r.source for r in recvs)} - set(group)
    if strangers:
        yield f"rank(s) {format_numbers(sorted(strangers))} are not in the group {format_numbers(group)}"


def _flaws_of_conversion(evidence: Evidence, rank: int, step: steps.Pack | steps.Exchange) -> Iterator[str]:
    """Flaws of a pack or exchange: wrong items, wrong group, or missing and surplus pieces."""
    assignment, inputs = evidence.plan.assignment, INPUTS[evidence.plan.direction]
    kind = step.before.kind
    inward = kind in inputs
    whole, home = Item(kind, assignment.place(rank)), Item(kind, rank, "home")
    if (step.before, step.after) != ((home, whole) if inward else (whole, home)):
        yield f"{format_item(step.after)} cannot be made of {format_item(step.before)} here"
    if isinstance(step, steps.Pack):
        if assignment.ulysses > 1 or not inward:
            yield "only inputs are packed, and only without Ulysses"
        return
    others = [other for other in assignment.ulysses_group(rank) if other != rank]
    if step.group != tuple(assignment.ulysses_group(rank)):
        yield f"heads must be traded within {format_numbers(assignment.ulysses_group(rank))}"
    # Before the grid, a rank gives its tokens and gets its heads; after it, it gives its heads and gets its tokens.
    due: set[steps.Send | steps.Recv] = {
        steps.Send(_piece(evidence, kind, rank if inward else o, o if inward else rank), o) for o in others
    }
    due |= {steps.Recv(_piece(evidence, kind, o if inward else rank, rank if inward else o), o) for o in others}
    due = {end for end in due if evidence.matrix.has_tokens(kind, end.item.shard)}
    made: set[steps.Send | steps.Recv] = {*step.sends, *step.recvs}
    for end in sorted(due ^ made, key=str):
        yield f"the exchange {'lacks' if end in due else 'has no use for'} {format_item(end.item)}"


def _piece(evidence: Evidence, kind: str, tokens_of: int, heads_of: int) -> Item:
    return Item(kind, tokens_of, "piece", evidence.plan.assignment.head_slice(heads_of))  # type: ignore[arg-type]
