"""Real ranks for the tests: one pool of eight workers for a whole process, and scripts as python or torchrun run them.

All of them are forked from one server (`run_ranks.py`), which saves each the import of torch.
"""

from __future__ import annotations

import atexit
import os
import re
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import torch
import torch._dynamo  # by the server as well, so that ranks that compile need not each
from run_ranks import RankPool, process_context
from torch.distributed import TCPStore


@lru_cache(maxsize=1)
def _pool() -> RankPool:
    pool = RankPool(8)
    atexit.register(pool.close)
    return pool


def shared_pool() -> RankPool:
    """The pool of this process; a new one if something failed in the last one, which says nothing about other tests."""
    if not _pool().is_whole:
        _pool().close()
        _pool.cache_clear()
    return _pool()


def said(call: Callable[[], object]) -> str:
    """The type and message of what a call raised, to be sent to the test."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def same_on_all(answers: Sequence[Mapping[str, str]]) -> str:
    """What rank 0 says, by what it was asked for. Others say the same, but for the ranks of their groups."""
    texts = ["".join(f"{name}: {said}\n" for name, said in answer.items()) for answer in answers]
    assert len({re.sub(r"\[[\d, ]+\]| at 0x\w+", "", text) for text in texts}) == 1, texts
    return re.sub(r" at 0x\w+|(?<=DeviceMesh)\(.*?\)\)", "", texts[0])  # torch writes meshes in several ways


class Finished(NamedTuple):
    """A script's exit code and output; with several ranks the code of one that failed, and their output by rank."""

    returncode: int
    stdout: str
    stderr: str


def run_script(script: Path, *flags: str, ranks: int = 0, timeout_s: float = 120.0) -> Finished:
    """Run a script with the environment that torchrun gives its ranks, or with `ranks=0` as python does."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    common = os.environ | {"OMP_NUM_THREADS": "1"}
    if ranks:
        common |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_RESTART_COUNT": "0"}
        common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    context = process_context()
    with tempfile.TemporaryDirectory(prefix="mesh-attention-script-") as folder:
        processes = []
        for rank in range(ranks or 1):
            environment = common | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {})
            given = (str(script), flags, environment, f"{folder}/{rank}")
            processes.append(context.Process(target=_run_as_main, args=given, daemon=True))
            processes[-1].start()
        code = _exit_code(processes, timeout_s)
        said = ["".join(Path(f"{folder}/{rank}.{name}").read_text() for rank in range(ranks or 1)) for name in STREAMS]
    return Finished(code, *said)


STREAMS = ("stdout", "stderr")


def _exit_code(processes: Sequence[BaseProcess], timeout_s: float) -> int:
    """Wait until all have succeeded or one has failed, then end the others. 124 means that time was up."""
    end = time.monotonic() + timeout_s
    codes: list[int | None] = [None]
    while None in codes and not any(codes) and time.monotonic() < end:
        time.sleep(0.02)
        codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return next(filter(None, codes), 124 if None in codes else 0)


def _run_as_main(script: str, flags: tuple[str, ...], environment: dict[str, str], output: str) -> None:
    for number, name in enumerate(STREAMS, start=1):
        os.dup2(os.open(f"{output}.{name}", os.O_CREAT | os.O_WRONLY), number)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = [script, *flags]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
