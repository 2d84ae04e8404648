"""The check of position ids as an operator of torch, for compiled layers: a compiler sees only shapes, this sees
values.

It returns the boundaries that attention is then called with, so that no compiler removes it as unused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mesh_attention.errors import UsageError
from mesh_attention.execution.operators import WeakRegistry
from mesh_attention.integrations.sequences import Row


class Checker(Protocol):
    """Knows the positions of this rank's tokens."""

    def check_agreed(self, position_ids: Tensor, rows: tuple[Row, ...]) -> None:
        """Raise on wrong position ids; once a forward, on every rank together."""


CHECKERS: WeakRegistry[Checker] = WeakRegistry()
number_of = CHECKERS.number


def checked_cuts(position_ids: Tensor, cuts: Sequence[int], rows: Sequence[Row], checker: int) -> Tensor:
    """`cuts` as a tensor, after checking the position ids of all rows."""
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
    found = CHECKERS.find(checker)
    if found is None:
        raise UsageError("the attention that this model was compiled with no longer exists; compile the model again")
    found.check_agreed(position_ids, tuple(Row(tuple(row[2:]), (row[0], row[1])) for row in split))
    return torch.tensor(cuts)


@_checked_cuts.register_fake
def _(position_ids: Tensor, cuts: Sequence[int], rows: Sequence[int], sizes: Sequence[int], checker: int) -> Tensor:
    return torch.empty(len(cuts), dtype=torch.int64, device="cpu")
