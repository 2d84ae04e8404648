"""`ShardedCache`: the keys and values of sequences, spread over the ranks of a `MeshAttention`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar, get_args

import torch

from mesh_attention.api import MeshAttention
from mesh_attention.errors import ProblemError, UsageError
from mesh_attention.plan.buffer_sizes import BLOCK_TOKENS, blocks_of_rank
from mesh_attention.planners.over_cache import COMBININGS, MOST_DECODED, QUERIES, Combining, Queries
from mesh_attention.problem import check_whole
from mesh_attention.serving.book import BlockPool, Book, WindowSize
from mesh_attention.serving.decoded_step import DTYPE_NAMES, Step
from mesh_attention.serving.memory import CachedLayer, CacheMemory, cache_nbytes
from mesh_attention.serving.new_tokens import Growth, checked_new_tokens
from mesh_attention.serving.step_runner import StepRunner
from mesh_attention.serving.turn import Turn
from mesh_attention.session.agreement import Statement
from mesh_attention.units import brief, count, format_nbytes

AnyTurn = TypeVar("AnyTurn", Turn, Step)
Deed = Literal["created", "removed", "truncated", "forked", "extended", "reserved", "attended"]


class ShardedCache:
    """Each rank holds its own tokens' keys and values of every layer, and nothing else.

    There is room for `tokens` tokens of up to `sequences` sequences, in blocks of `block_tokens`; `nbytes` says how
    many bytes of each rank that takes, and `ShardedCache.required_nbytes` computes it beforehand. All ranks make the
    same calls.

        cache = ShardedCache(attention, [CachedLayer(kv_heads=8, head_dim=128)] * 32, tokens=1 << 20)
        chat = cache.new()
        turn = cache.prefill({chat: 4000})                       # each rank runs its share of the new tokens
        hidden = embed(turn.shard(ids), turn.position_ids)
        out = turn.attend(0, q, k, v)                            # for every layer
        step = cache.decode({chat: 1})                           # every rank runs the same token
        out = step.attend(0, q, k, v)

    With windows, a sequence can be truncated by at most `max_rollback` tokens.
    """

    def __init__(
        self,
        attention: MeshAttention,
        layers: Sequence[CachedLayer],
        *,
        tokens: int,
        sequences: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        block_tokens: int = BLOCK_TOKENS,
        max_rollback: int = 0,
    ) -> None:
        if not isinstance(attention, MeshAttention):
            raise UsageError(f"attention is a {type(attention).__name__}; expected a MeshAttention")
        self.attention, self.dtype = attention, dtype
        self.block_tokens, self.tokens = block_tokens, tokens
        self.most_sequences, self.max_rollback = sequences, max_rollback
        with attention.session.telling():
            blocks = _blocks(layers, attention.ranks, tokens, sequences, block_tokens, max_rollback)
            _check_dtype(dtype)
            self.layers, self.device = tuple(layers), _device(device)
            self.memories = [
                CacheMemory(self.layers, blocks, block_tokens, dtype, self.device) for _ in attention.comms
            ]
        sizes = {"tokens": tokens, "sequences": sequences, "block_tokens": block_tokens, "max_rollback": max_rollback}
        made_with = {"dtype": dtype, **sizes, "layers": self.layers}
        self.made_with = {f"the cache's {name}": str(value) for name, value in made_with.items()}
        number = attention.session.count_cache()
        self.history = hash((number, Statement(must_match=self.made_with).call_id))
        """A hash of the cache and of all that was done to it, equal on all ranks; it is part of the ids of calls."""
        pools = {window: BlockPool(number) for window, number in blocks.items()}
        self.book = Book(attention.ranks, attention.layout, block_tokens, pools, max_rollback)
        # Of the last turn or step, but not the turn itself, which refers to its cache.
        self.last = set(range(len(self.layers)))
        """The layers that attended in it: the turn's own set, or a copy if the turn is over."""
        self._lengths = dict[int, int]()
        """How long its sequences were before."""
        graphs = attention.calls.cuda_graphs
        self.steps = StepRunner(attention.session, graphs, self.layers, self.memories, self.device, self.made_with)

    # CacheMemory

    @staticmethod
    def required_nbytes(
        layers: Sequence[CachedLayer],
        *,
        ranks: int,
        tokens: int,
        sequences: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        block_tokens: int = BLOCK_TOKENS,
        max_rollback: int = 0,
    ) -> int:
        """Bytes that a cache would take on each rank."""
        _check_dtype(dtype)
        blocks = _blocks(layers, ranks, tokens, sequences, block_tokens, max_rollback)
        return cache_nbytes(layers, blocks, block_tokens, dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes on this rank (in a local group: on one rank)."""
        return self.memories[0].nbytes

    def reserve(self, tokens: int, sequences: int | None = None) -> None:
        """Make room for `tokens` tokens in total, if there is less. Moves the cache, one layer at a time."""
        sequences = self.most_sequences if sequences is None else sequences
        sizes = {"block_tokens": self.block_tokens, "max_rollback": self.max_rollback}
        with self.attention.session.telling():
            _blocks(self.layers, self.ranks, tokens, sequences, **sizes)  # refuses what is not a number
            tokens, sequences = max(tokens, self.tokens), max(sequences, self.most_sequences)
            blocks = _blocks(self.layers, self.ranks, tokens, sequences, **sizes)
            blocks = {window: max(number, self.book.pools[window].size) for window, number in blocks.items()}
            if any(number > self.book.pools[window].size for window, number in blocks.items()):
                self.steps.drop()  # their tables and graphs refer to the old memory
                for memory in self.memories:
                    memory.grow(blocks)
        for window, number in blocks.items():
            self.book.pools[window].grow(number)
        self.tokens, self.most_sequences = tokens, sequences
        self.note("reserved", tokens, sequences)

    def __repr__(self) -> str:
        held = sum(self.length(number) for number in self.book.entries)
        sequences = count(len(self.book.entries), "sequence")
        return (
            f"<ShardedCache of {held:,} tokens in {sequences}, room for {self.tokens:,}; "
            f"{len(self.layers)} layers on {self.ranks} ranks, {format_nbytes(self.nbytes)} each>"
        )

    # Sequences

    @property
    def ranks(self) -> int:
        return self.attention.ranks

    @property
    def sequences(self) -> tuple[int, ...]:
        return tuple(self.book.entries)

    def new(self) -> int:
        """A new, empty sequence, as the number by which other calls know it."""
        self._refuse_one_more()
        self.note("created")
        return self.book.new()

    def length(self, sequence: int) -> int:
        """Tokens of a sequence, over all ranks."""
        return self.book.entry(sequence).shares.length

    def remove(self, sequence: int) -> None:
        """Forget a sequence."""
        self.book.remove(sequence)
        self.note("removed", sequence)
        self._end_turn_of(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        """Forget all but the first `length` tokens of a sequence, as when draft tokens are rejected.

        After many tokens are dropped, ranks may hold unequal numbers of tokens, and later ones then have less room.
        """
        check_whole(UsageError, least=0, length=length)
        self.book.truncate(sequence, length)
        self.note("truncated", sequence, length)
        self._end_turn_of(sequence)

    def fork(self, sequence: int) -> int:
        """A copy of a sequence. It shares the memory of all tokens up to now."""
        self.book.entry(sequence)
        self._refuse_one_more()
        self._refuse_unfinished()
        self.note("forked", sequence)
        return self.book.fork(sequence)

    def _refuse_one_more(self) -> None:
        if len(self.book.entries) >= self.most_sequences:
            raise UsageError(
                f"the cache has {len(self.book.entries)} sequences, the most it was made for; remove one, or make room "
                "with cache.reserve(tokens, sequences)"
            )

    # Attention

    def prefill(self, new: Mapping[int, int]) -> Turn:
        """Append `new[s]` tokens to each sequence s, spread over the ranks by the attention's layout.

        For a prompt, a chunk of one, or the next turn of a conversation.
        """
        return self._begun(Turn(self, self._extended(new, is_decoded=False)))

    def tokens_per_rank(self, new: Mapping[int, int]) -> list[int]:
        """How many new tokens each rank would get from `prefill`; some ranks may get none of a few tokens."""
        totals = [0] * self.ranks
        for number, tokens in checked_new_tokens(new):
            before = self.book.entry(number)
            after = before.shares.appended(tokens, self.attention.layout, before.counts).counts()
            totals = [t + a - b for t, a, b in zip(totals, after, before.counts, strict=True)]
        return totals

    def decode(
        self, new: Mapping[int, int], *, queries: Queries = "replicated", combine: Combining | None = None
    ) -> Step:
        """Append one or a few new tokens to each of some sequences; each token goes to the next rank.

        If queries are ``replicated``, every rank runs the same tokens; if they are ``sharded``, each rank runs some of
        the sequences. `combine` is how ranks combine their partial results: ``reduce_scatter``, or for replicated
        queries also ``all_gather``; by default what suits their size (see `planners.over_cache`).

        If sequences get different numbers of tokens, the step's tensors are (1, tokens, heads, dim): the tokens of all
        sequences one after the other.
        """
        if queries not in QUERIES:
            raise UsageError(f"queries={queries!r}: expected {' or '.join(QUERIES)}")
        possible = COMBININGS if queries == "replicated" else ("reduce_scatter",)
        if combine is not None and combine not in possible:
            raise UsageError(f"combine={combine!r}: expected reduce_scatter, or for replicated queries also all_gather")
        most = max(tokens for _, tokens in checked_new_tokens(new))
        if most > MOST_DECODED:
            raise UsageError(
                f"a step got {most} new tokens of one sequence; expected at most {MOST_DECODED}; use cache.prefill for "
                "more"
            )
        return self._begun(Step(self, self._extended(new, is_decoded=True), queries, combine))

    def note(self, what: Deed, *numbers: int) -> None:
        """Add to the history what was done, and to which sequences, tokens or layer."""
        # As a number: hashes of texts differ from process to process.
        self.history = hash((self.history, get_args(Deed).index(what), *numbers))

    def _begun(self, turn: AnyTurn) -> AnyTurn:
        self.last = turn.attended
        self._lengths = {number: grown.before.shares.length for number, grown in turn.sequences.items()}
        return turn

    def _end_turn_of(self, sequence: int) -> None:
        """A turn or step of this sequence can no longer attend: its tokens may be gone."""
        if sequence in self._lengths:
            self.last = self.last.copy()

    def _refuse_unfinished(self) -> None:
        """Refuse to go on while a sequence has tokens that some layer has no keys and values of."""
        missing = set(range(len(self.layers))) - self.last
        for number, length in self._lengths.items():
            entry = self.book.entries.get(number)
            if missing and entry is not None and entry.shares.length > length:
                raise UsageError(
                    f"layer {min(missing)} did not attend in the last turn, so it has no keys and values for the new "
                    f"tokens of sequence {number}; call attend for every layer, or give these tokens up with "
                    f"cache.truncate({number}, {length}) or cache.remove({number})"
                )

    def _extended(self, new: Mapping[int, int], *, is_decoded: bool) -> dict[int, Growth]:
        checked = dict(checked_new_tokens(new))
        self._refuse_unfinished()
        before = {number: self.book.entry(number) for number in checked}
        self.book.extend(checked, is_decoded=is_decoded)
        for memory in self.memories:
            memory.copy(self.book.copied)
        self.book.copied.clear()
        self.note("extended", int(is_decoded), *(number for pair in checked.items() for number in pair))
        return {number: Growth(before[number], self.book.entries[number]) for number in checked}


def _blocks(
    layers: Sequence[CachedLayer], ranks: int, tokens: int, sequences: int, block_tokens: int, max_rollback: int
) -> dict[WindowSize, int]:
    """Blocks of a rank for each window.

    The tokens of a window may all be on one rank, and while a turn runs, those before and after it are kept.
    """
    check_whole(ProblemError, ranks=ranks, tokens=tokens, sequences=sequences, block_tokens=block_tokens)
    check_whole(ProblemError, least=0, max_rollback=max_rollback)
    if not layers or not all(isinstance(layer, CachedLayer) for layer in layers):
        raise ProblemError(f"layers={brief(layers)}: expected a CachedLayer for each layer of the model")
    full = blocks_of_rank(tokens, sequences=sequences, ranks=ranks, block_tokens=block_tokens)
    blocks: dict[WindowSize, int] = {}
    for window in dict.fromkeys(layer.window for layer in layers):
        blocks[window] = full
        if window is not None:
            seen = -(-(window + max_rollback + MOST_DECODED) // block_tokens) + 2
            blocks[window] = min(2 * full, 2 * sequences * seen)
    return blocks


def _check_dtype(dtype: object) -> None:
    if dtype not in DTYPE_NAMES:
        raise ProblemError(f"dtype={dtype}: expected one of {', '.join(map(str, DTYPE_NAMES))}")


def _device(wanted: torch.device | str | None) -> torch.device:
    """The device of a cache, with its number: tensors have one."""
    device = torch.device(wanted if wanted is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
