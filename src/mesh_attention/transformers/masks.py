"""Recognises transformers' mask functions, which are closures: causal, bidirectional, and sliding windows of both.

transformers guesses packed documents from a rank's position ids, which jump where the shard does; here documents are
taken from the whole sequence instead, and attention checks the position ids against them. Other masks are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import masking_utils

from mesh_attention.arguments import refuse_unknown
from mesh_attention.errors import MaskError, UsageError
from mesh_attention.masks import Mask, causal, full, window

if TYPE_CHECKING:
    from mesh_attention.transformers.attention import ModelCall

MaskFunction = Callable[..., Any]


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
    """The mask of a layer: a band, the call that it belongs to, and boundaries in each row of a sharded batch.

    It is not a tensor, and stands for one only in attention.
    """

    band: Mask
    call: ModelCall = field(compare=False, repr=False)
    cuts: tuple[tuple[int, ...], ...] = ()

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


MASK_USE = (
    "the model's own code uses the attention mask, as indexed and sparse attention do, but with mesh attention the "
    "mask is not a tensor; run it on whole sequences, without parallelize, or use another model"
)


def refuse_own_mask(requested: Tensor, whole: Tensor | None) -> None:
    """Refuse a mask that a model made itself, of this rank's tokens, unless it masks nothing."""
    due = torch.ones_like(requested) if whole is None else whole.to(requested.device)
    if requested.shape != due.shape or not bool(((requested != 0) == (due != 0)).all()):
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
            "cannot interpret; run the model without parallelize"
        )
    if isinstance(q_offset, Tensor) or q_offset != 0 or kv_offset != 0:
        raise UsageError(DECODING)
    return band_of(mask_function)


DECODING = (
    "queries and keys are of different tokens (a filled KV cache, a StaticCache, or cross attention); mesh attention "
    "runs whole sequences, and generates with its own cache only: call model.generate without a cache, or give the "
    "model a GenerationCache"
)


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
        "windows, padding and packed documents; run the model without parallelize"
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
    tokens, size = torch.arange(6, device="cpu"), 6
    rows, columns = tokens[None, None, :, None], tokens[None, None, None, :]
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long, device="cpu")
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
