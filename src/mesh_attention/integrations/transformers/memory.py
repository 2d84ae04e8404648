"""A cache of the last answer about tensors: the layers of a forward ask the same, and reading values waits for a
device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Answer = TypeVar("Answer")


class Memory(Generic[Answer]):
    """The last answer, valid for the same unchanged tensors and equal other arguments.

    Nothing is cached for tensors made in inference mode, which do not count writes, nor while a compiler traces, which
    would recompile whenever the cache changes.
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
    # Held weakly: this must not keep a batch alive, and an address means nothing once it is reused.
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
