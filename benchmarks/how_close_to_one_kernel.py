"""How close does one of 256 ranks get to one kernel's rate? In a *replay*, one GPU plays one rank, in both passes.

    python benchmarks/how_close_to_one_kernel.py                        # the four problems, on a GPU; about 3 minutes
    python benchmarks/how_close_to_one_kernel.py --methods ring mesh --out benchmarks/results
    python benchmarks/how_close_to_one_kernel.py --quick --device cpu   # a small problem, to see that it runs

32 heads × 128, bfloat16, causal, zigzag. Kernels, merges and buffers are real; transfers are copies of the same size
between the GPU and pinned host memory, in both directions at once. A replay leaves out other ranks being late, and
contention in the network. Every round times all methods and one kernel. The tuner makes the plans, for this GPU behind
this link. The GPU rests for 0.2 s before each pass: a GPU that is always busy computes about a tenth slower, with any
method and with one kernel. The script prints the rows of a problem, and writes files, as soon as they are ready; the
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from run_facts import commit

from mesh_attention import Problem, causal
from mesh_attention.plan.steps import DIRECTIONS
from mesh_attention.topology import Topology
from mesh_attention.units import format_size
from mesh_attention_lab.cli.replay import rates_of
from mesh_attention_lab.drawing.charts import rate_chart, save_chart
from mesh_attention_lab.replay.device import Environment, check_memory, environment_of, find_device, measure_cluster
from mesh_attention_lab.replay.replay import replay
from mesh_attention_lab.replay.result import Replayed, ReplayRow, facts, rows_of, tuned_parts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "how_close_to_one_kernel"
METHODS = ("ring", "mesh", "ulysses+mesh", "attention2d")
PROBLEMS = tuple(
    Problem.self_attention(seq_len=seq, heads=32, kv_heads=kv_heads, head_dim=128, ranks=256, mask=causal())
    for seq in (2**20, 2**19)
    for kv_heads in (32, 8)
)
QUICK = (
    Problem.self_attention(seq_len=1024, heads=4, kv_heads=2, head_dim=16, ranks=8, dtype="float32", mask=causal()),
)

COLUMNS = (
    *(("problem", 10), ("method", 12), ("plan, forward; backward", 41), ("fwd TF/s", 8), ("% one", 5), ("×ring", 5)),
    *(("both TF/s", 9), ("% one", 5), ("×ring", 5), ("exposed ms", 10), ("forecast", 8), ("memory", 6)),
)
CAPTION = (
    "% one: of one kernel's rate on as much work. ×ring: how many times as fast. Exposed: what transfers add to both "
    "passes.\nForecast and memory: how far the simulator's time and the plan's bytes are from what was measured; the "
    "worse of the passes."
)


def main() -> int:
    given = _arguments()
    device = find_device(given.device)
    problems = QUICK if given.quick else PROBLEMS
    run = Run(given, device, environment_of(problems[0], device))
    on = run.environment
    versions = ", ".join(f"{name} {number}" for name, number in on.versions.items())
    run.say(f"replay on {on.device}, kernel {on.kernel}, merging {on.merging}; {versions}")
    for problem in problems:
        run.play(problem)
    run.say(CAPTION)
    run.write()
    print(json.dumps(run.facts))
    return 0


@dataclass
class Run:
    """The arguments, and the results so far."""

    given: argparse.Namespace
    device: torch.device
    environment: Environment
    lines: list[str] = field(default_factory=list)
    clusters: dict[int, Topology] = field(default_factory=dict)
    found: list[tuple[Problem, Replayed]] = field(default_factory=list)

    def say(self, *lines: str) -> None:
        self.lines += lines
        print(*lines, sep="\n", flush=True)

    def play(self, problem: Problem) -> None:
        if problem.kv_heads not in self.clusters:
            cluster = self.clusters[problem.kv_heads] = measure_cluster(problem, device=self.device, report=_quietly)
            self.say(_cluster_words(problem, cluster))
        if not self.found:
            self.say(_line([name for name, _ in COLUMNS]))
        self.found.append((problem, _replay(problem, self.clusters[problem.kv_heads], self.given, self.device)))
        self.say(*_table_lines(*self.found[-1]))
        self.write()

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "benchmark": NAME,
            "commit": commit(),
            "command": shlex.join(["python", *sys.argv]),
            **asdict(self.environment),
            "rounds": self.given.rounds,
            "scenes": {kv_heads: asdict(cluster) for kv_heads, cluster in self.clusters.items()},
            "problems": [_fact(*one) for one in self.found],
        }

    def write(self) -> None:
        if self.given.out is not None:
            self.given.out.mkdir(parents=True, exist_ok=True)
            _write(self.given.out, self.lines, self.facts, _chart(self.found, device=self.environment.device))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="NAME", help=f"such as {' '.join(METHODS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", help="cuda by default, if there is a GPU")
    parser.add_argument("--rank", type=int, help="the rank to play; by default the middle one")
    parser.add_argument("--no-graphs", action="store_true", help="queue every step instead of launching CUDA graphs")
    parser.add_argument("--quick", action="store_true", help="use a small problem of 8 ranks")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write the table, JSON and a chart to this folder")
    return parser.parse_args()


def _replay(problem: Problem, cluster: Topology, given: argparse.Namespace, device: torch.device) -> Replayed:
    topology = replace(cluster, ranks=problem.ranks)
    rank = problem.ranks // 2 if given.rank is None else given.rank
    methods = [method.replace("ulysses-", "ulysses+") for method in given.methods]
    parts = tuned_parts(problem, topology, methods, directions=DIRECTIONS, layout="zigzag")
    is_captured = device.type == "cuda" and not given.no_graphs
    check_memory(parts, rank=rank, device=device, is_captured=is_captured)
    return replay(parts, topology, rank=rank, device=device, rounds=given.rounds, cuda_graphs=is_captured)


def _quietly(activity: str, fraction: float) -> None:
    """Reports no progress."""


# The table


def _cluster_words(problem: Problem, cluster: Topology) -> str:
    device = cluster.device
    return (
        f"with {problem.kv_heads} KV heads: {device.forward.tflops:g} and {device.backward.tflops:g} TFLOP/s fitted, "
        f"{cluster.between.gb_per_s:g} GB/s each way at once, {cluster.between.latency_us:g} µs"
    )


def _problem_words(problem: Problem) -> str:
    return f"{format_size(problem.seq_q)} {problem.kv_heads} KV"


def _line(cells: Sequence[str]) -> str:
    is_text = {name for name, _ in COLUMNS[:3]}
    return "  ".join(
        cell.ljust(width) if name in is_text else cell.rjust(width)
        for cell, (name, width) in zip(cells, COLUMNS, strict=True)
    ).rstrip()


def _table_lines(problem: Problem, replayed: Replayed) -> list[str]:
    rows = rows_of(replayed)
    methods = dict.fromkeys(row.method for row in rows)
    lines = [_line(_cells(problem, [row for row in rows if row.method == method])) for method in methods]
    forward, both = (rate.tflops for rate in replayed.kernel), rows[-1].tflops / rows[-1].share
    rates = [f"{rate:.3g}" for rate in (next(forward), both)]
    kernel = [_problem_words(problem), "one kernel", "", rates[0], "100", "", rates[1], "100", "", "", "", ""]
    return [*lines, _line(kernel)]


def _cells(problem: Problem, rows: Sequence[ReplayRow]) -> list[str]:
    forward, backward, both = rows
    errors = [row.memory_error for row in (forward, backward)]
    known = [error for error in errors if error is not None]
    plans = dict.fromkeys((forward.plan, backward.plan))
    return [
        _problem_words(problem),
        forward.method,
        "; ".join(plans),
        *(f"{forward.tflops:.3g}", f"{forward.share:.0%}".rstrip("%"), _times(forward)),
        *(f"{both.tflops:.3g}", f"{both.share:.0%}".rstrip("%"), _times(both)),
        f"{both.exposed_s * 1e3:.2f}",
        f"{max((forward.forecast_error, backward.forecast_error), key=abs):+.1%}",
        f"{max(known, key=abs):+.1%}" if known else "–",
    ]


def _times(row: ReplayRow) -> str:
    return "–" if row.times_ring is None else f"{row.times_ring:.2f}"


# Files


def _fact(problem: Problem, replayed: Replayed) -> dict[str, Any]:
    return {
        "problem": asdict(problem) | {"mask": str(problem.mask)},
        "layout": "zigzag",
        "rank": replayed.rank,
        "rows": [facts(row) for row in rows_of(replayed)],
        "one_kernel": [facts(one) for one in replayed.kernel],
    }


def _write(folder: Path, lines: list[str], facts: dict[str, Any], chart: Figure | None) -> None:
    header = [f"$ {facts['command']}", facts["date"], f"commit {facts['commit']}"]
    (folder / f"{NAME}.txt").write_text("\n".join([*header, *lines, ""]))
    (folder / f"{NAME}.json").write_text(json.dumps(facts, indent=1) + "\n")
    if chart is not None:
        save_chart(chart, folder / f"{NAME}.png")


def _chart(found: Sequence[tuple[Problem, Replayed]], *, device: str) -> Figure | None:
    """The chart; None if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return None
    groups = [
        replace(group, name=f"{format_size(problem.seq_q)}\n{problem.kv_heads} KV\n{label}")
        for problem, replayed in found
        for group, label in zip(rates_of(replayed), ("forward", "backward", "both"), strict=True)
        if label != "backward"
    ]
    problem = found[0][0]
    return rate_chart(
        groups,
        title=f"One rank of {problem.ranks}, replayed on {device}",
        below=f"{problem.heads} heads × {problem.head_dim_qk}, {problem.dtype}, causal, zigzag",
    )


if __name__ == "__main__":
    sys.exit(main())
