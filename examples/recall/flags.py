"""The command line of `train_recall.py`. On an error, only rank 0 prints the message, and every rank exits."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args

from mesh_attention.planners.choice import Method
from recall.task import LESSONS, SHORTEST, Lesson

DTYPES = ("float32", "float64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    steps: int
    seq: int
    lessons: tuple[Lesson, ...]
    seed: int
    dtype: str
    method: Method | None
    tile: tuple[int, int] | None
    checkpoint: Path | None
    save_every: int
    resume: bool
    curve: Path | None
    json: bool

    @property
    def settings(self) -> dict[str, Any]:
        """The flags that decide the curve: a checkpoint continues only with the same. Ranks and method may differ."""
        return {
            "seq": self.seq,
            "seed": self.seed,
            "dtype": self.dtype,
            "lessons": [list(asdict(lesson).values()) for lesson in self.lessons],
        }


def read_flags(arguments: list[str] | None = None) -> Flags:
    parser = _Parser(prog="train_recall.py", description="Train a small Llama to recall, on a sharded sequence.")
    add = parser.add_argument
    add("--steps", type=_count, default=620, help="train up to this step (%(default)s)")
    add("--seq", type=_count, default=4096, help="tokens per sequence, over all ranks (%(default)s)")
    add("--lessons", type=_lessons, default=LESSONS, help=f"shorter sequences first; {_written(LESSONS)}")
    add("--seed", type=int, default=0, help="seed of weights and data (%(default)s)")
    add("--dtype", choices=DTYPES, default="float32", help="float64 to compare curves (%(default)s)")
    add("--method", choices=get_args(Method), help="method of attention; by default, mesh")
    add("--tile", type=_tile, metavar="ROWSxCOLS", help="tile of attention, such as 2x2 for 4 ranks")
    add("--checkpoint", type=Path, metavar="DIR", help="keep checkpoints in this folder")
    add("--save-every", type=_count, default=100, metavar="STEPS", help="steps between checkpoints (%(default)s)")
    add("--resume", action="store_true", help="continue with the newest checkpoint, on any number of ranks")
    add("--curve", type=Path, metavar="FILE", help="write step,loss,recall of each step to this file")
    add("--json", action="store_true", help="print one JSON object at the end")
    given = vars(parser.parse_args(arguments))
    if given["seed"] < 0:
        parser.error(f"argument --seed: {given['seed']} is negative; expected 0 or more")
    if given["seq"] < SHORTEST:
        parser.error(f"argument --seq: {given['seq']} tokens are too few; expected at least {SHORTEST}")
    if given["resume"] and given["checkpoint"] is None:
        parser.error("--resume needs --checkpoint DIR")
    if given["curve"] is not None and not given["curve"].absolute().parent.is_dir():
        parser.error(f"argument --curve: {given['curve'].parent} is not a folder")
    return Flags(**given)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            print(f"{self.prog}: error: {message}. See --help", file=sys.stderr)
        raise SystemExit(2)

    def print_help(self, file: Any = None) -> None:
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _tile(text: str) -> tuple[int, int]:
    rows, _, columns = text.partition("x")
    try:
        return _count(rows), _count(columns)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a tile; expected rows × columns, such as 2x2") from None


def _lessons(text: str) -> tuple[Lesson, ...]:
    try:
        lessons = tuple(Lesson(*map(_count, part.split("x"))) for part in text.split(",") if text)
    except (argparse.ArgumentTypeError, TypeError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of lessons; expected tokens × steps, such as {_written(LESSONS[:2])}"
        ) from None
    if any(lesson.seq < SHORTEST for lesson in lessons):
        raise argparse.ArgumentTypeError(f"{text!r}: a sequence has at least {SHORTEST} tokens")
    return lessons


def _written(lessons: tuple[Lesson, ...]) -> str:
    return ",".join(f"{lesson.seq}x{lesson.steps}" for lesson in lessons)
