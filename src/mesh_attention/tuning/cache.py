"""Tunings cached on disk, by problem and cluster. A file that cannot be read or written is ignored."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import NamedTemporaryFile, gettempdir

from mesh_attention.plan.steps import Direction
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.result import RESULT_VERSION, Tuning, tuning_from_json, tuning_to_json
from mesh_attention.tuning.search import Report
from mesh_attention.tuning.tune import tune

log = logging.getLogger(__name__)
PARTS = (
    "errors.py",
    "units.py",
    "masks.py",
    "problem.py",
    "topology.py",
    "timeline.py",
    "plan",
    "planning",
    "simulation",
    "tuning",
)


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/mesh-attention``, by default ``~/.cache/mesh-attention``; a temporary one without a home."""
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(named or Path.home() / ".cache") / "mesh-attention"
    except RuntimeError:  # the user has no home directory
        return Path(gettempdir()) / "mesh-attention"


def cached_tune(
    problem: Problem,
    topology: Topology,
    *,
    directions: Sequence[Direction] = ("forward",),
    layout: str | None = None,
    memory_nbytes: float | None = None,
    on_progress: Report | None = None,
    folder: Path | None = None,
) -> tuple[Tuning, bool]:
    """Call `tune`, or read its result from the cache on disk; the second value is True if it was read."""
    asked = (RESULT_VERSION, code_digest(), problem, topology, tuple(directions), layout, memory_nbytes)
    key = hashlib.sha256(repr(asked).encode()).hexdigest()[:32]
    path = (folder or cache_folder()) / f"tuning-{key}.json"
    found = _read(path, repr(asked))
    if found is not None:
        return found, True
    tuning = tune(
        problem,
        topology,
        directions=directions,
        layout=layout,
        memory_nbytes=memory_nbytes,
        on_progress=on_progress,
    )
    _write(path, repr(asked), tuning)
    return tuning, False


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Hash of the code that tunings depend on, so that those of another version are not reused."""
    package = Path(__file__).parent.parent
    parts = [path for name in PARTS for path in sorted((package / name).rglob("*.py")) or [package / name]]
    return hashlib.sha256(b"".join(path.read_bytes() for path in parts)).hexdigest()[:16]


def _read(path: Path, asked: str) -> Tuning | None:
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        return tuning_from_json(written["tuning"]) if written["asked"] == asked else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is not a cached tuning (%s); tuning again", path, error)
        return None


def _write(path: Path, asked: str, tuning: Tuning) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Ranks of one machine may write at once: each writes a temporary file, then moves it here.
        with NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8", suffix=".part") as part:
            json.dump({"asked": asked, "tuning": tuning_to_json(tuning)}, part)
        os.replace(part.name, path)
    except OSError as error:
        log.warning("could not cache the tuning: %s", error)
