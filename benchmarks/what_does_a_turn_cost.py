"""What do planning and agreement of a turn cost? Times turns of a few kinds, again and again while their pasts grow.

    python benchmarks/what_does_a_turn_cost.py                            # 4 processes over Gloo; 1 min
    python benchmarks/what_does_a_turn_cost.py --ranks 2 --turns 5

4 heads of 16 that share 2 KV heads, float32; one kind has layers with a window. "Planning" is the time that the first
layer of a turn spends on its layout, its engine (plans, programs) and agreement, all of which later layers find.
"First" is the first turn with a past, "known" the median and the shortest of those like it, of the slowest rank; "CPU"
is the time of its own process in them. Prints a table and a JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing
from one_gpu import free_address, join_group, meet
from rich.console import Console
from rich.table import Table
from run_facts import start_result

from mesh_attention import MeshAttention
from mesh_attention.serving import CachedLayer, ShardedCache

HEADS, KV_HEADS, DIM = 4, 2, 16
LAYERS = 4
PROMPT = 1000
"""Tokens that each sequence has before its first turn; no multiple of anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """New tokens of each sequence in every turn of this kind."""

    name: str
    new_tokens: tuple[int, ...]
    window: int | None = None


KINDS = (
    Kind(name="a chunk of 512 tokens", new_tokens=(512,)),
    Kind(name="a question of 37 tokens", new_tokens=(37,)),
    Kind(name="3 sequences, 40 + 100 + 24 tokens", new_tokens=(40, 100, 24)),
    Kind(name="a chunk of 512, window of 256", new_tokens=(512,), window=256),
)


class Clock:
    """Seconds, and those of this process's CPU, that wrapped functions take; a call inside another counts once."""

    def __init__(self) -> None:
        self.seconds = self.cpu = 0.0
        self.is_running = False

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.is_running:
                return function(*args, **kwargs)
            self.is_running, start, cpu = True, time.perf_counter(), time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.is_running = False
                self.seconds += time.perf_counter() - start
                self.cpu += time.process_time() - cpu

        return timed


def time_turns(kind: Kind, turns: int) -> dict[str, list[float]]:
    """Milliseconds of each turn: planning, its CPU time, and a later layer's `attend`."""
    layers = [CachedLayer(kv_heads=KV_HEADS, head_dim=DIM, window=kind.window)] * LAYERS
    room = len(kind.new_tokens) * PROMPT + (turns + 1) * sum(kind.new_tokens)
    device = torch.device("cpu")
    attention = MeshAttention()
    cache = ShardedCache(
        attention, layers, tokens=room, sequences=len(kind.new_tokens), dtype=torch.float32, device=device
    )
    chats = [cache.new() for _ in kind.new_tokens]
    times: dict[str, list[float]] = {"planning": [], "cpu": [], "layer": []}
    for turn_number in range(turns + 1):
        new = dict.fromkeys(chats, PROMPT) if turn_number == 0 else dict(zip(chats, kind.new_tokens, strict=True))
        turn, clock = cache.prefill(new), Clock()
        tokens = sum(map(len, turn.shards[dist.get_rank()]))
        q, k, v = (torch.randn(1, tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        engine, agree = attention.calls.engine, attention.session.agree
        meet(device)
        with (
            mock.patch.object(attention.calls, "engine", clock.wrap(engine)),
            mock.patch.object(attention.session, "agree", clock.wrap(agree)),
        ):
            clock.wrap(turn.layout)(kind.window)
            turn.attend(0, q, k, v)
        seconds = []
        for layer in range(1, LAYERS):
            meet(device)
            start = time.perf_counter()
            turn.attend(layer, q, k, v)
            seconds.append(time.perf_counter() - start)
        if turn_number:
            for name, each in (("planning", clock.seconds), ("cpu", clock.cpu), ("layer", median(seconds))):
                times[name].append(1000 * each)
    return times


def measure(rank: int, address: str, file: Path, ranks: int, turns: int) -> None:
    join_group(rank, ranks, address, "cpu")
    found = {kind.name: time_turns(kind, turns) for kind in KINDS}
    everybody: list[Any] = [None] * ranks
    dist.all_gather_object(everybody, found)
    if rank == 0:
        file.write_text(json.dumps(everybody))
    dist.barrier()
    dist.destroy_process_group()


def summary(kind: Kind, everybody: list[dict[str, dict[str, list[float]]]]) -> dict[str, Any]:
    """Times of the slowest rank in each turn."""
    slowest = {
        name: [max(of_turn) for of_turn in zip(*(rank[kind.name][name] for rank in everybody), strict=True)]
        for name in ("planning", "cpu", "layer")
    }
    first, *known = slowest["planning"]
    return {
        **asdict(kind),
        "first": first,
        "known": median(known),
        "shortest": min(known),
        "cpu": median(slowest["cpu"][1:]),
        "layer": median(slowest["layer"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 4), ("turns", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    facts = start_result("what_does_a_turn_cost")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "measured.json")
        job = free_address(), file, given.ranks, given.turns
        torch.multiprocessing.spawn(measure, args=job, nprocs=given.ranks)
        everybody = json.loads(file.read_text())
    rows = [summary(kind, everybody) for kind in KINDS]
    table = Table(
        *("a turn of", "planning: first", "known", "shortest", "CPU", "a layer's attend"),
        title=f"{given.ranks} processes, {given.turns} turns after a prompt of {PROMPT} tokens; milliseconds",
    )
    for row in rows:
        times = (f"{row[name]:.1f}" for name in ("first", "known", "shortest", "cpu", "layer"))
        table.add_row(row["name"], *times)
    Console(width=110).print(table)
    print(json.dumps({**facts, **vars(given), "rows": rows}))


if __name__ == "__main__":
    main()
