"""Registration: a name under which transformers' models find mesh attention, in both of its interfaces.

Both, because a model whose implementation makes no masks is given none, and would drop padding without a word.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from mesh_attention.api import MeshAttention
from mesh_attention.errors import UsageError
from mesh_attention.integrations.transformers.attention import LayerAttention
from mesh_attention.integrations.transformers.masks import check_meanings

NAME = "mesh_attention"
MEANINGFUL = ("flash", "sdpa", "flex", "eager", "paged", "/", "|", ":")
"""Parts of a name by which transformers chooses a path of its own."""


def register(attention: MeshAttention, *, name: str = NAME) -> None:
    """Make `attention` known to transformers as `name`, for ``attn_implementation=name``, until `unregister`.

    Several can be registered under several names, one for each group that models run on. A name stays with its
    `MeshAttention`, since models that run by it would otherwise change under their users.
    """
    if not isinstance(attention, MeshAttention):
        raise UsageError(f"register came with {type(attention).__name__}: expected a MeshAttention")
    if attention.is_local:
        raise UsageError(
            "register came with a local group, whose ranks are all in this process, and a model runs one rank in each; "
            "use a torch.distributed group (of one process, if need be)"
        )
    _check_name(name)
    held = AttentionInterface._global_mapping.get(name)
    if isinstance(held, LayerAttention) and held.attention is attention:
        return
    if held is not None or name in AttentionMaskInterface._global_mapping:
        raise UsageError(f"{name!r} is registered already; choose another name, or unregister({name!r}) first")
    check_meanings()
    layers = LayerAttention(attention)
    AttentionInterface.register(name, layers)
    # Not traced by torch.compile: it reads closures, and the padding's values. Layers can be compiled, one by one.
    untraced = torch.compiler.disable(layers.make_mask)  # type: ignore[no-untyped-call]
    AttentionMaskInterface.register(name, untraced)


def unregister(name: str = NAME) -> None:
    """Forget a registration; models that run by its name can no longer run until they are set to another."""
    if not isinstance(AttentionInterface._global_mapping.get(name), LayerAttention):
        raise UsageError(f"{name!r} is not a registered MeshAttention")
    del AttentionInterface._global_mapping[name]
    del AttentionMaskInterface._global_mapping[name]


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name or any(part in name for part in MEANINGFUL):
        raise UsageError(
            f"name={name!r}: expected a name in which transformers reads nothing, that is without any of "
            f"{' '.join(MEANINGFUL)}"
        )
