"""The attention function that transformers' layers call: arguments checked, rows of a batch grouped by their mask.

Tensors are transformers': (batch, heads, tokens, dim), of this rank's tokens. Arguments about the whole sequence
(padding, packed documents, its length) must be the same on every rank. Every argument is honoured, known to have no
effect on attention, or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef
from transformers import AttentionInterface

from mesh_attention.api import MeshAttention
from mesh_attention.arguments import describe
from mesh_attention.errors import MaskError, UsageError
from mesh_attention.execution.operators import WeakRegistry
from mesh_attention.integrations.pytorch import as_autocast, with_sinks
from mesh_attention.sequences import CUTS, LENGTHS, BatchRow, find_misplaced, read_documents
from mesh_attention.session.agreement import Statement
from mesh_attention.transformers.masks import (
    CALL,
    DECODING,
    BatchMask,
    CachedMask,
    make_cached_mask,
    make_mask,
    refuse_padding,
    shard_length,
)
from mesh_attention.transformers.models import refuse_mixing, refuse_rotary, refuse_router_loss
from mesh_attention.transformers.probe import TrialAttention

HONOURED = (
    "scaling",
    "dropout",
    "is_causal",
    "sliding_window",
    "softcap",
    "s_aux",
    "deterministic",
    "position_ids",
    "output_attentions",
    "output_router_logits",
    *CUTS,
    *LENGTHS,
)
PASSED_ON = ("position_ids", *CUTS, *LENGTHS)
"""Arguments of a model's call that its layers should pass on to attention; the mask carries them where they do not."""
PASSED_BY = ("use_cache", "num_items_in_batch", "shift_labels", "logits_to_keep", "output_hidden_states")
"""Arguments that pass through the layers and have no effect on attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A layer's arguments, checked: the mask of each row of the batch, the length of the whole sequence, the rest."""

    mask: BatchMask
    rows: tuple[BatchRow, ...]
    position_ids: Tensor
    seq_len: int
    softmax_scale: float | None
    softcap: float
    deterministic: bool
    sinks: Tensor | None

    def groups(self) -> dict[tuple[int, ...], list[int]]:
        """Rows that can share a call, by their boundaries."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, row in enumerate(self.rows):
            groups.setdefault(row.boundaries(is_causal=self.mask.is_causal), []).append(number)
        return groups


class LayerAttention:
    """The attention function of one `MeshAttention`, and the answers it caches between layers."""

    def __init__(self, attention: MeshAttention) -> None:
        self.attention = attention
        self._is_to_meet = True
        self._trial: TrialAttention | None = None
        self.number = LAYERS.number(self)
        self._documents: LastAnswer[tuple[tuple[int, ...], ...] | None] = LastAnswer()
        self._checked: LastAnswer[None] = LastAnswer()

    def make_mask(self, **request: Any) -> BatchMask:
        """The mask of layers. Models request it in every forward, on every rank, before the first layer attends."""
        if self._trial is not None:
            return self._trial.make_mask(**request)
        self._is_to_meet = True
        if CALL.cached is not None:
            return make_cached_mask(CALL.cached, **request)
        inputs = CALL.inputs or {}
        if inputs and inputs.get("attention_mask") is None and request.get("attention_mask") is not None:
            refuse_padding(request.pop("attention_mask"))
        return replace(make_mask(self.attention, **request), inputs={name: inputs.get(name) for name in PASSED_ON})

    def set_trial(self, trial: TrialAttention | None) -> None:
        """Let a trial attend in place of this, until it is None again."""
        self._trial = trial

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        """This rank's output, (batch, tokens, heads, dim), and None for the attention weights."""
        if self._trial is not None:
            refuse_arguments(module, arguments)
            mask = check_mask(attention_mask, arguments)
            return self._trial.attend(query, key, value, arguments.get("scaling"), mask), None
        if isinstance(attention_mask, CachedMask):
            return self._attend_cached(module, (query, key, value), attention_mask, arguments), None
        request = self._agreed(module, (query, key, value), attention_mask, arguments)
        tensors = as_autocast(query, key, value)
        groups = request.groups()
        if len(groups) == 1:
            return self._attend(tensors, next(iter(groups)), request), None
        parts = [
            self._attend([torch.cat([t[row : row + 1] for row in rows]) for t in tensors], cuts, request)
            for cuts, rows in groups.items()
        ]
        order = [row for rows in groups.values() for row in rows]
        singles = torch.cat(parts).unbind()
        return torch.stack([singles[order.index(row)] for row in range(len(order))]), None

    def _attend(self, tensors: Sequence[Tensor], cuts: tuple[int, ...], request: Request) -> Tensor:
        attention, band = self.attention, request.mask.band
        is_bshd = attention.tensor_format == "bshd"
        right = -1 if request.mask.is_causal or band.right is None else band.right
        documents: Sequence[int] | Tensor | None = cuts if len(cuts) > 2 else None
        if torch.compiler.is_compiling():
            documents = checked_cuts(request.position_ids, cuts, request.rows, self.number)
        result: Any = attention(
            *(tensor.transpose(1, 2) if is_bshd else tensor for tensor in tensors),
            causal=request.mask.is_causal,
            window_size=(-1 if band.left is None else band.left, right),
            cu_seqlens_q=documents,
            softmax_scale=request.softmax_scale,
            softcap=request.softcap,
            deterministic=request.deterministic,
            seq_len=request.seq_len,
            return_lse=request.sinks is not None,
        )
        out: Tensor = result if request.sinks is None else result[0]
        out = out if is_bshd else out.transpose(1, 2)
        return out if request.sinks is None else with_sinks(out, result[1], request.sinks)

    def _attend_cached(
        self, module: nn.Module, tensors: Sequence[Tensor], mask: CachedMask, arguments: Mapping[str, Any]
    ) -> Tensor:
        """Attention of new tokens to a cache and themselves, (rows, tokens, heads, dim)."""
        with self.attention.session.telling():
            refuse_arguments(module, arguments)
            check_mask(mask, arguments)
            sinks = check_sinks(arguments.get("s_aux"), heads=tensors[0].shape[1])
            layer = mask.call.cache.number_of_layer(mask.band.left)
        result: Any = mask.call.part.attend(
            layer,
            *(tensor.transpose(1, 2) for tensor in as_autocast(*tensors)),
            softmax_scale=arguments.get("scaling"),
            softcap=arguments.get("softcap") or 0.0,
            return_lse=sinks is not None,
        )
        out: Tensor = result if sinks is None else with_sinks(result[0], result[1], sinks)
        return out

    # Checks

    def _agreed(
        self, module: nn.Module, tensors: Sequence[Tensor], mask: object, arguments: Mapping[str, Any]
    ) -> Request:
        """The request. Once per forward, ranks tell each other of refusals; the others would wait otherwise.

        The moment does not depend on this rank's caches, which may differ from another rank's.
        """
        if torch.compiler.is_compiling():  # the operator checks positions when it runs
            return self._request(module, tensors, mask, arguments)
        with self._meeting():
            request = self._request(module, tensors, mask, arguments)
            self._check_positions(request.position_ids, request.rows)
        return request

    def check_agreed(self, position_ids: Tensor, rows: tuple[BatchRow, ...]) -> None:
        """Raise on wrong position ids; once per forward, on every rank together."""
        with self._meeting():
            self._check_positions(position_ids, rows)

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        if not self._is_to_meet:
            yield
            return
        session = self.attention.session
        with session.telling():
            yield
        session.agree(Statement(must_match={"operation": "a model's attention"}))
        self._is_to_meet = False

    def _request(
        self, module: nn.Module, tensors: Sequence[Tensor], mask: object, arguments: Mapping[str, Any]
    ) -> Request:
        query, key, _ = tensors
        refuse_arguments(module, arguments)
        batch_mask = check_mask(mask, arguments)
        arguments = with_inputs(arguments, batch_mask)
        if query.shape[2] != key.shape[2]:
            raise UsageError(DECODING)
        batch, tokens = query.shape[0], query.shape[2]
        seq_len, rows = self._rows(batch_mask, batch, tokens, arguments)
        refuse_rotary(getattr(module, "config", None), self.attention, rows, seq_len)
        return Request(
            mask=batch_mask,
            rows=rows,
            position_ids=check_shape(arguments.get("position_ids"), tokens),
            seq_len=seq_len,
            softmax_scale=arguments.get("scaling"),
            softcap=arguments.get("softcap") or 0.0,
            deterministic=bool(arguments.get("deterministic")),
            sinks=check_sinks(arguments.get("s_aux"), heads=query.shape[1]),
        )

    def _rows(
        self, mask: BatchMask, batch: int, tokens: int, arguments: Mapping[str, Any]
    ) -> tuple[int, tuple[BatchRow, ...]]:
        """The whole length and the rows, from boundaries and padding if given; otherwise all ranks have equal parts."""
        packing = [arguments.get(name) for name in (*CUTS, *LENGTHS)]
        documents = self._documents.ask(
            lambda: read_documents(arguments, batch=batch, seq_len=mask.seq_len), batch, mask.seq_len, *packing
        )
        if documents is not None:
            seq_len = documents[0][-1]
        else:
            seq_len = tokens * self.attention.ranks if mask.seq_len is None else mask.seq_len
        due = shard_length(self.attention, seq_len)
        if due != tokens:
            raise UsageError(
                f"the whole sequence has {seq_len} tokens, so this rank should hold {due} of them, but the layer "
                f"got {tokens}; "
                "cut inputs with shard_batch or MeshAttention.shard, and give cu_seq_lens of the whole sequence"
            )
        real = mask.real or ((0, seq_len),) * batch
        return seq_len, tuple(map(BatchRow, documents or ((0, seq_len),) * batch, real))

    def _check_positions(self, position_ids: Tensor, rows: tuple[BatchRow, ...]) -> None:
        def check() -> None:
            positions = self.attention.position_ids(rows[0].cuts[-1], device=position_ids.device)
            wrong = find_misplaced(position_ids, positions, rows)
            if wrong is not None:
                raise UsageError(_misplaced(position_ids, wrong, rows[wrong], positions))

        self._checked.ask(check, position_ids, rows)


def with_inputs(arguments: Mapping[str, Any], mask: BatchMask) -> dict[str, Any]:
    """The arguments, with positions and boundaries of the model's call where its layers do not pass them on.

    Some models pass on the positions of images as well, (3, batch, tokens).
    """
    missing = [name for name in PASSED_ON if arguments.get(name) is None]
    positions = arguments.get("position_ids")
    if isinstance(positions, Tensor) and positions.dim() == 3 and mask.inputs.get("position_ids") is not None:
        missing.append("position_ids")
    return {**arguments, **{name: mask.inputs.get(name) for name in missing}}


def check_shape(position_ids: object, tokens: int) -> Tensor:
    if not isinstance(position_ids, Tensor):
        raise UsageError(
            "the layer passed no position_ids to attention, so the positions of this rank's tokens cannot be checked; "
            "use a model whose layers pass them on (Llama, Qwen, Gemma, …)"
        )
    if position_ids.dim() != 2 or position_ids.shape[1] != tokens:
        raise UsageError(f"position_ids is {describe(position_ids)}: expected (batch or 1, {tokens}), one per token")
    return position_ids


def _misplaced(position_ids: Tensor, row: int, due: BatchRow, positions: Tensor) -> str:
    ids = position_ids[min(row, position_ids.shape[0] - 1)].tolist()
    first, last = ", ".join(map(str, ids[:4])), ", ".join(map(str, ids[-2:]))
    return (
        f"position_ids of row {row} ({first}, …, {last}) are not those of this rank's tokens, which are "
        f"{positions[0]} to {positions[-1]} of the whole sequence{' and its documents' if len(due.cuts) > 2 else ''}; "
        "pass position_ids from shard_batch or MeshAttention.position_ids to the model; if they restart for packed "
        "documents, or ranks hold unequal numbers of tokens, also pass cu_seq_lens_q/k of the whole sequence"
    )


def refuse_arguments(module: nn.Module, arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if name not in HONOURED and name not in PASSED_BY and value is not None:
            raise UsageError(
                f"{type(module).__name__} passed {name} to attention, which mesh attention does not know; if it is "
                "yours, leave it out; if it is the model's (such as a bias on scores), use another attn_implementation"
            )
    if arguments.get("dropout"):
        raise UsageError(
            f"attention dropout is not supported, got {arguments['dropout']}; load the model with an attention dropout "
            "of 0 (attention_dropout=0, or attn_pdrop=0 and the like), or call model.eval()"
        )
    config = getattr(module, "config", None)
    if arguments.get("output_attentions") or getattr(config, "output_attentions", False):
        raise UsageError(
            "output_attentions is not supported: no rank has the attention weights; use eager attention instead"
        )
    refuse_mixing(config)
    refuse_router_loss(config, arguments)


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


def check_sinks(sinks: object, *, heads: int) -> Tensor | None:
    if sinks is None or (isinstance(sinks, Tensor) and tuple(sinks.shape) == (heads,)):
        return sinks
    raise UsageError(f"s_aux is {describe(sinks)}: expected attention sinks, one per head ({heads})")


# The attention of a model


def find_layers(model: Any) -> LayerAttention | None:
    """The attention function of a model or of a part of it, if it is mesh attention."""
    for config in _configs(model.config):
        layers = AttentionInterface._global_mapping.get(str(getattr(config, "_attn_implementation", "")))
        if isinstance(layers, LayerAttention):
            return layers
    return None


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", ()):
        if getattr(config, name, None) is not None:
            yield from _configs(getattr(config, name))


# Answers that the layers of a forward share, because reading values waits for a device


Answer = TypeVar("Answer")


class LastAnswer(Generic[Answer]):
    """The last answer, valid for the same unchanged tensors and equal other arguments.

    Nothing is cached for tensors made in inference mode, which do not count writes, nor while a compiler traces, which
    would recompile whenever the cache changes.
    """

    def __init__(self) -> None:
        self._last: tuple[list[Any], Answer] | None = None

    def ask(self, answer: Callable[[], Answer], *about: Any) -> Answer:
        if torch.compiler.is_compiling() or any(isinstance(thing, Tensor) and thing.is_inference() for thing in about):
            return answer()
        # Held weakly: this must not keep a batch alive, and an address means nothing once it is reused.
        key = [(WeakIdRef(thing), thing._version) if isinstance(thing, Tensor) else thing for thing in about]
        if self._last is None or self._last[0] != key:
            self._last = key, answer()
        return self._last[1]


# The check of position ids as an operator of torch, for compiled layers: a compiler sees only shapes, this sees values


LAYERS: WeakRegistry[LayerAttention] = WeakRegistry()


def checked_cuts(position_ids: Tensor, cuts: Sequence[int], rows: Sequence[BatchRow], layers: int) -> Tensor:
    """`cuts` as a tensor, after checking the position ids of all rows.

    Attention is called with the result, so that no compiler removes the check as unused.
    """
    flat = [number for row in rows for number in (*row.real, *row.cuts)]
    sizes = [2 + len(row.cuts) for row in rows]
    checked: Tensor = torch.ops.mesh_attention.checked_cuts(position_ids, list(cuts), flat, sizes, layers)
    return checked


@torch.library.custom_op(
    "mesh_attention::checked_cuts",
    mutates_args=(),
    schema="(Tensor position_ids, SymInt[] cuts, SymInt[] rows, SymInt[] sizes, SymInt layers) -> Tensor",
)
def _checked_cuts(
    position_ids: Tensor, cuts: Sequence[int], rows: Sequence[int], sizes: Sequence[int], layers: int
) -> Tensor:
    numbers = iter(rows)
    split = [[next(numbers) for _ in range(size)] for size in sizes]
    attention = LAYERS.get(layers)
    if attention is None:
        raise UsageError("the attention that this model was compiled with no longer exists; compile the model again")
    attention.check_agreed(position_ids, tuple(BatchRow(tuple(row[2:]), (row[0], row[1])) for row in split))
    return torch.tensor(cuts)


@_checked_cuts.register_fake
def _(position_ids: Tensor, cuts: Sequence[int], rows: Sequence[int], sizes: Sequence[int], layers: int) -> Tensor:
    return torch.empty(len(cuts), dtype=torch.int64, device="cpu")
