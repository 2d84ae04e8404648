"""One rank of `mesh-attention calibrate`: it joins the others and measures. Prints nothing, draws nothing.

Torch is imported inside the functions, because importing the command line must not import it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mesh_attention.calibration.fit import Measurement
from mesh_attention.cli.demo_worker import loopback
from mesh_attention.cli.progress import Report
from mesh_attention.errors import UsageError
from mesh_attention.problem import Problem
from mesh_attention.units import count

if TYPE_CHECKING:
    import torch

    from mesh_attention.comm.base import Comm


def work(setting: Problem, ranks_per_node: int, progress_file: Path) -> Measurement:
    """One of the processes that were started on this machine for this. The launcher has set the environment."""
    import torch

    ranks = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))  # the ranks share this machine's cores
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    with joined() as (comm, device):

        def report(doing: str, fraction: float) -> None:
            if comm.rank == 0:
                with progress_file.open("a", encoding="utf-8") as file:
                    file.write(f"{fraction} {doing}\n")

        return measured(setting, comm, device, ranks_per_node=ranks_per_node, report=report)


@contextmanager
def joined() -> Iterator[tuple[Comm, torch.device]]:
    """This rank's end of the group that the environment describes: NCCL and a GPU each where there are, else Gloo."""
    import torch
    import torch.distributed as dist

    from mesh_attention.comm.torch_dist import TorchComm

    device = torch.device("cpu")
    if torch.cuda.is_available():
        check_gpus(ranks_here())
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        yield TorchComm(), device
    finally:
        dist.destroy_process_group()


def measured(setting: Problem, comm: Comm, device: torch.device, *, ranks_per_node: int, report: Report) -> Measurement:
    from mesh_attention.calibration.measurement import measure

    return measure(
        setting, comm=comm, device=device, ranks_per_node=ranks_per_node, ranks_here=ranks_here(), report=report
    )


def ranks_here() -> int:
    """How many processes of the group share this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def check_gpus(ranks: int) -> None:
    """Where there are GPUs, ranks that share one would measure neither it nor what joins two."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus and ranks > gpus:
        fewer = "--ranks 1 with --links-of, since one rank has no links" if gpus == 1 else f"--ranks {gpus}"
        raise UsageError(
            f"{ranks} ranks, but this machine has {count(gpus, 'GPU')}: expected one for each rank; give {fewer}, or "
            "set CUDA_VISIBLE_DEVICES= to measure the CPU"
        )
