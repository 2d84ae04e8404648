"""Everything in this folder runs on NCCL, with up to eight ranks that share one GPU; without a GPU it is skipped.

A summary says how long each file took.

With NCCL_TESTS_ON=gloo in the environment, the tests run on the CPU over Gloo, to be tried where there is no GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nccl.rig import IS_TRIED_ON_CPU, SIZES, Rig, versions

RIG = pytest.StashKey[Rig]()
ORDER = ("default", "graphs", "memory", "pass_ids", "calls", "refusals", "models", "attention", "faults")
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
    counts = ", ".join(f"{len(rig.tests[ranks])} on {ranks}" for ranks in SIZES if rig.tests[ranks])
    terminalreporter.section("NCCL")
    terminalreporter.line(f"{versions()}; MPS {rig.says_mps}")
    terminalreporter.line(f"tests by ranks that shared one GPU: {counts}; pools of ranks lost: {rig.lost}")
    for note in rig.notes:
        terminalreporter.line(note)
    terminalreporter.section("seconds of each file")
    for file, seconds in _seconds(terminalreporter).items():
        terminalreporter.line(f"{seconds:6.1f}  {file}")


def _seconds(terminalreporter: pytest.TerminalReporter) -> dict[str, float]:
    """What the tests of each file took, with their fixtures, in the order of running."""
    seconds: defaultdict[str, float] = defaultdict(float)
    reports = [one for found in terminalreporter.stats.values() for one in found if isinstance(one, pytest.TestReport)]
    for report in sorted(reports, key=lambda report: report.start):
        seconds[report.nodeid.partition("::")[0]] += report.duration
    return seconds
