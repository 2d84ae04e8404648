"""Tunings cached on disk, by problem and cluster. A file that cannot be read or written is ignored.

The first line of a file is the hash of its request and of the rest. So what is read is what this code has written for
this request: nothing in it is checked again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from functools import lru_cache
from pathlib import Path
from stat import S_IWGRP, S_IWOTH
from tempfile import NamedTemporaryFile
from typing import Any

from mesh_attention.errors import ParseError
from mesh_attention.plan.layout import Layout
from mesh_attention.planners.choice import Choice, default_layout
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.result import Tuning, tuning_from_json, tuning_to_json
from mesh_attention.tuning.tune import tune
from mesh_attention.units import Progress

log = logging.getLogger(__name__)


def cache_folder() -> Path | None:
    """``$XDG_CACHE_HOME/mesh-attention``, by default ``~/.cache/mesh-attention``; None for a user without a home."""
    return user_folder("XDG_CACHE_HOME", ".cache")


def user_folder(variable: str, in_home: str) -> Path | None:
    """This library's folder where an environment variable says, by default in a folder of the user's home."""
    named = os.environ.get(variable)
    try:
        return Path(named or Path.home() / in_home) / "mesh-attention"
    except RuntimeError:  # the user has no home directory
        return None


def cached_tune(
    problem: Problem,
    topology: Topology,
    *,
    layout: Layout | str | None = None,
    on_progress: Progress | None = None,
    folder: Path | None = None,
    **options: Any,
) -> tuple[Tuning, bool]:
    """Call `tune`, whose options these are, or read its result from the cache on disk; the second value is True if it
    was read."""
    layout = Choice.of(layout=layout).layout or default_layout(problem)
    request = repr((code_digest(), problem, topology, layout, sorted(options.items())))
    folder = own_folder(folder or cache_folder())
    path = None if folder is None else folder / f"tuning-{_digest(request)[:32]}.txt"
    if path is not None:
        try:
            return _read(path, request), True
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:  # a UsageError is a ValueError, and so are bytes that are not text
            log.warning("%s is not used, because it is not a cached tuning: %s; tuning again", path, error)
    tuning = tune(problem, topology, layout=layout, on_progress=on_progress, **options)
    if path is not None:
        _write(path, request, tuning)
    return tuning, False


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Hash of the library's code, so that tunings of another version are not reused."""
    parts = sorted(Path(__file__).parent.parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in parts)).hexdigest()[:16]


def own_folder(folder: Path | None) -> Path | None:
    """The folder, made if it is missing; None if others could write to it: what they put there would be run."""
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError as error:
        log.warning("tunings are not cached: %s", error)
        return None
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & (S_IWGRP | S_IWOTH)):
        log.warning(
            "%s is not used as a cache, because another user owns it or can write to it; use chmod 700, or set "
            "XDG_CACHE_HOME",
            folder,
        )
        return None
    return folder


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _read(path: Path, request: str) -> Tuning:
    digest, _, written = path.read_text(encoding="utf-8").partition("\n")
    if digest != _digest(request, written):
        raise ParseError("it was changed, or is of another request")
    return tuning_from_json(json.loads(written))


def _write(path: Path, request: str, tuning: Tuning) -> None:
    written = json.dumps(tuning_to_json(tuning))
    try:
        write_at_once(path, f"{_digest(request, written)}\n{written}")
    except OSError as error:
        log.warning("could not cache the tuning: %s", error)


def write_at_once(path: Path, text: str) -> None:
    """Write a temporary file and move it here: other ranks or jobs may be reading or writing this one."""
    with NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8", suffix=".part") as part:
        part.write(text)
    os.replace(part.name, path)
