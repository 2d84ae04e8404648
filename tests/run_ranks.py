"""A pool of worker processes with a group, kept between tests.

    with RankPool(8) as pool:
        results = pool.run(3, my_function, argument)      # my_function(group, argument) on ranks 0, 1, 2

The function must be importable by name. An exception on any rank is raised here, with its traceback.
The group is Gloo's. With `backend="nccl"` it is NCCL's, and all ranks share the first GPU.
Where the system can fork, workers of Gloo are forked from a server that has imported torch once.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from types import TracebackType
from typing import Any, NamedTuple

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


class RankError(AssertionError):
    """A rank raised; `errors` holds (rank, exception type name, message) of all that did."""

    def __init__(self, errors: list[tuple[int, str, str, str]]) -> None:
        super().__init__("\n".join(f"rank {rank}: {name}: {message}\n{trace}" for rank, name, message, trace in errors))
        self.errors = [(rank, name, message) for rank, name, message, _ in errors]


Workers = list[tuple[Any, Connection]]


def start_ranks(context: Any, ranks: int, target: Callable[..., None], *arguments: Any) -> Workers:
    """Processes that run ``target(connection, rank, *arguments)``, each with our end of its connection."""
    workers: Workers = []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, rank, *arguments), daemon=True)
        process.start()
        theirs.close()
        workers.append((process, ours))
    return workers


def end_ranks(workers: Workers) -> None:
    for process, connection in workers:
        connection.close()
        process.kill()
        process.join()


class RankPool:
    """Worker processes 0 to size - 1; the first few of them, any number, can run a function as one group.

    `sizes` says which numbers, if not all. `environment` is added to that of the workers, before they import torch.
    With `on_gpu`, which NCCL implies, workers can use CUDA.
    """

    def __init__(
        self,
        size: int,
        *,
        backend: str = "gloo",
        sizes: Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
        group_timeout_s: float = 60.0,
        on_gpu: bool = False,
    ) -> None:
        self.size = size
        self.is_whole = True
        """False once a rank raised or did not answer, or a call on a group failed: other functions would fail, too."""
        self._folder = tempfile.TemporaryDirectory(prefix="mesh-attention-pool-")
        # A process that was forked cannot use CUDA if the server looked for a device.
        context = multiprocessing.get_context("spawn") if on_gpu or "nccl" in backend else process_context()
        world = _World(size, backend, tuple(sizes or range(1, size + 1)), f"{self._folder.name}/store", group_timeout_s)
        self._workers = start_ranks(context, size, _work, world, {**os.environ, **(environment or {})})
        try:
            deadline = time.monotonic() + START_S
            self._results([self._receive(rank, deadline) for rank in range(size)])
        except BaseException:
            self.close()
            raise

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 120.0) -> list[Any]:
        """Results of the function on each of the first `ranks` ranks."""
        was_whole, self.is_whole = self.is_whole, False
        for _, connection in self._workers[:ranks]:
            connection.send((ranks, function, arguments))
        deadline = time.monotonic() + timeout_s
        answers = [self._receive(rank, deadline) for rank in range(ranks)]
        self.is_whole = was_whole and all(answer[0] == "result" for answer in answers)
        return self._results(answers)

    def _results(self, answers: list[Any]) -> list[Any]:
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
        end_ranks(self._workers)
        self._folder.cleanup()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _World(NamedTuple):
    """The group of all workers."""

    size: int
    backend: str
    sizes: tuple[int, ...]
    store: str
    timeout_s: float


def _work(connection: Connection, rank: int, world: _World, environment: dict[str, str]) -> None:
    os.environ.update(environment)  # the server's is as old as the server
    try:
        groups = _join(rank, world)
    except Exception as error:
        connection.send(_told(error))
        return
    connection.send(("ready", None))
    while True:
        try:
            ranks, function, arguments = connection.recv()
        except (EOFError, OSError):
            return
        try:
            result = function(groups[ranks], *arguments)
            connection.send(("failed group" if _has_failed(groups[ranks]) else "result", result))
        except Exception as error:
            connection.send(_told(error))


def _join(rank: int, world: _World) -> dict[int, Any]:
    """The groups of the first few ranks, by their number; this rank is in some of them."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if "nccl" in world.backend:
        from one_gpu import share_one_gpu  # of benchmarks/

        share_one_gpu(rank)
        torch.cuda.set_device(0)
        torch.cuda.synchronize()  # fails now if this process cannot use the GPU
    timeout, store = timedelta(seconds=world.timeout_s), f"file://{world.store}"
    dist.init_process_group(world.backend, init_method=store, rank=rank, world_size=world.size, timeout=timeout)
    return {n: dist.new_group(list(range(n)), timeout=timeout) for n in world.sizes}  # NCCL connects them at first use


def _has_failed(group: Any) -> bool:
    from mesh_attention.session.session import Session

    return Session(group).state.failure is not None


def _told(error: Exception) -> tuple[str, tuple[str, str, str]]:
    return "error", (type(error).__name__, str(error), traceback.format_exc())
