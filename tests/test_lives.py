"""docs/architecture.md lists every file that a first call and a tuning pass through; here both are traced."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ARCHITECTURE = Path(__file__).parents[1] / "docs" / "architecture.md"
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
{after}
"""
CALL = (
    """
import torch
import torch.distributed as dist
from mesh_attention import MeshAttention
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
attention = MeshAttention()
q, k, v = (attention.shard(torch.randn(1, 1000, heads, 64)) for heads in (8, 2, 2))
""",
    "attention(q, k, v, causal=True)",
    "dist.barrier(); dist.destroy_process_group()",
)
TUNING = (
    """
from mesh_attention import Problem, causal, cluster_named, tune
problem = Problem.self_attention(seq_len=65536, heads=8, kv_heads=4, head_dim=128, ranks=8, mask=causal())
cluster = cluster_named("h100x8")
""",
    'tune(problem, cluster, directions=("forward", "backward"))',
    "",
)
VALUES = {"masks.py", "problem.py", "planners/choice.py"} | {
    f"plan/{name}.py" for name in ("assignment", "layout", "schedule", "steps", "plan", "format")
}
OF_A_CLUSTER = {"topology.py", "timeline.py", "units.py"}
LOWERING = {f"plan/{name}.py" for name in ("lowering", "buffer_sizes", "kernel_calls", "program")}


def test_the_files_of_a_call_between_processes_are_those_of_the_page(tmp_path: Path) -> None:
    """All of them, values included, on two processes with Gloo."""
    passed = traced(CALL, *(["0", str(tmp_path / "store")], ["1", str(tmp_path / "store")]))
    assert passed == listed("The life of a call")
    assert len(passed) <= 36


def test_the_files_of_a_tuning_are_those_of_the_page() -> None:
    passed = [file for file in traced(TUNING, []) if file not in VALUES | OF_A_CLUSTER | LOWERING]
    assert passed == listed("The life of a tuning")
    assert len(passed) <= 24


def traced(code: tuple[str, str, str], *arguments: list[str]) -> list[str]:
    """The files that the code passes through, in order, in the first of as many processes as there are arguments."""
    before, within, after = code
    program = TRACE.format(before=before, traced=within, after=after)
    command = [sys.executable, "-c", program]
    started = [subprocess.Popen([*command, *more], stdout=subprocess.PIPE, text=True) for more in arguments]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert all(process.returncode == 0 for process in started)
    return outputs[0].split()


def listed(title: str) -> list[str]:
    """The files of the table under a heading, in order."""
    section = ARCHITECTURE.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
