"""Kernels for CUDA, on a CPU: the operators are faked densely, everything around them is what runs on a GPU."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from flash_fakes import FakeAten, flash_attn_2, flash_attn_3, flash_attn_4
from kernel_cases import MASKS, check, make_case, positions
from torch import Tensor

from mesh_attention import causal, documents, full
from mesh_attention.kernels import flash_attn, launching, torch_attention, windowed
from mesh_attention.kernels.base import CallMask, Demand, Gradients, Kernel, RowGradient, Scores, aligned
from mesh_attention.kernels.decode import TritonDecode
from mesh_attention.kernels.flash_attn import FLASH_ATTN_2, FLASH_ATTN_3, FLASH_ATTN_4, FlashAttnKernel, Release
from mesh_attention.kernels.intervals import IntervalKernel
from mesh_attention.kernels.reference import ReferenceKernel
from mesh_attention.kernels.select import KERNELS, choose_kernel
from mesh_attention.kernels.torch_attention import CudnnKernel, TorchFlashKernel
from mesh_attention_lab.testing.kernel_conformance import Setting, documents_stay_apart

PACKAGES: dict[Release, Callable[[list[str]], ModuleType]] = {
    FLASH_ATTN_2: flash_attn_2,
    FLASH_ATTN_3: flash_attn_3,
    FLASH_ATTN_4: flash_attn_4,
}
KERNELS_BY_NAME: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        CudnnKernel(),
        CudnnKernel(is_deterministic=True),
        TorchFlashKernel(),
        TorchFlashKernel(is_deterministic=True),
        *map(FlashAttnKernel, PACKAGES),
    )
}


@pytest.fixture
def aten(monkeypatch: pytest.MonkeyPatch) -> FakeAten:
    fake = FakeAten()
    for name in ("cudnn_forward", "cudnn_backward", "flash_forward", "flash_backward"):
        monkeypatch.setattr(torch_attention, f"_{name}", getattr(fake, name))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    return fake


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All three releases installed; their calls."""
    calls: list[str] = []
    for release, make in PACKAGES.items():
        monkeypatch.setitem(sys.modules, release.module, make(calls))
        parts = release.module.split(".")
        for depth in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
    flash_attn.find_functions.cache_clear()
    return calls


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    clear = flash_attn.find_functions.cache_clear
    yield
    clear()
    choose_kernel.cache_clear()


case = partial(make_case, dtype=torch.float32, device="cpu", dims=(8, 8))
EVERY_MASK = MASKS | {
    "small": CallMask("causal", causal(), (range(9),), (range(9),), 9, 9),
    "one key": CallMask("full", full(), (range(70),), (range(1),), 90, 90),
}


@pytest.mark.parametrize("kernel", KERNELS_BY_NAME)
@pytest.mark.parametrize("mask", EVERY_MASK)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_every_mask_is_exact(aten: FakeAten, packages: list[str], kernel: str, mask: str, kv_heads: int) -> None:
    check(KERNELS_BY_NAME[kernel], case(EVERY_MASK[mask], kv_heads=kv_heads))


@pytest.mark.parametrize("kernel", KERNELS_BY_NAME)
def test_records_that_are_not_aligned_are_copied(aten: FakeAten, packages: list[str], kernel: str) -> None:
    """An odd number of heads puts dO at an odd multiple of 8 bytes."""
    for heads in (1, 3):
        check(KERNELS_BY_NAME[kernel], case(MASKS["causal"], heads=heads, kv_heads=heads))


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_plan_of_cudnn_is_used_for_one_way_to_lie_only(aten: FakeAten, kv_heads: int) -> None:
    """torch's cuDNN plans know the strides of Q, K and V only; the fake refuses those of torch and of other strides."""
    given = case(MASKS["full"], kv_heads=kv_heads)
    do = given.row.do
    expanded = [lambda x, axis=axis: x.narrow(axis, 0, 1).expand_as(x) for axis in (0, 1)]
    for lay_q in (
        lambda x: x,
        lambda x: x.contiguous(),
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        *expanded,
    ):
        for lay in (do, do.clone(), do.contiguous(), do.mT.contiguous().mT):
            check(CudnnKernel(), given._replace(q=lay_q(given.q), row=given.row._replace(do=lay)))


@pytest.mark.parametrize(
    ("mask", "calls"),
    [
        ("full", ["cudnn forward", "cudnn backward"]),
        ("causal", ["cudnn forward causal", "cudnn backward causal"]),
        ("striped", ["cudnn forward causal", "cudnn backward causal"]),
        ("small", ["flash forward", "flash backward"]),
        ("one key", ["flash forward", "flash backward"]),
        ("window", ["flash forward", "flash backward"]),
        ("mixed strides", []),
    ],
)
def test_cudnn_gets_what_it_is_good_at(aten: FakeAten, mask: str, calls: list[str]) -> None:
    check(CudnnKernel(), case(EVERY_MASK[mask]))
    assert aten.calls == calls


def test_a_window_by_cudnn_alone_goes_to_the_reference(aten: FakeAten, caplog: pytest.LogCaptureFixture) -> None:
    """torch's flash has one head size, cuDNN may have two."""
    given = case(MASKS["window"], dims=(16, 8))
    with caplog.at_level(logging.INFO, logger="mesh_attention"):
        check(CudnnKernel(), given)
    assert aten.calls == []
    assert "reference for some calls: torch's flash kernel needs one head size, not 16 and 8" in caplog.text


class Taking:
    """Stands in for the interval kernel: takes every call, and counts them."""

    name = "taking"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def unsupported_reason(self, demand: Demand) -> str | None:
        return None if demand.deterministic else "was asked for less than it is used for"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        self.calls.append("forward")
        return ReferenceKernel().forward(q, k, v, scores)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, row: RowGradient, scores: Scores) -> Gradients:
        self.calls.append("backward")
        return ReferenceKernel().backward(q, k, v, row, scores)


@pytest.fixture
def taking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Taking]:
    fake = Taking()
    monkeypatch.setattr(windowed, "INTERVALS", fake)
    windowed._dispatch.cache_clear()
    yield fake
    windowed._dispatch.cache_clear()


LONG = positions(causal() & documents([0, 2200, 4400]), range(4400), range(4400), 4400)


@pytest.mark.parametrize("kernel", KERNELS_BY_NAME)
def test_short_windows_and_no_windows_are_one_call(
    aten: FakeAten, packages: list[str], taking: Taking, kernel: str, caplog: pytest.LogCaptureFixture
) -> None:
    both = ["forward", "backward"]
    windowed._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="mesh_attention"):
        for count, mask in enumerate(("documents", "mixed strides"), 1):
            check(KERNELS_BY_NAME[kernel], case(MASKS[mask]))
            assert taking.calls == count * both
    assert aten.calls == []
    assert "using taking for some calls: they have several short windows" in caplog.text
    check(KERNELS_BY_NAME[kernel], case(MASKS["window"]))
    assert taking.calls == 2 * both, "one window is not several"


def test_long_windows_are_calls_of_their_own(aten: FakeAten, taking: Taking) -> None:
    given = case(LONG, heads=1, kv_heads=1)
    CudnnKernel().forward(*given[:3], given.scores)
    assert (aten.calls, taking.calls) == (["cudnn forward causal"] * 2, [])


@pytest.mark.parametrize("kernel", KERNELS_BY_NAME)
def test_windows_keep_documents_apart(aten: FakeAten, packages: list[str], kernel: str) -> None:
    documents_stay_apart(KERNELS_BY_NAME[kernel], Setting(dtype=torch.float32, head_dim=8))
    assert aten.calls or packages


def test_a_torch_without_flash_still_has_cudnn(aten: FakeAten, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    for mask in ("window", "causal"):
        check(CudnnKernel(), case(EVERY_MASK[mask]))
    assert aten.calls == ["cudnn forward causal", "cudnn backward causal"]


def test_packages_get_what_they_take(aten: FakeAten, packages: list[str]) -> None:
    for release in PACKAGES:
        for mask in ("full", "causal", "window"):
            check(FlashAttnKernel(release), case(MASKS[mask]))
    both = ["forward", "backward"]
    assert packages == [
        f"{name} {way}" for name, count in ((2, 3), (3, 3), (4, 2)) for _ in range(count) for way in both
    ]
    assert aten.calls == ["flash forward", "flash backward"], "flash-attn 4 has causal windows only"


def test_deterministic_gradients_use_torchs_switch_and_put_it_back(aten: FakeAten) -> None:
    for kernel in ("torch flash", "torch flash, deterministic", "cudnn, deterministic"):
        check(KERNELS_BY_NAME[kernel], case(MASKS["causal"]))
    assert aten.modes == [0, 2, 2]
    assert aten.calls[-2:] == ["cudnn forward causal", "flash backward"]
    torch.set_deterministic_debug_mode("warn")
    try:
        with pytest.raises(RuntimeError, match="out of memory"), torch_attention._same_bits():
            raise RuntimeError("out of memory")
        assert torch.get_deterministic_debug_mode() == 1
        assert torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.set_deterministic_debug_mode("default")


def test_aligned_copies_only_what_it_must() -> None:
    whole = torch.randn(2, 10, 4, 8, dtype=torch.bfloat16).transpose(1, 2)
    for fine in (whole, whole[:, :, 3:], whole[:, :2], whole[..., 3:4, :]):
        assert aligned(fine) is fine
    shifted = torch.randn(641, dtype=torch.bfloat16)[1:].view(2, 10, 4, 8).transpose(1, 2)
    for odd in (whole[..., 1:], whole.mT, whole[..., :7].contiguous(), shifted):
        copy = aligned(odd)
        assert torch.equal(copy, odd)
        assert copy.transpose(1, 2).is_contiguous()
        assert copy.data_ptr() != odd.data_ptr()


def demand(**changes: object) -> Demand:
    plain: dict[str, object] = {"device": "cuda", "dtype": torch.bfloat16, "head_dim_qk": 128, "head_dim_v": 128}
    return Demand(**(plain | {"softcap": 0.0, "lse_gradient": False} | changes))  # type: ignore[arg-type]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU whose torch takes everything."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91600)
    monkeypatch.setattr(torch_attention, "_torch_unsupported_reason", lambda can_use, demand: None)
    return monkeypatch


def test_on_a_cpu_no_kernel_looks_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("CUDA was asked")

    monkeypatch.setattr(torch.cuda, "get_device_capability", refuse)
    monkeypatch.setattr(flash_attn, "find_functions", refuse)
    for kernel in KERNELS[1:-1]:
        for changes in ({}, {"deterministic": True}, {"head_dim_v": 64}):
            assert kernel.unsupported_reason(demand(device="cpu", **changes)) == "runs on cuda, not on cpu", kernel.name


DEMANDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "deterministic": {"deterministic": True},
    "softcap": {"softcap": 2.0},
    "a gradient into the LSE": {"lse_gradient": True},
    "on a CPU": {"device": "cpu"},
    "float32": {"dtype": torch.float32},
    "float64": {"dtype": torch.float64},
    "heads of 60": {"head_dim_qk": 60},
    "heads of 96": {"head_dim_qk": 96, "head_dim_v": 96},
    "heads of 192 and 128": {"head_dim_qk": 192},
    "heads of 192 and 128, deterministic": {"head_dim_qk": 192, "deterministic": True},
    "heads of 128 and 264": {"head_dim_v": 264},
}


def test_each_kernel_says_where_it_stops(
    hopper: pytest.MonkeyPatch, packages: list[str], golden: Callable[[str, str], None]
) -> None:
    """Asked as a Hopper GPU with everything installed, and then with a little less."""
    hopper.setattr(launching, "find_spec", lambda name: name)
    hopper.setattr(torch.cuda, "is_available", lambda: True)
    kernels: list[Any] = [*KERNELS_BY_NAME.values(), IntervalKernel(), TritonDecode()]

    def said(title: str, kernels: Sequence[Any], changes: dict[str, Any]) -> list[str]:
        launching.triton_unsupported_reason.cache_clear()
        reasons = ((kernel.name, kernel.unsupported_reason(demand(**changes))) for kernel in kernels)
        return [f"{title}: {name} {reason}" for name, reason in reasons if reason is not None]

    lines = [line for title, changes in DEMANDS.items() for line in said(title, kernels, changes)]
    hopper.setattr(launching, "find_spec", lambda name: None)
    lines += said("without Triton", kernels[-2:], {})
    hopper.setattr(torch.backends.cudnn, "version", lambda: 91500)
    lines += said("cuDNN 9.15.0", [CudnnKernel()], {})
    hopper.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 6))
    lines += said("compute capability 8.6", [CudnnKernel()], {})
    launching.triton_unsupported_reason.cache_clear()
    golden("kernel-reasons.txt", "\n".join(lines) + "\n")


def test_torch_is_asked_about_gradients() -> None:
    asked = []

    def can_use_nothing(params: object) -> bool:
        sizes = params.query.shape[-1], params.value.shape[-1]  # type: ignore[attr-defined]
        asked.append((*sizes, params.query.requires_grad and torch.is_grad_enabled()))  # type: ignore[attr-defined]
        return False

    with torch.no_grad():
        reason = torch_attention._torch_unsupported_reason(can_use_nothing, demand(device="cpu", head_dim_v=64))
    assert asked == [(128, 64, True)]
    assert reason == (
        "cannot do torch.bfloat16 with head sizes 128 and 64 here, according to torch.backends.cuda.can_use_nothing"
    )
    assert torch_attention._torch_unsupported_reason(lambda params: True, demand(device="cpu")) is None


def test_the_choice_is_logged_with_its_reasons(hopper: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="mesh_attention"):
        assert choose_kernel(demand()).name == "cudnn"
        assert choose_kernel(demand(deterministic=True)).name == "cudnn, deterministic"
    assert "not flash-attn 3: it cannot be imported (No module named 'flash_attn_interface')" in caplog.text
    assert "not cudnn: it adds up dQ in no fixed order" in caplog.text


def test_flash_attn_3_goes_first_where_it_is_installed(hopper: pytest.MonkeyPatch, packages: list[str]) -> None:
    assert choose_kernel(demand()).name == "flash-attn 3"
    assert choose_kernel(demand(deterministic=True)).name == "cudnn, deterministic"
    hopper.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    choose_kernel.cache_clear()
    assert choose_kernel(demand()).name == "flash-attn 2"


def test_a_package_with_other_parameters_is_passed_over(hopper: pytest.MonkeyPatch, packages: list[str]) -> None:
    module = sys.modules[FLASH_ATTN_3.module]
    hopper.setattr(module, "_flash_attn_backward", lambda dout, q, k, v, out, softmax_lse, window_size: None)
    flash_attn.find_functions.cache_clear()
    reason = FlashAttnKernel(FLASH_ATTN_3).unsupported_reason(demand())
    assert reason == (
        "has a _flash_attn_backward without softmax_scale, window_size_left, window_size_right, dq, dk, dv"
    )
    hopper.delattr(module, "_flash_attn_backward")
    flash_attn.find_functions.cache_clear()
    assert (
        FlashAttnKernel(FLASH_ATTN_3).unsupported_reason(demand()) == "has no flash_attn_interface._flash_attn_backward"
    )
