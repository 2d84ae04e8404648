"""Progress of training on stderr, and the file with the loss curve. Only rank 0 shows and writes anything."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mesh_attention.errors import UsageError

LINE_EVERY = 20
"""Steps per line, where stderr is not a terminal."""
HEADER = "step,loss,recall"


class Display:
    """A progress bar on a terminal, otherwise a line every few steps; and one line of the curve for every step."""

    def __init__(self, *, start: int, steps: int, is_shown: bool, curve: Path | None) -> None:
        self.steps = steps
        console = Console(stderr=True)
        self.has_lines = is_shown and not console.is_terminal
        doing = TextColumn("{task.description}", markup=False)
        columns = (doing, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console, disable=not is_shown or self.has_lines)
        self.task = self.bar.add_task("training", total=steps, completed=start)
        self.curve = _opened(curve, start) if is_shown and curve is not None else None
        self.begun_s, self.start, self.last_seq = time.monotonic(), start, 0

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.bar.stop()
        if self.curve is not None:
            self.curve.close()

    def show(self, step: int, *, seq: int, loss: float, recall: float) -> None:
        text = f"{seq} tokens  loss {loss:.4f}  recall {recall:6.1%}"
        self.bar.update(self.task, completed=step + 1, description=text)
        if self.curve is not None:
            print(f"{step},{loss!r},{recall!r}", file=self.curve, flush=True)
        is_due = step % LINE_EVERY == 0 or step + 1 == self.steps or seq != self.last_seq
        self.last_seq = seq
        if self.has_lines and is_due:
            step_s = (time.monotonic() - self.begun_s) / (step + 1 - self.start)
            print(f"step {step + 1:4}/{self.steps}  {text}  {step_s:.2f} s per step", file=sys.stderr, flush=True)


def _opened(path: Path, start: int) -> TextIO:
    """The file, with the lines of an earlier run for the steps before `start`."""
    header, *lines = path.read_text().splitlines() if start and path.is_file() else [HEADER]
    if header != HEADER:
        raise UsageError(
            f"--curve {path} is not the curve of an earlier run: it begins with {header!r}, not {HEADER!r}"
        )
    kept = [line for line in lines if int(line.partition(",")[0]) < start]
    file = path.open("w")
    print(HEADER, *kept, sep="\n", file=file, flush=True)
    return file
