"""Traces for Perfetto, charts and the explorer page. Values come in, files go out; nothing is simulated here."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mesh_attention.errors import UsageError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a refusal of the system to write a file into a `UsageError` that names the file."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise UsageError(f"{path}: cannot be written: {reason}; write elsewhere") from error
