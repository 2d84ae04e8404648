"""Registers mesh attention with transformers under a name, in both of its interfaces.

Both are needed, because a model whose implementation makes no masks gets none, and would silently ignore padding.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from mesh_attention.api import MeshAttention
from mesh_attention.errors import UsageError
from mesh_attention.integrations.transformers.attention import LayerAttention
from mesh_attention.integrations.transformers.guard import watch
from mesh_attention.integrations.transformers.masks import check_meanings

NAME = "mesh_attention"
MEANINGFUL = ("flash", "sdpa", "flex", "eager", "paged", "/", "|", ":")
"""Parts of a name that make transformers choose one of its own code paths."""


def register(attention: MeshAttention, *, name: str = NAME) -> None:
    """Make `attention` known to transformers as `name`, for ``attn_implementation=name``, until `unregister`.

    Several can be registered under different names, one for each group that models run on. A name cannot be registered
    again for another `MeshAttention`, which would change models that use it.
    """
    if not isinstance(attention, MeshAttention):
        raise UsageError(f"register got a {type(attention).__name__}; expected a MeshAttention")
    if attention.is_local:
        raise UsageError(
            "register needs one rank per process, but all ranks of a local group are in this process; use a "
            "torch.distributed group, which may have one process"
        )
    _check_name(name)
    held = AttentionInterface._global_mapping.get(name)
    if isinstance(held, LayerAttention) and held.attention is attention:
        return
    if held is not None or name in AttentionMaskInterface._global_mapping:
        raise UsageError(f"{name!r} is registered already; choose another name, or unregister({name!r}) first")
    check_meanings()
    watch()
    layers = LayerAttention(attention)
    AttentionInterface.register(name, layers)
    # torch.compile does not trace it: it reads closures and the values of padding. Layers can be compiled one by one.
    untraced = torch.compiler.disable(layers.make_mask)  # type: ignore[no-untyped-call]
    AttentionMaskInterface.register(name, untraced)


def unregister(name: str = NAME) -> None:
    """Remove a registration; models that use its name must be set to another implementation."""
    if not isinstance(AttentionInterface._global_mapping.get(name), LayerAttention):
        raise UsageError(f"{name!r} is not a registered MeshAttention")
    del AttentionInterface._global_mapping[name]
    del AttentionMaskInterface._global_mapping[name]


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name or any(part in name for part in MEANINGFUL):
        raise UsageError(
            f"name={name!r}: expected a name without any of {' '.join(MEANINGFUL)}, which have a meaning to "
            "transformers"
        )
