"""What do the marks cost, by which ranks notice that they are in different calls? (docs/decisions/0008-agreement.md)

Compares the same call with and without marks, in alternating rounds, at 1024 tokens a rank: over Gloo on the CPU, or
with --device cuda over NCCL, all ranks on one GPU. Prints a table and a JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from one_gpu import share_one_gpu
from rich.console import Console
from rich.table import Table
from run_facts import start_result

from mesh_attention import MeshAttention

DIM = 128
HEADS = 16
CALLS = {"cpu": 1, "cuda": 4}


def measure(rank: int, ranks: int, store: str, kind: str, rounds: int, tokens: int, method: dict[str, Any]) -> None:
    share_one_gpu(rank)
    torch.set_num_threads(1)
    is_cuda = kind == "cuda"
    device = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
    where = {"init_method": f"file://{store}", "rank": rank, "world_size": ranks}
    dist.init_process_group("nccl" if is_cuda else "gloo", **where, device_id=device if is_cuda else None)
    marked, plain = MeshAttention(**method), MeshAttention(**method)
    (comm,) = plain.session.comms_on(device)
    plain.session._on[device] = [comm.inner]  # type: ignore[attr-defined]
    dtype = torch.bfloat16 if is_cuda else torch.float32
    q, k, v, d_out = (torch.randn(1, tokens, HEADS, DIM, device=device, dtype=dtype) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def forward(attention: MeshAttention) -> None:
        with torch.no_grad():
            attention(*inputs, causal=True)

    def both(attention: MeshAttention) -> None:
        torch.autograd.grad(attention(*inputs, causal=True), inputs, d_out)

    seconds: dict[str, list[float]] = {
        f"{name} {how}": [] for name in ("forward", "both") for how in ("with", "without")
    }
    for round_ in range(rounds + 3):
        for name, call in (("forward", forward), ("both", both)):
            hows = [("with", marked), ("without", plain)]
            for how, attention in hows if round_ % 2 else reversed(hows):
                dist.barrier()
                start = time.perf_counter()
                for _ in range(CALLS[kind]):
                    call(attention)
                if is_cuda:
                    torch.cuda.synchronize()
                if round_ >= 3:
                    seconds[f"{name} {how}"].append((time.perf_counter() - start) / CALLS[kind])
    if rank == 0:
        Path(f"{store}.out").write_text(json.dumps({name: 1e3 * median(found) for name, found in seconds.items()}))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=1024, help="a rank")
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    facts = start_result("what_do_marks_cost", device=name)
    table = Table(
        "method",
        "pass",
        "without, ms",
        "with marks, ms",
        "cost",
        title=f"{options.ranks} ranks of {options.tokens} tokens",
    )
    rows = []
    for label, method in {"default": {}, "ring": {"method": "ring"}}.items():
        with tempfile.TemporaryDirectory() as folder:
            given = (options.ranks, f"{folder}/store", options.device, options.rounds, options.tokens, method)
            torch.multiprocessing.spawn(measure, args=given, nprocs=options.ranks)
            found = json.loads(Path(f"{folder}/store.out").read_text())
        for pass_ in ("forward", "both"):
            without, with_marks = found[f"{pass_} without"], found[f"{pass_} with"]
            cost = with_marks / without - 1
            table.add_row(label, pass_, f"{without:.2f}", f"{with_marks:.2f}", f"{cost:+.1%}")
            rows.append({"method": label, "pass": pass_, "ms_without": without, "ms_with": with_marks, "cost": cost})
    Console(width=100).print(table)
    print(json.dumps(facts | {"ranks": options.ranks, "tokens": options.tokens, "rows": rows}))


if __name__ == "__main__":
    main()
