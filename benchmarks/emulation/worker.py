"""One rank of `how_fast_on_a_slow_network`: it checks each method, calibrates, and times all methods in rounds.

    python -m emulation.worker JOB FOLDER       # a Job as JSON; rank 0 leaves `measured.json` in the folder

`emulation.network.Cluster` has set the environment.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from emulation.calibration import calibrate
from emulation.contenders import Job, Options, layout_of
from mesh_attention import MeshAttention
from mesh_attention.arguments import CallOptions
from mesh_attention.comm.base import Comm, Parcel, Sharing, Work
from mesh_attention.comm.torch_dist import TorchComm
from mesh_attention.execution import sharding
from mesh_attention.execution.autograd import run_forward
from mesh_attention.plan.assignment import Axis
from mesh_attention.plan.layout import TypicalTurn
from mesh_attention_lab.cli.demo_worker import LARGEST_ERROR, make_inputs, single_process_attention

CALIBRATION_NOTES = 6


class WrongResultError(AssertionError):
    """A method's result is not that of single-process attention."""


@dataclass
class Silent:
    """Moves nothing: a post is done at once, and what would be received stays as it was. Results are garbage."""

    inner: Comm

    def __post_init__(self) -> None:
        self.rank, self.size, self.is_capturable = self.inner.rank, self.inner.size, True  # so it marks nothing
        self.work = Done()

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        return self.work

    def share(self, text: str) -> Sharing:
        return self.inner.share(text)


class Done:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class Timed(NamedTuple):
    """One call on one rank; the bytes are those its whole node sent meanwhile."""

    seconds: float
    sent_nbytes: int


def main() -> None:
    job, folder = Job(**json.loads(sys.argv[1])), Path(sys.argv[2])
    torch.set_num_threads(1)  # the ranks share this machine's cores
    dist.init_process_group("gloo", timeout=timedelta(seconds=job.timeout_s))
    is_first = dist.get_rank() == 0
    steps = 1 + len(job.methods) * (1 + 2 * job.rounds) + CALIBRATION_NOTES
    # Drawn between measurements only: a drawing thread would take its share of the cores.
    bar = Progress(console=Console(stderr=True), transient=True, auto_refresh=False, disable=not is_first)
    with bar:
        task = bar.add_task("", total=steps)

        def note(activity: str) -> None:
            bar.update(task, description=activity, advance=1, refresh=True)

        measured = measure(job, folder, note)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, measured)
    if is_first:
        folder.joinpath("measured.json").write_text(json.dumps(everybody))
    dist.barrier()  # a rank that leaves while another still speaks to it ends that one
    # A MeshAttention and its engines refer to each other, and hold the group. If they still did when the interpreter
    # goes down, Gloo's threads would not have been joined, and one that drops a tensor then aborts the process.
    gc.collect()
    dist.destroy_process_group()


def measure(job: Job, folder: Path, note: Callable[[str], None]) -> dict[str, Any]:
    """What this rank saw; times and bytes are by method and round."""
    note("attention in one process")
    comm = TorchComm()
    real, silent = ({name: _attention(c, o) for name, o in job.methods.items()} for c in (comm, Silent(comm)))
    given, truth = own_tensors(job, folder, next(iter(real.values())))
    errors = {}
    for name, attention in real.items():
        note(f"{name}: compare")
        errors[name] = check(name, attend(attention, given, job), truth)
    for attention in silent.values():
        attend(attention, given, job)  # plans and programs are made the first time
    calibration = calibrate(job, note)
    times: dict[str, list[Timed]] = {name: [] for name in job.methods}
    floors: dict[str, list[Timed]] = {name: [] for name in job.methods}
    names = list(job.methods)
    for number in range(job.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            for what, attentions, seen in (("", real, times), (", moving nothing", silent, floors)):
                note(f"round {number + 1}: {name}{what}")
                seen[name].append(timed(partial(attend, attentions[name], given, job)))
    return {"errors": errors, "times": times, "floors": floors, "calibration": calibration}


def _attention(comm: Comm, options: Options) -> MeshAttention:
    # JSON has lists where `keep` and `tile` are tuples.
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    return MeshAttention(comm, layout="zigzag", **given)


def own_tensors(job: Job, folder: Path, attention: MeshAttention) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's tokens of Q, K, V, dO and of O, dQ, dK, dV, which rank 0 computes alone for all.

    They go through a file: over the emulated network they would take longer than all the rest.
    """
    path, problem = folder / "tensors.pt", job.problem(attention.ranks)
    if attention.rank == 0:
        torch.set_num_threads(os.cpu_count() or 1)
        inputs = make_inputs(problem)
        torch.save([inputs, single_process_attention(problem, inputs)], path)
        torch.set_num_threads(1)
    dist.barrier()
    wholes = torch.load(path, mmap=True)

    def own(whole: Tensor) -> Tensor:
        axis: Axis = "row" if whole.shape[1] == problem.seq_q else "col"
        layout, rank = layout_of(problem).along(axis, problem), attention.rank
        return sharding.shard(whole, layout, rank, ranks=attention.ranks).clone()

    (q, k, v, d_out), truth = ([own(whole) for whole in tensors] for tensors in wholes)
    return [*(tensor.requires_grad_(job.backward) for tensor in (q, k, v)), d_out], truth


def attend(attention: MeshAttention, given: Sequence[Tensor], job: Job) -> list[Tensor]:
    """O; and with backward dQ, dK and dV."""
    q, k, v, d_out = given
    if job.cached:
        options = CallOptions(causal=True, seq_len=job.seq, seq_len_k=job.cached + job.seq)
        engine = attention.calls.engine([(q, k, v)], options, layout=TypicalTurn(), gradient=False)
        return [run_forward(engine, [q, k, v])[0][0]]
    out = attention(q, k, v, causal=True, seq_len=job.seq)
    return [out.detach(), *(torch.autograd.grad(out, (q, k, v), d_out) if job.backward else ())]


def check(name: str, results: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The largest error of any rank, relative to the largest value there; raises on all ranks if it is too large."""
    errors = [float((ours - due).abs().max() / due.abs().max()) for ours, due in zip(results, truth, strict=False)]
    everybody: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybody, errors)
    wrong = [rank for rank, errors in enumerate(everybody) if not all(error <= LARGEST_ERROR for error in errors)]
    if wrong:
        raise WrongResultError(f"{name} is wrong on ranks {wrong}: relative errors {[everybody[r] for r in wrong]}")
    return max(map(max, everybody))


def timed(call: Callable[[], object]) -> Timed:
    dist.barrier()
    before = _sent_nbytes()
    dist.barrier()  # no rank of this node sends before the counter is read
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    dist.barrier()
    return Timed(seconds, _sent_nbytes() - before)


def _sent_nbytes() -> int:
    return int(Path("/sys/class/net", os.environ["NETNS_NIC"], "statistics/tx_bytes").read_text())


if __name__ == "__main__":
    main()
