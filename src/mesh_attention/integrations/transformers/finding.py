"""Finds the mesh attention of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import AttentionInterface

from mesh_attention.integrations.transformers.attention import LayerAttention


def find_layers(model: Any) -> LayerAttention | None:
    """The attention function of a model or of a part of it, if it is mesh attention."""
    for config in _configs(model.config):
        found = AttentionInterface._global_mapping.get(str(getattr(config, "_attn_implementation", "")))
        if isinstance(found, LayerAttention):
            return found
    return None


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", ()):
        if getattr(config, name, None) is not None:
            yield from _configs(getattr(config, name))
