"""Plan files, read and written. Whatever is wrong with one becomes a `UsageError` that names it."""

from __future__ import annotations

import json
from os.path import isdir  # unlike Path.is_dir, it says no to a name that is too long
from pathlib import Path

from mesh_attention.drawing.canvas import FORMATS, new_figure
from mesh_attention.errors import ParseError, UsageError
from mesh_attention.plan.codec import plan_to_json, read_plan
from mesh_attention.plan.plan import Plan

WRITES_ONE = "'mesh-attention plan --save FILE' writes one"


def read_plan_file(path: Path) -> Plan:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: expected a plan, but byte {error.start} is not UTF-8 text; {WRITES_ONE}") from error
    except OSError as error:
        raise UsageError(f"{path}: expected a plan file: {_reason(error)}; {WRITES_ONE}") from error
    try:
        return read_plan(text)
    except UsageError as error:
        raise ParseError(f"{path} is no plan: {error}; {WRITES_ONE}") from error
    except (TypeError, ValueError, RecursionError) as error:
        # What the readers below ours refuse: numbers of thousands of digits, brackets thousands deep, a list as a key.
        raise ParseError(f"{path} is no plan: a field holds what it should not ({error}); {WRITES_ONE}") from error


def check_output(option: str, path: Path | None, *, example: str) -> None:
    """Raise before any work is done for a file that cannot be written; none is none to write."""
    if path is None:
        return
    if not isdir(path.parent):
        raise UsageError(f"{option} {path}: there is no directory {path.parent}; make it first or save elsewhere")
    if isdir(path):
        raise UsageError(f"{option} {path}: is a directory; give a file name, such as {path / example}")


def check_chart(path: Path | None) -> None:
    """The same for a chart, and for one that cannot be drawn."""
    check_output("--chart", path, example="chart.png")
    if path is None:
        return
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"--chart {path}: expected a file name that ends in {' or '.join(FORMATS)}")
    new_figure(height_in=1.0)  # refuses where there is no matplotlib


def write_plan_file(path: Path, plan: Plan) -> None:
    """JSON for .json, text for anything else."""
    is_json = path.suffix.lower() == ".json"
    text = json.dumps(plan_to_json(plan), indent=1) + "\n" if is_json else str(plan)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--save {path}: {_reason(error)}; save elsewhere") from error


def _reason(error: OSError) -> str:
    reason = error.strerror or type(error).__name__
    return reason[0].lower() + reason[1:]
