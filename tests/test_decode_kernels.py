"""Decode kernels: torch's here, and Triton's where test_interpreted.py runs this file again."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_cases import Case, attend, cases, dense, make_call
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mesh_attention.kernels import decode, launching
from mesh_attention.kernels.base import Demand
from mesh_attention.kernels.decode import (
    Blocks,
    DecodeKernel,
    Reach,
    SplitTile,
    TorchDecode,
    TritonDecode,
    choose_decode,
)

CPU = torch.device("cpu")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNEL: DecodeKernel = TritonDecode("cpu", tile=SplitTile(16, 4, 3, 1)) if IS_INTERPRETED else TorchDecode()
WIDE = torch.float32 if IS_INTERPRETED else torch.float64
EXACT = {torch.float64: 1e-13, torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 3e-2}
EXAMPLES = 3 if IS_INTERPRETED else 60
PHASES = [Phase.explicit, Phase.generate] if IS_INTERPRETED else list(Phase)  # the interpreter is slow at shrinking

interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="needs Triton's interpreter")
in_plain_python = pytest.mark.skipif(IS_INTERPRETED, reason="already interpreted")

TYPICAL = Case(
    queries=2,
    kv_heads=2,
    group=3,
    dims=(24, 16),
    block_tokens=4,
    reaches=(((0, 37), (0, 38)), ((5, 5), (9, 3)), ((3, 20), (4, 21))),
)
UNEVEN = replace(TYPICAL, queries=1, block_tokens=16, reaches=(((0, 200),), ((0, 7),), ((4, 4),), ((2, 40),)))


@given(case=cases())
@settings(max_examples=EXAMPLES, phases=PHASES, deadline=None)
def test_every_call_is_exact(case: Case) -> None:
    """And slots that no query sees, which are NaN, are not used; nor are blocks beyond the need."""
    assert_exact(case, WIDE)


@pytest.mark.parametrize("case", [TYPICAL, UNEVEN, replace(UNEVEN, block_tokens=32, softcap=2.0)], ids=str)
def test_sequences_of_any_lengths_are_exact(case: Case) -> None:
    assert_exact(case, WIDE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *([] if IS_INTERPRETED else [torch.bfloat16])])
def test_dtypes_are_rounded_once(dtype: torch.dtype) -> None:
    assert_exact(TYPICAL, dtype)  # Triton's interpreter cannot multiply bfloat16


def assert_exact(case: Case, dtype: torch.dtype) -> None:
    call = make_call(case, dtype, CPU)
    out, lse = attend(KERNEL, call)
    due, due_lse = dense(call)
    torch.testing.assert_close(out.double(), due, rtol=0, atol=EXACT[dtype])
    torch.testing.assert_close(lse.double(), due_lse, rtol=0, atol=5e-13 if dtype == torch.float64 else 1e-5)


def test_neighbours_of_the_results_stay_what_they_are() -> None:
    heads, dim = 6, 5
    call = make_call(replace(TYPICAL, dims=(24, dim)), WIDE, CPU)
    raw = torch.full((3, 2, heads + 1, dim + 3), 7.0, dtype=WIDE)
    out, lse = raw[:, :, :heads, 1 : 1 + dim], raw[:, :, :heads, dim + 2]
    KERNEL.attend(call.q, call.blocks, call.reach, scale=call.scale, softcap=0.0, out=out, lse=lse)
    due, due_lse = attend(KERNEL, call)
    assert torch.equal(out, due)
    assert torch.equal(lse, due_lse)
    assert (raw[:, :, heads:] == 7.0).all()
    assert (raw[..., 0] == 7.0).all()
    assert (raw[..., dim + 1] == 7.0).all()


@given(cut=st.integers(0, 40), case=cases())
@settings(max_examples=EXAMPLES, phases=PHASES, deadline=None)
def test_two_parts_merge_into_the_whole(cut: int, case: Case) -> None:
    case = replace(case, block_tokens=5)
    left = tuple(tuple((low, min(high, cut)) for low, high in reach) for reach in case.reaches)
    right = tuple(tuple((max(low, cut), high) for low, high in reach) for reach in case.reaches)
    call = make_call(case, WIDE, CPU)
    whole, whole_lse = attend(TorchDecode(), call)
    parts = []
    for reaches in (left, right):
        first, stop = torch.tensor(reaches, dtype=torch.int32).unbind(-1)
        parts.append(attend(TorchDecode(), call._replace(reach=Reach(call.reach.table, first, stop))))
    dim = whole.shape[-1]
    outs, lses = (torch.stack(tuple(each)) for each in zip(*parts, strict=True))
    whole, whole_lse = whole.flatten(0, 1), whole_lse.flatten(0, 1)
    out = torch.empty(*whole_lse.shape, dim + 1, dtype=WIDE)[..., :dim]
    lse = torch.empty(whole_lse.mT.shape, dtype=WIDE).mT
    KERNEL.merge(outs.flatten(1, 2), lses.flatten(1, 2), out, lse)
    torch.testing.assert_close(out, whole, rtol=0, atol=EXACT[WIDE])
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=5 * EXACT[WIDE])


def merge_rows(parts: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Rows are tokens of one head."""
    KERNEL.merge(parts[:, :, None], lses[..., None], out[:, None], lse[:, None])


@pytest.mark.parametrize("size", [0.0, 1e4, 1e8, -1e8])
@pytest.mark.parametrize("number", [1, 3, 70])
def test_equal_lses_of_any_size_give_the_mean(size: float, number: int) -> None:
    """70 rows of 200 elements are more than the Triton kernel loads at a time."""
    parts = torch.randn(number, 5, 200, dtype=WIDE, generator=torch.Generator().manual_seed(0))
    lses = torch.full((number, 5), size, dtype=WIDE)
    lses[:, 1] = -torch.inf
    lses[1:, 2] = -torch.inf
    out, lse = torch.full((5, 200), torch.nan, dtype=WIDE), torch.full((5,), torch.nan, dtype=WIDE)
    merge_rows(parts, lses, out, lse)
    due, due_lse = parts.mean(0), torch.full((5,), size + math.log(number), dtype=WIDE)
    due[1], due_lse[1] = 0, -torch.inf
    due[2], due_lse[2] = parts[0, 2], size
    torch.testing.assert_close(out, due, rtol=0, atol=EXACT[WIDE])
    torch.testing.assert_close(lse, due_lse, rtol=1e-6, atol=1e-6)


def test_many_parts_merge_by_their_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(100, 4, 200, dtype=torch.float64, generator=generator)
    lses = torch.randn(100, 4, dtype=torch.float64, generator=generator) * 5
    out, lse = torch.empty(4, 200, dtype=WIDE), torch.empty(4, dtype=WIDE)
    merge_rows(parts.to(WIDE), lses.to(WIDE), out, lse)
    due = (lses.softmax(0)[..., None] * parts).sum(0)
    torch.testing.assert_close(out.double(), due, rtol=0, atol=EXACT[WIDE])
    torch.testing.assert_close(lse.double(), lses.logsumexp(0), rtol=0, atol=5 * EXACT[WIDE])


def test_nan_stays_nan_when_merged() -> None:
    out, lse = torch.zeros(3, 8, dtype=WIDE), torch.zeros(3, dtype=WIDE)
    parts, lses = torch.ones(3, 3, 8, dtype=WIDE), torch.zeros(3, 3, dtype=WIDE)
    parts[1, 1], lses[1, 2] = torch.nan, torch.nan
    merge_rows(parts, lses, out, lse)
    torch.testing.assert_close(out[0], torch.ones(8, dtype=WIDE))
    assert out[1:].isnan().all()
    assert lse.isnan().tolist() == [False, False, True]


@interpreted
def test_a_long_sequence_has_more_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sequence has one at least, also the one that sees nothing, and all have room in the scratch."""
    kernel, call, launched = TritonDecode("cpu", tile=SplitTile(16, 4, 3, 1)), make_call(UNEVEN, WIDE, CPU), []
    monkeypatch.setattr(decode, "launch", lambda key, *rest: (launched.append(key), launching.launch(key, *rest)))
    attend(kernel, call)
    (scratch,) = kernel._scratches.values()
    (work,) = {key[1] for key in launched}
    leading, numbers = scratch[work.scratch_size - 8 : work.scratch_size].view(4, 2).int().T.tolist()
    assert leading == [sum(numbers[:at]) for at in range(4)]
    assert numbers[0] > numbers[3]
    assert numbers[1:3] == [1, 1]
    assert sum(numbers) <= work.splits


@interpreted
def test_the_scratch_is_kept() -> None:
    call = make_call(replace(TYPICAL, reaches=TYPICAL.reaches[:1]), WIDE, CPU)
    kernel = TritonDecode("cpu", tile=SplitTile(16, 4, 3, 1))
    attend(kernel, call)
    (before,) = kernel._scratches.values()
    attend(kernel, call)
    assert [scratch is before for scratch in kernel._scratches.values()] == [True]


def demand(**changes: Any) -> Demand:
    plain = {"device": "cuda", "dtype": torch.bfloat16, "head_dim_qk": 192, "head_dim_v": 128}
    return Demand(**(plain | {"softcap": 5.0, "lse_gradient": False} | changes))


@in_plain_python
def test_torch_takes_what_triton_does_not() -> None:
    assert choose_decode(demand(device="cpu")).name == "torch"
    assert choose_decode(demand(dtype=torch.float64)).name == "torch"
    assert choose_decode(demand(device="cpu")) is not choose_decode(demand(device="cpu"))


@in_plain_python
def test_tensors_of_other_dtypes_or_strides_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "kernel", None)
    q, (k, v), reach, _, _ = make_call(TYPICAL, torch.float32, CPU)
    out, lse = torch.empty(3, 2, 6, 16), torch.empty(3, 2, 6)
    fine = (q, Blocks(k, v), reach, out, lse)
    for at, wrong in (
        (1, Blocks(k, v.half())),
        (2, reach._replace(first=reach.first.long())),
        (3, out.transpose(2, 3).contiguous().transpose(2, 3)),
    ):
        given: list[Any] = [*fine[:at], wrong, *fine[at + 1 :]]
        with pytest.raises(AssertionError):
            TritonDecode("cpu").attend(*given[:3], scale=1.0, softcap=0.0, out=given[3], lse=given[4])


@in_plain_python
def test_nothing_to_do_is_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "kernel", None)
    q, blocks, reach, _, _ = make_call(TYPICAL, torch.float32, CPU)
    none = Reach(*(each[:0] for each in reach))
    for kernel in (TritonDecode("cpu"), TorchDecode()):
        out, lse = torch.empty(0, 2, 6, 16), torch.empty(0, 2, 6)
        kernel.attend(q[:0], blocks, none, scale=1.0, softcap=0.0, out=out, lse=lse)
        kernel.merge(torch.empty(2, 0, 3, 8), torch.empty(2, 0, 3), torch.empty(0, 3, 8), torch.empty(0, 3))


@in_plain_python
def test_stages_of_loading_suit_the_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of compute capability 8.9, 8.0 and 9.0; 64 rows need more of it."""
    for program, sm, stages, resident in ((101376, 102400, 3, 1), (166912, 167936, 4, 1), (232448, 233472, 4, 2)):
        shared = launching.SharedMemory(program, sm)
        monkeypatch.setattr(decode, "shared_nbytes", lambda device, shared=shared: shared)
        assert decode._tile(512, 16, CPU) == SplitTile(64, 4, stages, resident)
    assert decode._tile(512, 64, CPU) == SplitTile(64, 4, 3, 2)
