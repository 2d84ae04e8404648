"""A pool of worker processes with a Gloo group, kept between tests.

    with RankPool(8) as pool:
        results = pool.run(3, my_function, argument)      # my_function(group, argument) on ranks 0, 1, 2

The function must be importable by name. An exception on any rank is raised here, with its traceback.
Where the system can fork, workers are forked from a server that has imported torch once.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

START_S = 120
"""Seconds that the workers may take to import torch and find each other."""
SLOW_IMPORTS = (
    *("mesh_attention.api", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    *("transformers.modeling_utils", "hypothesis", "pytest"),
)
"""Imported once for all workers if this process has imported them."""


def process_context() -> ForkServerContext | SpawnContext:
    """A forkserver with torch imported, or spawn if the system has no fork."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", *(name for name in SLOW_IMPORTS if name in sys.modules)])
    return context


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


class RankError(AssertionError):
    """A rank raised; `errors` holds (rank, exception type name, message) of all that did."""

    def __init__(self, errors: list[tuple[int, str, str, str]]) -> None:
        super().__init__("\n".join(f"rank {rank}: {name}: {message}\n{trace}" for rank, name, message, trace in errors))
        self.errors = [(rank, name, message) for rank, name, message, _ in errors]


class RankPool:
    """Worker processes 0 to size - 1; the first few of them, any number, can run a function as one group."""

    def __init__(self, size: int, *, group_timeout_s: float = 60.0) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="mesh-attention-pool-")
        context = process_context()
        self._workers: list[tuple[Any, Connection]] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, size, str(Path(self._folder.name) / "store"), group_timeout_s, dict(os.environ))
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        for rank in range(size):
            self._receive(rank, time.monotonic() + START_S)

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 120.0) -> list[Any]:
        """Results of the function on each of the first `ranks` ranks."""
        for _, connection in self._workers[:ranks]:
            connection.send((ranks, function, arguments))
        deadline = time.monotonic() + timeout_s
        answers = [self._receive(rank, deadline) for rank in range(ranks)]
        errors = [(rank, *answer[1]) for rank, answer in enumerate(answers) if answer[0] == "error"]
        if errors:
            raise RankError(errors)
        return [answer[1] for answer in answers]

    def _receive(self, rank: int, deadline: float) -> Any:
        process, connection = self._workers[rank]
        while not connection.poll(0.2):
            if not process.is_alive():
                return "error", ("ProcessDied", f"exit code {process.exitcode}", "")
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} has not answered")
        try:
            return connection.recv()
        except EOFError:
            return "error", ("ProcessDied", f"exit code {process.exitcode}", "")

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._folder.cleanup()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _work(
    connection: Connection, rank: int, size: int, store: str, group_timeout_s: float, environment: dict[str, str]
) -> None:
    os.environ.update(environment)  # the server's is as old as the server
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=group_timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    groups = {n: dist.new_group(list(range(n)), timeout=timeout) for n in range(1, size + 1)}
    connection.send(("ready", None))
    while True:
        try:
            ranks, function, arguments = connection.recv()
        except (EOFError, OSError):
            return
        try:
            connection.send(("result", function(groups[ranks], *arguments)))
        except Exception as error:
            connection.send(("error", (type(error).__name__, str(error), traceback.format_exc())))
