"""What does a decoded token cost the host? Times the attention of each layer, over NCCL with all ranks on one GPU.

    python benchmarks/what_does_a_decoded_token_cost.py                   # 2 ranks, with and without CUDA graphs; 30 s
    python benchmarks/what_does_a_decoded_token_cost.py --device cpu --cached 256 --layers 2 --tokens 6

32 heads of 128 that share 8 KV heads, bfloat16. "Host" is the mean time until `attend` of a layer returns; the device
is idle before each token, and waiting for it afterwards is not counted. "Step" is what a token costs once, for all its
layers: its place in the cache, and its lengths on the device. "Until done" is the time of a whole token with its
device work, for each layer. Prints a table and a JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from one_gpu import device_name, free_address, join_group, kernels_side_by_side, meet, synchronize
from rich.console import Console
from rich.table import Table
from run_facts import start_result

from mesh_attention import MeshAttention
from mesh_attention.serving import CachedLayer, ShardedCache

HEADS, KV_HEADS, DIM = 32, 8, 128
WARM_UP = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank is told."""

    ranks: int
    batch: int
    cached: int
    layers: int
    tokens: int
    kind: str


def decode(device: torch.device, job: Job, *, cuda_graphs: bool) -> dict[str, float]:
    """Median microseconds over tokens."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layers = [CachedLayer(kv_heads=KV_HEADS, head_dim=DIM)] * job.layers
    room = job.batch * (job.cached + job.tokens + WARM_UP)
    attention = MeshAttention(cuda_graphs=cuda_graphs)
    cache = ShardedCache(attention, layers, tokens=room, sequences=job.batch, dtype=dtype, device=device)
    chats = [cache.new() for _ in range(job.batch)]
    cache.book.extend(dict.fromkeys(chats, job.cached), is_decoded=False)  # what is cached does not matter here
    sizes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM))
    q, k, v = (torch.randn(job.batch, 1, *size, device=device, dtype=dtype) for size in sizes)
    times: dict[str, list[float]] = {"step": [], "host": [], "done": []}
    for token in range(job.tokens + WARM_UP):
        meet(device)
        start = time.perf_counter()
        step = cache.decode(dict.fromkeys(chats, 1))
        step.attend(0, q, k, v)
        begun = time.perf_counter()
        for layer in range(1, job.layers):
            step.attend(layer, q, k, v)
        returned = time.perf_counter()
        synchronize(device)
        done = time.perf_counter()
        if token >= WARM_UP:
            host = (returned - begun) / (job.layers - 1)
            found = {"step": begun - start - host, "host": host, "done": (done - start) / job.layers}
            for name, seconds in found.items():
                times[name].append(1e6 * seconds)
    return {name: median(each) for name, each in times.items()}


def measure(rank: int, address: str, file: Path, job: Job) -> None:
    device = join_group(rank, job.ranks, address, job.kind)
    ways = {"steps": False, "CUDA graphs": True} if device.type == "cuda" else {"steps": False}
    found = {name: decode(device, job, cuda_graphs=graphs) for name, graphs in ways.items()}
    everybody: list[Any] = [None] * job.ranks
    dist.all_gather_object(everybody, found)
    if rank == 0:
        file.write_text(json.dumps({"device": device_name(device), "ranks": everybody}))
    dist.barrier()
    gc.collect()  # NCCL waits for graphs with its transfers
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    for name, default in (("ranks", 2), ("batch", 1), ("cached", 16384), ("layers", 16), ("tokens", 40)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = vars(parser.parse_args())
    job = Job(kind=given.pop("device"), **given)
    with kernels_side_by_side(job.kind) as has_mps, tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "measured.json")
        torch.multiprocessing.spawn(measure, args=(free_address(), file, job), nprocs=job.ranks)
        measured = json.loads(file.read_text())
    facts = start_result("what_does_a_decoded_token_cost", device=measured["device"])
    table = Table(
        *("run as", "host per layer, µs", "step, µs", "until done per layer, µs"),
        title=f"{job.ranks} ranks, {job.batch} sequences of {job.cached} cached tokens, {job.layers} layers",
    )
    rows = []
    for name in measured["ranks"][0]:
        worst = {key: max(rank[name][key] for rank in measured["ranks"]) for key in ("host", "step", "done")}
        rows.append({"run as": name, **worst})
        table.add_row(name, *(f"{worst[key]:.1f}" for key in ("host", "step", "done")))
    Console(width=110).print(table)
    print(json.dumps({**facts, **asdict(job), "mps": has_mps, "rows": rows}))


if __name__ == "__main__":
    main()
