"""Everything in this folder needs a CUDA device; one is enough."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

# Autograd's thread may have no current CUDA context when it first calls cuBLAS. torch warns once in a process and sets
# one, so the order of the tests decides which of them would fail.
NO_CONTEXT = "ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning"
COMPILING = {"test_fused.py": "merging or rows", "test_kernels.py": "triton"}
"""The tests that spend most of their time in Triton's compiler."""
AHEAD = pytest.StashKey[list["subprocess.Popen[bytes]"]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark = pytest.mark.filterwarnings(NO_CONTEXT)
    if not torch.cuda.is_available():
        mark = pytest.mark.skip(reason="needs a CUDA device")
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(mark)


def pytest_collection_finish(session: pytest.Session) -> None:
    """While ranks on NCCL have their tests, let other processes compile: Triton finds on disk what they compiled."""
    chosen = {item.path for item in session.items}
    here = Path(__file__).parent
    if not torch.cuda.is_available() or session.config.option.collectonly:
        return
    if not any(path.parent.name == "nccl" for path in chosen):
        return
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    session.config.stash[AHEAD] = [
        subprocess.Popen(
            [*command, str(here / file), "-k", wanted], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for file, wanted in COMPILING.items()
        if here / file in chosen
    ]


def pytest_sessionfinish(session: pytest.Session) -> None:
    for process in session.config.stash.get(AHEAD, []):
        process.kill()
        process.wait()
