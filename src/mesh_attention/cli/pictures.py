"""Scenes as files: the explorer page, and a trace of the passes on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mesh_attention.drawing.page import Scene, write_page
from mesh_attention.drawing.trace import write_trace
from mesh_attention.errors import UsageError, writing
from mesh_attention.timeline import Timeline

TRACE = "trace.json"


def make_folder(option: str, folder: Path) -> None:
    """Make the folder and check that a file can be written into it."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{option} {folder}: is a file; give a folder, such as {folder.with_suffix('')}-pictures")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".mesh-attention-probe"
        probe.write_text("")
        probe.unlink()


def write_pictures(
    page: Path, scenes: Sequence[Scene], *, traced: Sequence[Scene], title: str, notes: list[str]
) -> Path:
    """Write the page, and beside it a trace of some of its scenes, whose path is returned."""
    write_page(page, scenes, title=title, notes=notes)
    trace = page.with_name(TRACE)
    write_trace(trace, timelines_of(traced))
    return trace


def timelines_of(scenes: Sequence[Scene]) -> dict[str, Timeline]:
    """Every pass of every scene once, forecast and, where it ran, measured, by a name that says which it is."""
    found: dict[str, Timeline] = {}
    for scene in scenes:
        for kind, timelines in (("forecast", scene.forecasts), ("measured", scene.measured)):
            for direction in scene.directions:
                if direction in timelines:
                    found.setdefault(f"{scene.method} {scene.tile} {direction}, {kind}", timelines[direction])
    return found
