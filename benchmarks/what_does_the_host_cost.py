"""What does a call cost the host? Times each pass until the call returns, over NCCL with all ranks on one GPU.

    python benchmarks/what_does_the_host_cost.py                                    # 4 ranks of 1024 tokens; 30 s
    python benchmarks/what_does_the_host_cost.py --choices "mesh 2x2" --profile     # and where the time goes
    python benchmarks/what_does_the_host_cost.py --device cpu --tokens 64 --rounds 5

16 heads of 128, bfloat16, causal. The device is idle before each pass. Waiting for it afterwards is not counted; "until
done" includes it. "In a row" is the mean of several passes of which none waits for the device, as the layers of a model
make them: then what the host needs is in its caches. On the CPU a pass computes and waits for transfers before it
returns, so there only the profile is of use. With --profile, rank 0 prints where its host spends the time of a pass, or
writes it to a folder. Prints a table and a JSON line.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from one_gpu import device_name, free_address, join_group, kernels_side_by_side, meet, synchronize
from rich.console import Console
from rich.table import Table
from run_facts import start_result
from torch import Tensor

from mesh_attention import MeshAttention

HEADS, DIM = 16, 128
WARM_UP = 5
IN_A_ROW = 8
DEFAULT = "default"
CHOICES = ("mesh 2x2", "ulysses 2 + mesh 2x1", "ulysses", "ring")
PASSES = ("forward", "backward")
LINES = 35
"""Functions that a profile lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank is told."""

    ranks: int
    tokens: int
    kind: str
    rounds: int
    choices: tuple[str, ...]
    cuda_graphs: bool
    profile: str | None


class Timed:
    """One choice on this rank: seconds of each pass, until the call returned and until the device was done."""

    def __init__(self, choice: str, device: torch.device, job: Job) -> None:
        chosen = {} if choice == DEFAULT else {"choice": choice}
        self.attention = MeshAttention(cuda_graphs=job.cuda_graphs, **chosen)  # type: ignore[arg-type]
        self.device = device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        made = [torch.randn(1, job.tokens, HEADS, DIM, device=device, dtype=dtype) for _ in range(4)]
        self.inputs, self.d_out = [tensor.requires_grad_() for tensor in made[:3]], made[3]
        self.forget()

    def forget(self) -> None:
        self.returned: dict[str, list[float]] = {name: [] for name in PASSES}
        self.done: dict[str, list[float]] = {name: [] for name in PASSES}
        self.in_a_row: dict[str, list[float]] = {name: [] for name in PASSES}

    def forward(self) -> Tensor:
        out: Tensor = self.attention(*self.inputs, causal=True)
        return out

    def backward(self, out: Tensor) -> None:
        torch.autograd.grad(out, self.inputs, self.d_out)

    def run(self) -> None:
        meet(self.device)
        start = time.perf_counter()
        out = self.forward()
        self._note("forward", start)
        meet(self.device)
        start = time.perf_counter()
        self.backward(out)
        self._note("backward", start)
        self._run_in_a_row()

    def _run_in_a_row(self) -> None:
        meet(self.device)
        start = time.perf_counter()
        outs = [self.forward() for _ in range(IN_A_ROW)]
        self.in_a_row["forward"].append((time.perf_counter() - start) / IN_A_ROW)
        meet(self.device)
        start = time.perf_counter()
        for out in outs:
            self.backward(out)
        self.in_a_row["backward"].append((time.perf_counter() - start) / IN_A_ROW)
        synchronize(self.device)

    def _note(self, name: str, start: float) -> None:
        self.returned[name].append(time.perf_counter() - start)
        synchronize(self.device)
        self.done[name].append(time.perf_counter() - start)

    def profile(self, profiles: dict[str, cProfile.Profile]) -> None:
        """One call under a profiler for each pass; on the other ranks there are none, and the call is plain."""
        meet(self.device)
        if profiles:
            out = profiles["forward"].runcall(self.forward)
            _follow_backward(out, self.inputs, profiles["backward"])
        else:
            out = self.forward()
        meet(self.device)
        self.backward(out)


def _follow_backward(out: Tensor, inputs: Sequence[Tensor], profile: cProfile.Profile) -> None:
    """Profile the thread that runs backward, from the gradient of the output to the first of the inputs'.

    On a GPU this is a thread of autograd's own, which no profiler started here would see.
    """
    handles = [tensor.register_hook(lambda gradient: _stop()) for tensor in inputs]
    out.register_hook(lambda gradient: profile.enable())

    def _stop() -> None:
        profile.disable()
        for handle in handles:
            handle.remove()


def measure(rank: int, address: str, file: Path, job: Job) -> None:
    device = join_group(rank, job.ranks, address, job.kind)
    found = {choice: _measured(choice, rank, device, job) for choice in job.choices}
    everybody: list[Any] = [None] * job.ranks
    dist.all_gather_object(everybody, found)
    if rank == 0:
        file.write_text(json.dumps({"device": device_name(device), "ranks": everybody}))
    dist.barrier()
    gc.collect()  # NCCL waits for graphs with its transfers
    dist.destroy_process_group()


def _measured(choice: str, rank: int, device: torch.device, job: Job) -> dict[str, dict[str, float]]:
    timed = Timed(choice, device, job)
    for _ in range(WARM_UP):
        timed.run()
    timed.forget()
    for _ in range(job.rounds):
        timed.run()
    if job.profile is not None:
        profiles = {name: cProfile.Profile() for name in PASSES} if rank == 0 else {}
        for _ in range(job.rounds):
            timed.profile(profiles)
        for name, profile in profiles.items():
            _show(f"{choice}, {name}", profile, job)
    return {
        name: {
            "returned": median(timed.returned[name]),
            "in a row": median(timed.in_a_row[name]),
            "done": median(timed.done[name]),
        }
        for name in PASSES
    }


def _show(title: str, profile: cProfile.Profile, job: Job) -> None:
    text = profile_text(title, profile, job.rounds)
    if job.profile:
        name = title.replace("×", "x").replace(",", "").replace(" ", "_")
        Path(job.profile, f"{name}.txt").write_text(text)
    else:
        print(text, flush=True)


def profile_text(title: str, profile: cProfile.Profile, calls: int) -> str:
    """The functions that take longest, by their own time and with what they call; microseconds a call."""
    stats = pstats.Stats(profile, stream=StringIO()).stats  # type: ignore[attr-defined]
    lines = []
    for order, index in (("own time", 2), ("time with callees", 3)):
        lines.append(f"{title}: {LINES} functions by {order}; per pass: calls, own µs, µs with callees")
        for (file, line, function), numbers in sorted(stats.items(), key=lambda item: -item[1][index])[:LINES]:
            place = f"{'/'.join(Path(file).parts[-2:])}:{line} {function}" if line else function
            _, count, own, whole = numbers[:4]
            lines.append(f"{count / calls:8.1f} {1e6 * own / calls:9.1f} {1e6 * whole / calls:9.1f}  {place[:88]}")
    return "\n".join(lines) + "\n"


def main() -> None:
    given = _arguments()
    job = Job(
        ranks=given.ranks,
        tokens=given.tokens,
        kind=given.device,
        rounds=given.rounds,
        choices=tuple(given.choices),
        cuda_graphs=given.cuda_graphs,
        profile=given.profile,
    )
    if given.profile:
        Path(given.profile).mkdir(parents=True, exist_ok=True)
    with kernels_side_by_side(given.device) as has_mps, tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "measured.json")
        torch.multiprocessing.spawn(measure, args=(free_address(), file, job), nprocs=job.ranks)
        measured = json.loads(file.read_text())
    facts = start_result("what_does_the_host_cost", device=measured["device"])
    rows = [_row(choice, name, measured["ranks"]) for choice in job.choices for name in PASSES]
    table = Table(
        *("choice", "pass", "rank 0, ms", "mean of ranks, ms", "slowest, ms", "in a row, ms", "until done, ms"),
        title=f"{job.ranks} ranks of {job.tokens} tokens{', CUDA graphs' if job.cuda_graphs else ''}",
    )
    for row in rows:
        times = (f"{row[name]:.2f}" for name in ("rank0_ms", "mean_ms", "slowest_ms", "in_a_row_ms", "done_ms"))
        table.add_row(row["choice"], row["pass"], *times)
    Console(width=110).print(table)
    print(json.dumps({**facts, **asdict(job), "mps": has_mps, "rows": rows}))


def _row(choice: str, name: str, ranks: Sequence[Any]) -> dict[str, Any]:
    returned = [1e3 * rank[choice][name]["returned"] for rank in ranks]
    return {
        "choice": choice,
        "pass": name,
        "rank0_ms": returned[0],
        "mean_ms": mean(returned),
        "slowest_ms": max(returned),
        "in_a_row_ms": mean(1e3 * rank[choice][name]["in a row"] for rank in ranks),
        "done_ms": max(1e3 * rank[choice][name]["done"] for rank in ranks),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="a rank")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--choices", nargs="+", default=CHOICES, metavar="CHOICE", help='such as "mesh 2x2" or default')
    parser.add_argument("--cuda-graphs", action="store_true")
    parser.add_argument("--profile", nargs="?", const="", metavar="FOLDER", help="where the time goes, on rank 0")
    return parser.parse_args()


if __name__ == "__main__":
    main()
