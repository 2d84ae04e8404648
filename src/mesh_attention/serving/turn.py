"""`Turn`: new tokens of some sequences, spread over the ranks, against all that is cached plus themselves.

The new tokens of all sequences are packed into one: queries end to end, and for each its keys, cached and new. Each
sequence is a document, causal from the right, so the turn is a problem like any other, on a layout of its own for keys
and values, and is planned, agreed on and run as one. Layers with the same window share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mesh_attention.arguments import CallOptions, Softmax
from mesh_attention.errors import UsageError
from mesh_attention.execution.autograd import run_forward, without_autocast
from mesh_attention.execution.engine import Engine
from mesh_attention.masks import Segment
from mesh_attention.plan.layout import Cached, Listed, join, shifted
from mesh_attention.serving.book import WindowSize, clip
from mesh_attention.serving.memory import slots_of
from mesh_attention.serving.new_tokens import Appended, Growth
from mesh_attention.session.agreement import Statement

if TYPE_CHECKING:
    from mesh_attention.serving.cache import ShardedCache


class Slots(NamedTuple):
    """Where a turn's tokens are on one rank: slots to read for each sequence; slots to write, and which of the rank's
    new tokens go there."""

    reads: list[Tensor | slice]
    writes: Tensor
    kept: Tensor


class TurnCall(NamedTuple):
    """A turn as an attention call: each sequence is a document."""

    keys: Listed
    layout: Cached
    options: CallOptions

    def num_keys(self, rank: int) -> int:
        return sum(map(len, self.keys.shards[rank]))


@dataclass(frozen=True, slots=True)
class WindowView:
    """A turn as layers of one window see it: an attention call, the typical one that it is planned as, and where each
    rank's tokens are."""

    call: TurnCall
    typical: TurnCall
    slots: dict[int, Slots] = field(default_factory=dict)


class Turn(Appended):
    """New tokens of some sequences. Each rank has its own share of them, in the order of `position_ids`.

    Call `attend` once for every layer, in any order. The tokens count as cached from the beginning.
    """

    def __init__(self, cache: ShardedCache, sequences: Mapping[int, Growth]) -> None:
        super().__init__(cache, sequences)
        self._views: dict[WindowSize, WindowView] = {}
        self._is_agreed = False

    @property
    def tokens(self) -> int:
        """New tokens of all sequences, on all ranks."""
        return sum(grown.tokens for grown in self.sequences.values())

    @cached_property
    def shards(self) -> tuple[tuple[Segment, ...], ...]:
        """The new tokens of each rank, packed."""
        return tuple(self._packed_queries(rank) for rank in range(self.cache.ranks))

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
            lambda rank: whole.index_select(dim, _numbers([*chain.from_iterable(self.shards[rank])], whole.device))
        )

    def _for_ranks(self, make: Any) -> Any:
        made = [make(comm.rank) for comm in self.cache.attention.comms]
        return made if self.cache.attention.is_local else made[0]

    # Attention

    def _attend(
        self, layer: int, tensors: tuple[Any, Any, Any], options: CallOptions, return_lse: bool
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        cache = self.cache
        with cache.attention.session.telling():
            ranks = self._by_rank(layer, tensors, return_lse)
            for comm, rank in zip(cache.attention.comms, ranks, strict=True):
                self._check_tensors(layer, rank, (1, self._num_queries(comm.rank)))
            softmax = self._softmax(layer, options)
        heads = [q.shape[2] for q, _, _ in ranks]
        self._agree(layer, heads[0], softmax)
        window = cache.layers[layer].window
        engine = self._engine(layer, heads, options)
        with torch.no_grad(), without_autocast(cache.device):
            inputs = [(q, *self._keys(number, layer, window, k[0], v[0])) for number, (q, k, v) in enumerate(ranks)]
            flat = [tensor for rank in inputs for tensor in rank]
            results, _ = run_forward(engine, flat, context=hash((cache.history, layer)))
        return list(results[0::2]), list(results[1::2])

    def peak_nbytes(self, layer: int, *, heads: int) -> int:
        """The most bytes that `attend` of a layer will hold at once on a rank, besides its inputs and the cache.

        All ranks call it, because they plan together. In a local group, the most of any rank.
        """
        self._check_layer(layer)
        comms = self.cache.attention.comms
        programs = self._engine(layer, [heads] * len(comms), CallOptions()).programs("forward")
        copied = [self._copied_nbytes(comm.rank, layer) for comm in comms]
        return max(program.device_nbytes + nbytes for program, nbytes in zip(programs, copied, strict=True))

    def _engine(self, layer: int, heads: Sequence[int], options: CallOptions) -> Engine:
        """The engine of a layer with these query heads on the local ranks. It is the one of the typical call, on which
        ranks agree once, stretched to this turn's lengths."""
        cache, known = self.cache, self.cache.layers[layer]
        view = self._view(known.window)
        scalar = torch.empty((), dtype=cache.dtype, device=cache.device)  # for tensors in shape only
        tensors = []
        for comm, num_heads in zip(cache.attention.comms, heads, strict=True):
            queries, keys = self._num_queries(comm.rank), view.typical.num_keys(comm.rank)
            sizes = (
                (queries, num_heads, known.head_dim),
                *((keys, known.kv_heads, d) for d in (known.head_dim, known.value_dim)),
            )
            tensors.append([scalar.expand(1, *size) for size in sizes])
        return cache.attention.calls.engine(
            tensors,
            _with_softmax_of(options, view.typical.options),
            layout=view.typical.layout,
            gradient=False,
            may_keep=False,
            stretched_to=(_with_softmax_of(options, view.call.options), view.call.layout),
        )

    def _agree(self, layer: int, heads: int, softmax: Softmax) -> None:
        """Raise on every rank unless all have these sequences, after the same history, and call the same layer in the
        same way; once in a turn, because a call of a known kind is not compared again."""
        session = self.cache.attention.session
        if self._is_agreed or session.is_local or session.size == 1:
            return
        sequences = ", ".join(f"{number} from {g.before.shares.length}" for number, g in self.sequences.items())
        must_match = {"operation": "a turn of a cache", **self.cache.made_with, "sequences": sequences}
        must_match |= {"history": str(self.cache.history), "layer": str(layer), "heads": str(heads)}
        session.agree(Statement(must_match=must_match | {"softmax": str(softmax), "device": self.cache.device.type}))
        self._is_agreed = True

    def _num_queries(self, rank: int) -> int:
        return sum(map(len, self.shards[rank]))

    def _copied_nbytes(self, rank: int, layer: int) -> int:
        """Bytes of keys and values that are not used where they are stored."""
        known = self.cache.layers[layer]
        keys = self._view(known.window).call.num_keys(rank)
        reads = self._slots(rank, known.window).reads
        is_view = known.window is None and len(reads) == 1 and isinstance(reads[0], slice)
        return 0 if is_view else keys * known.elements * self.cache.dtype.itemsize

    def layout(self, window: WindowSize = None) -> Cached:
        """Where the new queries are, and the keys that they see in layers with this window."""
        return self._view(window).call.layout

    def _view(self, window: WindowSize) -> WindowView:
        if window not in self._views:
            counts = [grown.before.counts for grown in self.sequences.values()]
            call = self._call(window, counts)
            typical = call if window is not None else self._call(window, list(map(_rounded, counts)))
            self._views[window] = WindowView(call, typical)
        return self._views[window]

    def _call(self, window: WindowSize, counts: Sequence[Sequence[int]]) -> TurnCall:
        """The attention call of layers with this window, if each rank had so many cached tokens of each sequence."""
        grown = list(self.sequences.values())
        pasts = [
            sum(count) if window is None else g.before.shares.length - g.first_seen(window)
            for g, count in zip(grown, counts, strict=True)
        ]
        q = (0, *accumulate(growth.tokens for growth in grown))
        kv = (0, *accumulate(past + growth.tokens for past, growth in zip(pasts, grown, strict=True)))
        keys: list[list[Segment]] = [[] for _ in range(self.cache.ranks)]
        for growth, count, past, start in zip(grown, counts, pasts, kv, strict=False):
            for rank, own in enumerate(keys):
                if window is None:
                    own += (_past(count, rank, start), *shifted(growth.new_segments(rank), start + past))
                else:
                    shares, first = growth.after.shares, growth.first_seen(window)
                    own += shifted(clip(shares.segments(rank), first, shares.length), start - first)
        listed = Listed(tuple(map(join, keys)))
        is_packed = len(grown) > 1
        options = CallOptions(
            causal=True,
            window_size=(-1 if window is None else window, -1),
            cu_seqlens_q=q if is_packed else None,
            cu_seqlens_k=kv if is_packed else None,
            seq_len=q[-1],
            seq_len_k=kv[-1],
        )
        return TurnCall(listed, Cached(Listed(self.shards), listed), options)

    # Keys and values

    def _keys(self, number: int, layer: int, window: WindowSize, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values that this rank has for the turn, (1, tokens, heads, dim)."""
        memory, rank = self.cache.memories[number], self.cache.attention.comms[number].rank
        reads, writes, kept = self._slots(rank, window)
        if window is None:
            memory.write(layer, writes, k, v)
            return _joined([memory.read(layer, read) for read in reads])
        cuts = [sum(map(len, grown.new_segments(rank))) for grown in self.sequences.values()]
        new = zip(torch.split(k, cuts), torch.split(v, cuts), strict=True)
        parts = ((memory.read(layer, read), own) for read, own in zip(reads, new, strict=True))
        joined = _joined([part for pair in parts for part in pair])
        memory.write(layer, writes, k.index_select(0, kept), v.index_select(0, kept))
        return joined

    def _slots(self, rank: int, window: WindowSize) -> Slots:
        slots = self._view(window).slots
        if rank not in slots:
            slots[rank] = self._find_slots(rank, window)
        return slots[rank]

    def _find_slots(self, rank: int, window: WindowSize) -> Slots:
        """Without a window, new tokens are written before they are read. With one, only old tokens are read: new ones
        that no later query sees are not written.
        """
        size, device = self.cache.block_tokens, self.cache.device
        reads: list[Tensor | slice] = []
        writes: list[int] = []
        kept: list[int] = []
        at = 0
        for grown in self.sequences.values():
            before, after = grown.before, grown.after
            table = (after if window is None else before).tables[window]
            base, stop = table.dropped * size, (after if window is None else before).counts[rank]
            first = 0 if window is None else before.shares.before(rank, grown.first_seen(window))
            read = slots_of(table.blocks, max(first, base) - base, stop - base, size)
            reads.append(_numbers(read, device) if isinstance(read, list) else read)
            table = after.tables[window]
            base, new = table.dropped * size, after.counts[rank] - before.counts[rank]
            stored = max(before.counts[rank], base)
            writes += _as_list(slots_of(table.blocks, stored - base, after.counts[rank] - base, size))
            kept += range(at + stored - before.counts[rank], at + new)
            at += new
        return Slots(reads, _numbers(writes, device), _numbers(kept, device))


def _with_softmax_of(options: CallOptions, call: CallOptions) -> CallOptions:
    return call._replace(softmax_scale=options.softmax_scale, softcap=options.softcap)


def _past(counts: Sequence[int], rank: int, start: int) -> Segment:
    """A rank's cached tokens of a sequence as one segment: those of rank 0 first, then those of rank 1, ….

    Every new query sees all of them, so their order does not matter, and a plan need not know in how many pieces they
    came.
    """
    first = start + sum(counts[:rank])
    return range(first, first + counts[rank])


def _rounded(counts: Sequence[int]) -> list[int]:
    """Typical numbers of cached tokens: a power of two on every rank that has any, so that turns with the same new
    tokens are the same call until their pasts have doubled."""
    typical = 1 << max(counts).bit_length() >> 1
    return [typical if count else 0 for count in counts]


def _joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Keys and values end to end, (1, tokens, heads, dim); a view if there is only one part."""
    k, v = parts[0] if len(parts) == 1 else (torch.cat([part[side] for part in parts]) for side in (0, 1))
    return k[None], v[None]


def _numbers(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.long, device=device)


def _as_list(slots: slice | list[int]) -> list[int]:
    return [*range(slots.start, slots.stop)] if isinstance(slots, slice) else slots
