"""The instruction set: the steps of a rank's program.

An *item* is a thing a rank holds: a shard of something, the running sum of a partial, a partial that arrived. A step
states the items it reads, writes and frees; waits, memory and data flow are derived from that and from nothing else.
`do` is what backward reads of a row besides Q: dO, LSE and delta. A *piece* is what two ranks trade in an exchange.

    recv q3 from 3            post a receive; the first step that reads q3 waits for it
    send q0 to 2              post a send of an item the rank holds
    gather / reduce over …    sends and receives that a group makes together
    exchange home:q6 -> q1    trade heads for tokens in a Ulysses group; what others get is in staged:q6 until it left
    exchange o1 -> staged:o6  and back, for results; what arrives is in staged:o6
    unpack o1 -> home:o6      put together this rank's own part of o1 and what is in staged:o6, for the caller
    pack home:q0 -> q0        copy an input of the caller's into the form that travels
    attend q0,q1 x kv0,kv4    one rectangle of shards; adds to o0~ and o1~ (backward, `with do0,do1`: to dq~ and dkv~)
    merge o3@5                fold the partial that rank 5 sent into o3~
    clear o3~                 set a running sum to zero, because no step adds to it
    finish o3                 the sum is complete: round it to the dtype that travels; o3~ is gone
    free kv4

In a pass over a cache, whose tokens a plan does not know (`layout.Past`):

    decode q0,q1 x home:kv2 -> o0,o1    append these tokens to the cache, and attend to all it has: partials of rows
    combine o1@0,o1@1 -> total:o1       merge all partials of a shard at once; the result is the caller's

Sends, receives, collectives and exchanges are only posted. The first step that reads what arrives waits for it, and
what leaves is waited for when it is freed.

A pass in several waves has its items in parts: q3.1 is part 1 of q3, some of its heads or some of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, get_args

from typing_extensions import assert_never

from mesh_attention.plan.assignment import Axis
from mesh_attention.problem import DIRECTIONS as DIRECTIONS
from mesh_attention.problem import Direction as Direction

Kind = Literal["q", "kv", "do", "o", "dq", "dkv"]
"""`o` is O with its LSE. `do` is the rest of a row's input in backward, besides Q: dO, LSE and delta."""

AXIS_OF: dict[Kind, Axis] = {"q": "row", "do": "row", "o": "row", "dq": "row", "kv": "col", "dkv": "col"}
INPUTS: dict[Direction, tuple[Kind, ...]] = {"forward": ("q", "kv"), "backward": ("q", "do", "kv")}
OUTPUTS: dict[Direction, tuple[Kind, ...]] = {"forward": ("o",), "backward": ("dq", "dkv")}
KINDS: tuple[Kind, ...] = ("q", "kv", "do", "o", "dq", "dkv")
Keep = Literal["own", "q", "kv"]
"""Items that forward leaves to backward: gathered Q or KV; or own, the inputs of this rank's own place as exchanged."""
Form = Literal["whole", "running", "home", "piece", "staged", "kept", "total"]
FORMS: tuple[Form, ...] = get_args(Form)


class Item(NamedTuple):
    """A thing a rank holds.

    form ``whole``: a shard (or finished partial) of grid place `shard`; with `source`, a partial as that rank sent it.
    form ``running``: a sum that is still being added to.
    form ``home``: the caller's input or result: the tokens of rank `shard`, all heads, in the caller's tensors.
    form ``piece``: tokens of rank `shard`, head slice `source`: what travels to, or from, one rank in an exchange.
    form ``staged``: all pieces of rank `shard` that an exchange sends to other ranks, or gets from them.
    form ``kept``: this rank's own exchanged shard, in a buffer of its own that forward leaves to backward.
    form ``total``: the complete result of a shard, in the form that travels, as a pass over a cache leaves it.

    `part` counts the parts of a shard's heads, or of its rows. Of a home or a staged item, it is the wave.
    """

    kind: Kind
    shard: int
    form: Form = "whole"
    source: int | None = None
    part: int = 0


def running(item: Item, kind: Kind | None = None) -> Item:
    """The running sum of an item's shard, of its own or another kind."""
    return Item(kind or item.kind, item.shard, "running", part=item.part)


def staged(home: Item) -> Item:
    """The pieces of a caller's tensors in an exchange."""
    return home._replace(form="staged")


@dataclass(frozen=True, slots=True)
class Recv:
    """Post a receive. The first step that reads the item waits for it."""

    item: Item
    source: int


@dataclass(frozen=True, slots=True)
class Send:
    """Post a send of an item. Freeing the item waits for it."""

    item: Item
    dest: int


CollectiveOp = Literal["gather", "reduce"]
COLLECTIVE_OPS: tuple[CollectiveOp, ...] = get_args(CollectiveOp)


@dataclass(frozen=True, slots=True)
class Collective:
    """Sends and receives that all ranks of a group make at once: to all of them (gather), or of partials to their homes
    (reduce)."""

    op: CollectiveOp
    group: tuple[int, ...]
    sends: tuple[Send, ...]
    recvs: tuple[Recv, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Heads for tokens, or back, in a Ulysses group.

    Before the grid, `before` is at home and `after` whole; its pieces are staged before they leave. After the grid,
    `before` is whole, and `after` the staged pieces.
    """

    before: Item
    after: Item
    group: tuple[int, ...]
    sends: tuple[Send, ...]
    recvs: tuple[Recv, ...]


@dataclass(frozen=True, slots=True)
class Pack:
    """Copy an input of the caller into the form that travels and that shares a buffer with received shards."""

    before: Item
    after: Item


@dataclass(frozen=True, slots=True)
class Unpack:
    """Make the caller's result `after` of this rank's piece of the whole item `before` and the staged pieces."""

    before: Item
    after: Item


@dataclass(frozen=True, slots=True)
class Attend:
    """Attention of every row with every column; backward when it has the rows' `do` as well."""

    rows: tuple[Item, ...]
    cols: tuple[Item, ...]
    grads: tuple[Item, ...] = ()


@dataclass(frozen=True, slots=True)
class Decode:
    """Append the keys and values of the rows' tokens to a cache, then attend with the rows to all that it holds.

    Rows are queries with the keys and values of their tokens; which of them the cache keeps is up to the cache.
    """

    rows: tuple[Item, ...]
    cache: Item
    partials: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Combine:
    """Merge all partials of a shard at once, in this order."""

    partials: tuple[Item, ...]
    total: Item


@dataclass(frozen=True, slots=True)
class Merge:
    """Add a partial that arrived to the running sum of its shard."""

    partial: Item


@dataclass(frozen=True, slots=True)
class Clear:
    """Set a running sum to zero, because no step adds to it."""

    item: Item


@dataclass(frozen=True, slots=True)
class Finish:
    """Turn the running sum of `item` into `item`: a partial to send, or the result in the caller's form."""

    item: Item


@dataclass(frozen=True, slots=True)
class Free:
    """Release an item, once its transfers are over."""

    item: Item


Step = Recv | Send | Collective | Exchange | Pack | Unpack | Attend | Decode | Combine | Merge | Clear | Finish | Free


def is_step(value: Any) -> bool:
    """True for a step whose fields have the types they are declared with. It may still speak of what a plan lacks."""
    return type(value) in get_args(Step) and all(
        _is_of(str(field.type), getattr(value, field.name)) for field in fields(value)
    )


def _is_of(declared: str, value: object) -> bool:
    """True for a value of the type that a field of a step is declared with."""
    if declared.startswith("tuple"):
        element = declared.removeprefix("tuple[").removesuffix(", ...]")
        return type(value) is tuple and all(_is_of(element, each) for each in value)
    if declared == "int":
        return type(value) is int
    if declared == "CollectiveOp":
        return value in COLLECTIVE_OPS
    return _is_item(value) if declared == "Item" else type(value).__name__ == declared and is_step(value)


def _is_item(value: object) -> bool:
    return (
        type(value) is Item
        and (value.kind in KINDS and value.form in FORMS and type(value.shard) is type(value.part) is int)
        and (type(value.source) is int if value.form == "piece" or value.source is not None else True)
    )


class Effects(NamedTuple):
    """The items that a step reads, writes and frees. `adds` are running sums, created by the first step that adds."""

    reads: tuple[Item, ...] = ()
    writes: tuple[Item, ...] = ()
    adds: tuple[Item, ...] = ()
    frees: tuple[Item, ...] = ()


def effects(step: Step) -> Effects:
    match step:
        case Attend(rows, cols, ()):
            return Effects(reads=rows + cols, adds=tuple([running(row, "o") for row in rows]))
        case Attend(rows, cols, grads):
            sums = [running(row, "dq") for row in rows] + [running(col, "dkv") for col in cols]
            return Effects(reads=rows + grads + cols, adds=tuple(sums))
        case Free(item):
            return Effects(frees=(item,))
        case Recv() | Send() | Collective():
            arriving, leaving = in_flight(step)
            return Effects(reads=leaving, writes=arriving)
        case Pack(before, after):
            return Effects(reads=(before,), writes=(after,))
        case Exchange(before, after):
            return Effects(reads=(before,), writes=(after, staged(before)) if before.form == "home" else (after,))
        case Unpack(before, after):
            return Effects(reads=(before, staged(after)), writes=(after,))
        case Decode(rows, cache, partials):
            return Effects(reads=(*rows, cache), writes=partials)
        case Combine(partials, total):
            return Effects(reads=partials, writes=(total,))
        case Merge(partial):
            return Effects(reads=(partial,), adds=(running(partial),))
        case Clear(item):
            return Effects(adds=(item,))
        case Finish(item):
            total = running(item)
            return Effects(reads=(total,), writes=(item,), frees=(total,))
        case _:
            assert_never(step)


def transfers(step: Step) -> tuple[tuple[Send, ...], tuple[Recv, ...]]:
    """The sends and the receives of a step."""
    match step:
        case Send():
            return (step,), ()
        case Recv():
            return (), (step,)
        case Collective(_, _, sends, recvs) | Exchange(_, _, _, sends, recvs):
            return sends, recvs
        case _:
            return (), ()


def in_flight(step: Step) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """The items that arrive after a step is over, and those that leave after it is."""
    if isinstance(step, Exchange):
        return (step.after,), (staged(step.before) if step.before.form == "home" else step.before,)
    sends, recvs = transfers(step)
    return tuple([recv.item for recv in recvs]), tuple([send.item for send in sends])
