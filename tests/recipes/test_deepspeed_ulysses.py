"""DeepSpeed: a ZeRO engine trained on 4 processes, with our module in the place of Ulysses's DistributedAttention."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from recipe_runs import Run, run_recipe

from mesh_attention import LocalGroup, UsageError
from mesh_attention.integrations.deepspeed import MeshDistributedAttention

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

RECIPE = "deepspeed_ulysses.py"


@pytest.fixture(scope="module")
def one_process() -> Run:
    return run_recipe(RECIPE, "attention=torch", ranks=1)


# DeepSpeed adds up gradients in float32.
@pytest.mark.parametrize("flags", [(), ("stage=1",), ("stage=3", "sp=2")], ids=" ".join)
def test_four_processes_train_like_one_without_mesh_attention(flags: tuple[str, ...], one_process: Run) -> None:
    run = run_recipe(RECIPE, *flags)
    assert len(run.losses) == 3
    assert run.losses == pytest.approx(one_process.losses, rel=1e-8)
    assert run.weights == pytest.approx(one_process.weights, rel=1e-8)


@pytest.mark.parametrize("gather_idx", [0, 1])
def test_tokens_are_in_the_dim_that_gather_idx_names(gather_idx: int) -> None:
    comm = LocalGroup(1).comm(0)
    q = torch.randn(2, 6, 3, 4, dtype=torch.float64)
    given = q.transpose(0, 1) if gather_idx == 0 else q
    out = MeshDistributedAttention(None, comm, 2, gather_idx, call={"causal": True})(
        given, given, given, 1 - gather_idx
    )
    heads_first = q.transpose(1, 2)
    due = torch.nn.functional.scaled_dot_product_attention(heads_first, heads_first, heads_first, is_causal=True)
    torch.testing.assert_close(out.transpose(0, 1) if gather_idx == 0 else out, due.transpose(1, 2))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"local_attention": torch.nn.Identity()}, "local_attention is a Identity: expected None"),
        ({"scatter_idx": 1}, "scatter_idx=1, gather_idx=0: expected heads in dim 2"),
        ({"sp_stream": object()}, "sp_stream is not supported"),
        ({"choice": "ring 1x1"}, "choice= cannot be given here, because it decides the order of tokens too"),
    ],
)
def test_a_module_that_cannot_be_right_is_refused(made: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MeshDistributedAttention(**{"local_attention": None, "sequence_process_group": LocalGroup(1).comm(0)} | made)


@pytest.mark.parametrize(
    ("called", "message"),
    [
        ({"batch_dim_idx": 0}, "batch_dim_idx=0 with gather_idx=0: expected 1"),
        ({"rotary_pos_emb": torch.zeros(1)}, "rotary_pos_emb is not supported"),
        ({"query": torch.zeros(6, 2, 12)}, "expected \\(tokens, batch, heads, dim\\)"),
        ({"key": torch.zeros(6, 2, 1, 4)}, "num_kv_heads=3, but key has 1 heads"),
    ],
)
def test_a_call_that_cannot_be_right_is_refused(called: dict[str, Any], message: str) -> None:
    comm = LocalGroup(1).comm(0)
    attention = MeshDistributedAttention(None, comm, num_kv_heads=3)
    x = torch.zeros(6, 2, 3, 4)
    with pytest.raises(UsageError, match=message):
        attention(**{"query": x, "key": x, "value": x, "batch_dim_idx": 1} | called)


def test_arguments_of_the_local_attention_are_refused() -> None:
    comm = LocalGroup(1).comm(0)
    x = torch.zeros(6, 2, 3, 4)
    with pytest.raises(UsageError, match="got 1 arguments for local_attention, which is not called"):
        MeshDistributedAttention(None, comm)(x, x, x, 1, None, torch.ones(6, 6))
