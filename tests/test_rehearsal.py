"""Before the first pass on NCCL, every kind of kernel call and merge has been made once: a first launch may wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mesh_attention.api import MeshAttention
from mesh_attention.comm.base import Parcel
from mesh_attention.execution import engine, rehearsal
from mesh_attention.kernels.base import Gradients, Kernel, RowGradient, Scores
from mesh_attention.kernels.merge import TorchMerging
from mesh_attention.kernels.select import choose_kernel

RANKS = 4


class Alone:
    """One rank of several, whose transfers are as on NCCL but carry nothing; notes when the first one is posted."""

    is_capturable = True
    rank, size = 1, RANKS

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> rehearsal._Done:
        for parcel in recvs:
            for chunk in parcel.chunks:
                chunk.zero_()
        self.log.append("post")
        return rehearsal._Done()

    def share(self, text: str) -> Any:
        class Shared(rehearsal._Done):
            def result(self) -> list[str]:
                return [text] * RANKS

        return Shared()


class Noted:
    """A kernel that notes the forms of its calls."""

    name = "noted"

    def __init__(self, kernel: Kernel, log: list[Any]) -> None:
        self.kernel, self.log = kernel, log

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        self.log.append(("forward", scores.mask.form, q.shape, k.shape))
        return self.kernel.forward(q, k, v, scores)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, row: RowGradient, scores: Scores) -> Gradients:
        self.log.append(("backward", scores.mask.form, q.shape, k.shape))
        return self.kernel.backward(q, k, v, row, scores)


class NotedMerging(TorchMerging):
    name = "noted"

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def merge_output(self, total: Tensor, total_lse: Tensor, partial: Tensor, lse: Tensor) -> None:
        self.log.append(("merge", total.shape))
        super().merge_output(total, total_lse, partial, lse)

    def add(self, total: Tensor, partial: Tensor) -> None:
        self.log.append(("add", total.shape))
        super().add(total, partial)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(engine, "choose_kernel", lambda demand: Noted(choose_kernel(demand), found))
    monkeypatch.setattr(engine, "choose_merging", lambda device: NotedMerging(found))
    monkeypatch.setattr(rehearsal, "_MADE", set())
    return found


def split(log: list[Any]) -> tuple[list[Any], list[Any]]:
    """What was made before the first post, and after it."""
    at = log.index("post")
    return log[:at], [entry for entry in log[at:] if entry != "post"]


@pytest.mark.parametrize(
    "options", [{"tile": (2, 2)}, {"method": "ring"}, {"tile": (1, 2), "ulysses_degree": 2}], ids=str
)
def test_every_form_of_call_is_made_before_the_first_post(log: list[Any], options: dict[str, Any]) -> None:
    attention = MeshAttention(Alone(log), **options)
    leaves = [torch.randn(1, 32, 4, 8, requires_grad=True) for _ in range(3)]
    out = attention(*leaves, causal=True)
    before, after = split(log)
    assert set(before) == set(after)
    assert len(before) <= len(after)
    assert not out.isnan().any()
    log.clear()
    out.sum().backward()
    before, after = split(log)
    assert set(before) == set(after)


def test_what_was_made_once_is_not_made_again(log: list[Any]) -> None:
    for _ in range(2):  # another object has other plans and masks, but no new kernels
        attention = MeshAttention(Alone(log), tile=(2, 2))
        for _ in range(2):
            log.clear()
            attention(*[torch.randn(1, 32, 4, 8)] * 3, causal=True)
    before, after = split(log)
    assert before == []
    assert after
    log.clear()
    attention(*[torch.randn(1, 64, 4, 8)] * 3, causal=True)
    before, after = split(log)
    assert set(before) == set(after)
