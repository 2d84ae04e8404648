"""`generate` on ranks: refuses what cannot work, makes the cache, and lets all ranks draw the same random numbers.

Every rank calls `generate` with the same arguments, except for a streamer, which may be given on one rank only. What
`generate` then does is transformers' own: it calls the model with a `GenerationCache`.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import MaxTimeCriteria

from mesh_attention.errors import UsageError
from mesh_attention.plan.buffer_sizes import BLOCK_TOKENS
from mesh_attention.session.agreement import Statement, summary_of
from mesh_attention.transformers.attention import ModelAttention
from mesh_attention.transformers.generation_cache import GenerationCache
from mesh_attention.units import count

INSTEAD = "or generate in one process: unparallelize(model)"
MODES = ("greedy_search", "sample", "beam_search", "beam_sample", "assisted_generation")
NOT_COMPARED = ("transformers_version", "compile_config")
"""Settings that ranks may differ in."""


def generate_on_ranks(
    parallel: ModelAttention, generate: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """What `generate` of transformers returns, on every rank."""
    arguments = signature(generate).bind_partial(*args, **kwargs).arguments
    session, outer = parallel.attention.session, parallel.columns_given
    parallel.columns_given = _columns_of(arguments)
    try:
        with session.telling():  # the other ranks wait for this one
            refuse_arguments(arguments)
            out = generate(*args, **kwargs)
            # A rank that stops before the others would leave them waiting in a step.
            texts = getattr(out, "sequences", out)
            summary = summary_of(texts) if isinstance(texts, Tensor) else type(texts).__name__
            session.agree(Statement(must_match={"operation": "the end of generate()", "texts": summary}))
        return out
    finally:
        parallel.columns_given = outer


def prepare_cache(
    model: Any,
    parallel: ModelAttention,
    prepare: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Give the model's arguments a `GenerationCache`, in the place of the cache that `prepare` would make."""
    arguments = signature(prepare).bind(*args, **kwargs).arguments
    settings, model_kwargs = arguments["generation_config"], arguments["model_kwargs"]
    mode, batch = arguments["generation_mode"], arguments["batch_size"]
    refuse_settings(settings, str(getattr(mode, "value", mode)))
    rows = batch * max(settings.num_beams or 1, settings.num_return_sequences or 1)
    cache = _cache_for(parallel, model_kwargs.get("past_key_values"))
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not mask.all() and "position_ids" not in signature(model.forward).parameters:
        raise UsageError(
            f"{type(model).__name__} counts padding as positions, because its forward takes no position_ids, and mesh "
            f"attention leaves padding out; generate from prompts of equal lengths, {INSTEAD}"
        )
    repeats = mask.shape[0] // batch if mask is not None else 1
    refuse_mask(cache, settings, mask, repeats=repeats, columns_given=parallel.columns_given)
    tokens = rows * arguments["max_cache_length"]
    if (settings.num_beams or 1) > 1:
        tokens += rows * parallel.attention.ranks * BLOCK_TOKENS  # a beam that is copied needs a block at once
    cache.expect(tokens=tokens, rows=rows, max_rollback=settings.prompt_lookup_num_tokens or 0)
    share_settings(parallel, settings, model.device)
    model_kwargs["past_key_values"] = cache


def _cache_for(parallel: ModelAttention, past: object) -> GenerationCache:
    if past is None:
        return GenerationCache(parallel.attention)
    if not isinstance(past, GenerationCache):
        raise UsageError(
            f"past_key_values is a {type(past).__name__}, which would be whole on every rank; leave it out, give the "
            f"past_key_values that generate returned, {INSTEAD}"
        )
    return past


def _columns_of(arguments: Mapping[str, Any]) -> int | None:
    """The columns of the tokens that `generate` was given; None if there are none."""
    others = arguments.get("kwargs", {})
    for tokens in (others.get("inputs_embeds"), others.get("input_ids"), arguments.get("inputs")):
        if isinstance(tokens, Tensor) and tokens.dim() > 1:
            return tokens.shape[1]
    return None


# Refusals


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of `generate` that lead away from its usual path."""
    others = arguments.get("kwargs", {})
    config = arguments.get("generation_config")
    if arguments.get("custom_generate") is not None or others.get("trust_remote_code"):
        raise UsageError(
            "custom_generate is not supported with mesh attention, nor are the modes that transformers loads in this "
            f"way (contrastive search, DoLa, group beams, constraints); leave them and trust_remote_code out, {INSTEAD}"
        )
    if arguments.get("assistant_model") is not None:
        raise UsageError(
            f"assistant_model is not supported with mesh attention; use prompt_lookup_num_tokens, {INSTEAD}"
        )
    if any(isinstance(criterion, MaxTimeCriteria) for criterion in arguments.get("stopping_criteria") or ()):
        raise UsageError(
            "MaxTimeCriteria is not supported: the ranks' clocks differ, and so would their texts; use max_new_tokens"
        )
    if "paged" in (others.get("cache_implementation"), getattr(config, "cache_implementation", None)):
        raise UsageError(f'cache_implementation="paged" is not supported with mesh attention; leave it out, {INSTEAD}')


def refuse_settings(settings: Any, mode: str) -> None:
    """Refuse settings of generation that ranks cannot follow, or not together."""
    if mode not in MODES or (mode == "assisted_generation" and settings.prompt_lookup_num_tokens is None):
        raise UsageError(f"{mode} is not supported with mesh attention; expected one of {', '.join(MODES)}, {INSTEAD}")
    if settings.cache_implementation is not None:
        raise UsageError(
            f"cache_implementation={settings.cache_implementation!r} is not supported: mesh attention has its own "
            f"cache, spread over the ranks; leave it out, {INSTEAD}"
        )
    if settings.use_cache is False:
        raise UsageError(f"use_cache=False is not supported with mesh attention; leave it out, {INSTEAD}")
    if settings.max_time is not None:
        raise UsageError(
            f"max_time={settings.max_time} is not supported: the ranks' clocks differ, and so would their texts; use "
            "max_new_tokens"
        )
    if settings.guidance_scale not in (None, 1):
        raise UsageError(
            f"guidance_scale={settings.guidance_scale} is not supported with mesh attention: it runs a second prompt "
            f"with a cache of its own; leave it out, {INSTEAD}"
        )


def refuse_mask(
    cache: GenerationCache, settings: Any, mask: Tensor | None, *, repeats: int, columns_given: int | None
) -> None:
    """Refuse a mask that cannot be of the whole text, and one without real tokens. transformers drops masks of ones."""
    columns = mask.shape[1] if mask is not None else getattr(settings, "_mask_length", None)
    if cache.columns and columns is not None:
        if columns <= cache.columns:
            raise UsageError(
                f"attention_mask has {count(columns, 'column')}, and the cache {cache.columns:,} already; give the "
                "whole text, or the new tokens with the attention_mask of the whole text"
            )
        if settings.prompt_lookup_num_tokens is not None and columns_given == columns:
            raise UsageError(
                "prompt_lookup_num_tokens on a filled cache needs the new tokens only, with the attention_mask of the "
                "whole text"
            )
    if mask is not None and mask.dim() == 2:
        has_tokens = (mask != 0).any(1).tolist()
        if not all(has_tokens):
            raise UsageError(
                f"row {has_tokens.index(False) // repeats} of attention_mask has no real token; leave the row out"
            )


# What all ranks share


def share_settings(parallel: ModelAttention, settings: Any, device: torch.device) -> None:
    """Compare settings with the other ranks. If tokens are sampled, all take the state of rank 0's generators."""
    session = parallel.attention.session
    summary = {"operation": "generate"}
    for name, value in sorted(vars(settings).items()):
        value = value.tolist() if isinstance(value, Tensor) else value
        is_plain = isinstance(value, bool | int | float | str | list | tuple | dict)
        if is_plain and not name.startswith("_") and name not in NOT_COMPARED:
            summary[name] = str(value)
    is_first = session.rank == 0
    states = _random_states(device) if settings.do_sample and is_first else None
    statements = session.agree(Statement(must_match=summary, payload=states))
    if settings.do_sample and not is_first:
        _set_random_states(statements[0].payload, device)


def _random_states(device: torch.device) -> list[str]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return [b64encode(bytes(state.tolist())).decode() for state in states]


def _set_random_states(states: list[str], device: torch.device) -> None:
    tensors = [torch.tensor(list(b64decode(state)), dtype=torch.uint8, device="cpu") for state in states]
    torch.set_rng_state(tensors[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(tensors[1], device)
