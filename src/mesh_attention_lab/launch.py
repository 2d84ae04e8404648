"""Processes on this machine, and the group that a launcher's environment describes. Torch is imported when called."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh_attention.errors import MeshAttentionError, UsageError
from mesh_attention.units import Progress, count

if TYPE_CHECKING:
    import torch

    from mesh_attention.comm.base import Comm

POLL_S = 0.2


class WorkerError(MeshAttentionError):
    """A process that was started here failed; the message names its rank and shows its traceback."""


def run_processes(function: Callable[..., Any], *arguments: Any, ranks: int, report: Progress) -> list[Any]:
    """Results of ``function(*arguments, progress_file)`` on each rank, started by torchrun's elastic launcher.

    The function must be importable by name. What it writes with `note_progress` is reported.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # a failure is shown below, once
    can_fork = "forkserver" in multiprocessing.get_all_start_methods()
    if can_fork:  # the processes are forked from one that has imported torch
        multiprocessing.set_forkserver_preload(["torch.distributed", function.__module__])
    with tempfile.TemporaryDirectory(prefix="mesh-attention-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=Path(folder).name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            start_method="forkserver" if can_fork else "spawn",
            # Gloo writes to stdout, which is for the results.
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=Std.ALL),
        )
        progress_file = Path(folder) / "progress"
        with _followed(progress_file, report):
            try:
                results = elastic_launch(config, function)(*arguments, progress_file)
            except ChildFailedError as error:
                rank, failure = error.get_first_failure()
                raise WorkerError(f"rank {rank} failed: {_traceback(failure.message)}") from error
            except SignalException as error:
                raise KeyboardInterrupt from error
    return [results[rank] for rank in range(ranks)]


def note_progress(progress_file: Path, activity: str, fraction: float) -> None:
    """Report from a process that `run_processes` started."""
    with progress_file.open("a", encoding="utf-8") as file:
        file.write(f"{fraction} {activity}\n")


def _traceback(message: str | dict[str, Any]) -> str:
    """Torch returns a dictionary if the process could still write one, or else a line."""
    return message if isinstance(message, str) else str(message["extraInfo"]["py_callstack"]).rstrip()


@contextmanager
def _followed(path: Path, report: Progress) -> Iterator[None]:
    """Reports the last line of a growing file until the block ends."""
    is_over = threading.Event()

    def follow() -> None:
        while not is_over.wait(POLL_S):
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
            if lines and lines[-1].endswith("\n"):
                fraction, _, activity = lines[-1].strip().partition(" ")
                report(activity, float(fraction))

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield
    finally:
        is_over.set()
        follower.join()


# The group of this process


@contextmanager
def joined_group(*, use_gpus: bool = True, is_local: bool = False) -> Iterator[tuple[Comm, torch.device]]:
    """This rank in the group that the environment describes: NCCL with a GPU for each rank, or else Gloo.

    `is_local` keeps Gloo on the loopback interface, for ranks that are all on this machine.
    """
    import torch
    import torch.distributed as dist

    from mesh_attention.comm.torch_dist import TorchComm

    if is_local:
        names = [name for _, name in socket.if_nameindex()]
        os.environ["GLOO_SOCKET_IFNAME"] = next(name for name in ("lo", "lo0") if name in names)
    device = torch.device("cpu")
    if use_gpus and torch.cuda.is_available():
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


def ranks_here() -> int:
    """Number of processes of the group that share this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def check_gpus(ranks: int) -> None:
    """Raise where ranks would share a GPU."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus and ranks > gpus:
        raise UsageError(
            f"{ranks} ranks, but this machine has {count(gpus, 'GPU')}: expected one for each rank; use "
            f"{count(gpus, 'rank')}, or set CUDA_VISIBLE_DEVICES= to use the CPU"
        )
