"""Eight ranks that share one GPU over NCCL, kept between tests; and CUDA's MPS, by which their kernels run at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from run_ranks import RankError, RankPool

SIZES = (2, 3, 4, 8)
IS_TRIED_ON_CPU = os.environ.get("NCCL_TESTS_ON") == "gloo"
BACKEND = "gloo" if IS_TRIED_ON_CPU else "nccl"
DEVICE = torch.device("cpu") if IS_TRIED_ON_CPU else torch.device("cuda", 0)
MOST_POOLS = 3
"""Pools that may be lost before the remaining tests fail at once."""
GROUP_TIMEOUT_S = 60.0 if IS_TRIED_ON_CPU else 40.0


class Mps:
    """CUDA's MPS, until `stop`. A process started with `environment` is a client of it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mesh-attention-mps-", ignore_cleanup_errors=True)
        self.environment: dict[str, str] = {}
        self.problem = ""
        """Why it does not run."""
        control = shutil.which("nvidia-cuda-mps-control")
        if control is None:
            self.problem = "nvidia-cuda-mps-control is not there"
            return
        self._control = control
        self.environment = dict.fromkeys(("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"), self._folder.name)
        self._call("-d")

    def _call(self, *flags: str, text: str = "") -> None:
        said = Path(self._folder.name) / "said"  # not a pipe: the daemon would hold it open
        try:
            with said.open("w") as file:
                environment = os.environ | self.environment
                subprocess.run(
                    [self._control, *flags], env=environment, input=text, text=True, stdout=file, stderr=file,
                    check=True, timeout=30,
                )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            self.problem = f"{error}; {said.read_text().strip()}"
            self.environment = {}

    def stop(self, problem: str = "") -> None:
        if self.environment:
            self._call(text="quit -t 5\n")
        self.environment = {}
        self.problem = self.problem or problem
        self._folder.cleanup()


class Rig:
    """Runs functions on ranks. Ranks that died, or hang, are replaced for the next test."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        """Measured by tests, to be printed at the end."""
        self.lost = 0
        self.mps: Mps | None = None
        self.says_mps = "not needed"
        self._pool: RankPool | None = None

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 100.0) -> list[Any]:
        """Results of the function on each of the first `ranks` ranks."""
        if self.lost >= MOST_POOLS:
            raise AssertionError(f"{self.lost} pools of ranks were lost in earlier tests; see the first of them")
        self._pool = self._pool or self._start()
        try:
            return self._pool.run(ranks, function, *arguments, timeout_s=timeout_s)
        except BaseException as error:
            if not (isinstance(error, RankError) and _all_asserted(error.errors, ranks)):
                self.lost += 1
                self.close()
            raise

    def _start(self) -> RankPool:
        if IS_TRIED_ON_CPU:
            return new_pool(8)
        torch.cuda.empty_cache()  # what tests in this process left
        self.mps = Mps()
        if self.mps.environment:
            try:
                pool = new_pool(8, self.mps)
            except (RankError, TimeoutError) as error:
                self.mps.stop(f"no rank could use it: {str(error).splitlines()[0]}")
            else:
                self.says_mps = "on"
                return pool
        self.says_mps = f"off: {self.mps.problem}"
        return new_pool(8)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self.mps is not None:
            self.mps.stop()
            self.mps = None


def new_pool(ranks: int, mps: Mps | None = None, *, sizes: Sequence[int] = SIZES, **options: Any) -> RankPool:
    """Processes of their own, for tests that leave a group broken: they run without MPS, which others need."""
    compiling = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # eight ranks compile at once
    return RankPool(
        ranks,
        backend=BACKEND,
        sizes=[size for size in sizes if size <= ranks],
        group_timeout_s=GROUP_TIMEOUT_S,
        environment=compiling | (mps.environment if mps else {}),
        **options,
    )


def _all_asserted(errors: list[tuple[int, str, str]], ranks: int) -> bool:
    """True if every rank found the same thing wrong, so that none waits for another."""
    return len(errors) == ranks and {name for _, name, _ in errors} == {"AssertionError"}


def versions() -> str:
    if IS_TRIED_ON_CPU:
        return f"torch {torch.__version__}, Gloo instead of NCCL"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"torch {torch.__version__}, NCCL {nccl}, {torch.cuda.get_device_name(0)}"
