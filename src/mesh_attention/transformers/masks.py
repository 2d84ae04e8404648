"""Recognises transformers' mask functions, which are closures: causal, bidirectional, and sliding windows of both.

transformers guesses packed documents from a rank's position ids, which jump where the shard does; here documents are
taken from the whole sequence instead, and attention checks the position ids against them. Other masks are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import local
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import masking_utils

from mesh_attention.api import MeshAttention
from mesh_attention.arguments import refuse_unknown
from mesh_attention.errors import MaskError, UsageError
from mesh_attention.masks import Mask, causal, full, window
from mesh_attention.sequences import real_tokens

if TYPE_CHECKING:
    from mesh_attention.serving import Step, Turn
    from mesh_attention.transformers.cache import GenerationCache

MaskFunction = Callable[..., Any]


class _ThreadCall(local):
    """The model call that this thread is in."""

    inputs: Mapping[str, Any] | None = None
    """Its arguments, because layers need some that not all models pass on."""
    cached: CachedCall | None = None
    """The part of a call with a `GenerationCache` that runs now."""


CALL = _ThreadCall()
DENSE_MASK_ARGUMENTS = (
    "allow_is_causal_skip",
    "allow_is_bidirectional_skip",
    "local_size",
    "dtype",
    "device",
    "config",
)
"""Arguments of mask functions that say how a dense mask is made, or repeat what the mask function says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMask:
    """The mask of a layer: a band, and the padding of the whole sequence (None: not given).

    It is not a tensor, and stands for one only in attention. `inputs` are the arguments of the model's call.
    """

    band: Mask
    seq_len: int | None = None
    real: tuple[tuple[int, int], ...] | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_causal(self) -> bool:
        return self.band.right == 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{MASK_USE} (it asked for its {name})")  # not ours: tools may ask for any attribute

    def __getitem__(self, index: object) -> Any:
        raise MaskError(f"{MASK_USE} (it asked for a part of it)")

    @classmethod
    def __torch_function__(cls, function: Any, types: object, args: object = (), kwargs: object = None) -> Any:
        raise MaskError(f"{MASK_USE} (it called {getattr(function, '__name__', function)})")


@dataclass(frozen=True, slots=True)
class CachedCall:
    """A call with a `GenerationCache`, and the turn or step of its tokens."""

    cache: GenerationCache
    part: Turn | Step


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedMask(BatchMask):
    """The mask of a layer that attends to a cache. Its tokens and their padding are known to the call."""

    call: CachedCall = field(compare=False, repr=False)


MASK_USE = (
    "the model's own code uses the attention mask, as indexed and sparse attention do, but with mesh attention the "
    "mask is not a tensor; use another attn_implementation on whole sequences, or another model"
)


def make_mask(
    attention: MeshAttention,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    **request: Any,
) -> BatchMask:
    """Makes the mask of layers; transformers' models call it once per forward for each kind of layer."""
    band = read_band(**request)
    if attention_mask is None:
        if kv_length != q_length:
            raise UsageError(DECODING)
        return BatchMask(band=band)
    _check_padding(attention, attention_mask, batch_size, q_length, kv_length)
    return BatchMask(band=band, seq_len=attention_mask.shape[1], real=real_tokens(attention_mask))


def make_cached_mask(
    call: CachedCall,
    *,
    attention_mask: Tensor | None = None,
    q_offset: object = 0,
    kv_offset: object = 0,
    **request: Any,
) -> CachedMask:
    """Makes the mask of layers that attend to a cache, which knows the positions of its tokens."""
    if attention_mask is not None:
        refuse_padding(attention_mask)
    band = read_band(**{name: value for name, value in request.items() if name not in SIZES})
    if band.right != 0:
        raise MaskError(f"generation needs causal attention, but the model asks for the mask {band}")
    return CachedMask(band=band, call=call)


SIZES = ("batch_size", "q_length", "kv_length")


def refuse_padding(attention_mask: Tensor) -> None:
    """Refuse a mask that a model made itself, of this rank's tokens, unless it masks nothing."""
    if not bool(attention_mask.all()):
        raise MaskError(
            "the model made its own attention_mask from this rank's tokens; pass shard_batch an attention_mask for the "
            "whole sequence"
        )


def read_band(
    *,
    mask_function: MaskFunction,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    use_vmap: bool = False,
    **others: Any,
) -> Mask:
    """The band that a model asks for, without documents and padding."""
    refuse_unknown(others, DENSE_MASK_ARGUMENTS, of="the mask function")
    if use_vmap:
        raise MaskError(
            "the model adds a custom mask function (or_mask_function or and_mask_function), which mesh attention "
            "cannot interpret; use another attn_implementation for it"
        )
    if isinstance(q_offset, Tensor) or q_offset != 0 or kv_offset != 0:
        raise UsageError(DECODING)
    return band_of(mask_function)


DECODING = (
    "queries and keys are of different tokens (a filled KV cache, a StaticCache, or cross attention); mesh attention "
    "runs whole sequences, and generates with its own cache only: call model.generate without a cache, or give the "
    "model a GenerationCache"
)


def _check_padding(
    attention: MeshAttention, attention_mask: Tensor, batch_size: int, q_length: int, kv_length: int
) -> None:
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch_size:
        raise MaskError(
            f"attention_mask is {tuple(attention_mask.shape)}: expected (batch, tokens) with {batch_size} rows"
        )
    seq_len = attention_mask.shape[1]
    due = shard_length(attention, seq_len)
    if q_length != due:
        raise MaskError(
            f"attention_mask covers {seq_len} tokens, so this rank should hold {due} of them, but the layer got "
            f"{q_length}; pass the mask of the whole sequence on every rank, not only this rank's part (shard_batch "
            "does this for you)"
        )
    if kv_length not in (q_length, seq_len):
        raise UsageError(DECODING)


def shard_length(attention: MeshAttention, seq_len: int) -> int:
    """Number of tokens of a whole sequence that this rank is home to."""
    segments = attention.layout.segments(attention.rank, seq_len=seq_len, ranks=attention.ranks)
    return sum(map(len, segments))


def band_of(mask_function: MaskFunction) -> Mask:
    """The band of one of transformers' mask functions, without documents."""
    if mask_function is masking_utils.causal_mask_function:
        return causal()
    if mask_function is masking_utils.bidirectional_mask_function:
        return full()
    match _KINDS.get(getattr(mask_function, "__code__", None)):
        case "and":
            mask = full()
            for part in _held(mask_function, "mask_functions"):
                mask &= band_of(part)
            return mask
        case "sliding window":
            return window(_held(mask_function, "sliding_window") - 1, -1)  # it includes the token itself
        case "sliding window both ways":
            return window(*[_held(mask_function, "sliding_window")] * 2)
        case "packed":
            return full()
    name = getattr(mask_function, "__qualname__", repr(mask_function)).partition(".")[0]
    raise MaskError(
        f"the model uses an unknown mask ({name}); mesh attention knows causal and bidirectional masks, sliding "
        "windows, padding and packed documents; use another attn_implementation for it"
    )


def _held(closure: MaskFunction, name: str) -> Any:
    """The value of a closure's variable."""
    cells = dict(zip(closure.__code__.co_freevars, closure.__closure__ or (), strict=True))
    return cells[name].cell_contents


def _kinds() -> dict[CodeType | None, str]:
    """Kinds of mask functions by their code, which all closures of one factory share."""
    examples = {
        "and": masking_utils.and_masks(masking_utils.causal_mask_function),
        "sliding window": masking_utils.sliding_window_overlay(1),
        "sliding window both ways": masking_utils.sliding_window_bidirectional_overlay(1),
        "packed": masking_utils.packed_sequence_mask_function(torch.zeros(1, 1)),
    }
    return {function.__code__: kind for kind, function in examples.items()}


_KINDS = _kinds()


def check_meanings() -> None:
    """Refuse a version of transformers whose mask functions mean something else, tested on every pair of a few
    tokens."""
    tokens, size = torch.arange(6), 6
    rows, columns = tokens[None, None, :, None], tokens[None, None, None, :]
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    functions: tuple[MaskFunction, ...] = (
        masking_utils.causal_mask_function,
        masking_utils.bidirectional_mask_function,
        masking_utils.sliding_window_causal_mask_function(3),
        masking_utils.sliding_window_bidirectional_mask_function(2),
    )
    for function in functions:
        allowed = function(zero, zero, rows, columns).expand(1, 1, size, size)[0, 0].tolist()
        band = band_of(function)
        expected = [
            [bool(band.pairs(range(q, q + 1), range(k, k + 1), seq_q=size, seq_kv=size)) for k in range(size)]
            for q in range(size)
        ]
        if allowed != expected:
            raise UsageError(
                f"{getattr(function, '__qualname__', function)} of this version of transformers does not mask "
                "as mesh attention expects; install another version of transformers or of mesh-attention"
            )
