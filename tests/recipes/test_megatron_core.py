"""Megatron-core: its GPT trained on 4 processes, and MeshCoreAttention next to Megatron's own attention."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from pool import run_script
from recipe_runs import Run, run_recipe

if find_spec("megatron") is None:  # importing it would raise its warnings here
    pytest.skip("needs megatron-core", allow_module_level=True)

RECIPE = "megatron_core.py"
CASES = Path(__file__).parent / "megatron_cases.py"
COMPARED = (
    *("causal", "no mask", "scale", "window", "window of other layers", "off by one", "learnable offset"),
    *("deterministic", "two head sizes", "packed, causal", "packed, no mask"),
)
REFUSED = {
    "cross": "attention_type='cross': expected self; give cross attention another core_attention",
    "dropout": "attention_dropout=0.1 is not supported; set attention_dropout=0.0",
    "group": "context_parallel_size=2, but the context-parallel group has 4 ranks",
    "fp8": "fp8_dot_product_attention=True is not supported",
    "clip": "qk_clip=True is not supported",
    "graph": "cuda_graph_impl='local' is not supported",
    "group of its own": "group= cannot be given here: Megatron decides it",
    "format of tensors": "tensor_format= cannot be given here: Megatron decides it",
    "layout": "the layout is contiguous: expected zigzag, the order in which Megatron cuts sequences",
    "layout of a choice": "the layout is striped: expected zigzag, the order in which Megatron cuts sequences",
    "option": "unknown argument 'clustr' of MeshAttention; did you mean cluster?",
    "mask": r"attention_mask is a tensor of shape \(1, 1, 48, 48\): expected None",
    "bias": "attention_bias was given, but an attention bias is not supported",
    "padding": "attn_mask_type=padding for unpacked sequences: expected one of causal",
    "arbitrary": "attn_mask_type=arbitrary for packed sequences: expected one of causal",
    "odd": "this rank has 11 tokens: expected an even number, .* pad it to a multiple of 8",
    "cache": "query has 2 tokens and key has 12: expected the same; inference with a KV cache is not supported",
    "dims": r"query is a tensor of shape \(10, 4, 8\): expected \(tokens, batch, heads, dim\)",
    "format": "qkv_format='sbhd': expected thd",
    "hybrid": "hybrid context parallelism is not supported",
    "nothing": "packed_seq_params has no cu_seqlens_q",
    "uneven": "a packed document has 11 tokens: expected a multiple of 8",
    "ends": "cu_seqlens end at 32, but 4 context-parallel ranks with 10 tokens each have 40",
    "longer": "cu_seqlens_q has documents of 20, 20 tokens, but cu_seqlens_q_padded of 16, 24",
    "sides": "cu_seqlens_q and cu_seqlens_kv differ",
}


@pytest.fixture(scope="module")
def one_process() -> Run:
    """Megatron's own attention over whole, unpadded sequences."""
    return run_recipe(RECIPE, "attention=megatron", ranks=1)


@pytest.fixture(scope="module")
def four_processes() -> dict[str, str]:
    return run_cases(4)


def run_cases(ranks: int) -> dict[str, str]:
    """What the cases printed, by name."""
    done = run_script(CASES, ranks=ranks, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(line.split(": ", maxsplit=1) for line in done.stdout.splitlines() if ": " in line)


# Megatron computes losses in float32; with tensor parallelism it adds up their parts in another order.
@pytest.mark.parametrize(("flags", "tolerance"), [((), 1e-11), (("cp=2",), 1e-11), (("tp=2",), 1e-7)])
def test_four_processes_train_like_one_without_mesh_attention(
    flags: tuple[str, ...], tolerance: float, one_process: Run
) -> None:
    run = run_recipe(RECIPE, *flags)
    assert len(run.losses) == 3
    assert run.losses == pytest.approx(one_process.losses, rel=tolerance)
    assert run.weights == pytest.approx(one_process.weights, rel=tolerance)


@pytest.mark.parametrize("case", COMPARED)
def test_results_and_gradients_equal_those_of_megatrons_attention(case: str, four_processes: dict[str, str]) -> None:
    assert float(four_processes[case]) < 1e-13


def test_tokens_are_in_megatrons_order(four_processes: dict[str, str]) -> None:
    assert four_processes["order"] == "the same"


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused(case: str, four_processes: dict[str, str]) -> None:
    assert re.search(REFUSED[case], four_processes[f"refused {case}"])


def test_a_packed_model_with_rotary_embeddings_equals_its_documents_one_by_one(four_processes: dict[str, str]) -> None:
    due = [float(number) for number in run_cases(1)["gpt, packed"].split()]
    for case in ("gpt, packed", "gpt, recomputed"):
        assert [float(number) for number in four_processes[case].split()] == pytest.approx(due, rel=1e-11)
