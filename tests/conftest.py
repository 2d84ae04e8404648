"""Shared settings: the same examples in every run, and a flag that rewrites golden files."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)  # tests run side by side, and their tensors are small
settings.register_profile(
    "repeatable", max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="rewrite golden files instead of comparing")
