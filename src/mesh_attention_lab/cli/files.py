"""Files that commands read and write. Anything wrong with a file becomes a `UsageError`."""

from __future__ import annotations

from dataclasses import asdict
from os.path import isdir  # unlike Path.is_dir, it answers False for a name that is too long
from pathlib import Path
from typing import Any

from mesh_attention.errors import ParseError, PlanError, UsageError
from mesh_attention.plan.parse import parse_plan
from mesh_attention.plan.plan import Plan
from mesh_attention.problem import Problem
from mesh_attention.units import Progress, count
from mesh_attention.verification.rules import check
from mesh_attention_lab.drawing import writing
from mesh_attention_lab.drawing.charts import FORMATS, new_figure

WRITES_ONE = "'mesh-attention plan --save FILE' writes one"


# Plans


def read_plan(path: Path) -> Plan:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: expected a plan, but byte {error.start} is not UTF-8 text; {WRITES_ONE}") from error
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise UsageError(f"{path}: expected a plan file: {reason}; {WRITES_ONE}") from error
    try:
        return parse_plan(text)
    except UsageError as error:
        raise ParseError(f"{path} is not a plan file: {error}; {WRITES_ONE}") from error


def checked_plan(path: Path, report: Progress) -> Plan:
    """The plan in a file; raises `PlanError` if it breaks a rule."""
    plan = read_plan(path)
    breaches = check(plan, on_progress=report)
    if breaches:
        raise PlanError(
            f"{path} breaks the rules in {count(len(breaches), 'place')}, the first: {breaches[0].message}; "
            f"'mesh-attention verify {path}' shows all"
        )
    return plan


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """The fields of a problem, for answers as JSON; the mask as text."""
    return asdict(problem) | {"mask": str(problem.mask)}


# Files and folders to write: what cannot be written is refused before any work is done


def output_file(text: str, *, example: str) -> Path:
    path = Path(text)
    if not isdir(path.parent):
        raise UsageError(f" {path}: {path.parent} does not exist; create it or write elsewhere")
    if isdir(path):
        raise UsageError(f" {path}: is a directory; give a file name, such as {path / example}")
    return path


def chart_file(text: str) -> Path:
    path = output_file(text, example="chart.png")
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f" {path}: expected a file name that ends in {' or '.join(FORMATS)}")
    new_figure(height_in=1.0)  # refuses where matplotlib is missing
    return path


def make_folder(option: str, folder: Path) -> None:
    """Create the folder and check that a file can be written into it."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{option} {folder}: is a file; give a folder, such as {folder.with_suffix('')}-pictures")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".mesh-attention-probe"
        probe.write_text("")
        probe.unlink()
