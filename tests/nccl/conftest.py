"""Everything in this folder runs on NCCL, with up to eight ranks that share one GPU; without a GPU it is skipped.

With NCCL_TESTS_ON=gloo in the environment, the tests run on the CPU over Gloo, to be tried where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nccl.rig import IS_TRIED_ON_CPU, Rig, versions

RIG = pytest.StashKey[Rig]()
ORDER = ("default", "graphs", "memory", "pass_ids", "calls", "models", "attention", "faults")
"""Short files that tell much come first. Faults come last: they keep the GPU busy, and are timed."""


def _place(item: pytest.Item) -> int:
    name = item.path.stem.removeprefix("test_")
    return ORDER.index(name) if name in ORDER and Path(__file__).parent in item.path.parents else -1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)
    if IS_TRIED_ON_CPU or (torch.cuda.is_available() and dist.is_nccl_available()):
        return
    mark = pytest.mark.skip(reason="needs a CUDA device, and a torch with NCCL")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(mark)


@pytest.fixture(scope="session")
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = request.config.stash[RIG] = Rig()
    yield made
    made.close()


@pytest.fixture
def needs_cuda() -> None:
    if IS_TRIED_ON_CPU:
        pytest.skip("needs a CUDA device")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rig = config.stash.get(RIG, None)
    if rig is None:
        return
    terminalreporter.section("NCCL")
    terminalreporter.line(f"{versions()}; MPS {rig.says_mps}; pools of ranks lost: {rig.lost}")
    for note in rig.notes:
        terminalreporter.line(note)
