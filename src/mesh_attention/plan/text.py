"""The text form of items, steps, moves and masks: one line each, and every line can be read back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from typing_extensions import assert_never

from mesh_attention.errors import ParseError
from mesh_attention.masks import Mask, causal, documents, full, window
from mesh_attention.plan import steps
from mesh_attention.plan.schedule import GROUP_OPS, Fetch, GroupMove, Meet, Move, Return
from mesh_attention.plan.steps import FORMS, KINDS, Item, Kind, Step
from mesh_attention.units import brief

Parsed = TypeVar("Parsed")

MAX_NUMBERS = 1 << 20
"""The most numbers in one list, so that a typo does not fill the memory."""

# Items and steps


def format_item(item: Item) -> str:
    name = f"{item.kind}{item.shard}" + (f".{item.part}" if item.part else "")
    match item.form:
        case "whole":
            return name + (f"@{item.source}" if item.source is not None else "")
        case "running":
            return f"{name}~"
        case "home" | "staged" | "kept":
            return f"{item.form}:{name}"
        case "piece":
            return f"{name}/{item.source}"
        case _:
            assert_never(item.form)


def format_end(end: steps.Send | steps.Recv) -> str:
    """A transfer as one of its ends sees it, without the verb: "kv3 to 1"."""
    return format_step(end).split(" ", 1)[1]


# No number here is longer than nine digits; longer ones are not read.
_ITEM = re.compile(r"(?:(home|staged|kept):)?([a-z]+)(\d{1,9})(?:\.(\d{1,9}))?(?:(~)|@(\d{1,9})|/(\d{1,9}))?")


def parse_item(text: str) -> Item:
    match = _ITEM.fullmatch(text)
    if match is None or (match[1] and (match[5] or match[6] or match[7])):
        raise ParseError(f"item {brief(text)}: expected one such as q3, q3.1, o3~, o3@5, home:q3, staged:q3 or q3/1")
    prefix, kind, shard, part, tilde, source, heads = match.groups()
    item = Item(_kind(kind), int(shard), part=int(part or 0))
    if prefix:
        return item._replace(form=next(form for form in FORMS if form == prefix))
    if tilde:
        return item._replace(form="running")
    if heads:
        return item._replace(form="piece", source=int(heads))
    return item._replace(source=int(source) if source else None)


def _kind(text: str) -> Kind:
    for kind in KINDS:
        if kind == text:
            return kind
    raise ParseError(f"kind {brief(text)}: expected one of {', '.join(KINDS)}")


def format_step(step: Step) -> str:
    match step:
        case steps.Recv(item, source):
            return f"recv {format_item(item)} from {source}"
        case steps.Send(item, dest):
            return f"send {format_item(item)} to {dest}"
        case steps.Collective(op, group, sends, recvs):
            return _with_transfers(f"{op} over {format_numbers(group)}", (*sends, *recvs))
        case steps.Exchange(before, after, group, sends, recvs):
            head = f"exchange {format_item(before)} -> {format_item(after)} over {format_numbers(group)}"
            return _with_transfers(head, (*sends, *recvs))
        case steps.Pack(before, after):
            return f"pack {format_item(before)} -> {format_item(after)}"
        case steps.Unpack(before, after):
            return f"unpack {format_item(before)} -> {format_item(after)}"
        case steps.Attend(rows, cols, grads):
            suffix = f" with {_format_items(grads)}" if grads else ""
            return f"attend {_format_items(rows)} x {_format_items(cols)}{suffix}"
        case steps.Merge(partial):
            return f"merge {format_item(partial)}"
        case steps.Clear(item):
            return f"clear {format_item(item)}"
        case steps.Finish(item):
            return f"finish {format_item(item)}"
        case steps.Free(item):
            return f"free {format_item(item)}"
        case _:
            assert_never(step)


def _with_transfers(head: str, transfers: tuple[steps.Send | steps.Recv, ...]) -> str:
    return f"{head}: {'; '.join(map(format_step, transfers))}".rstrip()


def _format_items(items: Iterable[Item]) -> str:
    return ",".join(map(format_item, items))


def _parse_items(text: str) -> tuple[Item, ...]:
    return tuple(map(parse_item, text.split(",")))


def _parse_transfers(text: str) -> tuple[tuple[steps.Send, ...], tuple[steps.Recv, ...]]:
    ends = [parse_step(part.strip()) for part in text.split(";") if part.strip()]
    for step in ends:
        if not isinstance(step, steps.Send | steps.Recv):
            raise ParseError(f"'{format_step(step)}' inside a collective: expected only sends and receives")
    return tuple(s for s in ends if isinstance(s, steps.Send)), tuple(s for s in ends if isinstance(s, steps.Recv))


def _parse_exchange(before: str, after: str, group: str, transfers: str) -> steps.Exchange:
    return steps.Exchange(parse_item(before), parse_item(after), parse_numbers(group), *_parse_transfers(transfers))


_STEP_FORMS: tuple[tuple[str, Callable[..., Step]], ...] = (
    (r"recv (\S+) from (\d{1,9})", lambda item, rank: steps.Recv(parse_item(item), int(rank))),
    (r"send (\S+) to (\d{1,9})", lambda item, rank: steps.Send(parse_item(item), int(rank))),
    (
        r"(gather|reduce) over (\S+):(.*)",
        lambda op, group, rest: steps.Collective(op, parse_numbers(group), *_parse_transfers(rest)),
    ),
    (r"exchange (\S+) -> (\S+) over (\S+):(.*)", _parse_exchange),
    (r"pack (\S+) -> (\S+)", lambda before, after: steps.Pack(parse_item(before), parse_item(after))),
    (r"unpack (\S+) -> (\S+)", lambda before, after: steps.Unpack(parse_item(before), parse_item(after))),
    (r"attend (\S+) x (\S+)", lambda rows, cols: steps.Attend(_parse_items(rows), _parse_items(cols))),
    (
        r"attend (\S+) x (\S+) with (\S+)",
        lambda rows, cols, grads: steps.Attend(_parse_items(rows), _parse_items(cols), _parse_items(grads)),
    ),
    (r"merge (\S+)", lambda item: steps.Merge(parse_item(item))),
    (r"clear (\S+)", lambda item: steps.Clear(parse_item(item))),
    (r"finish (\S+)", lambda item: steps.Finish(parse_item(item))),
    (r"free (\S+)", lambda item: steps.Free(parse_item(item))),
)


def parse_step(text: str) -> Step:
    kinds = "recv, send, gather, reduce, exchange, pack, unpack, attend, merge, clear, finish or free"
    return _parse("step", text, _STEP_FORMS, f"{kinds}, such as 'recv kv1 from 3'")


def _parse(what: str, text: str, forms: Iterable[tuple[str, Callable[..., Parsed]]], expected: str) -> Parsed:
    for form, build in forms:
        if match := re.fullmatch(form, text):
            return build(*match.groups())
    raise ParseError(f"{what} {brief(text)}: expected {expected}")


# Moves


def format_move(move: Move) -> str:
    wave = f"{move.wave}: " if move.wave else ""
    match move:
        case Fetch(kind, offset):
            return f"{wave}fetch {kind} {offset}"
        case Meet(rows, cols):
            return f"{wave}meet {format_numbers(rows)} x {format_numbers(cols)}"
        case Return(kind, offset):
            return f"{wave}return {kind} {offset}"
        case GroupMove(op, kind):
            return f"{wave}{op} {kind}"
        case _:
            assert_never(move)


_MOVE_FORMS: tuple[tuple[str, Callable[..., Move]], ...] = (
    (r"fetch ([a-z]+) (\d{1,9})", lambda kind, offset: Fetch(_kind(kind), int(offset))),
    (r"meet (\S+) x (\S+)", lambda rows, cols: Meet(parse_numbers(rows), parse_numbers(cols))),
    (r"return ([a-z]+) (\d{1,9})", lambda kind, offset: Return(_kind(kind), int(offset))),
    (rf"({'|'.join(GROUP_OPS)}) ([a-z]+)", lambda op, kind: GroupMove(op, _kind(kind))),
)


def parse_move(text: str) -> Move:
    kinds = "fetch, meet, return, gather, reduce, exchange or unpack"
    prefixed = re.fullmatch(r"(\d{1,9}): (.*)", text)
    wave, rest = (int(prefixed[1]), prefixed[2]) if prefixed else (0, text)
    move = _parse("move", rest, _MOVE_FORMS, f"{kinds}, such as 'fetch kv 1', '1: fetch kv 1' or 'meet 0,1 x 0-3'")
    return replace(move, wave=wave)


def format_numbers(numbers: Iterable[int]) -> str:
    """Runs of consecutive numbers as first-last; the order is kept."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def parse_numbers(text: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in text.split(","):
        run = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        first, last = (int(run[1]), int(run[2] or run[1])) if run else (0, -1)
        if not 0 <= last - first < MAX_NUMBERS:
            expected = f"expected numbers and rising ranges, at most {MAX_NUMBERS:,} in all, such as 0,1 or 0-3,8"
            raise ParseError(f"numbers {brief(text)}: {expected}")
        numbers.extend(range(first, last + 1))
        if len(numbers) > MAX_NUMBERS:
            raise ParseError(f"numbers {brief(text)}: expected at most {MAX_NUMBERS:,}")
    return tuple(numbers)


# Masks


def parse_mask(text: str) -> Mask:
    mask = full()
    for part in text.split("&"):
        mask &= _parse_mask_part(part.strip())
    return mask


def _parse_mask_part(text: str) -> Mask:
    if text == "full":
        return full()
    if text == "causal":
        return causal()
    if reach := re.fullmatch(r"window\((-?\d{1,18}),\s*(-?\d{1,18})\)", text):
        return window(int(reach[1]), int(reach[2]))
    if sides := re.fullmatch(r"documents\(([\d,]+)(?:\|([\d,]+))?\)", text):
        return documents(_parse_boundaries(sides[1]), _parse_boundaries(sides[2]) if sides[2] else None)
    raise ParseError(f"mask {brief(text)}: expected full, causal, window(LEFT,RIGHT) or documents(0,…), joined by '&'")


def _parse_boundaries(text: str) -> list[int]:
    cuts = text.split(",")
    if not all(0 < len(cut) < 19 for cut in cuts):
        raise ParseError(f"documents({brief(text)}): expected positions, such as documents(0,100,250)")
    return [int(cut) for cut in cuts]
