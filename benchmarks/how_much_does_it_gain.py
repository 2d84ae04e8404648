"""How much does it gain? Time and traffic of a rank against ranks: ring, Ulysses × ring, and what the tuner chooses.

Traffic is counted: bytes that an average rank sends in both passes. Times are forecasts on a preset. The best possible
time is that of the kernels alone, at their full rate. Takes some minutes. Prints a table and a JSON line, from which
`docs/make_gain_picture.py` draws.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table
from run_facts import start_result

from mesh_attention import Problem, causal, cluster_named, tune
from mesh_attention.plan.steps import DIRECTIONS
from mesh_attention_lab.bounds import lower_bounds
from mesh_attention_lab.cli.options import parse_size

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
HEADS, HEAD_DIM = 32, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", default="1m")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--device", default="h100", help="a preset of eight devices a node")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    given = parser.parse_args()
    facts = start_result("how_much_does_it_gain")
    counts = track(given.ranks, console=Console(stderr=True), transient=True)
    rows = [row_at(ranks, parse_size("--seq", given.seq), given.kv_heads, given.device) for ranks in counts]
    table = Table("ranks", "ring ms", "usp ms", "chosen ms", "best ms", "ring GB", "usp GB", "chosen GB", "chosen")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    heads = f"{HEADS} heads of {HEAD_DIM}, {given.kv_heads} KV heads"
    title = f"{given.seq} tokens, {heads}, causal, on {given.device.upper()}s"
    Console(width=160).print(f"{title}; forward and backward", table, sep="\n")
    print(json.dumps({**facts, "title": title, "rows": rows}, ensure_ascii=False))


def row_at(ranks: int, seq: int, kv_heads: int, device: str) -> dict[str, Any]:
    problem = Problem.self_attention(
        seq_len=seq, heads=HEADS, kv_heads=kv_heads, head_dim=HEAD_DIM, ranks=ranks, mask=causal()
    )
    cluster = cluster_named(f"{device}x{ranks}")
    tuning = tune(problem, cluster, directions=DIRECTIONS)
    by_family = {trial.family: trial for trial in tuning.trials}
    shown = {"ring": by_family["ring"], "usp": by_family["usp"], "chosen": tuning.chosen}
    return {
        "ranks": ranks,
        **{f"{name}_ms": round(trial.time_s * 1e3, 1) for name, trial in shown.items()},
        "best_ms": round(lower_bounds(problem, DIRECTIONS, cluster.device)[0] * 1e3, 1),
        **{f"{name}_gb": round(trial.sent_nbytes / 1e9, 2) for name, trial in shown.items()},
        "chosen": "; ".join(dict.fromkeys(str(choice) for choice in tuning.chosen.choices.values())),
    }


if __name__ == "__main__":
    main()
