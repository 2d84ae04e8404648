"""Shared settings: the same examples in every run, folders of their own, and a flag that rewrites golden files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from run_ranks import RankPool

torch.set_num_threads(1)  # tests run side by side, and their tensors are small
settings.register_profile(
    "repeatable", max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Neither tests nor what they start see what the user has measured and tuned. Matplotlib may keep its fonts."""
    with pytest.MonkeyPatch.context() as patch:
        fonts = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "matplotlib"
        patch.setenv("MPLCONFIGDIR", os.environ.get("MPLCONFIGDIR") or str(fonts))
        for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name)))
        yield


@pytest.fixture
def pool() -> RankPool:
    """Eight ranks, kept between tests."""
    from pool import shared_pool  # which imports a lot

    return shared_pool()


LONGEST = (
    *("page_in_chromium", "transformers", "emulation", "plans_verify", "tuning", "docs", "attention_local", "generate"),
    *("interpreted", "context_parallel", "train_recall", "cli", "cli_tune", "demo", "calibration", "processes"),
    *("coarse", "priced", "transformers_guard", "operators", "docs_site", "pass_ids", "papers", "drawing"),
)
"""Files that take long. They come first, so that two processes end at about the same time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with a file of tests/golden; with --rewrite-golden, rewrites the file first."""

    def compare(name: str, text: str) -> None:
        path = Path(__file__).parent / "tests" / "golden" / name
        if request.config.getoption("--rewrite-golden"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")

    return compare


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="rewrite golden files instead of comparing")
