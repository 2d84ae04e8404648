"""A turn: new tokens of some sequences, spread over the ranks, against all that is cached plus themselves.

The new tokens of all sequences are packed into one: queries end to end, and for each its keys, cached and new. Each
sequence is a document, causal from the right, so the turn is a problem like any other, on a layout of its own for keys
and values, and is planned, agreed on and run as one. Layers with the same window share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mesh_attention.arguments import CallOptions, TensorKind
from mesh_attention.errors import UsageError
from mesh_attention.execution.autograd import run_forward
from mesh_attention.execution.engine import Engine
from mesh_attention.masks import Segment
from mesh_attention.plan.layout import Cached, Listed, join, shifted
from mesh_attention.serving.book import Entry, Window, clip
from mesh_attention.serving.checks import by_rank, check_layer, check_tensors, check_turn, softmax_of
from mesh_attention.serving.memory import slots_of
from mesh_attention.session.agreement import Question

if TYPE_CHECKING:
    from mesh_attention.serving.cache import ShardedCache


@dataclass(frozen=True, slots=True)
class Grown:
    """A sequence before and after a turn."""

    before: Entry
    after: Entry

    @property
    def tokens(self) -> int:
        return self.after.shares.length - self.before.shares.length

    def new_segments(self, rank: int) -> tuple[Segment, ...]:
        """A rank's new positions, counted from the first new one."""
        start = self.before.shares.length
        return shifted(clip(self.after.shares.segments(rank), start, self.after.shares.length), -start)

    def first_seen(self, window: Window) -> int:
        """The first position that a new query sees."""
        return 0 if window is None else max(0, self.before.shares.length - window)


Places = tuple[list[Tensor | slice], Tensor, Tensor]
"""Slots to read for each sequence; slots to write, and which of a rank's new tokens go there."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A turn as layers of one window see it: an attention call on a layout, and where each rank's tokens are."""

    keys: Listed
    options: CallOptions
    places: dict[int, Places] = field(default_factory=dict)
    engines: dict[object, Engine] = field(default_factory=dict)
    """By scores and heads. Kept here, because no other turn has this layout."""


class Turn:
    """New tokens of some sequences. Each rank has its own share of them, in the order of `position_ids`.

    Call `attend` once for every layer, in any order. The tokens count as cached from the beginning.
    """

    def __init__(self, cache: ShardedCache, sequences: Mapping[int, Grown]) -> None:
        self.cache, self.sequences = cache, sequences
        self.attended: set[int] = set()
        self._known: dict[Window, Seen] = {}
        self._is_agreed = False

    @property
    def tokens(self) -> int:
        """New tokens of all sequences, on all ranks."""
        return sum(grown.tokens for grown in self.sequences.values())

    @cached_property
    def queries(self) -> Listed:
        """The layout of the new tokens, packed."""
        return Listed(tuple(self._packed_queries(rank) for rank in range(self.cache.ranks)))

    def _packed_queries(self, rank: int) -> tuple[Segment, ...]:
        starts = accumulate((grown.tokens for grown in self.sequences.values()), initial=0)
        parts = (shifted(g.new_segments(rank), at) for g, at in zip(self.sequences.values(), starts, strict=False))
        return join(chain.from_iterable(parts))

    @property
    def position_ids(self) -> Any:
        """The position of each of this rank's new tokens in its sequence, (1, tokens); in a local group a list."""
        return self._for_ranks(lambda rank: _numbers(self._positions(rank), self.cache.device)[None])

    def _positions(self, rank: int) -> list[int]:
        return [
            position
            for grown in self.sequences.values()
            for position in chain.from_iterable(shifted(grown.new_segments(rank), grown.before.shares.length))
        ]

    def shard(self, whole: Tensor, *, dim: int = 1) -> Any:
        """This rank's tokens of a tensor of all new tokens, those of the first sequence first (in a local group: a
        list)."""
        if not isinstance(whole, Tensor) or whole.dim() <= dim or whole.shape[dim] != self.tokens:
            shape = tuple(whole.shape) if isinstance(whole, Tensor) else type(whole).__name__
            raise UsageError(f"shard got {shape}: expected {self.tokens} new tokens in dim {dim}, of all sequences")
        return self._for_ranks(
            lambda rank: whole.index_select(
                dim, _numbers([*chain.from_iterable(self._packed_queries(rank))], whole.device)
            )
        )

    def _for_ranks(self, make: Any) -> Any:
        made = [make(comm.rank) for comm in self.cache.attention.comms]
        return made if self.cache.attention.is_local else made[0]

    # Attention

    def attend(
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        *,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        return_lse: bool = False,
    ) -> Any:
        """Store this rank's new keys and values of a layer, and attend its new queries to all that they see.

        Tensors are (1, tokens, heads, dim); in a local group, lists of them. With `return_lse`, also the LSE (1, heads,
        tokens).
        """
        cache = self.cache
        with cache.attention.session.telling():
            check_turn(cache, self, layer)
            ranks = by_rank(cache, q, k, v)
            for (_, tokens, _), rank in zip(self._sizes(layer), ranks, strict=True):
                check_tensors(cache, layer, rank, (1, tokens))
            options = CallOptions(softmax_scale=softmax_scale, softcap=softcap)
            softmax_of(cache.layers[layer], options)
        self._agree()
        window = cache.layers[layer].window
        tensors = [
            (rank_q, *self._keys(number, layer, window, rank_k[0], rank_v[0]))
            for number, (rank_q, rank_k, rank_v) in enumerate(ranks)
        ]
        engine = self._engine(tensors, window, options)
        with torch.no_grad():
            flat = [tensor for rank in tensors for tensor in rank]
            results, _ = run_forward(engine, flat, context=hash((cache.history, layer)))
        self.attended.add(layer)
        outs, lses = list(results[0::2]), list(results[1::2])
        if not cache.attention.is_local:
            return (outs[0], lses[0]) if return_lse else outs[0]
        return (outs, lses) if return_lse else outs

    def peak_nbytes(self, layer: int, *, heads: int) -> int:
        """The most bytes that `attend` of a layer will hold at once on a rank, besides its inputs and the cache.

        All ranks call it, because they plan together. In a local group, the most of any rank.
        """
        check_layer(self.cache, layer)
        known, window = self.cache.layers[layer], self.cache.layers[layer].window
        sizes = self._sizes(layer)
        one = torch.empty((), dtype=self.cache.dtype, device=self.cache.device)  # tensors in shape only
        tensors = [
            (
                one.expand(1, queries, heads, known.head_dim),
                one.expand(1, keys, known.kv_heads, known.head_dim),
                one.expand(1, keys, known.kv_heads, known.value_dim),
            )
            for _, queries, keys in sizes
        ]
        programs = self._engine(tensors, window, CallOptions()).programs("forward")
        copied = [self._copied_nbytes(rank, layer, keys) for rank, _, keys in sizes]
        return max(program.device_nbytes + nbytes for program, nbytes in zip(programs, copied, strict=True))

    def _engine(self, tensors: Sequence[Sequence[Tensor]], window: Window, options: CallOptions) -> Engine:
        seen = self._seen(window)
        key = options, *(TensorKind.of(tensor) for rank in tensors for tensor in rank)
        if key not in seen.engines:
            options = seen.options._replace(softmax_scale=options.softmax_scale, softcap=options.softcap)
            calls, layout = self.cache.attention.calls, self.layout(window)
            seen.engines[key] = calls.engine(tensors, options, layout=layout, gradient=False, may_keep=False)
        return seen.engines[key]

    def _agree(self) -> None:
        """Raise on every rank unless all have these sequences, after the same history; once in a turn."""
        session = self.cache.attention.session
        if self._is_agreed or session.is_local or session.size == 1:
            return
        sequences = ", ".join(f"{number} from {g.before.shares.length}" for number, g in self.sequences.items())
        asked = {
            "operation": "a turn of a cache",
            "sequences": sequences,
            "history": str(self.cache.history),
        }
        session.agree(Question(asked=asked))
        self._is_agreed = True

    def _sizes(self, layer: int) -> list[tuple[int, int, int]]:
        """For each local rank: its number, its new tokens, and the keys that it has for the turn."""
        keys = self._seen(self.cache.layers[layer].window).keys
        ranks = [comm.rank for comm in self.cache.attention.comms]
        return [(r, sum(map(len, self.queries.shards[r])), sum(map(len, keys.shards[r]))) for r in ranks]

    def _copied_nbytes(self, rank: int, layer: int, keys: int) -> int:
        """Bytes of keys and values that are not used where they are stored."""
        known = self.cache.layers[layer]
        reads, _, _ = self._places(rank, known.window)
        is_view = known.window is None and len(reads) == 1 and isinstance(reads[0], slice)
        return 0 if is_view else keys * known.elements * self.cache.dtype.itemsize

    def layout(self, window: Window = None) -> Cached:
        """Where the new queries are, and the keys that they see in layers with this window."""
        return Cached(self.queries, self._seen(window).keys)

    def _seen(self, window: Window) -> Seen:
        if window not in self._known:
            kv = Listed(tuple(self._packed_keys(rank, window) for rank in range(self.cache.ranks)))
            self._known[window] = Seen(kv, self._options(window))
        return self._known[window]

    def _packed_keys(self, rank: int, window: Window) -> tuple[Segment, ...]:
        found: list[Segment] = []
        start = 0
        for grown in self.sequences.values():
            shares, first = grown.after.shares, grown.first_seen(window)
            found += shifted(clip(shares.segments(rank), first, shares.length), start - first)
            start += shares.length - first
        return join(found)

    def _options(self, window: Window) -> CallOptions:
        """The turn as an attention call: each sequence is a document."""
        grown = list(self.sequences.values())
        q = [0, *accumulate(one.tokens for one in grown)]
        kv = [0, *accumulate(one.after.shares.length - one.first_seen(window) for one in grown)]
        is_packed = len(grown) > 1
        return CallOptions(
            causal=True,
            window_size=(-1 if window is None else window, -1),
            cu_seqlens_q=tuple(q) if is_packed else None,
            cu_seqlens_k=tuple(kv) if is_packed else None,
            seq_len=q[-1],
            seq_len_k=kv[-1],
        )

    # Keys and values

    def _keys(self, number: int, layer: int, window: Window, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values that this rank has for the turn, (1, tokens, heads, dim)."""
        memory, rank = self.cache.memories[number], self.cache.attention.comms[number].rank
        reads, slots, kept = self._places(rank, window)
        if window is None:
            memory.write(layer, slots, k, v)
            return _joined([memory.read(layer, read) for read in reads])
        cuts = [sum(map(len, grown.new_segments(rank))) for grown in self.sequences.values()]
        new = zip(torch.split(k, cuts), torch.split(v, cuts), strict=True)
        parts = ((memory.read(layer, read), own) for read, own in zip(reads, new, strict=True))
        found = _joined([part for pair in parts for part in pair])
        memory.write(layer, slots, k.index_select(0, kept), v.index_select(0, kept))
        return found

    def _places(self, rank: int, window: Window) -> Places:
        places = self._seen(window).places
        if rank not in places:
            places[rank] = self._find_places(rank, window)
        return places[rank]

    def _find_places(self, rank: int, window: Window) -> Places:
        """Without a window, new tokens are written before they are read. With one, only old tokens are read: new ones
        that no later query sees are not written.
        """
        size, device = self.cache.block_tokens, self.cache.device
        reads: list[Tensor | slice] = []
        slots: list[int] = []
        kept: list[int] = []
        at = 0
        for grown in self.sequences.values():
            before, after = grown.before, grown.after
            table = (after if window is None else before).tables[window]
            base, stop = table.dropped * size, (after if window is None else before).counts[rank]
            first = before.shares.before(rank, grown.first_seen(window))
            read = slots_of(table.blocks, max(first, base) - base, stop - base, size)
            reads.append(_numbers(read, device) if isinstance(read, list) else read)
            table = after.tables[window]
            base, new = table.dropped * size, after.counts[rank] - before.counts[rank]
            stored = max(before.counts[rank], base)
            slots += _as_list(slots_of(table.blocks, stored - base, after.counts[rank] - base, size))
            kept += range(at + stored - before.counts[rank], at + new)
            at += new
        return reads, _numbers(slots, device), _numbers(kept, device)


def _joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Keys and values end to end, (1, tokens, heads, dim); a view if there is only one part."""
    k, v = parts[0] if len(parts) == 1 else (torch.cat([part[side] for part in parts]) for side in (0, 1))
    return k[None], v[None]


def _numbers(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.long, device=device)


def _as_list(slots: slice | list[int]) -> list[int]:
    return [*range(slots.start, slots.stop)] if isinstance(slots, slice) else slots


def new_tokens(given: Mapping[int, int]) -> Sequence[tuple[int, int]]:
    """The sequences of a turn, checked."""
    if not isinstance(given, Mapping) or not given:
        raise UsageError(f"a turn got {given!r}: expected a number of new tokens for each of its sequences")
    for sequence, tokens in given.items():
        if type(tokens) is not int or tokens < 1:
            raise UsageError(f"sequence {sequence} got {tokens!r} new tokens: expected a whole number of at least 1")
    return list(given.items())
