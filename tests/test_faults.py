"""Errors on one rank, and what the others do about them: a share of the campaign, and what it does not cover."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from campaign import faults
from campaign.faults import Setting, run_cell
from pool import said, shared_pool
from serving_cases import HEAD_DIM, HEADS, KV_HEADS, VALUE_DIM, cache_of

from mesh_attention import DisagreementError, LocalGroup
from mesh_attention.api import MeshAttention, mesh_attention
from mesh_attention.comm.base import drive_together
from mesh_attention.comm.local import LocalComm
from mesh_attention.comm.torch_dist import ROOM, TorchComm
from mesh_attention.execution import engine
from mesh_attention.session.agreement import Statement, agree


def _inputs(tokens: int = 8, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.randn(1, tokens, 2, 4, dtype=dtype) for _ in range(3)]


def _fail(*given: Any, **named: Any) -> Any:
    raise ZeroDivisionError("a bug")


def _call(group: Any, options: dict[str, Any] | None = None, inputs: Any = None, **arguments: Any) -> Any:
    return MeshAttention(group, **options or {})(*(inputs or _inputs()), **arguments)


def _without_a_kernel(group: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "choose_kernel", _fail)
        return _call(group)


MISTAKES: dict[str, Callable[[Any], Any]] = {
    "return_lse=1: expected True or False": lambda group: _call(group, return_lse=1),
    "causal='yes': expected True or False": lambda group: _call(group, causal="yes"),
    "unknown argument 'casual' of attention; did you mean causal?": lambda group: _call(group, casual=True),
    "dropout_p was given": lambda group: _call(group, dropout_p=0.1),
    "list: expected a tensor": lambda group: _call(group, inputs=[[1.0], *_inputs()[1:]]),
    "a tensor of shape (8, 2): expected a tensor of 4": lambda group: _call(
        group, inputs=[torch.zeros(8, 2), *_inputs()[1:]]
    ),
    "q, k and v have [3, 4] dimensions": lambda group: _call(group, inputs=[torch.zeros(8, 2, 4), *_inputs()[1:]]),
    "cu_seqlens_q=(): expected running totals": lambda group: _call(group, cu_seqlens_q=[]),
    "cu_seqlens_q ends at 9 but": lambda group: _call(group, cu_seqlens_q=[0, 9], seq_len=24),
    "seq_len='24': expected a whole number": lambda group: _call(group, seq_len="24"),
    "method 'torus': expected one of": lambda group: mesh_attention(*_inputs(), group=group, method="torus"),
    "ZeroDivisionError: a bug": lambda group: MeshAttention(group, planner=_fail)(*_inputs()),
    "ZeroDivisionError: a bug ": lambda group: _without_a_kernel(group),
    "window_size=5: expected (left, right)": lambda group: _call(group, window_size=5),
    "expected a plain tensor of tokens": lambda group: MeshAttention(group).unshard([1]),
    "which has no dim 4": lambda group: MeshAttention(group).unshard(_inputs()[0], dim=4),
    "q is torch.float64 on cpu and k is torch.float32": lambda group: _call(
        group, inputs=[x.float() if at == 1 else x for at, x in enumerate(_inputs())]
    ),
}


def make_mistakes(group: Any) -> list[tuple[str, str]]:
    """What this rank raises for each mistake of rank 1; a good call between them is right."""
    found = []
    for due, mistake in MISTAKES.items():
        made = mistake if dist.get_rank(group) == 1 else _call
        found.append((due, said(lambda made=made: made(group))))
        assert _call(group).shape == (1, 8, 2, 4)
    return found


def test_whatever_one_rank_refuses_is_told_to_all_and_the_group_still_works() -> None:
    ranks = shared_pool().run(3, make_mistakes)
    for rank, found in enumerate(ranks):
        for due, raised in found:
            assert due.strip() in raised
            assert raised.startswith("DisagreementError: rank 1 refused the call: ") == (rank != 1), raised


def share_texts(group: Any) -> list[list[int]]:
    """Texts around the size of a message, of different lengths on every rank, with letters of several bytes."""
    comm = TorchComm(group)
    return [
        [len(text) for text in comm.share("é" * (length + 700 * comm.rank)).result()]
        for length in (0, 1, ROOM // 2, ROOM, 5 * ROOM)
    ]


def test_texts_of_any_length_are_shared() -> None:
    due = [[length + 700 * rank for rank in range(3)] for length in (0, 1, ROOM // 2, ROOM, 5 * ROOM)]
    assert shared_pool().run(3, share_texts) == [due] * 3


# Calls and shards that differ, and are compared before anything is sent


def _unshard(group: Any, local: torch.Tensor, layout: str = "contiguous", dim: int = 1) -> Any:
    return MeshAttention(group, layout=layout).unshard(local, dim=dim)  # type: ignore[arg-type]


LOCAL = torch.zeros(2, 6, 4)
DIFFERENCES: dict[str, Callable[[Any, bool], Any]] = {
    "seq_q is 24 on rank(s) 0,2, but 27 on rank(s) 1": lambda group, odd: _call(group, inputs=_inputs(8 + odd)),
    "dtype is float64 on rank(s) 0,2, but float32 on rank(s) 1": lambda group, odd: _call(
        group, inputs=_inputs(dtype=torch.float32 if odd else torch.float64)
    ),
    "mask is causal on rank(s) 0,2, but full on rank(s) 1": lambda group, odd: _call(group, causal=not odd),
    "softmax is Softmax(scale=0.5, softcap=0.0) on rank(s) 0,2, but Softmax(scale=0.7": lambda group, odd: _call(
        group, softmax_scale=0.7 if odd else None
    ),
    "forward plan is <Plan mesh 3x1": lambda group, odd: _call(group, {"tile": (1, 3) if odd else (3, 1)}),
    "rank 2 holds 8 tokens of q but its shard has 7": lambda group, odd: _call(group, seq_len=23),
    "gradient is not needed on rank(s) 0,2, but needed on rank(s) 1": lambda group, odd: _call(
        group, inputs=[x.requires_grad_(odd) for x in _inputs()]
    ),
    "dtype is torch.float32 on rank(s) 0,2, but torch.float64 on rank(s) 1; nothing was sent": lambda group, odd: (
        _unshard(group, LOCAL.double() if odd else LOCAL)
    ),
    "shape is (2, tokens, 4) on rank(s) 0,2, but (2, tokens, 5) on rank(s) 1; nothing was sent": lambda group, odd: (
        _unshard(group, torch.zeros(2, 6, 4 + odd))
    ),
    "layout is contiguous on rank(s) 0,2, but zigzag on rank(s) 1; nothing was sent": lambda group, odd: _unshard(
        group, LOCAL, "zigzag" if odd else "contiguous"
    ),
    "dim is 1 on rank(s) 0,2, but 0 on rank(s) 1; nothing was sent": lambda group, odd: _unshard(
        group, LOCAL, dim=1 - odd
    ),
    "ranks hold [6, 4, 6] tokens; expected [6, 5, 5], the shards of a contiguous sequence": lambda group, odd: _unshard(
        group, LOCAL[:, : 6 - 2 * odd]
    ),
    "operation is unshard on rank(s) 0,2, but attention on rank(s) 1; nothing was sent": lambda group, odd: (
        _call(group) if odd else _unshard(group, LOCAL)
    ),
    "the cache's dtype is torch.float32 on rank(s) 0,2, but torch.float64 on rank(s) 1; nothing": lambda group, odd: (
        _serve(group, dtype=torch.float64 if odd else torch.float32)
    ),
    "the cache's tokens is 200 on rank(s) 0,2, but 300 on rank(s) 1; nothing was sent": lambda group, odd: _serve(
        group, tokens=300 if odd else 200
    ),
    "the cache's layers is (CachedLayer(kv_heads=2, head_dim=4, head_dim_v=3, window=None),) on": lambda group, odd: (
        _serve(group, windows=(5 if odd else None,))
    ),
}


def _serve(group: Any, *, decodes: bool = False, **sizes: Any) -> Any:
    cache = cache_of(MeshAttention(group), **sizes)
    number, ranks = cache.new(), 1 if decodes else dist.get_world_size(group)
    part = (cache.decode if decodes else cache.prefill)({number: ranks})
    shapes = ((1, 1, HEADS, HEAD_DIM), (1, 1, KV_HEADS, HEAD_DIM), (1, 1, KV_HEADS, VALUE_DIM))
    return part.attend(0, *(torch.ones(shape, dtype=cache.dtype) for shape in shapes))


def make_differences(group: Any) -> list[tuple[str, str]]:
    odd = dist.get_rank(group) == 1
    found = []
    for due, make in DIFFERENCES.items():
        found.append((due, said(lambda make=make: make(group, odd))))
        assert _call(group).shape == (1, 8, 2, 4)
    return found


def test_ranks_that_differ_raise_everywhere_and_the_group_still_works() -> None:
    for found in shared_pool().run(3, make_differences):
        for due, raised in found:
            assert due in raised
            assert raised.startswith("ProblemError" if due.startswith("ranks hold") else "DisagreementError")


def decode_on_other_caches(group: Any, **sizes: Any) -> str:
    rank = dist.get_rank(group)
    return said(lambda: _serve(group, decodes=True, **{name: values[rank == 1] for name, values in sizes.items()}))


@pytest.mark.parametrize(
    ("sizes", "due"),
    [
        ({"dtype": (torch.float32, torch.float64)}, "the cache's dtype is torch.float32 on rank(s) 0,2, but torch.fl"),
        ({"tokens": (200, 300)}, "the cache's tokens is 200 on rank(s) 0,2, but 300 on rank(s) 1"),
    ],
)
def test_ranks_that_decode_on_other_caches_name_what_differs(sizes: dict[str, Any], due: str) -> None:
    for raised in shared_pool().run(3, partial(decode_on_other_caches, **sizes)):
        assert raised.startswith("DisagreementError: rank 1 makes a different call from ranks 0, 2 in pass ")
        assert due in raised


# A share of the table


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, errors come later than the campaign allows."""
    monkeypatch.setattr(faults, "LIMIT_S", 60.0)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("fault", "moment", "error"),
    [
        ("die", "before the first call", "TransportError: rank "),
        ("stop", "in agreement", "TransportError: rank "),
        ("out of memory", "in agreement", "DisagreementError: rank 1 refused the call: OutOfMemoryError"),
        ("other version", "in unshard", "DisagreementError: ranks run different versions"),
        ("raise", "in unshard", "TransportError: "),
    ],
)
def test_every_other_rank_raises_an_error_of_this_library(fault: str, moment: str, error: str) -> None:
    cell = run_cell(fault, moment)
    assert not cell.breaches
    for rank in (0, 2, 3):
        assert cell.ranks[rank].said.startswith(f"library|{error}")


@pytest.mark.usefixtures("patient")
def test_a_stopped_rank_that_keeps_the_store_holds_nobody_up() -> None:
    cell = run_cell("stop", "before the first call", Setting(victim=0, store_on_rank_0=True))
    assert not cell.breaches
    assert all("the group's store does not answer" in outcome.said for outcome in cell.ranks[1:])


def test_agreement_texts_fit_into_one_message_and_still_tell_long_values_apart() -> None:
    """A rank with an error then need not wait for the rest of the others' texts."""
    sent: list[str] = []

    class Listening(LocalComm):
        def share(self, text: str) -> Any:
            sent.append(text)
            return super().share(text)

    group = LocalGroup(2)
    comms = [Listening(group, rank) for rank in range(2)]
    attention = MeshAttention(comms)
    local = attention.shard(torch.zeros(1, 2000, 1, 4))
    attention(local, local, local, cu_seqlens_q=range(2001))
    assert max(map(len, sent)) < ROOM - 100
    asked = [{"mask": f"{list(range(2000))} and {last}"} for last in (1, 2)]
    with pytest.raises(DisagreementError, match="mask is "):
        drive_together([agree(comm, Statement(must_match=mask)) for comm, mask in zip(comms, asked, strict=True)])
