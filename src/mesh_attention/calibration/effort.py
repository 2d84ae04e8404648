"""How much to measure: thoroughly for a file that is kept, or briefly when a group meets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Sizes and times of a measurement; lengths and bytes by type of device.

    If it `is_thorough`, calls of every size are square and oblong, full and causal, and ranks compare their first times
    to take equally many samples. Otherwise causal calls are of the largest size only, and samples as few as can be.

    A sample of a call is as many calls in a row as fill `sample_s`; samples are taken for about `sampled_s`. A GPU
    rests for `rest_s` before a call is timed: at its power limit it slows down, by a tenth within a few tenths of a
    second, and earlier work should not count. No larger message is tried after one that took `longest_message_s`.
    """

    is_thorough: bool
    call_tokens: dict[str, tuple[int, ...]]
    sample_s: float
    sampled_s: float
    rest_s: float
    merged_nbytes: dict[str, int]
    message_nbytes: tuple[int, ...]
    longest_message_s: float
    messages_s: float


THOROUGH = Effort(
    call_tokens={"cpu": (64, 128, 256, 512, 1024), "cuda": (1024, 2048, 4096, 8192, 16384)},
    is_thorough=True,
    sample_s=0.01,
    sampled_s=0.06,
    rest_s=0.1,
    merged_nbytes={"cpu": 16 * 2**20, "cuda": 512 * 2**20},  # several times the caches
    message_nbytes=(8, 64 * 2**10, 2**20, 4 * 2**20, 16 * 2**20, 64 * 2**20),
    longest_message_s=0.03,
    messages_s=0.1,
)
BRIEF = Effort(
    call_tokens={"cpu": (64, 128), "cuda": (1024, 4096)},
    is_thorough=False,
    sample_s=0.005,
    sampled_s=0.015,
    rest_s=0.0,
    merged_nbytes={"cpu": 2**20, "cuda": 64 * 2**20},
    message_nbytes=(8, 2**20, 16 * 2**20),
    longest_message_s=0.005,
    messages_s=0.0,
)
"""About two seconds, and little memory."""
