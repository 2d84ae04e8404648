"""Tunings cached on disk, by problem and cluster. A file that cannot be read or written is ignored."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from stat import S_IWGRP, S_IWOTH
from tempfile import NamedTemporaryFile
from typing import Any

from mesh_attention.errors import ParseError
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.steps import Direction
from mesh_attention.planning.choice import Choice, default_layout
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.result import RESULT_VERSION, Tuning, tuning_from_json, tuning_to_json
from mesh_attention.tuning.tune import tune
from mesh_attention.units import Report, brief

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
    directions: Sequence[Direction] = ("forward",),
    layout: Layout | str | None = None,
    memory_limit: float | None = None,
    is_quick: bool = False,
    on_progress: Report | None = None,
    folder: Path | None = None,
) -> tuple[Tuning, bool]:
    """Call `tune`, or read its result from the cache on disk; the second value is True if it was read."""
    layout = Choice.of(layout=layout).layout or default_layout(problem)
    request = (RESULT_VERSION, code_digest(), problem, topology, tuple(directions), layout, memory_limit, is_quick)
    key = hashlib.sha256(repr(request).encode()).hexdigest()[:32]
    folder = own_folder(folder or cache_folder())
    path = None if folder is None else folder / f"tuning-{key}.json"
    if path is not None:
        try:
            tuning = _read(path, repr(request))
            _check(tuning, problem, directions, layout)
            return tuning, True
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:  # a UsageError is a ValueError, and so are bytes that are not text
            log.warning("%s is not used, because it is not a cached tuning: %s; tuning again", path, error)
    tuning = tune(
        problem,
        topology,
        directions=directions,
        layout=layout,
        memory_limit=memory_limit,
        is_quick=is_quick,
        on_progress=on_progress,
    )
    if path is not None:
        _write(path, repr(request), tuning)
    return tuning, False


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Hash of the code that tunings depend on, so that those of another version are not reused."""
    package = Path(__file__).parent.parent
    parts = [path for name in PARTS for path in sorted((package / name).rglob("*.py")) or [package / name]]
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


def _read(path: Path, request: str) -> Tuning:
    written = _read_json(path.read_text(encoding="utf-8"))
    if not isinstance(written, dict) or written.keys() != {"request", "tuning"} or written["request"] != request:
        raise ParseError("expected the tuning of this problem on this cluster")
    return tuning_from_json(written["tuning"])


def _read_json(text: str) -> object:
    """JSON, strictly: each key once, and no NaN or Infinity."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise ParseError("not JSON: brackets are nested too deep") from None
    except ParseError:
        raise
    except ValueError as error:  # also numbers of thousands of digits
        raise ParseError(f"not JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ParseError(f"not JSON: a second {brief(twice)} in an object; expected each key once")
    return made


def _no_constant(name: str) -> None:
    raise ParseError(f"not JSON: {name} is not a number")


def _check(tuning: Tuning, problem: Problem, directions: Sequence[Direction], layout: Layout) -> None:
    """Raise unless every choice is one for this problem: its tile, degree and layout."""
    for trial in tuning.trials:
        resolved = {direction: choice.resolved(problem, direction) for direction, choice in trial.choices.items()}
        if (
            (*resolved,) != (*directions,)
            or resolved != trial.choices
            or {c.layout for c in resolved.values()} != {layout}
        ):
            raise ParseError("its choices are for another problem")


def _write(path: Path, request: str, tuning: Tuning) -> None:
    try:
        write_at_once(path, json.dumps({"request": request, "tuning": tuning_to_json(tuning)}))
    except OSError as error:
        log.warning("could not cache the tuning: %s", error)


def write_at_once(path: Path, text: str) -> None:
    """Write a temporary file and move it here: other ranks or jobs may be reading or writing this one."""
    with NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8", suffix=".part") as part:
        part.write(text)
    os.replace(part.name, path)
