"""How fast is the default? Seconds of the first call of a model, and of a new length, before anything is sent.

One process plays rank 0 of 8, 64 and 256 ranks, with GPUs as the cluster says: it chooses, shares the choice, makes the
plans, and compiles its programs of both passes. The other ranks' answers are copies of its own, and arrive at once. The
cache on disk is empty, and every first call is made by a new process. Prints a table and a JSON line.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from run_facts import start_result

from mesh_attention import MeshAttention
from mesh_attention.arguments import CallOptions

RANKS = (8, 64, 256)
FIRST, LATER = 4096, (4096 + 256, 2048 + 128, 8192)
"""Tokens of a rank."""
LIMITS_S = {8: (1.0, 0.05), 64: (1.0, 0.05), 256: (3.0, 0.05)}


class Copies:
    """A transport on which every other rank says what this one says."""

    rank, is_capturable = 0, False

    def __init__(self, size: int) -> None:
        self.size = size

    def share(self, text: str) -> Shared:
        return Shared(text, self.size)

    def post(self, sends: object, recvs: object) -> object:
        raise AssertionError("nothing is sent here")


class Shared:
    def __init__(self, text: str, size: int) -> None:
        self.texts = [text] * size

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def result(self) -> list[str]:
        return self.texts


def seconds(attention: MeshAttention, tokens: int) -> float:
    q, kv = torch.empty(1, tokens, 32, 128, dtype=torch.bfloat16), torch.empty(1, tokens, 8, 128, dtype=torch.bfloat16)
    start = time.perf_counter()
    engine = attention.calls.engine([[q, kv, kv]], CallOptions(causal=True), gradient=True)
    engine.programs("backward")
    return time.perf_counter() - start


def measure(ranks: int, connection: object) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        attention = MeshAttention(Copies(ranks), cluster="h200")
        first, *later = (seconds(attention, tokens) for tokens in (FIRST, *LATER))
    connection.send((first, max(later)))  # type: ignore[attr-defined]


def main() -> None:
    facts = start_result("how_fast_is_the_default")
    context, rows = multiprocessing.get_context("spawn"), []
    for ranks in track(RANKS, console=Console(stderr=True), transient=True):
        ours, theirs = context.Pipe()
        process = context.Process(target=measure, args=(ranks, theirs))
        process.start()
        theirs.close()
        first_s, later_s = ours.recv()
        process.join()
        rows.append({"ranks": ranks, "first_s": first_s, "new_length_s": later_s, "limits_s": LIMITS_S[ranks]})
    table = Table(
        "ranks", "first call", "limit", "new length, longest of 3", "limit", title="Before anything is sent, s"
    )
    for row in rows:
        first_limit, later_limit = row["limits_s"]
        table.add_row(
            str(row["ranks"]), f"{row['first_s']:.2f}", f"{first_limit}", f"{row['new_length_s']:.3f}", f"{later_limit}"
        )
    Console(width=100).print(table)
    print(json.dumps({**facts, "rows": rows}))


if __name__ == "__main__":
    main()
