"""Agreement: every rank states what it was asked to do, and all ranks raise unless all statements are equal.

Ranks compare a new call in this way before they send its tensors, and a rank that refuses a call tells the others so.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from mesh_attention.comm.base import Comm, Work
from mesh_attention.errors import DisagreementError, TransportError, UsageError
from mesh_attention.plan.format import format_numbers

PATIENCE_S = 20.0
"""Seconds that a rank waits for the others to receive its error. Ranks that repeat a known call hear of it from the
watchdog, if there is one."""
MAX_VALUE_LENGTH = 160
"""Characters of a value in an agreement text; a longer one is truncated, and a hash added."""
MAX_REFUSAL_LENGTH = 2000
logger = logging.getLogger(__name__)
ShardSizes = Callable[[int], Mapping[str, int]]


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What one rank states to all ranks of its group.

    `must_match` must be the same on every rank. `holds` are this rank's token counts; `expected` gives those that any
    rank must have. `payload` is any JSON, passed on to the others without being compared. `advice` ends the error's
    text.
    """

    must_match: Mapping[str, str] = field(default_factory=dict)
    holds: Mapping[str, int] = field(default_factory=dict)
    expected: ShardSizes | None = None
    payload: Any = None
    advice: str = ""

    @cached_property
    def call_id(self) -> int:
        """A hash of what must match, equal on all ranks that have agreed."""
        return int.from_bytes(sha256(json.dumps(dict(self.must_match)).encode()).digest()[:6], "big")


def agree(comm: Comm, statement: Statement) -> Generator[Work, None, list[Statement]]:
    """What all ranks hold, and their payloads; raises on every rank if they disagree. Yields what it waits for."""
    sharing = comm.share(_text(statement))
    yield sharing
    texts = sharing.result()
    read = {text: json.loads(text) for text in set(texts)}  # most ranks say the same
    messages = [read[text] for text in texts]
    if verdict := _verdict(messages, statement.expected):
        advice = f". {statement.advice}" if statement.advice else ""
        raise DisagreementError(f"{verdict}; nothing was sent{advice}")
    return [Statement(holds=message["holds"], payload=message["payload"]) for message in messages]


def tell(comm: Comm, error: Exception) -> None:
    """Make every other rank raise a `DisagreementError` with this reason at its next agreement.

    Raises a `TransportError` if the others do not come to one, perhaps because they know the call already.
    """
    reason = reason_of(error)
    start, is_noted = time.monotonic(), False
    sharing = comm.share(_text(Statement(), refusal=reason))
    while not sharing.is_done():
        waited = time.monotonic() - start
        if waited > 1.0 and not is_noted:
            logger.warning("rank %d is waiting to tell the other ranks about its error: %s", comm.rank, reason)
            is_noted = True
        if waited > PATIENCE_S:
            raise TransportError(f"rank {comm.rank} refused a call, but could not tell the other ranks: {reason}")
        time.sleep(0.001)
    sharing.wait()


def reason_of(error: Exception) -> str:
    return str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"


def _text(statement: Statement, *, refusal: str | None = None) -> str:
    from mesh_attention import __version__

    message = {
        "version": __version__,
        "must_match": {name: truncated(value, MAX_VALUE_LENGTH) for name, value in statement.must_match.items()},
        "holds": dict(statement.holds),
        "refusal": None if refusal is None else truncated(refusal, MAX_REFUSAL_LENGTH),
        "payload": statement.payload,
    }
    return json.dumps(message)


def truncated(text: str, length: int) -> str:
    """The text, short enough to be shared in one message, and still different for different texts."""
    if len(text) <= length:
        return text
    return f"{text[: length - 20]}… #{sha256(text.encode()).hexdigest()[:16]}"


def _verdict(messages: Sequence[Mapping[str, Any]], expected: ShardSizes | None) -> str | None:
    """Why ranks disagree, the same on every rank; None if they agree."""
    versions = [{"version": message["version"]} for message in messages]
    if difference := find_difference(dict(enumerate(versions))):
        return f"ranks run different versions of mesh-attention: {difference}; install the same one on every rank"
    for rank, message in enumerate(messages):
        if message["refusal"] is not None:
            return f"rank {rank} refused the call: {message['refusal']}"
    calls = [message["must_match"] for message in messages]
    if difference := find_difference(dict(enumerate(calls))):
        advice = lengths_advice(calls, [message["holds"] for message in messages])
        return f"ranks were called with different arguments: {difference}{advice}"
    return None if expected is None else find_misfit([message["holds"] for message in messages], expected)


def find_difference(statements: Mapping[int, Mapping[str, str]]) -> str | None:
    """The first name whose value differs between ranks, with its values; None if all agree."""
    if len({tuple(statement.items()) for statement in statements.values()}) == 1:
        return None
    for name in dict.fromkeys(name for statement in statements.values() for name in statement):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, statement in statements.items():
            ranks_by_value.setdefault(statement.get(name, "nothing"), []).append(rank)
        if len(ranks_by_value) > 1:
            parts = (f"{value} on rank(s) {format_numbers(ranks)}" for value, ranks in ranks_by_value.items())
            return f"{name} is {', but '.join(parts)}"
    return None


def lengths_advice(calls: Sequence[Mapping[str, str]], holds: Sequence[Mapping[str, int]]) -> str:
    """What to give if ranks inferred different lengths from what they hold; empty if that is not the difference."""
    for side, length, option in (("q", "seq_q", "seq_len"), ("kv", "seq_kv", "seq_len_k")):
        if len({call.get(length) for call in calls}) > 1 and all(side in held for held in holds):
            tokens = sum(held[side] for held in holds)
            return f". Together they hold {tokens} tokens of {side}; if that is the sequence, give {option}={tokens}"
    return ""


def find_misfit(holds: Sequence[Mapping[str, int]], expected: ShardSizes) -> str | None:
    """The first rank that does not hold what is expected of it; None if all do."""
    for rank, held in enumerate(holds):
        for name, tokens in expected(rank).items():
            if held.get(name) != tokens:
                return (
                    f"rank {rank} holds {held.get(name)} tokens of {name} but its shard has {tokens}; shard inputs "
                    "with `MeshAttention.shard`, and give seq_len (and seq_len_k) when ranks hold unequal numbers"
                )
    return None


# Tensors in statements


PLACE_FACTOR, NUMBER_FACTOR, MIXED_FACTOR = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB
"""Large odd numbers."""
CHUNK = 1 << 22
"""Elements hashed together: embeddings of a long prompt would otherwise need several times their own memory."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def summary_of(value: object) -> str:
    """A short text that differs for different tensors of whole numbers; the shape for other tensors."""
    if not isinstance(value, Tensor):
        return str(value)
    text = f"{tuple(value.shape)} {value.dtype}"
    return text if value.is_floating_point() else f"{text} #{int(fingerprint(value)):010x}"


def fingerprint(tensor: Tensor) -> Tensor:
    """A hash of a tensor's elements in their order, of 40 bits, on its device. Floats are hashed by their bits."""
    flat = tensor.detach().flatten()
    numbers = flat.view(INTEGERS[flat.element_size()]) if flat.is_floating_point() else flat
    total = torch.zeros((), dtype=torch.long, device=flat.device)
    for start in range(0, numbers.numel(), CHUNK):
        part = numbers[start : start + CHUNK].long()
        places = torch.arange(start + 1, start + 1 + part.numel(), device=flat.device)
        # Overflow is fine. Both are mixed before the sum: a sum of products does not tell [5, 7] from [7, 6].
        mixed = part * NUMBER_FACTOR + places * PLACE_FACTOR
        mixed = (mixed ^ (mixed >> 32)) * MIXED_FACTOR
        total = total + (mixed ^ (mixed >> 29)).sum()
    return total & 0xFFFFFFFFFF
