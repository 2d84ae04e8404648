"""Runs a model on a `GenerationCache`, as `generate` does: every rank is given the whole call, and runs its own part.

    many new tokens    each rank runs its tokens of all rows, packed into one; the logits that are wanted are then sent
                       to all ranks
    a few              every rank runs the same tokens, and has all logits

Where so few tokens are given that some rank would get none, but more than one step takes, there are several steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import ModelOutput

from mesh_attention.arguments import describe
from mesh_attention.errors import MaskError, UsageError
from mesh_attention.execution.sharding import gather
from mesh_attention.integrations.pytorch import as_autocast, with_sinks
from mesh_attention.planners.over_cache import MOST_DECODED
from mesh_attention.serving import Step, Turn
from mesh_attention.session.agreement import Statement, fingerprint
from mesh_attention.transformers.attention import Implementation, ModelAttention, check_sinks
from mesh_attention.transformers.generation_cache import GenerationCache
from mesh_attention.transformers.masks import BatchMask, read_band, refuse_own_mask
from mesh_attention.transformers.models import refuse_rotary
from mesh_attention.transformers.trial import observe, try_once
from mesh_attention.units import count

Inputs = Mapping[str, Any]
"""The arguments of a model's call, by name."""


def call_with_cache(model: Any, inputs: Inputs, parallel: ModelAttention) -> Any:
    """The model's output for a whole call, on every rank."""
    cache: GenerationCache = inputs["past_key_values"]
    session = parallel.attention.session
    with session.telling():
        new = _checked(model, cache, inputs, parallel)
    try_once(model, {new.name: new.tokens, "position_ids": new.tokens}, parallel)  # makes positions of its own
    with session.telling():
        cache.prepare(observe(model, parallel, new.tokens.device), rows=len(new.counts), tokens=sum(new.counts))
        call = _Call(model, cache, new, parallel.implementation)
        steps = call.steps()
    if cache.is_to_meet or steps is None or len(steps) > 1:
        _compare(cache, new)
    try:
        out = call.run(steps)
    except BaseException as error:
        cache.failure = f"{type(error).__name__}: {error}"
        raise
    cache.columns += new.columns
    cache.is_to_meet = False
    return out.to_tuple() if inputs.get("return_dict") is False else out


def _checked(model: Any, cache: GenerationCache, inputs: Inputs, parallel: ModelAttention) -> NewTokens:
    if cache.attention is not parallel.attention:
        raise UsageError("the GenerationCache is of another MeshAttention than the model's; use a new cache")
    if model.training:
        raise UsageError("a model in training mode cannot fill a GenerationCache; call model.eval() first")
    embeddings = [inputs["inputs_embeds"]] if isinstance(inputs.get("inputs_embeds"), Tensor) else []
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*embeddings, *model.parameters())):
        raise UsageError(
            "a GenerationCache keeps no gradients, but the model's parameters or inputs_embeds require them; use "
            "torch.no_grad()"
        )
    if cache.failure is not None:
        raise UsageError(f"an earlier call with this cache failed ({cache.failure}); start with a new cache")
    return read_new_tokens(inputs, columns=cache.columns, lengths=cache.lengths if cache.sequences else [])


def _compare(cache: GenerationCache, new: NewTokens) -> None:
    """Raise on every rank unless all were given the same tokens."""
    summary = {
        "operation": "a model's call with a cache",
        "new tokens": f"{tuple(new.tokens.shape)} {new.tokens.dtype} #{int(fingerprint(new.tokens)):010x}",
        "tokens of rows": str(new.counts),
        "cached tokens": str(cache.lengths),
        "logits_to_keep": f"{count(len(new.wanted), 'column')} #{hash(new.wanted) & 0xFFFFFFFFFF:010x}",
    }
    advice = "Every rank of the attention's group must make the same call, with the same whole prompt"
    cache.attention.session.agree(Statement(must_match=summary, advice=advice))


class _Call:
    """One call: its steps, the model's runs on them, and the logits that come of them."""

    def __init__(self, model: Any, cache: GenerationCache, new: NewTokens, implementation: Implementation) -> None:
        assert cache.store is not None
        self.implementation = implementation
        self.model, self.cache, self.store, self.new = model, cache, cache.store, new
        self.keeps = "logits_to_keep" in signature(model.forward).parameters

    def steps(self) -> list[range] | None:
        """The columns of each step to decode; None for a prefill."""
        new = self.new
        counts = self._by_sequence({row: number for row, number in enumerate(new.counts) if number})
        most = max(counts.values(), default=0)
        is_one_step = len({*counts.values()}) <= 1 and most <= MOST_DECODED
        if not is_one_step and min(self.store.tokens_per_rank(counts)):
            refuse_rotary(self.model.config, self._ends())
            return None
        starts = range(new.columns - most, new.columns, MOST_DECODED)
        return [range(first, min(first + MOST_DECODED, new.columns)) for first in starts]

    def _by_sequence(self, counts: Mapping[int, int]) -> dict[int, int]:
        return {self.cache.sequences[row]: number for row, number in counts.items()}

    def _ends(self) -> list[int]:
        """For each rank, the position behind the last of its new tokens."""
        ends = [0] * self.store.ranks
        for sequence, number in zip(self.cache.sequences, self.new.counts, strict=True):
            entry = self.store.book.entry(sequence)
            if number:
                after = entry.shares.appended(number, self.store.attention.layout, entry.counts)
                for rank in range(self.store.ranks):
                    segments = [s for s in after.segments(rank) if s and s[-1] >= entry.shares.length]
                    ends[rank] = max([ends[rank], *(s[-1] + 1 for s in segments)])
        return ends

    def run(self, steps: Sequence[range] | None) -> Any:
        new = self.new
        if steps is None:
            return self._prefill()
        if set(new.counts) == {new.columns} and len(steps) == 1:
            return self._decode(dict(enumerate(new.counts)), new.tokens, new.wanted)
        if not steps:  # all new tokens are padding
            size = self.model.config.get_text_config().vocab_size
            return self._output({}, torch.empty(0, size, dtype=self.model.dtype, device=new.tokens.device), [])
        logits, slots = [], []
        for columns in steps:
            packed = self._packed(columns)
            rows = 1 if len({*packed.counts.values()}) > 1 else len(packed.counts)  # a ragged step is one row
            tokens = packed.tokens.view(rows, -1, *packed.tokens.shape[1:])
            out = self._decode(packed.counts, tokens, range(tokens.shape[1]))
            logits.append(out["logits"].flatten(0, 1)[packed.wanted])
            slots += packed.slots
        return self._output(out, torch.cat(logits), slots)

    def _packed(self, columns: range) -> PackedTokens:
        new = self.new
        starts = [max(columns.start, new.columns - number) for number in new.counts]
        counts = {row: columns.stop - start for row, start in enumerate(starts) if start < columns.stop}
        packed = PackedTokens(
            counts, torch.cat([new.tokens[row, starts[row] : columns.stop] for row in counts]), [], []
        )
        before = 0
        for row, number in counts.items():
            for slot, column in enumerate(new.wanted):
                if starts[row] <= column < columns.stop:
                    packed.wanted.append(before + column - starts[row])
                    packed.slots.append(row * len(new.wanted) + slot)
            before += number
        return packed

    def _decode(self, counts: Mapping[int, int], tokens: Tensor, wanted: Sequence[int]) -> Any:
        """A few tokens: run the same on every rank. Returns the logits of the wanted ones."""
        step = self.store.decode(self._by_sequence(counts))
        hashed = fingerprint(self.new.tokens)
        step.fingerprint = hashed if tokens.device.type == "cuda" else int(hashed)
        return self._run_model(step, tokens, step.position_ids, wanted)

    def _prefill(self) -> Any:
        """Many tokens: run this rank's, and send the logits that are wanted to all ranks."""
        packed = self._packed(range(self.new.columns))
        turn = self.store.prefill(self._by_sequence(packed.counts))
        homes = [_find(turn.shards, place) for place in packed.wanted]
        numbers = [[number for home, number in homes if home == rank] for rank in range(self.store.ranks)]
        own = numbers[self.cache.attention.rank]
        out = self._run_model(turn, turn.shard(packed.tokens[None]), turn.position_ids, own or [0])
        ours = out["logits"][0, : len(own)].contiguous()
        parts = gather(ours, list(map(len, numbers)), self.cache.attention.session, label="logits")
        slots = [slot for _, slot in sorted(zip(homes, packed.slots, strict=True), key=lambda pair: pair[0][0])]
        return self._output(out, torch.cat(parts), slots)

    def _output(self, out: Mapping[str, Any], wanted: Tensor, slots: Sequence[int]) -> Any:
        """A model's output with the logits of all rows, zeros for padding, and nothing of a part of the tokens."""
        others = [name for name, value in out.items() if name not in KEPT and value is not None]
        if others:
            raise UsageError(
                f"the model returns {', '.join(others)}, which each rank has for its own tokens only; leave out the "
                "argument that asks for it"
            )
        rows, columns = len(self.new.counts), len(self.new.wanted)
        logits: Any = wanted.new_zeros((rows * columns, wanted.shape[-1]))
        logits[slots] = wanted
        return CausalLMOutputWithPast(logits=logits.view(rows, columns, -1), past_key_values=self.cache)

    def _run_model(self, part: Turn | Step, tokens: Tensor, positions: Tensor, wanted: Sequence[int]) -> Any:
        """The model's output for these tokens; its logits are those of the wanted columns."""
        inputs: dict[str, Any] = {self.new.name: tokens, "position_ids": positions.to(tokens.device)}
        inputs |= {"past_key_values": self.cache, "use_cache": True, "return_dict": True}
        is_cut = list(wanted) != list(range(tokens.shape[1]))
        columns = torch.tensor(wanted, device=tokens.device)
        if self.keeps and is_cut:
            inputs["logits_to_keep"] = columns
        # Compiled layers run uncompiled: shapes and tables change with every call.
        stance = torch.compiler.set_stance("force_eager")
        call = CachedCall(cache=self.cache, part=part)
        with self.implementation.calling(call), self.cache.called(), stance:
            out = nn.Module.__call__(self.model, **inputs)
        name = type(self.model).__name__
        self.cache.check_all_attended(part, name)
        logits = out.get("logits") if isinstance(out, ModelOutput) else None
        if type(logits) is not Tensor or logits.dim() != 3:
            raise UsageError(f"{name} returns no logits as a plain tensor; a GenerationCache needs a causal LM")
        if is_cut and not self.keeps:
            out["logits"] = logits.index_select(1, columns)
        return out


def _find(shards: Sequence[Sequence[range]], position: int) -> tuple[int, int]:
    """The rank that has a position, and its number among the rank's."""
    for rank, segments in enumerate(shards):
        before = 0
        for segment in segments:
            if position in segment:
                return rank, before + segment.index(position)
            before += len(segment)
    raise AssertionError(f"position {position} is on no rank")


class PackedTokens(NamedTuple):
    """The real tokens of some columns, all in one row; `counts` are those of each row of the batch that has any."""

    counts: dict[int, int]
    tokens: Tensor
    wanted: list[int]
    """Places in `tokens` of those whose logits are wanted."""
    slots: list[int]
    """Where these belong among the logits of all rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedCall:
    """A model's call with a `GenerationCache`: layers attend to it, and add the new tokens of a turn or a step."""

    cache: GenerationCache
    part: Turn | Step

    def make_mask(self, *, attention_mask: Tensor | None = None, **request: Any) -> BatchMask:
        """The mask of layers. The cache knows the positions of its tokens."""
        if attention_mask is not None:
            refuse_own_mask(attention_mask, None)
        band = read_band(**{name: value for name, value in request.items() if name not in KNOWN})
        if band.right != 0:
            raise MaskError(f"generation needs causal attention, but the model asks for the mask {band}")
        return BatchMask(band=band, call=self)

    def attend(self, tensors: Sequence[Tensor], mask: BatchMask, arguments: Mapping[str, Any]) -> Tensor:
        """Attention of new tokens to a cache and themselves, (rows, tokens, heads, dim)."""
        with self.cache.attention.session.telling():
            sinks = check_sinks(arguments, heads=tensors[0].shape[1])
            layer = self.cache.number_of_layer(mask.band.left)
        result: Any = self.part.attend(
            layer,
            *(tensor.transpose(1, 2) for tensor in as_autocast(*tensors)),
            softmax_scale=arguments.get("scaling"),
            softcap=arguments.get("softcap") or 0.0,
            return_lse=sinks is not None,
        )
        out: Tensor = result if sinks is None else with_sinks(result[0], result[1], sinks)
        return out


KNOWN = ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset")
"""Sizes and positions that the cache knows better."""


# The new tokens of a call. Everything here is about the whole call, which is the same on every rank, and sends nothing


TOKENS = ("input_ids", "inputs_embeds")
ACCEPTED = (*TOKENS, "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "return_dict")
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
ENCODED = "mm_encoder_outputs"
"""Images and videos, encoded by `generate`; empty if there are none."""
KEPT = ("logits", "past_key_values", "rope_deltas")
"""Outputs that become those of all tokens; `rope_deltas` are of images, and dropped."""
OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")


@dataclass(frozen=True, kw_only=True)
class NewTokens:
    """The new tokens of a call. The last `counts[row]` of its columns are real tokens of a row; the others are padding.

    `wanted` are the columns whose logits the caller wants, in order.
    """

    name: str
    tokens: Tensor
    counts: tuple[int, ...]
    wanted: tuple[int, ...]

    @property
    def columns(self) -> int:
        return self.tokens.shape[1]


def read_new_tokens(inputs: Inputs, *, columns: int, lengths: Sequence[int]) -> NewTokens:
    """The new tokens of a call. The cache has `columns`, with padding, and rows of these `lengths` (none: empty)."""
    _refuse_unknown(inputs)
    names = [name for name in TOKENS if inputs.get(name) is not None]
    if len(names) != 1:
        raise UsageError(f"the model got {' and '.join(names) or 'no tokens'}: expected input_ids or inputs_embeds")
    tokens = inputs[names[0]]
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 + (names[0] == "inputs_embeds") or 0 in tokens.shape:
        raise UsageError(f"{names[0]} is {describe(tokens)}: expected tokens, (rows, tokens, …)")
    rows, new = tokens.shape[:2]
    lengths = lengths or [0] * rows
    if len(lengths) != rows:
        raise UsageError(
            f"the cache has {len(lengths)} rows, but the model got {rows}; give as many as in the last turn (num_beams "
            "and num_return_sequences multiply them)"
        )
    counts = _counts(inputs.get("attention_mask"), rows, new, columns, lengths)
    _check_positions(inputs.get("position_ids"), counts, lengths, new)
    return NewTokens(name=names[0], tokens=tokens, counts=counts, wanted=_wanted(inputs.get("logits_to_keep"), new))


def _refuse_unknown(inputs: Inputs) -> None:
    for name, value in inputs.items():
        if name in (*OUTPUTS, ENCODED) and not value:
            continue
        name = "images or videos" if name == ENCODED else name
        if name in OUTPUTS:
            raise UsageError(f"{name} is not supported with a GenerationCache: each rank has its own tokens only")
        if name not in ACCEPTED and value is not None:
            raise UsageError(
                f"the model got {name} and a GenerationCache; expected {', '.join(ACCEPTED)} only, because a rank does "
                f"not know its part of {name}; leave it out"
            )
    if inputs.get("use_cache") is False:
        raise UsageError("use_cache=False contradicts the GenerationCache that was given; leave one of them out")


def _counts(mask: object, rows: int, new: int, columns: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """The number of real new tokens of each row."""
    if mask is None:
        if any(length != columns for length in lengths):
            raise MaskError(
                "the cache has padded rows, but the model got no attention_mask; give the mask of all tokens, cached "
                "and new"
            )
        return (new,) * rows
    due = (rows, columns + new)
    if not isinstance(mask, Tensor) or tuple(mask.shape) != due:
        raise MaskError(f"attention_mask is {describe(mask)}: expected {due}, the tokens in the cache and the new ones")
    real = mask != 0
    old, own = real[:, :columns].sum(1), real[:, columns:]
    at_end = own.flip(1).int().cumprod(1).sum(1)
    rows_counts = torch.stack([old, own.sum(1), at_end], 1).tolist()  # waits for the device once
    for row, (held, own_count, last) in enumerate(rows_counts):
        if held != lengths[row]:
            raise MaskError(
                f"row {row} of attention_mask has {held} real tokens of {columns} that are cached, but the cache has "
                f"{lengths[row]}; give the mask of the earlier turns again, with 1 for every token that was generated"
            )
        if own_count == last and held and own_count < new:
            raise MaskError(
                f"row {row} has padding between its cached and its new tokens; give every row the same number of new "
                "tokens in a later turn"
            )
        if own_count != last:
            raise MaskError(
                f"row {row} of attention_mask has padding after real tokens; pad on the left only "
                '(tokenizer.padding_side = "left")'
            )
    return tuple(own_count for _, own_count, _ in rows_counts)


def _check_positions(position_ids: Any, counts: Sequence[int], lengths: Sequence[int], new: int) -> None:
    """Refuse positions other than those of the real tokens of each row, counted from 0."""
    if position_ids is None:
        return
    rows = len(counts)
    is_tensor = isinstance(position_ids, Tensor) and position_ids.dim() in (2, 3)
    if not is_tensor or position_ids.shape[-1] != new or position_ids.shape[-2] not in (1, rows):
        raise UsageError(f"position_ids is {describe(position_ids)}: expected (rows or 1, {new}), one for each token")
    device = position_ids.device
    columns, held = torch.arange(new, device=device), torch.tensor([lengths, counts], device=device)[..., None]
    due, padding = held.sum(0) - new + columns, new - held[1] > columns
    right = ((position_ids == due) | padding).all(-1).view(-1, rows).all(0)
    if bool(right.all()):
        return
    row = right.tolist().index(False)
    raise UsageError(
        f"position_ids of row {row} are not those of its new tokens, {lengths[row]} to "
        f"{lengths[row] + counts[row] - 1}; leave position_ids out, or count each row's tokens from 0, without padding"
    )


def _wanted(kept: object, new: int) -> tuple[int, ...]:
    """The columns that `logits_to_keep` asks for."""
    if kept is None:
        kept = 0
    if isinstance(kept, Tensor) and kept.dim() == 1 and kept.dtype in INTEGERS:
        columns = kept.tolist()
        if not columns:
            raise UsageError("logits_to_keep names no column; name at least one, or give 0 for all of them")
        for column in columns:
            if not -new <= column < new:
                raise UsageError(
                    f"logits_to_keep names column {column} of {count(new, 'new token')}: expected {-new} to {new - 1}"
                )
        return tuple(range(new)[column] for column in columns)
    if type(kept) is not int or kept < 0:
        raise UsageError(f"logits_to_keep is {describe(kept)}: expected a number of tokens, or columns as a 1D tensor")
    return tuple(range(new)[-kept:] if kept else range(new))
