"""The worker processes of one number of ranks, seen from the process that asks them."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from one_gpu import free_address, kernels_side_by_side

from side_by_side.worker import Setup, Task, work

START_S = 180.0
"""Seconds that the workers may take to import torch and find each other."""
LATER_S = 15.0
"""Seconds after the group's own timeout at which the workers are given up; also how long they may take to meet."""
STOP_S = 10.0


class FailedError(RuntimeError):
    """A command failed on some rank. The ranks are in step if all of them have answered."""

    def __init__(self, text: str, *, is_in_step: bool) -> None:
        super().__init__(text)
        self.is_in_step = is_in_step


class Ranks:
    """Workers that are started again, MPS included, when a contender has left them out of step."""

    def __init__(self, size: int, *, kind: str, folders: dict[str, Path], timeout_s: float) -> None:
        self.size, self.kind, self.folders, self.timeout_s = size, kind, folders, timeout_s
        self.task: Task | None = None
        self.device, self.has_mps, self.restarts = "", False, 0
        self._stack = ExitStack()
        self._workers: list[tuple[Any, Connection]] = []
        self._start()

    def ask(self, command: str, *arguments: Any) -> list[Any]:
        """Each rank's answer. After a failure the workers can be asked again, if need be because they are new."""
        try:
            return self._ask(command, *arguments, patience_s=self.timeout_s + LATER_S)
        except FailedError as error:
            if not (error.is_in_step and self._can_meet()):
                self._restart()
            raise

    def pose(self, task: Task) -> None:
        self.task = task
        self.ask("pose", task)

    def close(self) -> None:
        for _, connection in self._workers:
            with suppress(OSError):
                connection.send(None)
        end = time.monotonic() + STOP_S
        for process, connection in self._workers:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
            process.join()
            connection.close()
        self._workers = []
        self._stack.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self._stack = ExitStack()
        self.has_mps = self._stack.enter_context(kernels_side_by_side(self.kind))
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="side-by-side-"))
        setup = Setup(
            ranks=self.size,
            kind=self.kind,
            address=free_address(),
            timeout_s=self.timeout_s,
            folders=self.folders,
            folder=folder,
        )
        context = multiprocessing.get_context("spawn")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, rank, setup), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        self.device = self._answers("start", START_S)[0]

    def _restart(self) -> None:
        self.restarts += 1
        for process, _ in self._workers:
            process.kill()
        self.close()
        self._start()
        if self.task is not None:
            self._ask("pose", self.task, patience_s=START_S)

    def _can_meet(self) -> bool:
        try:
            self._ask("meet", patience_s=LATER_S)
        except FailedError:
            return False
        return True

    def _ask(self, command: str, *arguments: Any, patience_s: float) -> list[Any]:
        try:
            for _, connection in self._workers:
                connection.send((command, *arguments))
        except OSError:
            raise FailedError(f"{command}: a process has ended", is_in_step=False) from None
        return self._answers(command, patience_s)

    def _answers(self, command: str, patience_s: float) -> list[Any]:
        """One answer of each rank. Once a rank has failed, the others are not waited for much longer."""
        end = time.monotonic() + patience_s
        answers: dict[int, tuple[str, Any]] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        while waiting and time.monotonic() < end:
            for connection in wait(list(waiting), timeout=0.2):
                rank = waiting.pop(connection)  # type: ignore[arg-type]
                answers[rank] = self._receive(rank)
                if answers[rank][0] != "done":
                    end = min(end, time.monotonic() + LATER_S)
        for rank in waiting.values():
            answers[rank] = "silent", ("no answer in time", "")
        failures = [(rank, outcome, *what) for rank, (outcome, what) in answers.items() if outcome != "done"]
        if failures:
            _show(failures)
            rank, _, what, _ = failures[0]  # the others may have waited for this one
            others = f", and {len(failures) - 1} more" if len(failures) > 1 else ""
            is_in_step = all(outcome == "failed" for _, outcome, *_ in failures)
            raise FailedError(f"{command} on rank {rank}{others}: {what}", is_in_step=is_in_step)
        return [answers[rank][1] for rank in range(self.size)]

    def _receive(self, rank: int) -> tuple[str, Any]:
        process, connection = self._workers[rank]
        try:
            answer: tuple[str, Any] = connection.recv()
            return answer
        except (EOFError, OSError):
            process.join(1.0)
            return "silent", (f"its process ended with {process.exitcode}", "")


def _show(failures: list[tuple[Any, ...]]) -> None:
    """The end of the first traceback."""
    traces = [trace for *_, trace in failures if trace]
    if traces:
        print(*traces[0].strip().splitlines()[-5:], sep="\n", file=sys.stderr, flush=True)
