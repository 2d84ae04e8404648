"""Memory of the last answer about tensors: layers of a forward ask alike, and looking at values waits for a device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Answer = TypeVar("Answer")


class Memory(Generic[Answer]):
    """The last answer, for as long as the same tensors, unchanged, and equal other things are asked about.

    Of tensors made in inference mode nothing is remembered: they do not count how often they were written to. Nor is
    anything while a compiler traces, which would compile again whenever the memory is another.
    """

    def __init__(self) -> None:
        self._last: tuple[list[Any], Answer] | None = None

    def ask(self, answer: Callable[[], Answer], *about: Any) -> Answer:
        if torch.compiler.is_compiling():
            return answer()
        if self._last is not None and _are_same(self._last[0], about):
            return self._last[1]
        given = answer()
        self._last = [_mark(thing) for thing in about], given
        return given


def _mark(thing: Any) -> Any:
    # Held weakly: a batch must not live on here, and an address says nothing once it can be used again.
    if not isinstance(thing, Tensor):
        return thing
    return None if thing.is_inference() else (weakref.ref(thing), thing._version)


def _are_same(marks: list[Any], things: tuple[Any, ...]) -> bool:
    return len(marks) == len(things) and all(map(_is_same, marks, things))


def _is_same(mark: Any, thing: Any) -> bool:
    if isinstance(thing, Tensor):
        is_mark = isinstance(mark, tuple) and len(mark) == 2 and isinstance(mark[0], weakref.ref)
        return is_mark and mark[0]() is thing and mark[1] == thing._version
    return bool(type(mark) is type(thing) and mark == thing)
