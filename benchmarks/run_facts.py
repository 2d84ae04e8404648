"""Commit, versions and machine of a run: the first line and the first entries of every result."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mesh_attention import __version__

ROOT = Path(__file__).resolve().parent.parent


def start_result(benchmark: str, *, device: str = "cpu") -> dict[str, Any]:
    """Prints the first line of a result, and returns the same facts for its JSON line."""
    versions = {"mesh-attention": __version__, "torch": version("torch"), "python": platform.python_version()}
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {device}"
    facts = {"benchmark": benchmark, "commit": commit(), "versions": versions, "machine": machine}
    print(f"commit {facts['commit']}; {', '.join(' '.join(pair) for pair in versions.items())}; {machine}", flush=True)
    return facts


def commit() -> str:
    """The commit of this checkout, with "+changes" if tracked files other than results differ from it."""
    known = _git("rev-parse", "--short", "HEAD")
    if not known:
        return "unknown"
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return f"{known}+changes" if changed else known


def _git(*arguments: str) -> str:
    """The output of a git command; empty if it fails, as it does outside of a checkout."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""
