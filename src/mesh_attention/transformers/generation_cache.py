"""`GenerationCache`: a `ShardedCache` as transformers' models and `generate` see a cache.

Rows of the batch are sequences of the sharded cache. A row is as long as its real tokens: padding is not stored.
transformers counts *columns* instead, padding included. The keys and values that layers give to `update` go on to
attention, which stores them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache

from mesh_attention.api import MeshAttention
from mesh_attention.errors import MaskError, UsageError
from mesh_attention.problem import check_whole
from mesh_attention.serving import CachedLayer, ShardedCache, Step, Turn
from mesh_attention.units import count

NO_CALL = (
    "a GenerationCache was given to a model whose attention is not mesh attention; call parallelize(model, attention), "
    "or give it another cache"
)


@dataclass(frozen=True)
class Observed:
    """The layers that a model puts into a cache, by their index, and the dtype and device of their keys."""

    layers: Mapping[int, CachedLayer]
    dtype: torch.dtype
    device: torch.device


class GenerationCache(Cache):
    """The keys and values of a batch, spread over the ranks of a `MeshAttention`.

    `generate` makes one where none is given, and returns it; a later turn continues it
    (``past_key_values=out.past_key_values``). All ranks use it in the same calls. Reserves room for `tokens` tokens in
    `rows` rows; grows when needed. With sliding windows, it can be cropped by up to `max_rollback` tokens.
    """

    def __init__(self, attention: MeshAttention, *, tokens: int = 0, rows: int = 0, max_rollback: int = 0) -> None:
        super().__init__(layers=[])  # so that there is one mask for each kind of layer, whatever its window
        if not isinstance(attention, MeshAttention) or attention.is_local:
            raise UsageError(
                f"GenerationCache got a {type(attention).__name__}; expected a MeshAttention over a torch.distributed "
                "group"
            )
        check_whole(UsageError, least=0, tokens=tokens, rows=rows, max_rollback=max_rollback)
        self.attention = attention
        self.columns = 0
        """Tokens of each row as transformers counts them: with padding."""
        self.sequences: list[int] = []
        self.is_to_meet = True
        """True if ranks must compare the next call."""
        self.failure: str | None = None
        self.store: ShardedCache | None = None
        self._room, self._max_rollback = (tokens, rows), max_rollback
        self._observed: Observed | None = None
        self._updated: int | None = None
        self._is_called = False

    def __repr__(self) -> str:
        columns, rows = count(self.columns, "column"), count(len(self.sequences), "row")
        return f"<GenerationCache of {columns} in {rows}: {self.store!r}>"

    # Calls of a model

    @property
    def lengths(self) -> list[int]:
        """Real tokens of each row."""
        return [self._stored().length(number) for number in self.sequences]

    def prepare(self, observed: Observed, *, rows: int, tokens: int) -> None:
        """Make room for new tokens of a model with these layers: `tokens` in all rows together. Begin the rows of a
        batch, unless they have begun."""
        if self._observed is None:
            self._observed = observed
        elif self._observed != observed:
            raise UsageError(
                "the cache is of another model, dtype or device: it was filled with layers "
                f"{_describe(self._observed)}, but this model has {_describe(observed)}; use a new cache"
            )
        held = sum(self.lengths) if self.store is not None else 0
        most, expected_rows = self._room
        most, most_rows = max(most, held + tokens), max(rows, expected_rows, len(self.sequences))
        if self.store is None:
            self.store = ShardedCache(
                self.attention,
                [layer for _, layer in sorted(observed.layers.items())],
                tokens=most,
                sequences=most_rows,
                dtype=observed.dtype,
                device=observed.device,
                max_rollback=self._max_rollback,
            )
        elif most > self.store.tokens or most_rows > self.store.most_sequences:
            grown = most if most == self._room[0] else max(most, self.store.tokens * 3 // 2)
            self.store.reserve(grown, most_rows)
        self.sequences = self.sequences or [self.store.new() for _ in range(rows)]

    def expect(self, *, tokens: int, rows: int, max_rollback: int = 0) -> None:
        """Note what the next calls need, in all, so that there is room at once."""
        if (
            self.store is not None
            and max_rollback > self.store.max_rollback
            and any(x.window is not None for x in self.store.layers)
        ):
            raise UsageError(
                f"the cache can be cropped by {self.store.max_rollback} tokens, but guessing needs {max_rollback}, "
                "and its windows have dropped the others; begin the first turn with "
                f"GenerationCache(attention, max_rollback={max_rollback})"
            )
        self._room = max(tokens, self._room[0]), max(rows, self._room[1])
        self._max_rollback = max(max_rollback, self._max_rollback)
        self.is_to_meet = True

    @contextmanager
    def called(self) -> Iterator[None]:
        """Inside, a model with mesh attention runs, and may update the cache."""
        self._is_called = True
        try:
            yield
        finally:
            self._is_called = False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Note which layer attends next. Its new keys and values are returned as they are."""
        if not self._is_called:
            raise UsageError(NO_CALL)
        self._updated = layer_idx
        return key_states, value_states

    def updated_layer(self) -> int:
        """The index of the layer that attends now."""
        index, self._updated = self._updated, None
        if index is None:
            raise UsageError(
                "a layer attends to keys and values that it did not put into the cache (of another layer, perhaps); "
                "generate in one process: unparallelize(model)"
            )
        return index

    def number_of_layer(self, window: int | None) -> int:
        """The number in the sharded cache of the layer that attends now, with this window."""
        index, observed = self.updated_layer(), self._observed
        assert observed is not None
        if observed.layers[index].window != window:
            raise MaskError(
                f"layer {index} has a window of {window} tokens before its own, but the cache keeps "
                f"{observed.layers[index].window}; use a new cache, and windows that do not change"
            )
        return sorted(observed.layers).index(index)

    def check_all_attended(self, part: Turn | Step, name: str) -> None:
        layers = len(self._stored().layers)
        if len(part.attended) < layers:
            raise UsageError(
                f"{len(part.attended)} of {layers} layers of {name} called mesh attention, so the cache lacks tokens; "
                "generate in one process: unparallelize(model)"
            )

    def _stored(self) -> ShardedCache:
        if self.store is None:
            raise UsageError("the cache is empty: no model has filled it")
        return self.store

    # transformers' interface

    def __len__(self) -> int:
        return len(self._observed.layers) if self._observed is not None else 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    @property
    def batch_size(self) -> int:
        return len(self.sequences) or -1

    @property
    def is_initialized(self) -> bool:
        return self.store is not None

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of every row: ``crop(-3)`` forgets three. As in older versions of transformers,
        ``crop(30)`` keeps the first thirty columns."""
        last = -int(tokens_to_remove) if tokens_to_remove <= 0 else max(0, self.columns - int(tokens_to_remove))
        if not last or self.store is None:
            return
        if last > min(self.lengths):
            raise UsageError(f"crop({tokens_to_remove}): the shortest row has {min(self.lengths)} tokens")
        for number in self.sequences:
            self.store.truncate(number, self.store.length(number) - last)
        self.columns -= last

    def reset(self) -> None:
        """Forget all rows. The memory is kept."""
        for number in self.sequences:
            self._stored().remove(number)
        self.sequences, self.columns, self.failure = [], 0, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._take(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._take(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._take([row for row in range(len(self.sequences)) for _ in range(repeats)])

    def _take(self, rows: Sequence[int]) -> None:
        """Make these the rows. One that is taken several times shares its memory with its copies."""
        if not self.sequences:
            return
        store, old = self._stored(), self.sequences
        for row in {*range(len(old))} - {*rows}:
            store.remove(old[row])
        store.reserve(store.tokens, len(rows))
        taken: set[int] = set()
        new = []
        for row in rows:
            new.append(store.fork(old[row]) if row in taken else old[row])
            taken.add(row)
        self.sequences = new

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise UsageError(
            "a GenerationCache cannot be copied: the ranks share it; to go on from the same tokens again, crop it, or "
            "give the batch several rows"
        )

    def __reduce__(self) -> NoReturn:
        raise UsageError("a GenerationCache cannot be pickled: each rank holds a part of it")

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(
            "a GenerationCache has keys and values of attention only, on the ranks' devices: offloading, convolutions, "
            "recurrent states and indexers are not supported"
        )

    offload = prefetch = update_indexer = early_initialization = _refuse
    get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = has_previous_state = _refuse


def _describe(observed: Observed) -> str:
    kinds = {str(layer) for layer in observed.layers.values()}
    return f"{len(observed.layers)} × {' and '.join(sorted(kinds))}, {observed.dtype} on {observed.device}"
