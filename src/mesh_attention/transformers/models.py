"""Refuses models that a rank cannot run on its own tokens, recognised by their configs and arguments.

Everything but attention must treat tokens one by one: a rank's tokens are neither neighbours nor the whole sequence.
Convolutions and recurrences over tokens, rotary frequencies that depend on the largest position, and a router's loss do
not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from mesh_attention.api import MeshAttention
from mesh_attention.errors import UsageError
from mesh_attention.sequences import BatchRow

ATTENTION_LAYERS = ("full_attention", "sliding_attention", "attention")
HYBRIDS = (
    "mamba_d_conv",
    "mamba_d_state",
    "mamba_expand",
    "mamba_num_heads",
    "ssm_state_size",
    "ssm_cfg",
    "conv_kernel",
    "conv_kernel_size",
    "conv_L_cache",
    "short_conv_kernel_size",
    "linear_conv_kernel_dim",
    "linear_num_key_heads",
    "linear_num_heads",
    "linear_attn_config",
    "lru_width",
    "layers_block_type",
    "block_types",
    "hybrid_override_pattern",
    "hybrid_layer_pattern",
    "attn_layer_period",
)
"""Config attributes of models that mix tokens outside attention, for configs without layer types."""

LAYERDROPS = ("layerdrop", "decoder_layerdrop", "encoder_layerdrop")


def parts_of(config: Any) -> tuple[Any, Any]:
    """The config of a model, and that of its text part, which may be the same."""
    return config, config.get_text_config()


def refuse_model(model: Any) -> None:
    """Refuse a model of two sequences, or one whose layers, other than attention, use several tokens."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise UsageError(
            f"{_name(model.config)} is an encoder-decoder model, which attends across two sequences; in transformers, "
            "mesh attention supports models of one sequence only; run it without parallelize, or use "
            "MeshAttention in your own layers, which supports cross attention"
        )
    for config in parts_of(model.config):
        refuse_mixing(config)


def refuse_mixing(config: object) -> None:
    """Refuse a model whose layers, other than attention, use several tokens."""
    layers = getattr(config, "layer_types", None)
    if layers is not None:
        others = [name for name in layers if name not in ATTENTION_LAYERS]
        if others:
            raise UsageError(_mixes(config, f"layer_types has {others[0]!r}"))
        return
    for name in HYBRIDS:
        if getattr(config, name, None) is not None:
            raise UsageError(_mixes(config, f"its config has {name}"))


def _mixes(config: object, why: str) -> str:
    return (
        f"{_name(config)} mixes tokens outside of plain attention ({why}), where each rank would silently treat its "
        "own tokens as the whole sequence; run it on whole sequences, without parallelize, or use a model "
        "whose layers are full or sliding attention"
    )


def refuse_call(model: Any, inputs: Mapping[str, Any]) -> None:
    """Refuse what a trial does not show, because it depends on values or on training."""
    kept = inputs.get("logits_to_keep")
    if isinstance(kept, Tensor) or kept:
        raise UsageError(
            "logits_to_keep was given, and each rank would keep its own last tokens; leave logits_to_keep out"
        )
    has_labels = any(inputs.get(name) is not None for name in ("labels", "shift_labels"))
    if has_labels and inputs.get("num_items_in_batch") is None:
        raise UsageError(
            "num_items_in_batch of the sharded batch was left out, so the loss would be the mean over this rank's "
            "labels; call the model with all entries of shard_batch, or without labels"
        )
    for config in parts_of(model.config):
        if model.training:
            _refuse_layerdrop(config)
        _refuse_outputs(config, inputs)


def _refuse_layerdrop(config: object) -> None:
    """Refuse a model that skips layers at random in training: ranks would skip different ones."""
    for name in LAYERDROPS:
        if getattr(config, name, None):
            raise UsageError(
                f"{_name(config)} skips layers at random in training ({name}={getattr(config, name)}), and ranks would "
                f"skip different ones; load the model with {name}=0, or call model.eval()"
            )


def _refuse_outputs(config: object, inputs: Mapping[str, Any]) -> None:
    """Refuse outputs that no rank has, or that ranks would have of their own tokens only."""
    if inputs.get("output_attentions") or getattr(config, "output_attentions", False):
        raise UsageError(
            "output_attentions is not supported: no rank has the attention weights; use eager attention instead"
        )
    argument = inputs.get("output_router_logits")
    if getattr(config, "output_router_logits", False) if argument is None else argument:
        raise UsageError(
            "output_router_logits is not supported: the auxiliary loss of a router would cover this rank's tokens "
            "only, and be counted once for every rank; set config.output_router_logits to False, and compute that loss "
            "outside of the model, over the tokens of all ranks"
        )


def refuse_rotary(config: object, ends: Sequence[int]) -> None:
    """Refuse rotary frequencies that depend on the largest position, if ranks differ in it.

    `ends` are the positions behind the last token of each rank, or the least and the greatest of them.
    """
    if len(set(ends)) == 1:
        return
    for part in parts_of(config):
        for kind, limit in _rotary_limits(part):
            if max(ends) > limit and not (kind == "longrope" and min(ends) > limit):
                raise UsageError(_depends(part, kind, limit, max(ends)))


def _depends(config: object, kind: str, limit: int, seq_len: int) -> str:
    instead = (
        f"or enough that every rank has a token beyond position {limit}, without padding or documents "
        '(layout="striped" gives every rank late tokens)'
        if kind == "longrope"
        else "or use another rope_type, such as yarn"
    )
    return (
        f"{_name(config)} has rotary embeddings ({kind}) whose frequencies depend on the largest position beyond "
        f"{limit}; with {seq_len} tokens, the largest position differs between ranks; give at most {limit} tokens, "
        f"{instead}"
    )


def _rotary_limits(config: object) -> Iterator[tuple[str, int]]:
    """Kinds of rotary frequencies that depend on the largest position, and the position beyond which they do."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, Mapping)]
    for rotary in by_layer_type or [parameters]:
        kind = str(rotary.get("rope_type", rotary.get("type", "default")))
        limit = getattr(config, "max_position_embeddings", None)
        if kind == "longrope":
            limit = rotary.get("original_max_position_embeddings", limit)
        if limit is not None and (kind == "longrope" or "dynamic" in kind):
            yield kind, limit


def least_end(attention: MeshAttention, rows: Sequence[BatchRow]) -> int:
    """The smallest end among the ranks' tokens; 0 where positions may restart, so that it is unknown."""
    seq_len, ranks = rows[0].cuts[-1], attention.ranks
    whole = (0, seq_len)
    if any(row.cuts != whole or row.real != whole for row in rows):
        return 0
    shards = (attention.layout.segments(rank, seq_len=seq_len, ranks=ranks) for rank in range(ranks))
    return min(max(segment[-1] for segment in shard) + 1 for shard in shards if shard)


def _name(config: object) -> str:
    return str(getattr(config, "model_type", None) or type(config).__name__)
