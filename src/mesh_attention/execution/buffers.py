"""Buffers: the memory that holds items. The bytes of a token are contiguous, and so is any span of tokens.

A token's bytes are the fields of its kind side by side (K and V; O and its LSE; …), statistics first, padded to the
size that the plan counts with: bytes sent and bytes held are the plan's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesh_attention.kernels.base import DTYPES
from mesh_attention.plan.steps import Item, Kind
from mesh_attention.problem import Problem

Fields = Mapping[str, Tensor]
"""Tensors by field name, (batch, heads, tokens, dim)."""
STATISTICS = ("lse", "delta")
"""Fields with one number for each token and head."""


class Field(NamedTuple):
    name: str
    heads: int
    dim: int


def fields_of(kind: Kind, problem: Problem) -> tuple[Field, ...]:
    """The tensors an item of a kind is made of, statistics first."""
    heads, kv_heads, qk, v = problem.heads, problem.kv_heads, problem.head_dim_qk, problem.head_dim_v
    fields: dict[Kind, tuple[Field, ...]] = {
        "q": (Field("q", heads, qk),),
        "kv": (Field("k", kv_heads, qk), Field("v", kv_heads, v)),
        "do": (Field("lse", heads, 1), Field("delta", heads, 1), Field("do", heads, v)),
        "o": (Field("lse", heads, 1), Field("o", heads, v)),
        "dq": (Field("dq", heads, qk),),
        "dkv": (Field("dk", kv_heads, qk), Field("dv", kv_heads, v)),
    }
    return fields[kind]


@dataclass(frozen=True, slots=True)
class TokenFormat:
    """The place of each field in the bytes of one token of one batch entry, and the number of those bytes."""

    slots: tuple[tuple[str, int, int, int, int, torch.dtype], ...]  # name, start, stop, heads, dim, dtype
    nbytes: int


@lru_cache(maxsize=4096)
def _views(fmt: TokenFormat, tokens: int, batch: int) -> tuple[tuple[str, torch.dtype, tuple[Any, ...]], ...]:
    """Each field's name and dtype, and its sizes, strides and offset in memory of that dtype."""
    found = []
    for name, start, _, heads, dim, dtype in fmt.slots:
        width = fmt.nbytes // dtype.itemsize
        size = 3 if name in STATISTICS else 4
        sizes, strides = (batch, heads, tokens, dim)[:size], (width, dim, batch * width, 1)[:size]
        found.append((name, dtype, (sizes, strides, start // dtype.itemsize)))
    return tuple(found)


@lru_cache(maxsize=256)
def token_format(
    kind: Kind, problem: Problem, shares: int, is_running: bool = False, *, is_over_cache: bool = False
) -> TokenFormat:
    """The format of items that hold one share of the heads. Over a cache, queries bring the keys and values of their
    tokens."""
    wire = DTYPES[problem.dtype]
    wide = torch.float64 if problem.dtype == "float64" else torch.float32
    statistic = torch.float64 if is_running else wide  # see `problem.RUNNING_LSE_NBYTES`
    slots = []
    at, alignment = 0, 1
    added = fields_of("kv", problem) if kind == "q" and is_over_cache else ()
    for name, heads, dim in (*fields_of(kind, problem), *added):
        dtype = wide if is_running else wire
        if name in STATISTICS:
            dtype, alignment = statistic, statistic.itemsize
        width = heads // shares * dim * dtype.itemsize
        slots.append((name, at, at + width, heads // shares, dim, dtype))
        at += width
    return TokenFormat(tuple(slots), at + -at % alignment)


class TokenSpan(NamedTuple):
    """Consecutive tokens of a buffer."""

    start: int
    stop: int


class TwoSpans(NamedTuple):
    """Two spans of one length: the first, and how far behind its start the second one starts."""

    start: int
    stop: int
    step: int


Span = TokenSpan | TwoSpans


def part(field: Tensor, span: Span | None) -> Tensor:
    """The tokens of a span, or all of them. Two spans of a batch of one become a batch of two: one launch does both."""
    if span is None:
        return field
    if isinstance(span, TokenSpan):
        return field.narrow(2, span.start, span.stop - span.start)
    (_, heads, _, *dim), (_, per_head, per_token, *per_dim) = field.shape, field.stride()
    sizes, strides = (2, heads, span.stop - span.start, *dim), (span.step * per_token, per_head, per_token, *per_dim)
    return field.as_strided(sizes, strides, field.storage_offset() + span.start * per_token)


def paired(spans: Sequence[tuple[Any, TokenSpan, TokenSpan]], batch: int) -> list[tuple[Any, Span, Span]]:
    """Pairs of spans with a key; in a batch of one, neighbours of equal keys and lengths become one: one launch."""
    paired_spans: list[tuple[Any, Span, Span]] = []
    for what, ours, theirs in spans:
        if batch == 1 and paired_spans and paired_spans[-1][0] == what:
            _, (start, stop, *second), (their_start, their_stop, *_) = paired_spans[-1]
            step, their_step = ours.start - start, theirs.start - their_start
            if not second and stop - start == ours.stop - ours.start and min(step, their_step) > 0:
                paired_spans[-1] = what, TwoSpans(start, stop, step), TwoSpans(their_start, their_stop, their_step)
                continue
        paired_spans.append((what, ours, theirs))
    return paired_spans


class Buffer:
    """Memory of one or more items. `fields` are (batch, heads, tokens, dim) views, statistics without dim.

    `raw` is None for a caller's tensors.
    """

    __slots__ = ("_by_token", "_chunks", "_flat", "_views", "fields", "raw")

    def __init__(self, fields: Mapping[str, Tensor], raw: Tensor | None = None) -> None:
        self.fields, self.raw = fields, raw
        self._views: dict[tuple[str, Span], Tensor] = {}
        self._by_token: dict[tuple[TokenSpan | None, int], Fields] = {}
        self._flat: Tensor | None = None
        self._chunks: dict[tuple[int, int], Tensor] = {}

    def view(self, name: str, span: Span | None) -> Tensor:
        """A span of tokens of a field, or all of them. Made once: making a view takes longer than looking it up."""
        if span is None:
            return self.fields[name]
        view = self._views.get((name, span))
        if view is None:
            view = self._views[name, span] = part(self.fields[name], span)
        return view

    def by_token(self, span: TokenSpan | None, parts: int = 0) -> Fields:
        """The fields of a span with tokens first, (tokens, heads, dim); or of so many equal parts of it one after
        another, (parts, tokens, heads, dim). Of a batch of one."""
        key = span, parts
        views = self._by_token.get(key)
        if views is None:
            views = {name: self.view(name, span)[0].transpose(0, 1) for name in self.fields}
            if parts:
                views = {name: view.view(parts, -1, *view.shape[1:]) for name, view in views.items()}
            self._by_token[key] = views
        return views

    @classmethod
    def empty(cls, fmt: TokenFormat, *, tokens: int, batch: int, device: torch.device) -> Buffer:
        return cls.over(fmt, torch.empty((tokens, batch, fmt.nbytes), dtype=torch.uint8, device=device))

    @classmethod
    def over(cls, fmt: TokenFormat, raw: Tensor) -> Buffer:
        """A buffer over existing bytes (tokens, batch, bytes per token)."""
        tokens, batch, _ = raw.shape
        typed: dict[torch.dtype, Tensor] = {}
        fields = {}
        # One as_strided instead of a slice, a view and a permute: hosts are slow, and there are many buffers.
        for name, dtype, (sizes, strides, at) in _views(fmt, tokens, batch):
            flat = typed.get(dtype)
            if flat is None:
                flat = typed[dtype] = raw.view(dtype)
            fields[name] = flat.as_strided(sizes, strides, flat.storage_offset() + at)
        return cls(fields, raw)

    @property
    def nbytes(self) -> int:
        return 0 if self.raw is None else self.raw.numel()

    def chunk(self, start: int, stop: int) -> Tensor:
        """The bytes of a span of tokens; contiguous."""
        assert self.raw is not None, "the caller's tensors do not travel; they are packed first"
        if self._flat is None:
            self._flat = self.raw.view(-1)
        tokens, batch, nbytes = self.raw.shape
        if stop - start == tokens:
            return self._flat
        chunk = self._chunks.get((start, stop))
        if chunk is None:
            at, length = (tokens * batch * nbytes for tokens in (start, stop - start))
            chunk = self._chunks[start, stop] = self._flat.narrow(0, at, length)
        return chunk


class Meter:
    """Counts the bytes held now, and the most held so far."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def take(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def give(self, nbytes: int) -> None:
        self.now -= nbytes


class Allocation(NamedTuple):
    """Items that share one allocation, the spans of each in it, and its size and format."""

    items: tuple[Item, ...]
    spans: dict[Item, tuple[TokenSpan, ...]]
    tokens: int
    nbytes: int
    fmt: TokenFormat
