"""Changes one model of transformers so that it runs and generates on ranks; everything that is hooked there is here.

* The model's class becomes a subclass of its own, as `fully_shard` does it. `__call__` and `forward` begin a call: the
  second, because PEFT calls it directly, and the first, because TRL gives a model another `forward`. `generate` and
  `_prepare_cache_for_generation` make the cache. All else is inherited, and the class has the name of the model's.
* The model's configs become copies, which name an attention implementation of its own. Configs may be shared between
  models, and every layer reads its implementation from one. A model whose implementation makes no masks gets none, and
  would silently ignore padding, so the name is known to both of transformers' interfaces.
* One attribute of the model holds its `ModelAttention`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache, partial, wraps
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

from mesh_attention.api import MeshAttention
from mesh_attention.errors import UsageError
from mesh_attention.session.agreement import Statement
from mesh_attention.transformers.attention import CopiedConfig, Implementation, ModelAttention, ShardedCall, read_call
from mesh_attention.transformers.cached_call import call_with_cache
from mesh_attention.transformers.generation import generate_on_ranks, prepare_cache
from mesh_attention.transformers.generation_cache import GenerationCache
from mesh_attention.transformers.masks import check_meanings
from mesh_attention.transformers.models import refuse_model
from mesh_attention.transformers.trial import try_once

STATE = "_mesh_attention"
"""The attribute of a parallelized model."""
Model = TypeVar("Model", bound=PreTrainedModel)


def parallelize(model: Model, attention: MeshAttention) -> Model:
    """Make `model` run on sharded sequences, and generate on all ranks of `attention`. Returns the model itself.

    The model may have any attention implementation. It is tried on a few tokens before its first call, and refused if
    anything but attention uses several tokens. Call this before or after `fully_shard`, and before PEFT, DDP or
    `torch.compile` wrap the model. Deep copies are parallelized too. `unparallelize` undoes it.
    """
    _refuse_wrapped(model)
    if not isinstance(attention, MeshAttention):
        raise UsageError(f"parallelize got a {type(attention).__name__}; expected a MeshAttention")
    if attention.is_local:
        raise UsageError(
            "parallelize needs one rank per process, but all ranks of a local group are in this process; use a "
            "torch.distributed group, which may have one process"
        )
    if find_parallel(model) is not None:
        raise UsageError(f"{_name(model)} is parallelized already; call unparallelize(model) first")
    check_meanings()
    _refuse_classes(model)
    refuse_model(model)
    implementation = Implementation()
    configs = _copied_configs(model)
    for copied in configs:
        if _is_of_text(copied.config, model):
            copied.private._attn_implementation_internal = implementation.name
    _exchange(model, [(copied.config, copied.private) for copied in configs])
    vars(model)[STATE] = ModelAttention(attention, implementation, configs)
    model_class: Any = type(model)
    model.__class__ = _parallel_class(model_class)
    return model


def unparallelize(model: Model) -> Model:
    """Make a parallelized model what it was, with its own class, configs and attention. Returns the model itself.

    What was changed in its config meanwhile remains changed.
    """
    _refuse_wrapped(model)
    if STATE not in vars(model):
        raise UsageError(f"{_name(model)} is not parallelized")
    original = _original_class(type(model))
    parallel: ModelAttention = vars(model).pop(STATE)
    for copied in parallel.configs:
        ours = {"_attn_implementation_internal", *copied.config.sub_configs}
        copied.private._attn_implementation_internal = copied.config._attn_implementation
        for name, value in vars(copied.private).items():
            if name not in ours and (name not in copied.values or copied.values[name] is not value):
                vars(copied.config)[name] = value
    _exchange(model, [(copied.private, copied.config) for copied in parallel.configs])
    model.__class__ = original
    return model


def find_parallel(model: nn.Module) -> ModelAttention | None:
    """What `parallelize` noted in a model, or in the model that it wraps."""
    noted = (vars(module).get(STATE) for module in model.modules())
    return next((parallel for parallel in noted if parallel is not None), None)


# Refusals


def _refuse_wrapped(model: object) -> None:
    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"expected a model of transformers, got a {type(model).__name__}; if it wraps one (PEFT, DDP, "
            "torch.compile), give the model inside, or call parallelize before you wrap it"
        )


def _refuse_classes(model: PreTrainedModel) -> None:
    """Refuse a model whose attention is not chosen by its config."""
    for part in model.modules():
        is_asked = isinstance(part, PreTrainedModel) and _is_of_text(part.config, model)
        own_class: Any = next(base for base in type(part).__mro__ if not issubclass(base, FSDPModule))
        if is_asked and not own_class._can_set_attn_implementation():
            raise UsageError(
                f"{_name(part)} does not use transformers' attention interface, so mesh attention cannot replace its "
                "attention; use whole sequences, or another model"
            )


def _is_of_text(config: object, model: PreTrainedModel) -> bool:
    """True for the config of a part that attends to text, and not to images or sounds."""
    return type(config) in (type(model.config), type(model.config.get_text_config()))


def _name(model: object) -> str:
    return type(model).__name__.removeprefix("FSDP")


# Configs


def _copied_configs(model: nn.Module) -> list[CopiedConfig]:
    """Every config that a part of the model has, with a copy of it. Copies have copies as their parts."""
    originals: dict[int, Any] = {}
    waiting = [value for module in model.modules() for value in vars(module).values()]
    while waiting:
        config = waiting.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in originals:
            originals[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    copies = {number: copy.copy(config) for number, config in originals.items()}
    for private in copies.values():
        for name in private.sub_configs:
            part = vars(private).get(name)
            vars(private)[name] = copies.get(id(part), part)
    return [CopiedConfig(originals[number], private, dict(vars(private))) for number, private in copies.items()]


def _exchange(model: nn.Module, configs: list[tuple[Any, Any]]) -> None:
    """Give all parts of a model the second of two configs for the first."""
    others = {id(config): other for config, other in configs}
    for module in model.modules():
        for name, value in vars(module).items():
            if id(value) in others:
                vars(module)[name] = others[id(value)]


# The class


UNCOMPILED = "mesh attention checks every call of a model; compile its layers one by one, or without fullgraph=True"
is_traced_inside: Any = partial(torch.compiler.disable, recursive=False, reason=UNCOMPILED)
"""Not compiled itself, unlike the parts of the model that it calls."""


class Parallel:
    """The methods that a parallelized model has of its own. A new model of its class is an ordinary one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = super().__call__  # type: ignore[misc]
        return call(*args, **kwargs) if getattr(self, STATE, None) is None else _run(self, call, args, kwargs)


class ParallelGeneration(Parallel):
    """Of a model that can generate."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        generate: Callable[..., Any] = super().generate  # type: ignore[misc]
        parallel = getattr(self, STATE, None)
        return generate(*args, **kwargs) if parallel is None else generate_on_ranks(parallel, generate, args, kwargs)

    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        prepare: Callable[..., Any] = super()._prepare_cache_for_generation  # type: ignore[misc]
        parallel = getattr(self, STATE, None)
        return prepare(*args, **kwargs) if parallel is None else prepare_cache(self, parallel, prepare, args, kwargs)


@cache
def _parallel_class(model_class: type[Any]) -> type[Any]:
    """A subclass of a model's class, with its name: `save_pretrained` writes that into the config."""
    inherited = model_class.forward

    @is_traced_inside()  # type: ignore[untyped-decorator]
    @wraps(inherited)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        parallel = getattr(self, STATE, None)
        if parallel is None or parallel.implementation.is_running_here():
            return inherited(self, *args, **kwargs)
        return _run(self, partial(inherited, self), args, kwargs)

    mixin = ParallelGeneration if issubclass(model_class, GenerationMixin) else Parallel
    names = {name: getattr(model_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(model_class.__name__, (mixin, model_class), {**names, "forward": forward})


def _original_class(model_class: type[Any]) -> type[Any]:
    """The class that a model had, or would have if `fully_shard` had met that one."""
    if issubclass(model_class.__bases__[0], Parallel):
        return model_class.__bases__[1]
    bases = tuple(_original_class(base) if issubclass(base, Parallel) else base for base in model_class.__bases__)
    own = {name: value for name, value in vars(model_class).items() if name not in ("__dict__", "__weakref__")}
    return type(model_class.__name__, bases, own)


# A call


@is_traced_inside()  # type: ignore[untyped-decorator]
def _run(model: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parallel: ModelAttention = vars(model)[STATE]
    implementation = parallel.implementation
    with implementation.running(model):
        inputs = _bind(model, args, kwargs)
        if isinstance(inputs.get("past_key_values"), GenerationCache):
            return call_with_cache(model, inputs, parallel)
        with implementation.calling(_agreed_call(model, inputs, parallel)):
            return forward(*args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _agreed_call(model: PreTrainedModel, inputs: Mapping[str, Any], parallel: ModelAttention) -> ShardedCall:
    """The call, checked. Ranks tell each other of refusals; the others would wait otherwise."""
    try_once(model, inputs, parallel)
    session = parallel.attention.session
    with session.telling():
        call = read_call(model, inputs, parallel.attention)
    # In training, layers may refuse what they compute otherwise.
    session.agree(Statement(must_match={"operation": "a model's attention", "training": str(model.training)}))
    return call


@torch.compiler.disable  # type: ignore[untyped-decorator]
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
