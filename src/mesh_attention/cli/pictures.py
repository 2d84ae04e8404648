"""Scenes as files: the matrix, the steps, the timeline, methods against ring, a trace and the explorer page."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from typing_extensions import assert_never

from mesh_attention.cli.comparison import counted_ranks
from mesh_attention.cli.passes import joined
from mesh_attention.cli.progress import Report
from mesh_attention.cli.words import mask_words, size_words
from mesh_attention.drawing.against import Contender, against_chart
from mesh_attention.drawing.canvas import shorten
from mesh_attention.drawing.charts import save_chart
from mesh_attention.drawing.files import writing
from mesh_attention.drawing.matrix import matrix_chart
from mesh_attention.drawing.page import Scene, write_page
from mesh_attention.drawing.passes import passes_chart
from mesh_attention.drawing.steps import steps_chart
from mesh_attention.drawing.trace import write_trace
from mesh_attention.errors import ParseError, UsageError
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.queries import rank_costs
from mesh_attention.timeline import Timeline

Picture = Literal["matrix", "steps", "timeline", "against_ring", "trace", "explorer"]
PICTURES: tuple[Picture, ...] = get_args(Picture)
CHARTS: tuple[Picture, ...] = ("matrix", "steps", "timeline", "against_ring")
"""Those that matplotlib draws."""
CHART_FORMATS = ("png", "svg", "pdf")
LONGEST_BELOW = 100
"""Letters below a title that the sheet has room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Album:
    """What is drawn: `subject` by itself, `rivals` (ring first) beside it, `scenes` for choice in the explorer.

    `times_s` are measured times of whole methods by name, where there are any.
    """

    subject: Scene
    rivals: Sequence[Scene]
    scenes: Sequence[Scene]
    title: str
    where: str
    notes: Sequence[str] = ()
    rank: int = 0
    times_s: Mapping[str, float] = field(default_factory=dict)
    page_name: str = "explorer.html"

    @property
    def plan(self) -> Plan:
        """The first pass of the subject."""
        return self.subject.plans[self.subject.directions[0]]

    @property
    def shown_ranks(self) -> tuple[int, ...]:
        """Whose timelines are drawn; fewer where each is drawn twice."""
        ranks = self.subject.ranks
        there = {span.rank for timeline in self.subject.forecasts.values() for span in timeline.spans}
        wanted = {self.rank, ranks - 1} if self.subject.measured else {self.rank, ranks // 2, ranks - 1}
        return tuple(sorted(min(there, key=lambda rank: (abs(rank - want), rank)) for want in wanted))


def pictures_from(text: str) -> tuple[Picture, ...]:
    """A list with commas, in the order of `PICTURES`."""
    wanted = [part.strip() for part in text.split(",")]
    wrong = [part for part in wanted if part not in PICTURES]
    if wrong:
        raise ParseError(f"--only {text!r}: expected some of {','.join(PICTURES)}, not {wrong[0]!r}")
    return tuple(picture for picture in PICTURES if picture in wanted)


def make_folder(option: str, folder: Path) -> None:
    """There afterwards, and something can be written into it; otherwise raises."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{option} {folder}: is a file; give a folder, such as {folder.with_suffix('')}-pictures")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".mesh-attention-probe"
        probe.write_text("")
        probe.unlink()


def write_album(
    album: Album, folder: Path, *, wanted: Collection[Picture], chart_format: str, report: Report
) -> dict[Picture, Path]:
    """The files that were written."""
    draw: dict[Picture, Callable[[Path], None]] = {
        "matrix": lambda path: save_chart(matrix_chart(album.plan, rank=album.rank), path),
        "steps": lambda path: save_chart(steps_chart(album.plan, rank=album.rank), path),
        "timeline": lambda path: _write_timeline(album, path),
        "against_ring": lambda path: _write_against(album, path),
        "trace": lambda path: write_trace(path, traced([album.subject, *album.rivals])),
        "explorer": lambda path: write_page(path, album.scenes, title=album.title, notes=album.notes),
    }
    chosen = [picture for picture in PICTURES if picture in wanted]
    written: dict[Picture, Path] = {}
    for number, picture in enumerate(chosen):
        path = folder / file_name(picture, album, chart_format)
        report(f"drawing {path.name}", number / len(chosen))
        draw[picture](path)
        written[picture] = path
    return written


def file_name(picture: Picture, album: Album, chart_format: str) -> str:
    match picture:
        case "matrix" | "steps" | "timeline" | "against_ring":
            return f"{picture}.{chart_format}"
        case "trace":
            return "trace.json"
        case "explorer":
            return album.page_name
        case _:
            assert_never(picture)


def traced(scenes: Sequence[Scene]) -> dict[str, Timeline]:
    """Every pass of every scene once, forecast and, where it ran, measured, by a name that says which it is."""
    found: dict[str, Timeline] = {}
    for scene in scenes:
        for kind, timelines in (("forecast", scene.forecasts), ("measured", scene.measured)):
            for direction in scene.directions:
                if direction in timelines:
                    found.setdefault(f"{scene.method} {scene.tile} {direction}, {kind}", timelines[direction])
    return found


def _write_timeline(album: Album, path: Path) -> None:
    subject = album.subject
    timelines = {
        f"{direction}, {kind}": found[direction]
        for direction in subject.directions
        for kind, found in (("forecast", subject.forecasts), ("measured", subject.measured))
        if direction in found
    }
    title = f"{subject.method} {subject.tile}: what ranks do when"
    save_chart(passes_chart(timelines, ranks=album.shown_ranks, title=title, below=_words(album)), path)


def _write_against(album: Album, path: Path) -> None:
    scenes = list(album.rivals)
    if not any((s.method, s.tile) == (album.subject.method, album.subject.tile) for s in scenes):
        scenes.append(album.subject)
    passes = " and ".join(album.subject.directions)
    contenders = [_contender(scene, album.times_s.get(scene.method)) for scene in scenes]
    save_chart(against_chart(contenders, passes=passes, title="Against ring", below=_words(album)), path)


def _contender(scene: Scene, measured_s: float | None) -> Contender:
    plans = list(scene.plans.values())
    received = [sum(rank_costs(p, rank).received_nbytes for p in plans) for rank in counted_ranks(scene.ranks)]
    whole = joined(scene.forecasts)
    return Contender(
        name=f"{scene.method} {scene.tile}",
        received_nbytes=max(received),
        time_s=whole.time_s,
        exposed_s=whole.exposed_s,
        measured_s=measured_s,
    )


def _words(album: Album) -> str:
    problem = album.plan.problem
    return shorten(f"{size_words(problem)}, {mask_words(problem)}; {album.where}", most=LONGEST_BELOW)
