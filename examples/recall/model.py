"""The model of the recall examples: a Llama of two layers."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from recall.task import VOCABULARY

ROPE_THETA = 1e5


def make_model(*, seed: int, seq: int, dtype: str = "float32", rope_theta: float = ROPE_THETA) -> LlamaForCausalLM:
    """A small model with random weights, the same on every rank."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=seq,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        initializer_range=0.05,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    for name, module in list(model.named_modules()):
        if isinstance(module, LlamaRMSNorm):  # it computes in float32 for every dtype; torch's does not
            model.set_submodule(name, nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
    return model.to(getattr(torch, dtype))
