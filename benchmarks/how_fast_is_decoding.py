"""How fast is decoding? Bytes of K and V that a decode kernel must read, divided by the time, next to the read rate.

    python benchmarks/how_fast_is_decoding.py               # on a GPU; 20 s
    python benchmarks/how_fast_is_decoding.py --device cpu  # small sizes

32 heads and 8 KV heads of 128, bfloat16; blocks of tokens in shuffled order. A time is that of `attend`, its merging of
splits included, inside a CUDA graph. The read rate is that of a sum over 4 GiB. torch's flash and cuDNN read K and V
without gaps, with the queries of a group as rows; they take sequences of one length. Prints a table and a JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from run_facts import start_result
from torch import Tensor

from mesh_attention.kernels.base import Demand
from mesh_attention.kernels.decode import Blocks, DecodeKernel, Reach, choose_decode

HEADS, KV_HEADS, DIM = 32, 8, 128
LAYERS_NBYTES = 400 * 2**20
"""Calls take turns over layers of as many bytes, so that none finds its K and V in the L2 cache."""
CALLS, REPEATS = 8, 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    lengths: tuple[int, ...]
    queries: int = 1
    block_tokens: int = 64

    @property
    def nbytes(self) -> int:
        return sum(self.lengths) * KV_HEADS * DIM * 2 * 2

    @property
    def layers(self) -> int:
        return max(2, -(-LAYERS_NBYTES // self.nbytes))


def cases(kind: str) -> list[Case]:
    if kind == "cpu":
        return [Case(name="2 × 512", lengths=(512,) * 2), Case(name="uneven", lengths=(700, 200))]
    uneven = (65536, 16384, 16384, 8192, 8192, 8192, 4096, 4096)
    return [
        Case(name="8 × 16384", lengths=(16384,) * 8),
        Case(name="8 × 16384, 4 queries", lengths=(16384,) * 8, queries=4),
        Case(name="8 × 16384, 16 queries", lengths=(16384,) * 8, queries=16),
        Case(name="8 × 16384, blocks of 16", lengths=(16384,) * 8, block_tokens=16),
        Case(name="8 × 16384, blocks of 128", lengths=(16384,) * 8, block_tokens=128),
        Case(name="1 × 131072", lengths=(131072,)),
        Case(name="1 × 131072, 4 queries", lengths=(131072,), queries=4),
        Case(name="1 × 16384", lengths=(16384,)),
        Case(name="8 from 4096 to 65536", lengths=uneven),
        Case(name="20 × 8192", lengths=(8192,) * 20),
        Case(name="34 × 4096", lengths=(4096,) * 34),
        Case(name="64 × 2048", lengths=(2048,) * 64),
        Case(name="256 × 1024", lengths=(1024,) * 256),
    ]


# Ways to make a call; each is a function of the layer


Way = Callable[[int], object]


def by_kernel(kernel: DecodeKernel, case: Case, device: torch.device) -> Way:
    needs = [-(-length // case.block_tokens) for length in case.lengths]
    order = torch.randperm(sum(needs), device=device).int().split(needs)
    table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
    shape = (sum(needs), case.block_tokens, KV_HEADS, DIM)
    layers = [Blocks(*(random(shape, device) for _ in range(2))) for _ in range(case.layers)]
    behind = torch.arange(case.queries - 1, -1, -1, device=device)
    stop = (torch.tensor(case.lengths, device=device)[:, None] - behind).int()
    reach = Reach(table, torch.zeros_like(stop), stop)
    q = random((len(case.lengths), case.queries, HEADS, DIM), device)
    records = random((len(case.lengths), case.queries, HEADS, DIM + 2), device)
    out, lse = records[..., :DIM], records.view(torch.float32)[..., DIM // 2]

    def act(layer: int) -> None:
        kernel.attend(q, layers[layer], reach, scale=DIM**-0.5, softcap=0.0, out=out, lse=lse)

    return act


def by_torch(operator: Callable[[Tensor, Tensor, Tensor], object], case: Case, device: torch.device) -> Way:
    """K and V (sequences, tokens, KV heads, dim), without gaps."""
    shape = (len(case.lengths), case.lengths[0], KV_HEADS, DIM)
    layers = [tuple(random(shape, device).transpose(1, 2) for _ in range(2)) for _ in range(case.layers)]
    q = random((len(case.lengths), KV_HEADS, HEADS // KV_HEADS, DIM), device)
    return lambda layer: operator(q, *layers[layer])


def flash(q: Tensor, k: Tensor, v: Tensor) -> object:
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> object:
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)


def ways(case: Case, device: torch.device) -> dict[str, Callable[[], Way]]:
    demand = Demand(
        device=device.type, dtype=torch.bfloat16, head_dim_qk=DIM, head_dim_v=DIM, softcap=0.0, lse_gradient=False
    )
    kernel = choose_decode(demand)
    found: dict[str, Callable[[], Way]] = {kernel.name: lambda: by_kernel(kernel, case, device)}
    if device.type == "cuda" and case.queries == 1 and len(set(case.lengths)) == 1 and case.block_tokens == 64:
        found["torch flash"] = lambda: by_torch(flash, case, device)
        found["cuDNN"] = lambda: by_torch(cudnn, case, device)
    return found


def random(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


# Times


def seconds(way: Way, layers: int, device: torch.device) -> float:
    """Seconds of a call: the median over replays of a graph of several."""
    way(0)
    way(1)
    if device.type != "cuda":
        return median(clocked(lambda: way(0)) for _ in range(REPEATS))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(CALLS):
            way(call % layers)
    graph.replay()
    return median(on_device(graph.replay) for _ in range(REPEATS)) / CALLS


def clocked(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def on_device(act: Callable[[], object]) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    act()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


def read_rate(device: torch.device) -> float:
    """Bytes a second of a sum over 4 GiB; on a CPU over 256 MiB."""
    x = torch.ones(2**30 if device.type == "cuda" else 2**26, device=device)
    return x.numel() * x.itemsize / seconds(lambda _: x.sum(), 1, device)


def host_microseconds(device: torch.device) -> float:
    """Microseconds to enqueue one call."""
    case = Case(name="short", lengths=(64,) * 2)
    way = next(iter(ways(case, device).values()))()
    way(0)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e6 * clocked(lambda: [way(0) for _ in range(200)]) / 200


def time_merging(device: torch.device) -> float:
    """Microseconds to merge the partials of 8 ranks, of 8 sequences."""
    demand = Demand(device=device.type, dtype=torch.bfloat16, head_dim_qk=DIM, head_dim_v=DIM, softcap=0.0,
                    lse_gradient=False)  # fmt: skip
    kernel, records = choose_decode(demand), random((8, 8, HEADS, DIM + 2), device)
    parts, lses = records[..., :DIM], records.view(torch.float32)[..., DIM // 2]
    lses.normal_()
    out, lse = torch.empty_like(parts[0]), torch.empty_like(lses[0])
    return 1e6 * seconds(lambda _: kernel.merge(parts, lses, out, lse), 1, device)


def rows_of(case: Case, rate: float, device: torch.device) -> list[dict[str, Any]]:
    rows = []
    for name, make in ways(case, device).items():
        second = seconds(make(), case.layers, device)
        moved = case.nbytes / second
        row = {"case": case.name, "kernel": name, "us": round(1e6 * second, 1), "tb_per_s": round(moved / 1e12, 3)}
        rows.append({**row, "share": round(moved / rate, 3)})
    return rows


def show(facts: dict[str, Any], rows: list[dict[str, Any]], console: Console) -> None:
    table = Table("sequences × tokens", "kernel", "µs", "TB/s", "of the read rate")
    for row in rows:
        cells = (
            row["case"],
            row["kernel"],
            f"{row['us']:.1f}",
            f"{row['tb_per_s']:.2f}",
            f"{100 * row['share']:.0f} %",
        )
        table.add_row(*cells)
    console.print(table)
    console.print(
        f"read rate {facts['read_tb_per_s']} TB/s; host {facts['host_us']} µs a call; "
        f"merging the partials of 8 ranks, 8 sequences: {facts['merge_us']} µs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    kind = parser.parse_args().device
    device = torch.device(kind, 0 if kind == "cuda" else None)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("how_fast_is_decoding needs a CUDA device, and torch sees none; --device cpu times small sizes here")
    facts = start_result(
        "how_fast_is_decoding", device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    )
    rate = read_rate(device)
    facts |= {"read_tb_per_s": round(rate / 1e12, 3), "host_us": round(host_microseconds(device), 1)}
    facts["merge_us"] = round(time_merging(device), 1)
    rows = [row for case in cases(device.type) for row in rows_of(case, rate, device)]
    show(facts, rows, Console())
    print(json.dumps({**facts, "rows": rows}))


if __name__ == "__main__":
    main()
