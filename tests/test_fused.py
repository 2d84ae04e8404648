"""Mergings and row sums conform: torch's here, and Triton's where test_interpreted.py runs this file again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from merging_conformance import CHECKS, ROW_CHECKS, TYPICAL, Case, Check, RowCheck, cases

from mesh_attention.kernels import launching, merging
from mesh_attention.kernels.base import Merging
from mesh_attention.kernels.merging import FusedMerging, TorchMerging
from mesh_attention.kernels.select import choose_merging

CPU = torch.device("cpu")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MERGING: Merging = FusedMerging("cpu") if IS_INTERPRETED else TorchMerging()
EXAMPLES = 12 if IS_INTERPRETED else 40  # a GPU meets more of them in tests/gpu

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
in_plain_python = pytest.mark.skipif(IS_INTERPRETED, reason="already interpreted")


@pytest.fixture(scope="module", autouse=True)
def rounding() -> Any:
    """Triton's interpreter cuts a float32 to make a bfloat16, where a GPU rounds to the nearest even, and gets the
    float32 of a subnormal bfloat16 wrong."""
    if not IS_INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    cut = interpreter._convert_float

    def convert(values: Any, source: Any, dest: Any, mode: Any) -> Any:
        if (str(source), str(dest)) == ("fp32", "bf16"):
            return torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()
        if (str(source), str(dest)) == ("bf16", "fp32"):
            return torch.from_numpy(values.copy()).view(torch.bfloat16).float().numpy()
        return cut(values, source, dest, mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert)
        patch.setattr(merging, "_is_fused", lambda tensor: True)
        yield


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@given(case=cases())
@example(case=TYPICAL)
@settings(max_examples=EXAMPLES)
def test_merging(check: Check, case: Case) -> None:
    check(MERGING, CPU, case)


@pytest.mark.parametrize("check", ROW_CHECKS, ids=lambda check: check.__name__)
@given(case=cases())
@example(case=TYPICAL)
@settings(max_examples=EXAMPLES)
def test_rows(check: RowCheck, case: Case) -> None:
    check(merging, CPU, case)


@in_plain_python
def test_no_tokens_is_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(file: str, name: str) -> None:
        raise AssertionError(f"launched {name}")

    monkeypatch.setattr(launching, "kernel", launched)
    monkeypatch.setattr(merging, "_is_fused", lambda tensor: True)
    output, lse = torch.empty(2, 3, 0, 8), torch.empty(2, 3, 0)
    fused = FusedMerging("cpu")
    fused.start_output(output, lse, output, lse)
    fused.merge_output(output, lse, output, lse)
    fused.copy(lse, lse)
    fused.add(output, output)
    assert merging.row_delta(output.transpose(1, 2), output.transpose(1, 2), wide=torch.float32).shape == (2, 0, 3)
    assert [made.shape for made in merging.stand_in_rows(output, lse, lse)] == [output.shape, lse.shape]


@in_plain_python
def test_shapes_that_differ_are_refused() -> None:
    """A kernel would read past the end."""
    output, lse = torch.empty(2, 3, 4, 8), torch.empty(2, 3, 4)
    fused = FusedMerging("cpu")
    for other, statistic in ((output[:, :, :1], lse), (output, lse[:, :, :1])):
        with pytest.raises(AssertionError):
            fused.merge_output(output, lse, other, statistic)
        with pytest.raises(AssertionError):
            fused.merge_output(output, statistic, other, lse)
        with pytest.raises(AssertionError):
            merging.stand_in_rows(other, lse, statistic)
    with pytest.raises(AssertionError):
        fused.add(output, output[..., :1])
    with pytest.raises(AssertionError):
        merging.row_delta(output, output[..., :1], wide=torch.float32)


@pytest.mark.skipif(not IS_INTERPRETED, reason="needs Triton's interpreter")
def test_stand_ins_lie_as_attention_kernels_want_them() -> None:
    records = torch.randn(7, 2, 3 * 16 + 5)[..., 5:].view(7, 2, 3, 16).permute(1, 2, 0, 3)
    assert merging.stand_in_rows(records, *2 * [records.sum(-1)])[0].transpose(1, 2).is_contiguous()


@in_plain_python
def test_nothing_imports_triton() -> None:
    code = (
        "import mesh_attention, mesh_attention.api, mesh_attention.kernels.merging, sys, torch\n"
        "from mesh_attention.kernels.select import choose_merging\n"
        "choose_merging(torch.device('cpu'))\n"
        "print('triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@in_plain_python
def test_fused_merging_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FusedMerging().unsupported_reason(CPU) == "runs on cuda, not on cpu"
    assert choose_merging(CPU).name == "torch"
    launching.triton_unsupported_reason.cache_clear()
    monkeypatch.setattr(launching, "find_spec", lambda name: None)
    assert FusedMerging().unsupported_reason(torch.device("cuda")) == "needs triton, which is not installed"
    monkeypatch.setattr(launching, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    launching.triton_unsupported_reason.cache_clear()
    assert FusedMerging().unsupported_reason(torch.device("cuda")) == "needs compute capability 8.0, not 7.5"
    launching.triton_unsupported_reason.cache_clear()


# What the compiler makes of the kernels for an H200; it needs no GPU for that.

LSE_POINTERS = {"a_stat": "fp32", "b_stat": "fp32", "c_stat": "fp32"}
RUNNING_LSE = {"a_stat": "fp64"}


@pytest.fixture
def _compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, and what Triton 3.9 does by default and warns that 3.10 will not."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


def ptx(name: str, pointers: dict[str, str], **constants: Any) -> list[str]:
    """The global loads and stores, barriers and local memory of a kernel, in order."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mesh_attention.kernels import merging_kernels

    kernel = getattr(merging_kernels, name)
    block, in_tile = merging._tile(128, 4)
    constants |= {"heads": 32, "dim": 128, "block": block, "rows": in_tile}
    names = [parameter.name for parameter in kernel.params]
    constants |= {name: 1 for name in names if name.endswith("_dim")}
    signature = {
        parameter.name: "constexpr"
        if parameter.name in constants
        else "*" + pointers[parameter.name]
        if parameter.name in pointers
        else parameter.annotation_type
        for parameter in kernel.params
    }
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in pointers if name in names},
    )
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    return re.findall(r"\b(?:ld|st)\.(?:global|local)[\w.]*|bar\.sync", text)


@needs_triton
@in_plain_python
@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize(
    ("name", "pointers", "constants", "wide"),
    [
        (
            "merge_rows",
            {"a": "fp32", "b": "bf16"} | RUNNING_LSE,
            {"unit": 4, "is_first": False},
            {"ld.global.v4.b32": 8},
        ),
        (
            "merge_rows",
            {"a": "fp32", "b": "bf16"} | RUNNING_LSE,
            {"unit": 4, "is_first": True},
            {"st.global.v4.b32": 8},
        ),
        ("add_rows", {"a": "fp32", "b": "bf16"}, {"unit": 4, "is_first": False}, {"ld.global.v4.b32": 8}),
        ("add_rows", {"a": "bf16", "b": "fp32"}, {"unit": 4, "is_first": True}, {"st.global.v2.b32": 8}),
        ("dot_rows", {"a": "bf16", "b": "bf16"}, {"unit": 8}, {"ld.global.v4.b32": 8}),
        ("stand_in_rows", {"a": "bf16", "b": "bf16"}, {"unit": 8}, {"st.global.v4.b32": 4}),
    ],
)
def test_kernels_load_and_store_several_elements_at_once(
    name: str, pointers: dict[str, str], constants: dict[str, Any], wide: dict[str, int]
) -> None:
    found = ptx(name, LSE_POINTERS | pointers, **constants)
    assert not [one for one in found if ".local" in one or one.endswith(".b16")]
    for instruction, times in wide.items():
        assert found.count(instruction) == times


@needs_triton
@in_plain_python
@pytest.mark.usefixtures("_compiler")
def test_the_running_lse_is_written_when_all_warps_have_read_it() -> None:
    found = ptx("merge_rows", {"a": "fp32", "b": "bf16"} | LSE_POINTERS | RUNNING_LSE, unit=4, is_first=False)
    barrier = found.index("bar.sync")
    assert not [one for one in found[barrier:] if one.startswith("ld.global")]
    assert found[barrier + 1 :] == ["st.global.b64"]


@needs_triton
@in_plain_python
@pytest.mark.parametrize("name", ["merge_rows", "add_rows", "dot_rows", "stand_in_rows"])
def test_only_the_stride_over_dim_selects_a_compilation(name: str) -> None:
    from mesh_attention.kernels import merging_kernels

    parameters = getattr(merging_kernels, name).params
    special = [one.name for one in parameters if not (one.is_constexpr or one.do_not_specialize)]
    assert set(special) - {"a", "b", "a_stat", "b_stat", "c_stat"} == {"a_dim", "b_dim"}
    assert {one.annotation_type for one in parameters if one.do_not_specialize} == {"i64", "i32"}
