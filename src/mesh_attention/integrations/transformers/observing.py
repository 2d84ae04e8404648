"""Observes what a model puts into a cache, by running it on a few tokens, instead of reading its config."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import Cache

from mesh_attention.errors import MaskError, UsageError
from mesh_attention.integrations.autocast import as_autocast
from mesh_attention.integrations.transformers.attention import LayerAttention
from mesh_attention.integrations.transformers.cache import OTHERS_KEYS, Observed
from mesh_attention.integrations.transformers.masks import BatchMask
from mesh_attention.integrations.transformers.probe import ERRORS, ROWS, WHOLE, Trial, undisturbed, usual_ids
from mesh_attention.serving import CachedLayer

_OBSERVED: WeakKeyDictionary[nn.Module, dict[object, Observed]] = WeakKeyDictionary()


def observe(model: Any, layers: LayerAttention, device: torch.device) -> Observed:
    """The layers of a model as a cache sees them; looked at once for each dtype and device."""
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    key = layers.number, model.dtype, device, autocast
    known = _OBSERVED.setdefault(model, {})
    if key not in known:
        known[key] = _look(model, layers, device)
    return known[key]


def _look(model: Any, layers: LayerAttention, device: torch.device) -> Observed:
    noted = _NotingCache()
    trial = _Look(noted=noted)
    ids = usual_ids(model, torch.zeros(1, dtype=torch.long, device=device)).repeat(ROWS, 1)
    positions = torch.arange(WHOLE, device=device).repeat(ROWS, 1)
    layers.set_trial(trial)
    try:
        with undisturbed(model):
            nn.Module.__call__(model, input_ids=ids, position_ids=positions, past_key_values=noted, use_cache=True)
    except UsageError:
        raise
    except ERRORS as error:
        raise UsageError(
            f"{type(model).__name__} cannot generate with mesh attention: it raised {type(error).__name__} with a "
            f'cache ({error}); generate with another implementation: model.set_attn_implementation("sdpa")'
        ) from error
    finally:
        layers.set_trial(None)
    if not trial.layers or trial.made is None:
        raise UsageError(f"{type(model).__name__} puts nothing into its cache, so it cannot generate on ranks")
    return Observed(trial.layers, *trial.made)


class _NotingCache(Cache):
    """An empty cache that notes the last layer that used it."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.last: int | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.last = layer_idx
        return key_states, value_states


class _Look(Trial):
    """A trial that notes the heads, sizes and window of each layer that attends."""

    def __init__(self, noted: _NotingCache) -> None:
        super().__init__()
        self.noted = noted
        self.layers: dict[int, CachedLayer] = {}
        self.made: tuple[torch.dtype, torch.device] | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, mask: BatchMask) -> Tensor:
        index, self.noted.last = self.noted.last, None
        if index is None:
            raise UsageError(OTHERS_KEYS)
        if not mask.is_causal:
            raise MaskError(f"generation needs causal attention, but layer {index} has the mask {mask.band}")
        self.layers[index] = CachedLayer(
            kv_heads=key.shape[1], head_dim=key.shape[3], head_dim_v=value.shape[3], window=mask.band.left
        )
        cast = as_autocast(key)[0]
        self.made = cast.dtype, cast.device
        return super().attend(query, key, value, scaling, mask)
