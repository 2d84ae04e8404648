"""Ranks of a benchmark: processes that share one GPU over NCCL, or the CPU over Gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from shutil import which

import torch
import torch.distributed as dist

MPS = "nvidia-cuda-mps-control"
MPS_S = 20
"""Seconds that starting or stopping CUDA's MPS may take."""


@contextmanager
def kernels_side_by_side(kind: str) -> Iterator[bool]:
    """Run CUDA's MPS, so that kernels of several processes run at once; False if there is none.

    Processes started inside use it. This process must not have used CUDA before.
    """
    if kind != "cuda" or which(MPS) is None:
        yield False
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for place in places.values():
            os.mkdir(place)
        os.environ.update(places)
        try:
            yield _control("-d").returncode == 0
        finally:
            try:
                _control(text="quit\n")
            except subprocess.TimeoutExpired:
                print(f"{MPS} has not stopped after {MPS_S} s; stop it by hand: echo quit | {MPS}")
            for name in places:
                del os.environ[name]


def _control(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    # Not through pipes: the service would hold them open.
    quiet = subprocess.DEVNULL
    return subprocess.run([MPS, *arguments], input=text, text=True, stdout=quiet, stderr=quiet, timeout=MPS_S)


def free_address() -> str:
    """Where a group can meet."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"tcp://127.0.0.1:{server.getsockname()[1]}"


def join_group(rank: int, ranks: int, address: str, kind: str, *, timeout_s: float = 60.0) -> torch.device:
    """Make this process a rank of the default group; returns its device."""
    share_one_gpu(rank)
    torch.set_num_threads(1)  # the ranks share this machine's cores
    is_cuda = kind == "cuda"
    device = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        init_method=address,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if is_cuda else None,
    )
    return device


def synchronize(device: torch.device) -> None:
    """Wait for everything that this process has queued on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def meet(device: torch.device) -> None:
    """Wait until all ranks are here and their devices are idle."""
    synchronize(device)
    dist.barrier()
    synchronize(device)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def share_one_gpu(rank: int) -> None:
    """Make NCCL see this process as a host of its own, so that ranks can share a GPU; call it before making a group."""
    os.environ.update(
        NCCL_HOSTID=f"host{rank}",
        NCCL_NET="Socket",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_MAX_NCHANNELS="2",
        NCCL_IB_DISABLE="1",
        NCCL_P2P_DISABLE="1",
        NCCL_SHM_DISABLE="1",
    )
