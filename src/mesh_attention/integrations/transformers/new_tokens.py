"""Reads a model's call with a cache: which columns of which rows are new tokens, at which positions, and whose logits
are wanted.

Everything here is about the whole call, which is the same on every rank. Padding on the left is told apart from real
tokens, and left out from here on. Sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mesh_attention.arguments import describe
from mesh_attention.errors import MaskError, UsageError
from mesh_attention.integrations.fingerprints import fingerprint
from mesh_attention.units import count

INPUTS = ("input_ids", "inputs_embeds")
KNOWN = (*INPUTS, "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "return_dict")
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
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

    def of_row(self, row: int, start: int, count: int) -> Tensor:
        """Some real tokens of a row, counted from its first new one."""
        first = self.columns - self.counts[row] + start
        return self.tokens[row, first : first + count]

    def place(self, row: int, column: int) -> int | None:
        """The number of a column among the row's new tokens; None for padding."""
        found = column - self.columns + self.counts[row]
        return found if found >= 0 else None

    def fingerprint(self) -> Tensor:
        """A hash of the token ids or embeddings, of at most 40 bits, on their device."""
        return fingerprint(self.tokens)


def read_new_tokens(given: Mapping[str, Any], *, columns: int, lengths: Sequence[int]) -> NewTokens:
    """The new tokens of a call. The cache has `columns`, with padding, and rows of these `lengths` (none: empty)."""
    _refuse_unknown(given)
    names = [name for name in INPUTS if given.get(name) is not None]
    if len(names) != 1:
        raise UsageError(f"the model got {' and '.join(names) or 'no tokens'}: expected input_ids or inputs_embeds")
    tokens = given[names[0]]
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 + (names[0] == "inputs_embeds") or 0 in tokens.shape:
        raise UsageError(f"{names[0]} is {describe(tokens)}: expected tokens, (rows, tokens, …)")
    rows, new = tokens.shape[:2]
    lengths = lengths or [0] * rows
    if len(lengths) != rows:
        raise UsageError(
            f"the cache has {len(lengths)} rows, but the model got {rows}; give as many as in the last turn (num_beams "
            "and num_return_sequences multiply them)"
        )
    counts = _counts(given.get("attention_mask"), rows, new, columns, lengths)
    _check_positions(given.get("position_ids"), counts, lengths, new)
    return NewTokens(name=names[0], tokens=tokens, counts=counts, wanted=_wanted(given.get("logits_to_keep"), new))


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in OUTPUTS and not value:
            continue
        if name in OUTPUTS:
            raise UsageError(f"{name} is not supported with a GenerationCache: each rank has its own tokens only")
        if name not in KNOWN and value is not None:
            raise UsageError(
                f"the model got {name} and a GenerationCache; expected {', '.join(KNOWN)} only, because a rank does "
                f"not know its part of {name}; leave it out"
            )
    if given.get("use_cache") is False:
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
    found = torch.stack([old, own.sum(1), at_end], 1).tolist()  # waits for the device once
    for row, (held, own_count, last) in enumerate(found):
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
    return tuple(own_count for _, own_count, _ in found)


def _check_positions(position_ids: Any, counts: Sequence[int], lengths: Sequence[int], new: int) -> None:
    """Refuse positions other than those of the real tokens of each row, counted from 0."""
    if position_ids is None:
        return
    rows = len(counts)
    is_tensor = isinstance(position_ids, Tensor) and position_ids.dim() in (2, 3)
    if not is_tensor or position_ids.shape[-1] != new or position_ids.shape[-2] not in (1, rows):
        raise UsageError(f"position_ids is {describe(position_ids)}: expected (rows or 1, {new}), one for each token")
    first = torch.tensor([[length + count - new] for length, count in zip(lengths, counts, strict=True)])
    due = (first + torch.arange(new)).to(position_ids.device)
    padding = torch.tensor([[new - count] for count in counts], device=due.device) > torch.arange(new).to(due.device)
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
    if isinstance(kept, Tensor) and kept.dim() == 1 and kept.dtype in WHOLE:
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
