"""Processes on this machine, and the group that a launcher's environment describes. Torch is imported when called."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh_attention.errors import MeshAttentionError, UsageError
from mesh_attention.units import count

if TYPE_CHECKING:
    import torch

    from mesh_attention.comm.base import Comm


class WorkerError(MeshAttentionError):
    """A process that was started here failed; the message names its rank and shows its traceback."""


def run_processes(function: Callable[..., Any], *arguments: Any, ranks: int) -> list[Any]:
    """Results of a function on each rank, started by torchrun's elastic launcher. It must be importable by name."""
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
        try:
            results = elastic_launch(config, function)(*arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise WorkerError(f"rank {rank} failed: {_traceback(failure.message)}") from error
        except SignalException as error:
            raise KeyboardInterrupt from error
    return [results[rank] for rank in range(ranks)]


def _traceback(message: str | dict[str, Any]) -> str:
    """Torch returns a dictionary if the process could still write one, or else a line."""
    return message if isinstance(message, str) else str(message["extraInfo"]["py_callstack"]).rstrip()


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
