"""What the library says: refusals state what was given, what was expected and what to do, and texts read well.

The sessions in tests/golden/python are compared word for word; every refusal is a ValueError.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh_attention import DisagreementError

GOLDEN = Path(__file__).parent / "golden" / "python"


def as_said(session: str) -> str:
    """A session, with what its lines of Python print now, or are refused with."""
    names: dict[str, Any] = {"__name__": "session"}
    lines = []
    for line in session.splitlines():
        if line.startswith("#"):
            lines += ["", line] if lines else [line]
        elif line.startswith(">>> "):
            lines += [line, *_answer(line.removeprefix(">>> "), names)]
    return "\n".join(lines) + "\n"


def _answer(source: str, names: dict[str, Any]) -> list[str]:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(f"{source}\n", "session", "single"), names)
    except (ValueError, DisagreementError) as error:
        return f"{type(error).__name__}: {error}".replace("\0", r"\0").splitlines()
    return [line.rstrip() for line in printed.getvalue().splitlines()]


def sessions() -> Iterator[Any]:
    """Those of transformers take long."""
    for path in sorted(GOLDEN.glob("*.txt")):
        yield pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem.startswith("transformers") else [])


@pytest.mark.parametrize("path", list(sessions()))
def test_what_is_said_is_what_it_was(path: Path, golden: Callable[[str, str], None]) -> None:
    """Rewrite with --rewrite-golden, then read the diff. A new case is a line of Python, after `>>>`."""
    if path.stem.startswith("transformers"):
        pytest.importorskip("transformers")
    golden(f"python/{path.name}", as_said(path.read_text(encoding="utf-8")))
