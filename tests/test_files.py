"""Files that others could have written: a short share of the campaign, and damaged tunings one by one."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

sys.path.insert(0, str(Path(__file__).parent / "campaign"))

from files import PROBLEM, TOPOLOGY, campaign

from mesh_attention.tuning.stored import cached_tune


def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    answers, failures = campaign(300, 0, tmp_path)
    assert failures == []
    assert answers["refused"] > answers["valid"] > 0


BAD_TUNINGS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    # how a file is changed, and what is said of it
    "empty": (lambda data: b"", "it was changed"),
    "cut short": (lambda data: data[:-100], "it was changed"),
    "edited": (lambda data: data.replace(b'"method": "ring"', b'"method": "mesh"'), "it was changed"),
    "another request": (lambda data: b"0" * 64 + data[64:], "or is of another request"),
    "no text": (lambda data: data + b"\xff", "can't decode byte 0xff"),
}


def cached(folder: Path) -> tuple[Any, bool]:
    return cached_tune(PROBLEM, TOPOLOGY, directions=("forward", "backward"), folder=folder)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str, bytes]]:
    """A tuning, and the file in which it is cached. It is not tuned again."""
    folder = tmp_path_factory.mktemp("cache")
    tuning, _ = cached(folder)
    (path,) = folder.iterdir()
    with patch("mesh_attention.tuning.stored.tune", lambda *_, **__: tuning):
        yield tuning, path.name, path.read_bytes()


@pytest.mark.parametrize("what", BAD_TUNINGS)
def test_a_file_that_is_no_cached_tuning_is_not_used(
    tuned: tuple[Any, str, bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    tuning, name, data = tuned
    changed, said = BAD_TUNINGS[what][0](data), BAD_TUNINGS[what][1]
    assert changed != data
    (tmp_path / name).write_bytes(changed)
    with caplog.at_level(logging.WARNING):
        assert cached(tmp_path) == (tuning, False)
    (record,) = caplog.records
    assert "is not used, because it is not a cached tuning: " in record.getMessage()
    assert said in record.getMessage()
    assert "\n" not in record.getMessage()
    assert cached(tmp_path) == (tuning, True)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="owners and modes of POSIX")
def test_a_folder_that_others_can_write_to_is_not_used(
    tuned: tuple[Any, str, bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning, folder = tuned[0], tmp_path / "cache"
    assert cached(folder) == (tuning, False)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert cached(folder) == (tuning, True)
    for mode in (0o770, 0o707, 0o1777):
        folder.chmod(mode)
        assert cached(folder) == (tuning, False)
        assert "because another user owns it or can write to it" in caplog.text
    folder.chmod(0o755)
    assert cached(folder) == (tuning, True)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert cached(folder) == (tuning, False)
