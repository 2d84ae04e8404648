"""Trials of transformers' models on a GPU, in dtypes and depths at which rounding could be taken for a difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mesh_attention import LocalGroup, UsageError
from mesh_attention.api import MeshAttention

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {"vocab_size": 997, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}


@pytest.fixture
def attention() -> MeshAttention:
    return MeshAttention(LocalGroup(1).comm(0))


def make(config: Any, dtype: torch.dtype, attention: MeshAttention) -> Any:
    from mesh_attention.transformers import parallelize

    torch.manual_seed(0)
    with torch.device("cuda"):
        return parallelize(transformers.AutoModelForCausalLM.from_config(config, dtype=dtype), attention)


def local(attention: MeshAttention) -> Any:
    from mesh_attention.batches import shard_batch

    ids = torch.randint(4, 997, (2, 64), device="cuda")
    return shard_batch(attention, {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)})


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama", torch.bfloat16), ("experts", torch.bfloat16), ("llama", torch.float16)]
)
def test_deep_models_pass_the_trial(attention: MeshAttention, name: str, dtype: torch.dtype) -> None:
    sizes = SIZES | {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 24}
    config = (
        transformers.LlamaConfig(**sizes)
        if name == "llama"
        else transformers.Qwen3MoeConfig(**sizes, moe_intermediate_size=128, num_experts=32, num_experts_per_tok=4)
    )
    assert make(config, dtype, attention)(**local(attention)).loss.isfinite()


def test_positions_of_its_own_are_found_in_bfloat16(attention: MeshAttention) -> None:
    config = transformers.BartConfig(vocab_size=997, d_model=128, decoder_layers=2, decoder_attention_heads=4)
    with pytest.raises(UsageError, match="computes its own positions"):
        make(config, torch.bfloat16, attention)(**local(attention))
