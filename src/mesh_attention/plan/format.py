"""The text of items, steps and moves: one line each, which `plan.parse` reads back."""

from __future__ import annotations

from collections.abc import Iterable

from typing_extensions import assert_never

from mesh_attention.plan import steps
from mesh_attention.plan.schedule import Fetch, GroupMove, Meet, Move, Return
from mesh_attention.plan.steps import Item, Step

# Items and steps


def format_item(item: Item) -> str:
    name = f"{item.kind}{item.shard}" + (f".{item.part}" if item.part else "")
    match item.form:
        case "whole":
            return name + (f"@{item.source}" if item.source is not None else "")
        case "running":
            return f"{name}~"
        case "home" | "staged" | "kept" | "total":
            return f"{item.form}:{name}"
        case "piece":
            return f"{name}/{item.source}"
        case _:
            assert_never(item.form)


def format_end(end: steps.Send | steps.Recv) -> str:
    """A transfer as one of its ends sees it, without the verb: "kv3 to 1"."""
    return format_step(end).split(" ", 1)[1]


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
        case steps.Pack(before, after) | steps.Unpack(before, after):
            return f"{_verb(step)} {format_item(before)} -> {format_item(after)}"
        case steps.Attend(rows, cols, grads):
            suffix = f" with {_format_items(grads)}" if grads else ""
            return f"attend {_format_items(rows)} x {_format_items(cols)}{suffix}"
        case steps.Decode(rows, cache, partials):
            return f"decode {_format_items(rows)} x {format_item(cache)} -> {_format_items(partials)}"
        case steps.Combine(partials, total):
            return f"combine {_format_items(partials)} -> {format_item(total)}"
        case steps.Merge(item) | steps.Clear(item) | steps.Finish(item) | steps.Free(item):
            return f"{_verb(step)} {format_item(item)}"
        case _:
            assert_never(step)


def _verb(step: Step) -> str:
    return type(step).__name__.lower()


def _with_transfers(head: str, transfers: tuple[steps.Send | steps.Recv, ...]) -> str:
    return f"{head}: {'; '.join(map(format_step, transfers))}".rstrip()


def _format_items(items: Iterable[Item]) -> str:
    return ",".join(map(format_item, items))


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


def format_numbers(numbers: Iterable[int]) -> str:
    """Runs of consecutive numbers as first-last; the order is kept."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
