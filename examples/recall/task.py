"""The task: recall which value a key was given earlier in the sequence. Data only; it does not depend on ranks.

The first half of a sequence consists of pairs: a key token and its value token. The second half consists of keys; at
each key the model must predict the value that the first half gave it:

    k7 v3  k2 v9  k5 v1  …  |  k5  k7  k7 …        →  v1  v3  v3 …

Values are random in every sequence, so they cannot be memorised. Training begins with short sequences, many to a batch,
in which few keys occur: with long sequences alone, models of this size do not start to learn.
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
    """A number of steps on sequences of one length."""

    seq: int
    steps: int


LESSONS = tuple(Lesson(*pair) for pair in ((16, 240), (32, 40), (64, 60), (128, 120), (512, 40), (2048, 30)))


def lesson_seq(step: int, *, seq: int, lessons: Sequence[Lesson]) -> int:
    """The length of the sequences of a step; after the last lesson, `seq`."""
    for lesson in lessons:
        if step < lesson.steps:
            return min(lesson.seq, seq)
        step -= lesson.steps
    return seq


def make_batch(seed: int, step: int, *, rows: int, seq: int, stream: Stream = "training") -> dict[str, Tensor]:
    """Whole sequences, and what each token should predict. Equal arguments give equal batches, on any rank."""
    random = _generator(f"{stream} {seed} {step}")
    keys_in_play, pairs = min(KEYS, seq), seq // 4
    shuffled = torch.rand(rows, keys_in_play, generator=random).argsort(dim=1)
    value_of = torch.randint(VALUES, (rows, keys_in_play), generator=random) + KEYS
    keys = shuffled.repeat(1, -(-pairs // keys_in_play))[:, :pairs]
    asked = keys.gather(1, torch.randint(pairs, (rows, seq - 2 * pairs), generator=random))
    told = torch.stack([keys, value_of.gather(1, keys)], dim=2).flatten(1)
    targets = torch.cat([torch.full_like(told, IGNORED), value_of.gather(1, asked)], dim=1)
    # The targets are already shifted, so they are `shift_labels`, not `labels`.
    return {"input_ids": torch.cat([told, asked], dim=1), "shift_labels": targets}


def _generator(name: str) -> torch.Generator:
    """A generator for each name. Seeded by a hash: torch reads 32 bits of a seed, so sums and shifts could collide."""
    return torch.Generator().manual_seed(int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "big"))
