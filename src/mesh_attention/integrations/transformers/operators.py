"""The check of position ids as an operator of torch, for compiled layers: a compiler sees shapes, and it sees values.

It gives the boundaries that attention is then called with, so no compiler can leave it out as being without use.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mesh_attention.integrations.sequences import Row


class Checker(Protocol):
    """Whoever knows where this rank's tokens stand."""

    def check_agreed(self, position_ids: Tensor, rows: tuple[Row, ...]) -> None:
        """Raise unless they stand where they should, on every rank if once a forward."""


_numbers = count(1)
_checkers: WeakValueDictionary[int, Any] = WeakValueDictionary()


def number_of(checker: Checker) -> int:
    """A number that stands for the checker among the operator's arguments, as long as the checker lives."""
    number = next(_numbers)
    _checkers[number] = checker
    return number


def checked_cuts(position_ids: Tensor, cuts: Sequence[int], rows: Sequence[Row], checker: int) -> Tensor:
    """`cuts` as a tensor, once the position ids of all rows have been looked at."""
    flat = [number for row in rows for number in (*row.real, *row.cuts)]
    sizes = [2 + len(row.cuts) for row in rows]
    found: Tensor = torch.ops.mesh_attention.checked_cuts(position_ids, list(cuts), flat, sizes, checker)
    return found


@torch.library.custom_op(
    "mesh_attention::checked_cuts",
    mutates_args=(),
    schema="(Tensor position_ids, SymInt[] cuts, SymInt[] rows, SymInt[] sizes, SymInt checker) -> Tensor",
)
def _checked_cuts(
    position_ids: Tensor, cuts: Sequence[int], rows: Sequence[int], sizes: Sequence[int], checker: int
) -> Tensor:
    numbers = iter(rows)
    split = [[next(numbers) for _ in range(size)] for size in sizes]
    _checkers[checker].check_agreed(position_ids, tuple(Row(tuple(row[2:]), (row[0], row[1])) for row in split))
    return torch.tensor(cuts)


@_checked_cuts.register_fake
def _(position_ids: Tensor, cuts: Sequence[int], rows: Sequence[int], sizes: Sequence[int], checker: int) -> Tensor:
    return torch.empty(len(cuts), dtype=torch.int64, device="cpu")
