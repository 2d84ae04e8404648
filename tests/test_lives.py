"""docs/architecture.md lists every file that a first call and a tuning pass through; here both are traced."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ARCHITECTURE = Path(__file__).parents[1] / "docs" / "architecture.md"
MOST_FILES = 27
TRACE = """
import sys
import mesh_attention
from pathlib import Path

{before}
root, passed = Path(mesh_attention.__file__).parent, {{}}
sys.setprofile(lambda frame, event, _: passed.setdefault(frame.f_code.co_filename) if event == "call" else None)
{traced}
sys.setprofile(None)
print(*(Path(file).relative_to(root) for file in passed if Path(file).is_relative_to(root)))
"""
CALL = (
    """
import torch
from mesh_attention import LocalGroup, MeshAttention
attention = MeshAttention(LocalGroup(4))
q, k, v = (attention.shard(torch.randn(1, 1000, heads, 64)) for heads in (8, 2, 2))
""",
    "attention(q, k, v, causal=True)",
)
TUNING = (
    """
from mesh_attention import Problem, causal, cluster_named, tune
problem = Problem.self_attention(seq=65536, heads=8, kv_heads=4, head_dim=128, ranks=8, mask=causal())
cluster = cluster_named("h100x8")
""",
    'tune(problem, cluster, directions=("forward", "backward"))',
)
VALUES = {"masks.py", "problem.py", "planning/choice.py"} | {
    f"plan/{name}.py" for name in ("assignment", "layout", "schedule", "steps", "plan", "text")
}
OF_A_CLUSTER = {"topology.py", "timeline.py", "units.py"}
LOWERING = {f"plan/{name}.py" for name in ("lowering", "routes", "buffers", "program")}


@pytest.mark.parametrize(
    ("title", "code", "left_out"),
    [("The life of a call", CALL, VALUES), ("The life of a tuning", TUNING, VALUES | OF_A_CLUSTER | LOWERING)],
)
def test_the_files_of_a_life_are_those_of_the_page(title: str, code: tuple[str, str], left_out: set[str]) -> None:
    before, traced = code
    command = [sys.executable, "-c", TRACE.format(before=before, traced=traced)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    passed = [file for file in output.split() if file not in left_out]
    assert passed == listed(title)
    assert len(passed) <= MOST_FILES


def listed(title: str) -> list[str]:
    """The files of the table under a heading, in order."""
    section = ARCHITECTURE.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
