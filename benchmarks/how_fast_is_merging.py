"""How fast is merging? Compares torch's operations with the fused kernels: bytes that must move, divided by the time.

32 heads × 128, float32 sums in the layout of buffers, bfloat16 partials as a kernel returns them. Measurements
alternate, so that a change of clocks affects both. Prints a table and a JSON line. Needs a CUDA device; `--device cpu`
times small sizes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from run_facts import start_result
from torch import Tensor

from mesh_attention.kernels.base import Merging
from mesh_attention.kernels.select import MERGINGS

HEADS, DIM = 32, 128
TOKENS = {"cuda": (4096, 8192, 16384, 32768, 65536), "cpu": (128, 512)}
REPEATS = {"cuda": 30, "cpu": 5}
HOST_CALLS = 200

Operation = Callable[[Merging], None]


def operations(tokens: int, device: torch.device) -> dict[str, tuple[Operation, int]]:
    """The operations to time, and the fewest bytes that each must read and write."""
    raw = torch.randn(tokens, 1, HEADS * (DIM + 2), device=device)
    total = raw[..., 2 * HEADS :].view(tokens, 1, HEADS, DIM).permute(1, 2, 0, 3)
    total_lse = raw.view(torch.float64)[..., :HEADS].permute(1, 2, 0).normal_()
    partial = torch.randn(1, tokens, HEADS, DIM, device=device).to(torch.bfloat16).transpose(1, 2)
    lse = torch.randn(1, HEADS, tokens, device=device)
    rounded = torch.empty_like(partial)
    wide, narrow, statistic = nbytes(total), nbytes(partial), nbytes(lse)
    return {
        "start_output": (
            lambda way: way.start_output(total, total_lse, partial, lse),
            wide + narrow + 3 * statistic,
        ),
        "merge_output": (
            lambda way: way.merge_output(total, total_lse, partial, lse),
            2 * wide + narrow + 5 * statistic,
        ),
        "add": (lambda way: way.add(total, partial), 2 * wide + narrow),
        "copy to bfloat16": (lambda way: way.copy(rounded, total), wide + narrow),
    }


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def seconds(act: Callable[[], None], device: torch.device) -> float:
    """Seconds of one operation, by the clock of the device if it has one."""
    if device.type != "cuda":
        start = time.perf_counter()
        act()
        return time.perf_counter() - start
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    act()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


def time_operations(tokens: int, device: torch.device, ways: list[Merging]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, (operation, moved) in operations(tokens, device).items():
        taken: dict[str, list[float]] = {way.name: [] for way in ways}
        for repeat in range(REPEATS[device.type] + 3):
            for way in ways:
                second = seconds(lambda operation=operation, way=way: operation(way), device)  # type: ignore[misc]
                if repeat >= 3:  # compiling and warming up
                    taken[way.name].append(second)
        for way in ways:
            middle = statistics.median(taken[way.name])
            rows.append(
                {
                    "tokens": tokens,
                    "operation": name,
                    "way": way.name,
                    "us": round(1e6 * middle, 1),
                    "gb_per_s": round(moved / middle / 1e9, 1),
                }
            )
    return rows


def host_microseconds(device: torch.device, ways: list[Merging]) -> dict[str, float]:
    """Microseconds to enqueue one merge, which gives the device almost nothing to do."""
    merge, _ = operations(16, device)["merge_output"]
    cost = {}
    for way in ways:
        merge(way)
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            merge(way)
        cost[way.name] = round(1e6 * (time.perf_counter() - start) / HOST_CALLS, 1)
    return cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = torch.device(parser.parse_args().device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("how_fast_is_merging needs a CUDA device, and torch sees none; --device cpu times small sizes here")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    facts = start_result("how_fast_is_merging", device=name)
    ways = [way for way in MERGINGS if way.unsupported_reason(device) is None]
    sizes = track(TOKENS[device.type], console=Console(stderr=True), transient=True)
    rows = [row for tokens in sizes for row in time_operations(tokens, device, ways)]
    host = host_microseconds(device, ways)
    table = Table("tokens", "operation", "way", "µs", "GB/s")
    for row in rows:
        table.add_row(*map(str, row.values()))
    console = Console()
    console.print(table)
    console.print("host, µs a merge: " + ", ".join(f"{name} {cost}" for name, cost in host.items()))
    print(json.dumps({**facts, "host_us": host, "rows": rows}))


if __name__ == "__main__":
    main()
