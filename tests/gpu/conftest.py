"""Everything in this folder needs a CUDA device; one is enough."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

# Autograd's thread may have no current CUDA context when it first calls cuBLAS. torch warns once in a process and sets
# one, so the order of the tests decides which of them would fail.
NO_CONTEXT = "ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark = pytest.mark.filterwarnings(NO_CONTEXT)
    if not torch.cuda.is_available():
        mark = pytest.mark.skip(reason="needs a CUDA device")
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(mark)
