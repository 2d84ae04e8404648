"""Files as they are written here: what the system refuses becomes a `UsageError` that names the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mesh_attention.errors import UsageError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise UsageError(f"{path}: cannot be written: {reason}; write elsewhere") from error
