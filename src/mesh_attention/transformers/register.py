"""Registers mesh attention with transformers, and watches the models that use it.

`register` uses both of transformers' interfaces, because a model whose implementation makes no masks gets none, and
would silently ignore padding.

`register` and `shard_batch` also start the guard. From then on a model is checked if its attention is mesh attention,
or if it gets a sharded batch: it is tried on a few tokens before its first call (`probe`), and its results are refused
if mesh attention did not run. Other models are not affected.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from functools import cache, wraps
from inspect import getsource, signature
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from mesh_attention.api import MeshAttention
from mesh_attention.batches import NEVER_RAN, count_passes, is_sharded
from mesh_attention.errors import UsageError
from mesh_attention.sequences import CUTS
from mesh_attention.session.agreement import Statement
from mesh_attention.transformers.attention import LayerAttention, ShardedCall, find_layers, make_mask, read_call
from mesh_attention.transformers.cache import GenerationCache
from mesh_attention.transformers.cached_call import call_with_cache
from mesh_attention.transformers.generation import watch_generation
from mesh_attention.transformers.masks import CALL, calling, check_meanings
from mesh_attention.transformers.models import refuse_model
from mesh_attention.transformers.probe import try_once

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
    AttentionInterface.register(name, LayerAttention(attention))
    # torch.compile does not trace it: it reads closures and the values of padding. Layers can be compiled one by one.
    AttentionMaskInterface.register(name, torch.compiler.disable(make_mask))  # type: ignore[no-untyped-call]


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


# The guard


UNCOMPILED = "mesh attention checks every call of a model; compile its layers one by one, or without fullgraph=True"


def watch() -> None:
    """Watch all models from now on. Calling it again does nothing."""
    if PreTrainedModel.__call__ is _call:
        return
    changed: Any = PreTrainedModel
    changed.__call__ = _call
    changed.get_correct_attn_implementation = _refuse_classes(changed.get_correct_attn_implementation)
    watch_generation()


def _call(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    # A compiler sees neither which tensors were sharded nor this function's state, but boundaries as numbers.
    is_watched = isinstance(kwargs.get(CUTS[0]), tuple) or find_layers(model) is not None
    if is_watched or (not torch.compiler.is_compiling() and any(map(is_sharded, (*args, *kwargs.values())))):
        return _watched(model, *args, **kwargs)
    return nn.Module.__call__(model, *args, **kwargs)


# Parts of the model can be compiled.
@torch.compiler.disable(recursive=False, reason=UNCOMPILED)  # type: ignore[no-untyped-call, untyped-decorator]
def _watched(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    if CALL.current is not None:  # a part of a model that is being called
        return nn.Module.__call__(model, *args, **kwargs)
    inputs, layers = _bind(model, args, kwargs), find_layers(model)
    if layers is None:
        passes = _count_passes(model, inputs)
        out = nn.Module.__call__(model, *args, **kwargs)
        if passes is not None and passes == _count_passes(model, inputs):
            raise UsageError(NEVER_RAN.format(what=type(model).__name__))
        return out
    if isinstance(inputs.get("past_key_values"), GenerationCache):
        return call_with_cache(model, inputs, layers)
    with calling(_agreed_call(model, inputs, layers)):
        return nn.Module.__call__(model, *args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _count_passes(model: PreTrainedModel, inputs: Mapping[str, Any]) -> int | None:
    """How often the attention has run that a sharded batch needs; None if no rank needs another's tokens."""
    passes = count_passes(inputs.values())
    if passes is not None:
        refuse_model(model)
    return passes


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _agreed_call(model: PreTrainedModel, inputs: Mapping[str, Any], layers: LayerAttention) -> ShardedCall:
    """The call, checked. Ranks tell each other of refusals; the others would wait otherwise."""
    try_once(model, inputs, layers)
    session = layers.attention.session
    with session.telling():
        call = read_call(model, inputs, layers.attention)
    # In training, layers may refuse what they compute otherwise.
    session.agree(Statement(must_match={"operation": "a model's attention", "training": str(model.training)}))
    return call


def _bind(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    if not args:
        return dict(kwargs)
    parameters = signature(model.forward)
    bound = parameters.bind_partial(*args, **kwargs).arguments
    for name, parameter in parameters.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound |= bound.pop(name, {})
    return bound


def _refuse_classes(choose: Callable[..., str]) -> Callable[..., str]:
    @wraps(choose)
    def checked(model: Any, requested: Any, *args: Any, **kwargs: Any) -> str:
        is_ours = isinstance(AttentionInterface._global_mapping.get(requested), LayerAttention)
        if is_ours and not _takes_functions(type(model)):  # type: ignore[arg-type]
            raise UsageError(
                f"{type(model).__name__} does not use transformers' attention interface, so mesh attention cannot "
                "replace its attention; use another attn_implementation on whole sequences, or another model; if it "
                'is the vision or audio part of a model, give attn_implementation={"text_config": "mesh_attention"}'
            )
        return choose(model, requested, *args, **kwargs)

    return checked


@cache
def _takes_functions(model_class: type[Any]) -> bool:
    """True if a model's attention can be replaced; as transformers does, it looks at the source."""
    if not model_class._can_set_attn_implementation():
        return False
    try:
        source = getsource(sys.modules[model_class.__module__])
    except (OSError, TypeError, KeyError):
        return True
    return not re.search(r"_CLASSES\[(self\.)?config\._attn_implementation\]", source)
