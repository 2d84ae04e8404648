"""The task: look up, across the whole sequence, which value a key was given. Data only; knows no ranks.

The first half of a sequence is records, a key token and its value token; the second half is keys, and at each of them
the value that the first half gave it is to be predicted:

    k7 v3  k2 v9  k5 v1  …  |  k5  k7  k7 …        →  v1  v3  v3 …

Values are drawn anew for every sequence, so nothing can be learnt by heart. Training begins with short sequences, many
to a batch, in which few keys occur: with long ones alone, models of this size find no way to start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import torch
from torch import Tensor

KEYS, VALUES = 128, 32
VOCABULARY = KEYS + VALUES
SHORTEST = 8
IGNORED = -100
Stream = Literal["training", "test"]


@dataclass(frozen=True, slots=True)
class Lesson:
    """So many steps on sequences of so many tokens."""

    seq: int
    steps: int


LESSONS = tuple(Lesson(*pair) for pair in ((16, 240), (32, 40), (64, 60), (128, 120), (512, 40), (2048, 30)))


def lesson_seq(step: int, *, seq: int, lessons: Sequence[Lesson]) -> int:
    """How long the sequences of a step are; after the last lesson, `seq`."""
    for lesson in lessons:
        if step < lesson.steps:
            return min(lesson.seq, seq)
        step -= lesson.steps
    return seq


def make_batch(seed: int, step: int, *, rows: int, seq: int, stream: Stream = "training") -> dict[str, Tensor]:
    """Whole sequences and what each token should predict: the same for the same arguments, wherever it is called."""
    random = _generator(f"{stream} {seed} {step}")
    keys_in_play, records = min(KEYS, seq), seq // 4
    shuffled = torch.rand(rows, keys_in_play, generator=random).argsort(dim=1)
    value_of = torch.randint(VALUES, (rows, keys_in_play), generator=random) + KEYS
    keys = shuffled.repeat(1, -(-records // keys_in_play))[:, :records]
    asked = keys.gather(1, torch.randint(records, (rows, seq - 2 * records), generator=random))
    told = torch.stack([keys, value_of.gather(1, keys)], dim=2).flatten(1)
    targets = torch.cat([torch.full_like(told, IGNORED), value_of.gather(1, asked)], dim=1)
    # Already those of the next token, so they are `shift_labels`, not `labels`.
    return {"input_ids": torch.cat([told, asked], dim=1), "shift_labels": targets}


def _generator(name: str) -> torch.Generator:
    """One for each name, by a hash: torch reads only 32 bits of a seed, so that sums and shifts would meet again."""
    return torch.Generator().manual_seed(int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "big"))
