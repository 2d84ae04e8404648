"""The attention function that transformers' layers call, and what a model's call on a rank's tokens tells them.

Tensors are transformers': (batch, heads, tokens, dim), of this rank's tokens. Arguments about the whole sequence
(padding, packed documents, its length) must be the same on every rank. They are read from the model's call, because not
all models pass them on to their layers. Every argument is honoured, known to have no effect on attention, or refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from threading import Lock, get_ident
from typing import Any, Protocol
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache
from transformers.masking_utils import AttentionMaskInterface

from mesh_attention.api import MeshAttention
from mesh_attention.arguments import describe
from mesh_attention.errors import MaskError, UsageError
from mesh_attention.integrations.pytorch import as_autocast, with_sinks
from mesh_attention.sequences import CUTS, LENGTHS, BatchRow, find_misplaced, read_documents, real_tokens
from mesh_attention.transformers.generation_cache import Observed
from mesh_attention.transformers.masks import DECODING, BatchMask, read_band, refuse_own_mask
from mesh_attention.transformers.models import least_end, refuse_rotary

HONOURED = ("scaling", "dropout", "is_causal", "sliding_window", "softcap", "s_aux", "deterministic")
OF_THE_CALL = ("position_ids", "output_attentions", "output_router_logits", *CUTS, *LENGTHS)
"""Arguments of a model's call, which are read and checked there."""
PASSED_BY = ("use_cache", "num_items_in_batch", "shift_labels", "logits_to_keep", "output_hidden_states")
"""Arguments that pass through the layers and have no effect on attention."""


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **arguments: Any
) -> tuple[Tensor, None]:
    """What a layer calls: this rank's output, (batch, tokens, heads, dim), and None for the attention weights."""
    refuse_arguments(module, arguments)
    mask = check_mask(attention_mask, arguments)
    return mask.call.attend((query, key, value), mask, arguments), None


class ModelCall(Protocol):
    """A model's call: on a rank's tokens, with a cache, or as a trial."""

    def make_mask(self, *, batch_size: int, q_length: int, kv_length: int, **request: Any) -> BatchMask:
        """The mask of its layers."""

    def attend(self, tensors: Sequence[Tensor], mask: BatchMask, arguments: Mapping[str, Any]) -> Tensor:
        """The output of a layer, (batch, tokens, heads, dim), from (batch, heads, tokens, dim)."""


class Implementation:
    """An attention implementation of transformers, for one parallelized model and its copies.

    The model's call is here while it runs. Masks, which transformers requests of it in every forward before the first
    layer attends, carry the call to the layers.
    """

    def __init__(self) -> None:
        self.name = f"mesh_attention_{next(NUMBERS)}"
        self._call: ModelCall | None = None
        self._thread: int | None = None
        self._lock = Lock()
        AttentionInterface.register(self.name, attend)
        # torch.compile does not trace it: it reads closures and the values of padding. Layers can be compiled.
        make_mask: Any = torch.compiler.disable(partial(_make_mask, ref(self)))  # type: ignore[no-untyped-call]
        AttentionMaskInterface.register(self.name, make_mask)
        finalize(self, _forget, self.name)

    def __deepcopy__(self, memo: object) -> Implementation:
        return self

    @contextmanager
    def running(self, model: object) -> Iterator[None]:
        """Inside, the model runs. It cannot be called again, by this thread or another."""
        if not self._lock.acquire(blocking=False):
            where = "called by itself, or by a copy" if self.is_running_here() else "running in another thread"
            raise UsageError(
                f"{type(model).__name__} is {where}; a parallelized model and its copies make one call at a time"
            )
        self._thread = get_ident()
        try:
            yield
        finally:
            self._thread = None
            self._lock.release()

    def is_running_here(self) -> bool:
        """True inside of a call, in its thread."""
        return self._thread == get_ident()

    @contextmanager
    def calling(self, call: ModelCall) -> Iterator[None]:
        """Inside, the layers attend through `call`."""
        before, self._call = self._call, call
        try:
            yield
        finally:
            self._call = before

    def make_mask(self, **request: Any) -> BatchMask:
        if self._call is None or not self.is_running_here():
            raise UsageError(NOT_CALLED)
        return self._call.make_mask(**request)


NUMBERS = count()
NOT_CALLED = (
    "a part of a parallelized model was called, or a model with its config; call the whole model, or "
    "parallelize(…, attention) the model that is called"
)


def _make_mask(implementation: ref[Implementation], **request: Any) -> BatchMask:
    held = implementation()
    assert held is not None  # it is forgotten otherwise
    return held.make_mask(**request)


def _forget(name: str) -> None:
    del AttentionInterface._global_mapping[name]
    del AttentionMaskInterface._global_mapping[name]


@dataclass(frozen=True)
class CopiedConfig:
    """A config of a model, the copy that the model has instead, and the values that were copied."""

    config: Any
    private: Any
    values: Mapping[str, Any]


class ModelAttention:
    """The attention of a parallelized model, and what is known of the model."""

    def __init__(
        self, attention: MeshAttention, implementation: Implementation, configs: Sequence[CopiedConfig]
    ) -> None:
        self.attention, self.implementation, self.configs = attention, implementation, configs
        self.tried: dict[frozenset[str], str | None] = {}
        """The kinds of calls that it was tried with, and why it refuses padding on the left, if it does."""
        self.observed: dict[object, Observed] = {}
        """Its layers as a cache sees them, by dtype and device."""
        self.columns_given: int | None = None
        """The columns of the tokens that the `generate` that runs was given."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelAttention:
        return ModelAttention(self.attention, self.implementation, copy.deepcopy(self.configs, memo))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedCall:
    """A model's call on this rank's tokens, checked: the rows of the whole batch, and their padding as it was given."""

    attention: MeshAttention
    rows: tuple[BatchRow, ...]
    padding: Tensor | None

    @property
    def seq_len(self) -> int:
        return self.rows[0].cuts[-1]

    def make_mask(
        self, *, batch_size: int, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **request: Any
    ) -> BatchMask:
        band = read_band(**request)
        if kv_length not in (q_length, self.seq_len):
            raise UsageError(DECODING)
        if batch_size != len(self.rows):
            raise UsageError(f"the model's layers have {batch_size} rows, but it was called with {len(self.rows)}")
        rows = self.rows
        if attention_mask is None:
            rows = tuple(BatchRow(row.cuts, (0, self.seq_len)) for row in rows)
        else:
            refuse_own_mask(attention_mask, self.padding)
        return BatchMask(band=band, call=self, cuts=tuple(row.boundaries(is_causal=band.right == 0) for row in rows))

    def attend(self, tensors: Sequence[Tensor], mask: BatchMask, arguments: Mapping[str, Any]) -> Tensor:
        """This rank's output. Rows with the same boundaries share a call."""
        if tensors[0].shape[2] != tensors[1].shape[2]:
            raise UsageError(DECODING)
        tensors = as_autocast(*tensors)
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, cuts in enumerate(mask.cuts):
            groups.setdefault(cuts, []).append(number)
        if len(groups) == 1:
            return self._attend(tensors, mask.cuts[0], mask, arguments)
        parts = [
            self._attend([torch.cat([t[row : row + 1] for row in rows]) for t in tensors], cuts, mask, arguments)
            for cuts, rows in groups.items()
        ]
        order = [row for rows in groups.values() for row in rows]
        singles = torch.cat(parts).unbind()
        return torch.stack([singles[order.index(row)] for row in range(len(order))])

    def _attend(
        self, tensors: Sequence[Tensor], cuts: tuple[int, ...], mask: BatchMask, arguments: Mapping[str, Any]
    ) -> Tensor:
        attention, band = self.attention, mask.band
        sinks = check_sinks(arguments, heads=tensors[0].shape[1])
        is_bshd = attention.tensor_format == "bshd"
        result: Any = attention(
            *(tensor.transpose(1, 2) if is_bshd else tensor for tensor in tensors),
            causal=mask.is_causal,
            window_size=(
                -1 if band.left is None else band.left,
                -1 if mask.is_causal or band.right is None else band.right,
            ),
            cu_seqlens_q=cuts if len(cuts) > 2 else None,
            softmax_scale=arguments.get("scaling"),
            softcap=arguments.get("softcap") or 0.0,
            deterministic=bool(arguments.get("deterministic")),
            seq_len=self.seq_len,
            return_lse=sinks is not None,
        )
        out: Tensor = result if sinks is None else result[0]
        out = out if is_bshd else out.transpose(1, 2)
        return out if sinks is None else with_sinks(out, result[1], sinks)


def read_call(model: Any, inputs: Mapping[str, Any], attention: MeshAttention) -> ShardedCall:
    """A model's call from its arguments, by name; its positions must be those of this rank's tokens."""
    past = inputs.get("past_key_values")
    if isinstance(past, Cache) and past.get_seq_length():
        raise UsageError(DECODING)
    tokens = inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"]
    padding = inputs.get("attention_mask")
    rows = _read_rows(inputs, tokens, padding, attention)
    refuse_rotary(model.config, (least_end(attention, rows), rows[0].cuts[-1]))
    position_ids = inputs.get("position_ids")
    if position_ids is None:  # a model that passed the trial counts like this
        position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or position_ids.shape[1] != tokens.shape[1]:
        raise UsageError(
            f"position_ids is {describe(position_ids)}: expected (batch or 1, {tokens.shape[1]}), one per token"
        )
    positions = attention.position_ids(rows[0].cuts[-1], device=position_ids.device)
    wrong = find_misplaced(position_ids, positions, rows)
    if wrong is not None:
        raise UsageError(_misplaced(position_ids, wrong, rows[wrong], positions))
    return ShardedCall(attention=attention, rows=rows, padding=padding)


def _read_rows(
    inputs: Mapping[str, Any], tokens: Tensor, padding: Tensor | None, attention: MeshAttention
) -> tuple[BatchRow, ...]:
    """The rows, from boundaries and padding if given; otherwise all ranks have equal parts."""
    batch, own = tokens.shape[:2]
    if padding is not None and (not isinstance(padding, Tensor) or padding.dim() != 2 or padding.shape[0] != batch):
        raise MaskError(
            f"attention_mask is {describe(padding)}: expected (batch, tokens) with {batch} rows; custom 4D masks are "
            "not supported"
        )
    seq_len = own * attention.ranks if padding is None else padding.shape[1]
    documents = read_documents(inputs, batch=batch, seq_len=None if padding is None else seq_len)
    if documents is not None:
        seq_len = documents[0][-1]
    segments = attention.layout.segments(attention.rank, seq_len=seq_len, ranks=attention.ranks)
    due = sum(map(len, segments))
    if due != own:
        raise MaskError(
            f"{'the whole sequence has' if padding is None else 'attention_mask covers'} {seq_len} tokens, so this "
            f"rank should hold {due} of them, but the model got {own}; cut inputs with shard_batch or "
            "MeshAttention.shard, and give attention_mask and cu_seq_lens of the whole sequence on every rank"
        )
    real = ((0, seq_len),) * batch if padding is None else real_tokens(padding)
    return tuple(map(BatchRow, documents or ((0, seq_len),) * batch, real))


def _misplaced(position_ids: Tensor, row: int, due: BatchRow, positions: Tensor) -> str:
    ids = position_ids[min(row, position_ids.shape[0] - 1)].tolist()
    first, last = ", ".join(map(str, ids[:4])), ", ".join(map(str, ids[-2:]))
    return (
        f"position_ids of row {row} ({first}, …, {last}) are not those of this rank's tokens, which are "
        f"{positions[0]} to {positions[-1]} of the whole sequence{' and its documents' if len(due.cuts) > 2 else ''}; "
        "pass position_ids from shard_batch or MeshAttention.position_ids to the model; if they restart for packed "
        "documents, or ranks hold unequal numbers of tokens, also pass cu_seq_lens_q/k of the whole sequence"
    )


# A layer's arguments


def refuse_arguments(module: nn.Module, arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if name not in (*HONOURED, *OF_THE_CALL, *PASSED_BY) and value is not None:
            raise UsageError(
                f"{type(module).__name__} passed {name} to attention, which mesh attention does not know; if it is "
                "yours, leave it out; if it is the model's (a bias on scores, say), run the model without parallelize"
            )
    if arguments.get("dropout"):
        raise UsageError(
            f"attention dropout is not supported, got {arguments['dropout']}; load the model with an attention dropout "
            "of 0 (attention_dropout=0, or attn_pdrop=0 and the like), or call model.eval()"
        )


def check_mask(mask: object, arguments: Mapping[str, Any]) -> BatchMask:
    """The mask, checked against the other arguments that describe it."""
    if not isinstance(mask, BatchMask):
        what = "no mask" if mask is None else describe(mask)
        raise MaskError(
            f"attention got {what} as its mask, expected one made for mesh attention: custom 4D masks, and models that "
            "do not use transformers' mask interface, are not supported; give a 2D attention_mask of the whole "
            "sequence, or cu_seq_lens"
        )
    is_causal, window = arguments.get("is_causal"), arguments.get("sliding_window")
    if is_causal is not None and bool(is_causal) != mask.is_causal:
        raise MaskError(f"is_causal={is_causal} contradicts the mask {mask.band}; set config.is_causal instead")
    reach = mask.band.left
    if window is not None and reach not in ((window - 1,) if mask.is_causal else (window - 1, window)):
        raise MaskError(f"sliding_window={window} contradicts the mask {mask.band}, which has another window")
    return mask


def check_sinks(arguments: Mapping[str, Any], *, heads: int) -> Tensor | None:
    sinks = arguments.get("s_aux")
    if sinks is None or (isinstance(sinks, Tensor) and tuple(sinks.shape) == (heads,)):
        return sinks
    raise UsageError(f"s_aux is {describe(sinks)}: expected attention sinks, one per head ({heads})")
