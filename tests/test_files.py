"""Files that others could have written: a short share of the campaign, and cached tunings one by one."""

from __future__ import annotations

import json
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

from mesh_attention.tuning.cache import cached_tune


def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    answers, failures = campaign(300, 0, tmp_path)
    assert failures == []
    assert answers["refused"] > answers["valid"] > 0


def change(*keys: Any, to: Any) -> Callable[[str], str]:
    """Replace a value inside a cached tuning; `to` may be a function of the value."""

    def apply(text: str) -> str:
        found = holder = json.loads(text)
        for key in keys[:-1]:
            holder = holder[key]
        holder[keys[-1]] = to(holder[keys[-1]]) if callable(to) else to
        return json.dumps(found)

    return apply


TRIAL = ("tuning", "trials", 0)
BAD_TUNINGS: dict[str, tuple[Callable[[str], str], str]] = {
    # how a file is changed, and what is said of it
    "empty": (lambda text: "", "not JSON"),
    "deep": (lambda text: "[" * 100_000, "brackets are nested too deep"),
    "digits": (lambda text: text.replace('"version": 3', f'"version": {"9" * 5000}'), "not JSON"),
    "a key twice": (lambda text: text.replace('"request"', '"request": 1, "request"', 1), "a second 'request'"),
    "NaN": (change(*TRIAL, "forecasts", "forward", "time_s", to=float("nan")), "NaN is not a number"),
    "request": (change("request", to="something else"), "expected the tuning of this problem on this cluster"),
    "a list": (lambda text: "[]", "expected the tuning of this problem on this cluster"),
    "version": (change("tuning", "version", to=1), "version 1, expected"),
    "no trials": (change("tuning", "trials", to=[]), "trials []: expected a list of at least one"),
    "odd trials": (change("tuning", "trials", to={"a": 1}), "trials {'a': 1}: expected a list"),
    "left out": (change("tuning", "left_out", to=[1]), "left_out [1]: expected reasons"),
    "family": (change(*TRIAL, "family", to=["ring"]), "family ['ring']: expected one of"),
    "no passes": (lambda text: change(*TRIAL, "choices", to={})(change(*TRIAL, "forecasts", to={})(text)), "passes []"),
    "other passes": (change(*TRIAL, "choices", to={}), "expected the same passes"),
    "numbers": (change(*TRIAL, "forecasts", "forward", "time_s", to="1"), "time_s '1': expected a number"),
    "keep": (change(*TRIAL, "choices", "forward", "keep", to=7), "keep 7: expected some of own, q and kv"),
    "tile type": (change(*TRIAL, "choices", "forward", "tile", to=[]), "tile []: expected"),
    "foreign tile": (change(*TRIAL, "choices", "forward", to=lambda c: c | {"method": "mesh", "tile": "3x3"}), "tile"),
    "open tile": (change(*TRIAL, "choices", "forward", to=lambda c: c | {"tile": None}), "are for another problem"),
    "layout": (change(*TRIAL, "choices", "forward", "layout", to="striped"), "are for another problem"),
    "one pass": (
        change(*TRIAL, to=lambda t: t | {k: {"forward": t[k]["forward"]} for k in ("choices", "forecasts")}),
        "are for another problem",
    ),
}


def cached(folder: Path) -> tuple[Any, bool]:
    return cached_tune(PROBLEM, TOPOLOGY, directions=("forward", "backward"), folder=folder)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str, str]]:
    """A tuning, and the file in which it is cached. It is not tuned again."""
    folder = tmp_path_factory.mktemp("cache")
    tuning, _ = cached(folder)
    (path,) = folder.iterdir()
    with patch("mesh_attention.tuning.cache.tune", lambda *_, **__: tuning):
        yield tuning, path.name, path.read_text()


@pytest.mark.parametrize("what", BAD_TUNINGS)
def test_a_file_that_is_no_cached_tuning_is_not_used(
    tuned: tuple[Any, str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    tuning, name, text = tuned
    changed, said = BAD_TUNINGS[what][0](text), BAD_TUNINGS[what][1]
    assert changed != text
    (tmp_path / name).write_text(changed)
    with caplog.at_level(logging.WARNING):
        assert cached(tmp_path) == (tuning, False)
    (record,) = caplog.records
    assert "is not used, because it is not a cached tuning: " in record.getMessage()
    assert said in record.getMessage()
    assert "\n" not in record.getMessage()
    assert cached(tmp_path) == (tuning, True)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="owners and modes of POSIX")
def test_a_folder_that_others_can_write_to_is_not_used(
    tuned: tuple[Any, str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
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
