"""A tiny model of any family of the installed transformers, from its registries: configs are shrunk by field names.

No family is named here. A field that sizes something is recognised by its name, in the config and in its sub-configs;
where the first sizes do not fit a family, the next are tried.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto import modeling_auto

VOCABULARY = 96
LARGEST = 20_000_000
"""Parameters of a model that is built."""
KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "multimodal": "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "encoder": "MODEL_FOR_TEXT_ENCODING_MAPPING",
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 3, "decoder_start_token_id": 1}
"""Ids of special tokens; those that stand for images and sounds are at the end of the vocabulary."""


@dataclass(frozen=True)
class Sizes:
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head: int = 8
    layers: int = 2

    def fields(self) -> dict[str, Any]:
        """Values by patterns of field names; the first that matches counts."""
        return {
            r".*(dropout|drop_path|layerdrop|drop_prob|pdrop|drop_rate|jitter).*": 0.0,
            r".*vocab_size.*": VOCABULARY,
            r"(qk_rope|qk_nope|v|qk|index|attention|rope)?_?head_dim|d_kv|global_head_dim|kv_channels": self.head,
            r"(kv|q)_lora_rank|o_lora_rank": 8,
            r"rotary_dim": self.head,
            r"num_(key_value|kv)_heads|multi_query_group_num|num_global_key_value_heads": self.kv_heads,
            r"((encoder|decoder|num|n)_)*(attention_)?heads?|num_attention_heads|n_head": self.heads,
            r"(num|n)_(hidden_)?layers?|(num_)?(encoder|decoder)_(hidden_)?layers?|depth|num_blocks": self.layers,
            r"num_(local_)?experts|n_routed_experts|moe_num_experts|num_routed_experts": 4,
            r"num_experts_per_tok(en)?|moe_topk|moe_k|top_?k_experts|num_selected_experts": 2,
            r"n_group|topk_group": 1,
            r"n_shared_experts|num_shared_experts": 1,
            r"first_k_dense_replace|num_dense_layers|moe_layer_start_index": 1,
            r".*(intermediate_size|ffn_dim|ffn_hidden_size|ff_dim|n_inner|d_ff)|inner_dim|feedforward_size": self.hidden
            * 2,
            r"(hidden|embedding|embed|d_model|n_embd|d_embed|dim_model|model)_?(size|dim)?|(word_)?embed(_proj)?_dim|"
            r"projection_(size|dim)|out_hidden_size|dim|hidden_dim|width|emb_dim|d_model|project_dim|"
            r"hidden_size_per_layer_input": self.hidden,
            r"(max_)?(source_|target_)?(position_embeddings|positions|seq(uence)?_len(gth)?)|n_positions|n_ctx|"
            r"max_(encoder_|decoder_)?position_embeddings|max_seqlen|original_max_position_embeddings": 64,
            r"mamba_(n_heads|num_heads|d_head|head_dim)|linear_(num_)?(key|value)_(heads|head_dim)|linear_head_dim": 8,
            r"image_size|input_size": 32,
            r"patch_size": 16,
            r"num_mel_bins|n_mels": 16,
        }


TRIED = (
    Sizes(),
    Sizes(hidden=64, heads=4, kv_heads=2, head=16),
    Sizes(hidden=64, heads=4, kv_heads=4, head=16),
    Sizes(hidden=64, heads=4, kv_heads=4, head=16, layers=4),
    Sizes(hidden=128, heads=4, kv_heads=2, head=32, layers=4),
    Sizes(hidden=256, heads=2, kv_heads=1, head=128),
    Sizes(hidden=256, heads=4, kv_heads=4, head=64, layers=6),
)


def families() -> Iterator[tuple[str, str, str]]:
    """(model type, kind, name of the class) of every model that takes tokens, each class once."""
    seen = set()
    for kind, mapping in KINDS.items():
        for model_type, names in getattr(modeling_auto, f"{mapping}_NAMES").items():
            name = names if isinstance(names, str) else names[0]
            if (model_type, name) not in seen:
                seen.add((model_type, name))
                yield model_type, kind, name


def make_config(config_class: Any, sizes: Sizes) -> Any:
    return config_class(**_shrunk(config_class, sizes))


def _shrunk(config_class: Any, sizes: Sizes) -> dict[str, Any]:
    values: dict[str, Any] = {}
    subs = _sub_classes(config_class)
    for number, (name, parameter) in enumerate(inspect.signature(config_class.__init__).parameters.items()):
        default = parameter.default
        if name in subs:
            values[name] = {"model_type": subs[name].model_type} | _shrunk(subs[name], sizes)
        elif name in SPECIAL:
            values[name] = SPECIAL[name]
        elif name.endswith(("token_id", "token_index", "_token_ids")):
            values[name] = VOCABULARY - 1 - number % 20 if not isinstance(default, (list, tuple)) else default
        elif "sliding_window" in name and isinstance(default, int) and not isinstance(default, bool):
            values[name] = 5
        elif name == "attention_types":
            values[name] = [[["global", "local"], sizes.layers // 2]]
        else:
            found = next((size for pattern, size in sizes.fields().items() if re.fullmatch(pattern, name)), None)
            is_wanted = default is not None or re.fullmatch(OPTIONAL, name)
            if found is not None and is_wanted and not isinstance(default, (bool, list, tuple, dict, str)):
                values[name] = found if isinstance(found, int) or isinstance(default, float) else 0
    return values


OPTIONAL = r"head_dim|num_(key_value|kv)_heads|vocab_size|n_(routed|shared)_experts|num_experts_per_tok|(topk|n)_group"
"""Fields that are set even where their default is None."""


def _sub_classes(config_class: Any) -> dict[str, Any]:
    """The classes of sub-configs; where a family leaves one open, that of its default config."""
    subs = dict(getattr(config_class, "sub_configs", {}))
    if any(sub is AutoConfig for sub in subs.values()):
        default = config_class()
        subs = {name: type(getattr(default, name, None)) if sub is AutoConfig else sub for name, sub in subs.items()}
    return {name: sub for name, sub in subs.items() if getattr(sub, "model_type", "")}


def build(model_type: str, kind: str, implementation: str, sizes: Sizes) -> Any:
    """A float32 model whose weights make attention anything but even; the same for the same arguments."""
    config = make_config(CONFIG_MAPPING[model_type], sizes)
    mapping = getattr(modeling_auto, KINDS[kind])
    model_class = mapping[type(config)]
    model_class = model_class[0] if isinstance(model_class, (list, tuple)) else model_class
    if not isinstance(config, model_class.config_class):
        text = config.get_text_config(decoder=True)
        config = text if isinstance(text, model_class.config_class) else config
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = SPECIAL["decoder_start_token_id"]
    if kind == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    with torch.device("meta"):
        size = sum(
            p.numel() for p in model_class._from_config(copy.deepcopy(config), attn_implementation="eager").parameters()
        )
    if size > LARGEST:
        raise ValueError(f"a tiny config still has {size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation=implementation).float()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random)
            fan_in = parameter.shape[-1] if parameter.dim() > 1 else 1
            parameter.add_(noise * (0.1 if parameter.dim() < 2 else 1.2 / fan_in**0.5))
    return model.eval()


def tokens(batch: int, seq: int) -> Tensor:
    return torch.randint(4, VOCABULARY - 24, (batch, seq), generator=torch.Generator().manual_seed(seq))
