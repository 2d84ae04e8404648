"""Soak: random calls on four processes for as long as you like; memory, descriptors and threads must not grow.

    python tests/campaign/soak.py --seconds 3600

Every rank draws the same calls: forward, both passes, calls that are refused on one rank or on all, unshard, calls of
the function form, and now and then a new group in place of an old one. Calls are drawn and compared as those of
`fuzz.py`. The medians of the second quarter of the run are compared with those of the last quarter.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

from attending import CASES, Attended, Call, wholes_of
from fuzz import Object, draw_call
from run_ranks import process_context, start_ranks

from mesh_attention import DisagreementError, MeshAttention, UsageError, mesh_attention

RANKS = 4
CALLS_PER_ROUND = 20
GROWTH = {"rss_mib": (1.05, 8.0), "descriptors": (1.0, 2.0), "threads": (1.0, 1.0)}
"""What may be added between the quarters: a factor, and a number."""
METHODS: tuple[dict[str, Any], ...] = (
    {"method": "ring"},
    {"method": "mesh", "tile": (2, 2)},
    {"method": "attention2d", "tile": (2, 2)},
    {"method": "pass-q"},
    {"method": "mesh", "tile": (1, 2), "ulysses_degree": 2, "layout": "contiguous"},
    {"method": "ring", "layout": "striped"},
)


class Sample(NamedTuple):
    """What one process holds."""

    rss_mib: float
    descriptors: int
    threads: int


def sample() -> Sample:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return Sample(
        pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
    )


@dataclass
class Soaking:
    """One rank. All ranks draw the same numbers."""

    rank: int
    draw: random.Random
    group: Any = None
    attentions: list[MeshAttention] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)

    def one(self) -> None:
        """Make one random call."""
        if self.group is None or self.draw.random() < 0.01:
            self.new_group()
        calls = [self.forward, self.step, self.unshard, self.refuse, self.disagree, self.function]
        call: Callable[[], None] = self.draw.choices(calls, weights=(5, 5, 1, 1, 1, 1))[0]
        call()
        self.done[call.__name__] += 1

    def new_group(self) -> None:
        old, self.group, self.attentions = self.group, None, []
        gc.collect()
        if old is not None:
            dist.destroy_process_group(old)
        del old
        self.group = dist.new_group(list(range(RANKS)), timeout=timedelta(seconds=120))
        self.attentions = [MeshAttention(self.group, **options) for options in METHODS]
        self.done["groups"] += 1

    def forward(self) -> None:
        self.attend(replace(self.call(), mode="no_grad"))

    def step(self) -> None:
        self.attend(self.call())

    def call(self) -> Call:
        """Of one of the dtypes in which it is exact enough; four heads can be shared out by every method."""
        given = Object(RANKS)
        call = replace(draw_call(self.draw, given, 2, "cpu"), dtype=self.draw.choice(("float64", "float32")), skips=0)
        lengths = {"seq_len": call.seq_q, "seq_len_k": call.seq_k}
        return replace(call, arguments=call.arguments | lengths)

    def attend(self, call: Call) -> None:
        attended = Attended(self.draw.choice(self.attentions), call)
        wrong = attended.wrong()
        assert not wrong, f"rank {self.rank}: {call}: {wrong}"

    def unshard(self) -> None:
        attention = self.draw.choice(self.attentions)
        whole = torch.arange(self.draw.randint(1, 99))[None, :, None].expand(-1, -1, self.draw.randint(1, 5))
        assert torch.equal(attention.unshard(attention.shard(whole)), whole)

    def refuse(self) -> None:
        """Rank `odd` makes a mistake; all raise."""
        attention, odd = self.draw.choice(self.attentions), self.draw.randrange(RANKS)
        wrong = self.draw.choice([{"casual": True}, {"window_size": 3}, {"cu_seqlens_q": []}, {"softmax_scale": "x"}])
        q = torch.randn(1, self.draw.randint(100, 1000), 2, 8)  # not seen before, or the others would not listen
        with pytest.raises(UsageError if self.rank == odd else DisagreementError):
            attention(q, q, q, **(wrong if self.rank == odd else {}))

    def disagree(self) -> None:
        attention, odd = self.draw.choice(self.attentions), self.draw.randrange(RANKS)
        q = torch.randn(1, self.draw.randint(100, 1000), 2, 8)
        scale = 0.3 if self.rank == odd else 0.4
        with pytest.raises(DisagreementError):
            attention(q, q, q, softmax_scale=scale)

    def function(self) -> None:
        """The function form, which keeps attentions of its own."""
        q, k, v = (self.attentions[0].shard(whole) for whole in wholes_of(CASES["causal"])[:3])
        ours = mesh_attention(q, k, v, group=self.group, seq_len=37, causal=True, **METHODS[0])
        assert torch.equal(ours, self.attentions[0](q, k, v, seq_len=37, causal=True))


def work(connection: Connection, rank: int, port: int, seconds: float, seed: int) -> None:
    torch.set_num_threads(1)
    store = TCPStore("localhost", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=300))
    soaking = Soaking(rank, random.Random(seed))
    start = time.monotonic()
    is_over = torch.zeros(1)
    while not is_over.item():
        for _ in range(CALLS_PER_ROUND):
            soaking.one()
        gc.collect()
        connection.send((time.monotonic() - start, sample(), dict(soaking.done)))
        is_over.fill_(time.monotonic() - start > seconds)
        dist.broadcast(is_over, src=0)


def quarters(samples: Sequence[tuple[float, Sample]], name: str) -> tuple[float, float]:
    """The medians of the second and of the last quarter of the time."""
    end = samples[-1][0]

    def median(from_: float, to: float) -> float:
        return statistics.median(getattr(one, name) for at, one in samples if from_ * end <= at <= to * end)

    return median(0.25, 0.5), median(0.75, 1.0)


def growths(samples: Sequence[tuple[float, Sample]]) -> list[str]:
    """What grew between the quarters, by more than it may."""
    found = []
    for name, (factor, number) in GROWTH.items():
        before, after = quarters(samples, name)
        if after > before * factor + number:
            found.append(f"{name} grew from {before:.0f} to {after:.0f}")
    return found


def soak(seconds: float, seed: int, report: Callable[[str], None]) -> list[str]:
    """What was wrong."""
    context = process_context()
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    workers = start_ranks(context, RANKS, work, store.port, seconds, seed)
    samples: list[list[tuple[float, Sample]]] = [[] for _ in workers]
    last = time.monotonic()
    done: dict[str, int] = {}
    open_ = dict(enumerate(workers))
    while open_:
        for rank, (_, connection) in list(open_.items()):
            try:
                if connection.poll(0.1):
                    at, one, done = connection.recv()
                    samples[rank].append((at, one))
            except EOFError:
                del open_[rank]
        if time.monotonic() - last > 60:
            last = time.monotonic()
            report(f"{samples[0][-1][0] / 60:5.0f} min  {_describe(samples)}  {sum(done.values())} calls")
    wrong = []
    for rank, (process, _) in enumerate(workers):
        process.join()
        if process.exitcode:
            wrong.append(f"rank {rank} ended with code {process.exitcode}")
    if not wrong:
        for rank, mine in enumerate(samples):
            before_after = {name: quarters(mine, name) for name in Sample._fields}
            shown = ", ".join(f"{name} {a:.0f} → {b:.0f}" for name, (a, b) in before_after.items())
            report(f"rank {rank}: second quarter → last quarter: {shown}")
            wrong += [f"rank {rank}: {growth}" for growth in growths(mine)]
    report(f"made {', '.join(f'{count} {name}' for name, count in done.items())}")
    return wrong


def _describe(samples: Sequence[Sequence[tuple[float, Sample]]]) -> str:
    latest = [mine[-1][1] for mine in samples if mine]
    return "  ".join(f"{name} {'/'.join(f'{getattr(one, name):.0f}' for one in latest)}" for name in Sample._fields)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    wrong = soak(given.seconds, given.seed, lambda line: print(line, flush=True))
    for line in wrong:
        print(line)
    print("flat" if not wrong else "NOT FLAT")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
