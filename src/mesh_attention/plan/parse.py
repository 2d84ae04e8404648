"""Reads a plan and its parts from their text: the inverse of ``str(plan)`` and of `plan.format`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any, TypeVar

from mesh_attention.errors import ParseError
from mesh_attention.masks import Mask, causal, documents, full, window
from mesh_attention.plan import steps
from mesh_attention.plan.assignment import Assignment, Tile
from mesh_attention.plan.format import format_step
from mesh_attention.plan.layout import parse_layout
from mesh_attention.plan.plan import HEADER, Plan
from mesh_attention.plan.program import Program
from mesh_attention.plan.schedule import GROUP_OPS, Fetch, GroupMove, Meet, Move, Return, Schedule
from mesh_attention.plan.steps import FORMS, KINDS, Item, Kind, Step
from mesh_attention.problem import Problem
from mesh_attention.units import brief

Parsed = TypeVar("Parsed")

MAX_NUMBERS = 1 << 20
"""The most numbers in one list, so that a typo does not fill the memory."""

# Plans

_REQUIRED = ("method", "direction", "problem", "layout", "tile", "ulysses", "route", "partials", "keep")
_OPTIONAL = ("mask", "inner", "waves", "moves", "programs")


def parse_plan(text: str) -> Plan:
    """A plan from its text, such as the contents of a plan file; the inverse of ``str(plan)``."""
    entries = _entries(text)
    missing = [key for key in _REQUIRED if key not in entries]
    unknown = [key for key in entries if key not in (*_REQUIRED, *_OPTIONAL)]
    if missing or unknown:
        raise ParseError(
            f"missing fields: {', '.join(missing) or 'none'}; unknown fields: {', '.join(unknown)[:200] or 'none'}; "
            "save the plan again"
        )
    if ("moves" in entries) == ("programs" in entries):
        which = "both moves and programs" if "moves" in entries else "neither moves nor programs"
        raise ParseError(f"plan has {which}; expected one of the two; save the plan again")
    waves, _, cut = entries.get("waves", "1 of heads").partition(" of ")
    keep = entries["keep"]
    return Plan(
        method=entries["method"],
        direction=entries["direction"],
        problem=_problem(entries["problem"], mask=entries.get("mask", "full")),
        layout=parse_layout(entries["layout"]),
        assignment=Assignment(
            Tile.parse(entries["tile"]),
            _whole("ulysses", entries["ulysses"]),
            Tile.parse(entries["inner"]) if "inner" in entries else None,
            _whole("waves", waves),
            cut,
        ),
        schedule=Schedule(
            moves=tuple(map(parse_move, entries.get("moves", ()))),
            route=entries["route"],
            partials=entries["partials"],
            keep=() if keep == "nothing" else tuple(keep.split(",")),
        ),
        programs=tuple(map(_program, entries["programs"])) if "programs" in entries else None,
    )


def _entries(text: str) -> dict[str, Any]:
    """The lines of a plan's text by their first word. `moves` is a list of lines, `programs` one of lists of lines."""
    lines = text.splitlines()
    if not lines or lines[0].strip() != HEADER:
        raise ParseError(f"first line {(lines or [''])[0][:60]!r}: expected {HEADER!r}")
    entries: dict[str, Any] = {}
    section: list[str] | None = None  # the moves or the program that indented lines belong to
    for number, line in enumerate(lines[1:], start=2):
        key, _, value = line.partition(" ")
        if line.startswith("  "):
            if section is None:
                raise ParseError(f"line {number}: {brief(line.strip())} is outside 'moves' and 'program'")
            section.append(line.strip())
        elif key == "program":
            section = [value]
            entries.setdefault("programs", []).append(section)
        elif line.strip():
            if key in entries or key == "programs":
                raise ParseError(f"line {number}: a second {brief(key)}; expected each key once")
            if line == "moves":
                section = entries[key] = []
            else:
                entries[key] = value
    return entries


def _problem(text: str, *, mask: str) -> Problem:
    values: dict[str, Any] = {}
    for name, _, value in (field.partition("=") for field in text.split()):
        if name in values:
            raise ParseError(f"problem has {brief(name)} twice; expected each field once")
        values[name] = value if name == "dtype" else _whole(name, value)
    names = {field.name for field in fields(Problem)} - {"mask"}
    if set(values) != names:
        raise ParseError(f"problem {brief(text)}: expected the fields {', '.join(sorted(names))}")
    return Problem(**values, mask=parse_mask(mask))


def _program(lines: list[str]) -> Program:
    head = re.fullmatch(r"(\d{1,18}) peak (\d{1,18})", lines[0])
    if head is None:
        raise ParseError(f"program {brief(lines[0])}: expected a rank and its peak, such as 'program 0 peak 1024'")
    return Program(rank=int(head[1]), steps=tuple(map(parse_step, lines[1:])), peak_nbytes=int(head[2]))


def _whole(name: str, text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise ParseError(f"{name}={brief(text)}: expected a whole number of at most 18 digits")
    return int(text)


# Items and steps

# No number here is longer than nine digits; longer ones are not read.
_ITEM = re.compile(r"(?:(home|staged|kept|total):)?([a-z]+)(\d{1,9})(?:\.(\d{1,9}))?(?:(~)|@(\d{1,9})|/(\d{1,9}))?")


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
    (r"exchange (\S+) -> (\S+) over (\S+):(.*)", _parse_exchange),
    (r"pack (\S+) -> (\S+)", lambda before, after: steps.Pack(parse_item(before), parse_item(after))),
    (r"unpack (\S+) -> (\S+)", lambda before, after: steps.Unpack(parse_item(before), parse_item(after))),
    (r"attend (\S+) x (\S+)(?: with (\S+))?", lambda *sides: steps.Attend(*map(_parse_items, filter(None, sides)))),
    (
        r"decode (\S+) x (\S+) -> (\S+)",
        lambda rows, cache, partials: steps.Decode(_parse_items(rows), parse_item(cache), _parse_items(partials)),
    ),
    (r"combine (\S+) -> (\S+)", lambda partials, total: steps.Combine(_parse_items(partials), parse_item(total))),
    (r"merge (\S+)", lambda item: steps.Merge(parse_item(item))),
    (r"clear (\S+)", lambda item: steps.Clear(parse_item(item))),
    (r"finish (\S+)", lambda item: steps.Finish(parse_item(item))),
    (r"free (\S+)", lambda item: steps.Free(parse_item(item))),
    (
        rf"({'|'.join(steps.COLLECTIVE_OPS)}) over (\S+):(.*)",
        lambda op, group, rest: steps.Collective(op, parse_numbers(group), *_parse_transfers(rest)),
    ),
)


def parse_step(text: str) -> Step:
    verbs = ", ".join(re.findall(r"\w+", " ".join(form.split()[0] for form, _ in _STEP_FORMS)))
    return _parse("step", text, _STEP_FORMS, f"{verbs}, such as 'recv kv1 from 3'")


def _parse(what: str, text: str, forms: Iterable[tuple[str, Callable[..., Parsed]]], expected: str) -> Parsed:
    for form, build in forms:
        if match := re.fullmatch(form, text):
            return build(*match.groups())
    raise ParseError(f"{what} {brief(text)}: expected {expected}")


# Moves

_MOVE_FORMS: tuple[tuple[str, Callable[..., Move]], ...] = (
    (r"fetch ([a-z]+) (\d{1,9})", lambda kind, offset: Fetch(_kind(kind), int(offset))),
    (r"meet (\S+) x (\S+)", lambda rows, cols: Meet(parse_numbers(rows), parse_numbers(cols))),
    (r"return ([a-z]+) (\d{1,9})", lambda kind, offset: Return(_kind(kind), int(offset))),
    (rf"({'|'.join(GROUP_OPS)}) ([a-z]+)", lambda op, kind: GroupMove(op, _kind(kind))),
)


def parse_move(text: str) -> Move:
    kinds = f"fetch, meet, return, {', '.join(GROUP_OPS[:-1])} or {GROUP_OPS[-1]}"
    prefixed = re.fullmatch(r"(\d{1,9}): (.*)", text)
    wave, rest = (int(prefixed[1]), prefixed[2]) if prefixed else (0, text)
    move = _parse("move", rest, _MOVE_FORMS, f"{kinds}, such as 'fetch kv 1', '1: fetch kv 1' or 'meet 0,1 x 0-3'")
    return replace(move, wave=wave)


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
