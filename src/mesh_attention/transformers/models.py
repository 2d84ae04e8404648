"""Refuses models that a rank cannot run on its own tokens, recognised by their configs.

Everything but attention must treat tokens one by one: a rank's tokens are neither neighbours nor the whole sequence.
Convolutions and recurrences over tokens, rotary frequencies that depend on the largest position, and a router's loss do
not. Decisions depend only on what is the same on every rank, so all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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


def refuse_two_sequences(config: object) -> None:
    """Refuse an encoder-decoder model, which attends across two sequences."""
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(
            f"{_name(config)} is an encoder-decoder model, which attends across two sequences; in transformers, mesh "
            "attention supports models of one sequence only; use another attn_implementation for it, or MeshAttention "
            "in your own layers, which supports cross attention"
        )


def refuse_layerdrop(config: object) -> None:
    """Refuse a model that skips layers at random in training: ranks would skip different ones."""
    for name in LAYERDROPS:
        if getattr(config, name, None):
            raise UsageError(
                f"{_name(config)} skips layers at random in training ({name}={getattr(config, name)}), and ranks would "
                f"skip different ones; load the model with {name}=0, or call model.eval()"
            )


def _mixes(config: object, why: str) -> str:
    return (
        f"{_name(config)} mixes tokens outside of plain attention ({why}), where each rank would silently treat its "
        "own tokens as the whole sequence; run it with another attn_implementation on whole sequences, or use a model "
        "whose layers are full or sliding attention"
    )


def refuse_router_loss(config: object, arguments: Mapping[str, Any]) -> None:
    argument = arguments.get("output_router_logits")
    if getattr(config, "output_router_logits", False) if argument is None else argument:
        raise UsageError(
            "output_router_logits is not supported: the auxiliary loss of a router would cover this rank's tokens "
            "only, and be counted once for every rank; set config.output_router_logits to False, and compute that loss "
            "outside of the model, over the tokens of all ranks"
        )


def refuse_rotary(config: object, attention: MeshAttention, rows: Sequence[BatchRow], seq_len: int) -> None:
    """Refuse rotary frequencies that depend on the largest position, where ranks could differ in it."""
    for kind, limit in _rotary_limits(config):
        if seq_len > limit and not (kind == "longrope" and limit < _least_end(attention, rows, seq_len)):
            raise UsageError(_depends(config, kind, limit, seq_len))


def refuse_rotary_ends(config: Any, ends: Sequence[int]) -> None:
    """Refuse rotary frequencies that depend on the largest position, if ranks differ in it; `ends` are those behind."""
    if len(set(ends)) == 1:
        return
    for part in (config, getattr(config, "text_config", None)):
        for kind, limit in _rotary_limits(part):
            if max(ends) >= limit and not (kind == "longrope" and min(ends) > limit):
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


def _least_end(attention: MeshAttention, rows: Sequence[BatchRow], seq_len: int) -> int:
    """The smallest end among the ranks' tokens; 0 where positions may restart, so that it is unknown."""
    whole = (0, seq_len)
    if any(row.cuts != whole or row.real != whole for row in rows):
        return 0
    shards = (
        attention.layout.segments(rank, seq_len=seq_len, ranks=attention.ranks) for rank in range(attention.ranks)
    )
    return min(max(segment[-1] for segment in shard) + 1 for shard in shards if shard)


def _name(config: object) -> str:
    return str(getattr(config, "model_type", None) or type(config).__name__)
