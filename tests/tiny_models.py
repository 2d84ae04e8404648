"""Tiny transformers models in float64, batches for them, and what one process with eager attention makes of these.

transformers computes norms, rotary angles, eager softmax and losses in float32, whatever the model's dtype. `Exact`
keeps what is float64 in float64 there, so that 1e-9 can be demanded; in our own code it changes nothing.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    LlavaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3Config,
    WhisperConfig,
)

VOCABULARY = 29
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SIZES),
    # The first layer sees everything, the second a window.
    "qwen2": lambda: Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "encoder": lambda: LlamaConfig(**SIZES, is_causal=False),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=6),
    # Windows and whole layers in turn, scores scaled and capped so that both matter.
    "gemma2": lambda: Gemma2Config(**SIZES, sliding_window=5, query_pre_attn_scalar=3, attn_logit_softcapping=2.0),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, sliding_window=4, query_pre_attn_scalar=5, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt_oss": lambda: GptOssConfig(
        **SIZES,
        sliding_window=5,
        num_local_experts=3,
        num_experts_per_tok=2,
        experts_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    # Keys and values of different sizes, expanded from what a cache would keep.
    "deepseek_v3": lambda: DeepseekV3Config(
        **SIZES | {"head_dim": 4, "num_key_value_heads": 4},
        q_lora_rank=6,
        kv_lora_rank=5,
        qk_rope_head_dim=4,
        qk_nope_head_dim=6,
        v_head_dim=7,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=12,
        first_k_dense_replace=1,
        experts_implementation="eager",
    ),
    # Frequencies that depend on whether there is a position beyond 16.
    "dynamic rotary": lambda: LlamaConfig(
        **SIZES | {"max_position_embeddings": 16},
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    ),
    "long rotary": lambda: Phi3Config(
        **{name: size for name, size in SIZES.items() if name != "head_dim"},
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "short_factor": [1.0] * 2,
            "long_factor": [4.0] * 2,
            "rope_theta": 1e4,
        },
    ),
    "convolutions": lambda: Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
    "experts": lambda: MixtralConfig(
        **SIZES, num_local_experts=3, num_experts_per_tok=2, experts_implementation="eager"
    ),
    "llava": lambda: LlavaConfig(
        text_config=LlamaConfig(**SIZES),
        vision_config={"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, **SMALL},
        image_token_id=IMAGE,
        image_seq_length=4,
    ),
    # Its positions are of three kinds, which are equal for text.
    "qwen2_vl": lambda: Qwen2VLConfig(
        text_config={
            **{name: size for name, size in SIZES.items() if name != "head_dim"},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]},
        },
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4},
        image_token_id=IMAGE,
        vision_start_token_id=1,
    ),
    # The decoder alone, which takes no position ids.
    "whisper": lambda: WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=24,
        max_target_positions=64,
        **{name: SIZES[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    ),
}
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGE = VOCABULARY - 1
"""The token that stands for an image."""
VISION = ("llava", "qwen2_vl")
UNUSUAL = ("dynamic rotary", "long rotary", "convolutions", "experts", "whisper", *VISION)
"""Models that are refused, always or for some batches, or that only generate here."""


def make_model(name: str, implementation: str = "eager", **changes: Any) -> Any:
    """The same on every rank, with weights that make attention anything but even."""
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    registry: Any = AutoModelForImageTextToText if name in VISION else AutoModelForCausalLM
    model = registry.from_config(config, attn_implementation=implementation).double()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=torch.float64) * 0.4)
    return model


class Exact(TorchFunctionMode):
    """What transformers would make float32 of a float64 tensor, or of position ids, is float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.float and args[0].dtype in (torch.float64, torch.int64) and _asked_there():
            return args[0].double()
        if func in (Tensor.to, Tensor.type, functional.softmax) and args[0].dtype == torch.float64 and _asked_there():
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _asked_there() -> bool:
    """True if the call was made by transformers' code."""
    frame = sys._getframe(2)
    while frame.f_globals["__name__"].startswith("torch."):  # softmax is Python that calls Python
        assert frame.f_back is not None
        frame = frame.f_back
    return bool(frame.f_globals["__name__"].startswith("transformers."))


def tokens(batch: int, seq: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seq)
    ids = torch.randint(1, VOCABULARY, (batch, seq), generator=random)
    labels = ids.clone()
    labels[:, seq // 3 : seq // 2] = -100
    return {"input_ids": ids, "labels": labels}


def padded(real: list[tuple[int, int]], seq: int) -> dict[str, Tensor]:
    batch = tokens(len(real), seq)
    mask = torch.zeros(len(real), seq, dtype=torch.long)
    for row, (start, stop) in enumerate(real):
        mask[row, start:stop] = 1
    batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    return batch | {"attention_mask": mask}


def packed(*rows: tuple[int, ...], by: str) -> dict[str, Any]:
    """Documents of these lengths; told by position ids that restart, or by boundaries."""
    seq = sum(rows[0])
    batch: dict[str, Any] = tokens(len(rows), seq)
    if by == "position_ids":
        return batch | {"position_ids": torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])}
    cuts = torch.tensor([0, *(n for row in rows for n in row)]).cumsum(0).to(torch.int32)
    longest = max(map(max, rows))
    return batch | {"cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts, "max_length_q": longest, "max_length_k": longest}


BATCHES: dict[str, Any] = {
    "plain": lambda: tokens(2, 24),
    "uneven": lambda: tokens(1, 23),
    "padded left": lambda: padded([(0, 23), (4, 23), (9, 23), (4, 23)], 23),
    "padded right": lambda: padded([(0, 24), (0, 17), (0, 5)], 24),
    "padded both": lambda: padded([(3, 20), (0, 22)], 22),
    "packed by positions": lambda: packed((9, 1, 13), by="position_ids"),
    "packed by boundaries": lambda: packed((7, 12, 3), by="cu_seq_lens"),
    "packed rows": lambda: packed((7, 12, 3), (20, 2), (7, 12, 3), by="cu_seq_lens"),
}
DOCUMENTS = {
    "packed by positions": ((9, 1, 13),),
    "packed by boundaries": ((7, 12, 3),),
    "packed rows": ((7, 12, 3), (20, 2), (7, 12, 3)),
}


def whole_logits(model: Any, name: str) -> Tensor:
    """Of one process with eager attention. Documents are run one by one: nothing is left to a mask there."""
    batch = BATCHES[name]()
    ids = batch["input_ids"]
    if name not in DOCUMENTS:
        logits: Tensor = model(input_ids=ids, attention_mask=batch.get("attention_mask")).logits
        return logits
    rows = []
    for row, lengths in zip(ids, DOCUMENTS[name], strict=True):
        cuts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        rows.append(torch.cat([model(input_ids=row[None, a:b]).logits for a, b in pairwise(cuts)], dim=1))
    return torch.cat(rows)


def mean_loss(logits: Tensor, name: str) -> Tensor:
    """The mean over the labels of next tokens; neither padding nor the last token of a document predicts anything."""
    batch = BATCHES[name]()
    labels = batch["labels"].clone()
    for row, lengths in zip(labels, DOCUMENTS.get(name, ()), strict=False):
        row[[*accumulate(lengths[:-1])]] = -100
    labels = labels[:, 1:]
    if "attention_mask" in batch:
        labels = labels.masked_fill(batch["attention_mask"][:, :-1] == 0, -100)
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=-100)


@lru_cache(maxsize=1)
def truth(model_name: str, batch_name: str) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Logits, loss and the gradients of all parameters, of one process."""
    with Exact():
        model = make_model(model_name)
        logits = whole_logits(model, batch_name)
        loss = mean_loss(logits, batch_name)
        loss.backward()
    return logits.detach(), loss.item(), {name: p.grad for name, p in model.named_parameters()}


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.detach().cpu() - theirs.cpu()).abs().max() / theirs.abs().max())
