"""Triton's kernels, interpreted: files of tests that run again, in a process in which Triton compiles nothing.

Triton decides that when it is imported, hence the process. A GPU meets larger cases in tests/gpu.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from merging_conformance import CHECKS, ROW_CHECKS
from test_intervals import CHECKS as ATTENTION_CHECKS

PASSES = {
    "test_decode_kernels.py": 24,
    "test_fused.py": len(CHECKS) + len(ROW_CHECKS) + 1,
    "test_intervals.py": len(ATTENTION_CHECKS) + 1,
}
"""Tests of the kernels, of which none may be skipped."""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_kernels_conform_when_interpreted() -> None:
    files = [str(Path(__file__).parent / name) for name in PASSES]
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:xdist", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        [*command, "-W", "ignore::RuntimeWarning"],  # numpy minds log 0 and inf - inf
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name, passes in PASSES.items():
        assert len(re.findall(rf"{name}::.* PASSED", done.stdout)) == passes, (name, done.stdout)
