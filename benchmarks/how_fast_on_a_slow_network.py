"""How fast are the methods if the network is the bottleneck? Runs real processes on an emulated network.

Every node is a network namespace behind a rate-limited link. Ranks use Gloo over TCP, and the same ranks run all
methods one after the other. Needs Linux, root and iproute2; without them, the script says so and exits with 0.

    python benchmarks/how_fast_on_a_slow_network.py
    python benchmarks/how_fast_on_a_slow_network.py --nodes 4 --ranks-per-node 4 --backward
    python benchmarks/how_fast_on_a_slow_network.py --methods ring mesh 'grouped={"blocks_per_call": 4}'
    python benchmarks/how_fast_on_a_slow_network.py --seq 512 --cached 16384        # a turn of a conversation

Prints a table and a JSON line, which also contains the calibration: links, kernels and merging, measured by the same
processes with all ranks at once. The simulator forecasts each method from it. Exits with 1 if a rank fails or a result
is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from emulation.contenders import Job, Options, choose_methods, default_methods, plans_of, sent_nbytes, shape_of
from emulation.forecast import cluster_of, forecasts
from emulation.network import Cluster, RunResult, exit_on_signals, parse_rate, why_not
from rich.console import Console
from rich.table import Table
from run_facts import start_result

from mesh_attention import MeshAttentionError

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method. Times are the slowest rank's, by round; bytes are those a node sends to others in one call.

    `speedups` are, round by round, the baseline's time over this one's.
    """

    method: str
    options: Options
    grid: str
    times_s: tuple[float, ...]
    floors_s: tuple[float, ...]
    """The same calls over a transport that moves nothing: computing, and nothing else."""
    speedups: tuple[float, ...]
    planned_nbytes: int
    """The busiest node's, by the plan: tensors only."""
    planned_ratio: float
    """The baseline's planned bytes over these."""
    counted_nbytes: int
    """The busiest node's, at its interface: with headers and acknowledgements."""
    counted_over_planned: tuple[float, float]
    """The least and the most, of all nodes and rounds."""
    floor_nbytes: int
    """The most that any node sent in a call that moves nothing: barriers."""
    error: float
    """Relative, against float64 in one process; of any rank and result."""
    forecast_s: float
    """The simulator's, on the cluster that the run's own calibration describes."""
    forecast_speedup: float

    @property
    def time_s(self) -> float:
        return median(self.times_s)

    @property
    def floor_s(self) -> float:
        return median(self.floors_s)


Column = tuple[str, Callable[[Row], str]]


def columns(baseline: str) -> list[Column]:
    """The columns of the table: a heading, and a function that writes a cell."""
    return [
        ("method", lambda row: row.method),
        ("grid", lambda row: row.grid),
        ("time, s", lambda row: f"{row.time_s:.2f}"),
        (f"× {baseline} (least–most)", lambda row: _spread(median(row.speedups), row.speedups)),
        ("forecast, s", lambda row: f"{row.forecast_s:.2f} ({row.forecast_s / row.time_s - 1:+.0%})"),
        ("forecast ×", lambda row: f"{row.forecast_speedup:.2f} ({_deviation(row):+.0%})"),
        ("× by bytes", lambda row: f"{row.planned_ratio:.2f}"),
        ("floor, s", lambda row: f"{row.floor_s:.2f}"),
        ("time / floor", lambda row: f"{row.time_s / row.floor_s:.2f}"),
        ("MiB planned", lambda row: f"{row.planned_nbytes / MIB:.2f}"),
        ("counted / planned", lambda row: "–".join(f"{ratio:.3f}" for ratio in row.counted_over_planned)),
    ]


def _deviation(row: Row) -> float:
    """Deviation of the forecast speed-up from the measured one."""
    return row.forecast_speedup / median(row.speedups) - 1


def _spread(middle: float, values: Sequence[float]) -> str:
    return f"{middle:.2f} ({min(values):.2f}–{max(values):.2f})"


def main() -> int:
    parser = _parser()
    given = parser.parse_args()
    load = os.getloadavg()[0]
    reason = why_not()
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    try:
        parse_rate(given.rate)
        job = _job(given)
    except (ValueError, MeshAttentionError) as error:
        parser.error(str(error))
    with exit_on_signals(), tempfile.TemporaryDirectory(prefix="slow-network-") as folder:
        cluster = Cluster(nodes=given.nodes, ranks_per_node=given.ranks_per_node, rate=given.rate)
        result = _run(cluster, job, Path(folder))
        if result.returncode:
            return 1
        measured = json.loads(Path(folder, "measured.json").read_text())
    rows = make_rows(job, measured, ranks_per_node=given.ranks_per_node)
    header = start_result("how_fast_on_a_slow_network")
    _print(given, rows, result)
    facts = _facts(given, rows, result, measured[0]["calibration"])
    print(json.dumps(_rounded({**header, **facts, "load_before": load})))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--ranks-per-node", type=int, default=1, help="with unlimited links between them")
    parser.add_argument("--rate", default="50mbit", help="rate of a node, each way: 50mbit, 1gbit; 0 for no limit")
    parser.add_argument("--seq", type=int, default=8192, help="tokens in the whole sequence")
    parser.add_argument("--cached", type=int, default=0, help="tokens before these that the ranks have cached")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, help="by default as many as heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--backward", action="store_true", help="time forward and backward, not forward alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help='names, or name={"tile": "2x8"}')
    parser.add_argument("--calibration-s", type=float, default=1.0, help="seconds per measurement of the calibration")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which everything is killed")
    return parser


def _job(given: argparse.Namespace) -> Job:
    if given.cached and given.backward:
        raise ValueError("--cached cannot be combined with --backward: a cache is for serving")
    job = Job(
        seq=given.seq,
        cached=given.cached,
        heads=given.heads,
        kv_heads=given.kv_heads or given.heads,
        head_dim=given.head_dim,
        backward=given.backward,
        rounds=given.rounds,
        calibration_s=given.calibration_s,
        timeout_s=given.timeout,
        methods={},
    )
    problem = job.problem(given.nodes * given.ranks_per_node)
    known = default_methods(problem, job.directions)
    methods = choose_methods(given.methods or list(known), known)
    for options in methods.values():
        plans_of(problem, options, job.directions)  # refuse what cannot be planned before anything starts
    return Job(**{**asdict(job), "methods": methods})


def _run(cluster: Cluster, job: Job, folder: Path) -> RunResult:
    here = Path(__file__).resolve().parent
    paths = [str(here), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Hides the warning that there is no name server inside the namespaces.
    env = {"PYTHONPATH": os.pathsep.join(paths), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "emulation.worker", json.dumps(asdict(job)), str(folder)]
    with cluster:
        return cluster.run(command, timeout_s=job.timeout_s, env=env)


# Results


def make_rows(job: Job, measured: Sequence[Mapping[str, Any]], *, ranks_per_node: int) -> list[Row]:
    """One row per method. `measured` is by rank. The baseline is ring, or without ring the first method."""
    problem = job.problem(len(measured))
    baseline = baseline_of(job.methods)
    plans = {name: plans_of(problem, options, job.directions) for name, options in job.methods.items()}
    planned = {name: sent_nbytes(plans[name], ranks_per_node=ranks_per_node) for name in plans}
    times, floors = (
        {name: _slowest([[t[0] for t in rank[what][name]] for rank in measured]) for name in plans}
        for what in ("times", "floors")
    )
    shard = problem.seq_q // problem.ranks
    cluster = cluster_of(measured[0]["calibration"], ranks=problem.ranks, ranks_per_node=ranks_per_node, shard=shard)
    forecast = forecasts(job, cluster)
    rows = []
    for name, options in job.methods.items():
        # By node and round; any rank of a node can read its counter.
        counted, silent = (
            [[t[1] for t in rank[what][name]] for rank in measured[::ranks_per_node]] for what in ("times", "floors")
        )
        ratios = [nbytes / max(1, due) for node, due in zip(counted, planned[name], strict=True) for nbytes in node]
        rows.append(
            Row(
                method=name,
                options=options,
                grid=shape_of(plans[name]),
                times_s=times[name],
                floors_s=floors[name],
                speedups=tuple(base / own for base, own in zip(times[baseline], times[name], strict=True)),
                planned_nbytes=max(planned[name]),
                planned_ratio=max(planned[baseline]) / max(1, *planned[name]),
                counted_nbytes=int(max(median(node) for node in counted)),
                counted_over_planned=(min(ratios), max(ratios)),
                floor_nbytes=max(map(max, silent)),
                error=measured[0]["errors"][name],
                forecast_s=forecast[name],
                forecast_speedup=forecast[baseline] / forecast[name],
            )
        )
    return rows


def baseline_of(methods: Mapping[str, Options]) -> str:
    return "ring" if "ring" in methods else next(iter(methods))


def _slowest(by_rank: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The time of the slowest rank, by round."""
    return tuple(map(max, zip(*by_rank, strict=True)))


def _print(given: argparse.Namespace, rows: Sequence[Row], result: RunResult) -> None:
    passes = "forward and backward" if given.backward else "forward"
    where = f"{given.nodes} nodes × {given.ranks_per_node} ranks, {given.rate}"
    cached = f" after {given.cached} cached" if given.cached else ""
    heads = f"{given.heads} heads ({given.kv_heads or given.heads} KV) of {given.head_dim}"
    what = f"{given.seq} tokens{cached}, {heads}, causal"
    shown = columns(baseline_of({row.method: row.options for row in rows}))
    table = Table(
        *(heading for heading, _ in shown), title=f"{where}; {what}, float32, {passes}; {given.rounds} rounds"
    )
    for row in rows:
        table.add_row(*(cell(row) for _, cell in shown))
    Console(width=None if sys.stdout.isatty() else 180).print(table)
    print(f"whole run {result.seconds:.0f} s, dropped packets {result.dropped_packets}")


def _facts(
    given: argparse.Namespace, rows: Sequence[Row], result: RunResult, calibration: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "settings": vars(given),
        "seconds": result.seconds,
        "dropped_packets": result.dropped_packets,
        "rows": [asdict(row) for row in rows],
        "calibration": calibration,
    }


def _rounded(value: Any) -> Any:
    """The same data with every float rounded to six digits."""
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
