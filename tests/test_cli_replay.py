"""`replay` as its users meet it, on a CPU and with tiny problems: what is printed, what is written, what is refused."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import test_cli
import torch
from test_cli import Outcome, Run, as_json, assert_refused

from mesh_attention import Problem, causal, cluster_named, make_plan
from mesh_attention.topology import Topology
from mesh_attention_lab.cli.main import main
from mesh_attention_lab.drawing.charts import Rates, rate_chart

run = test_cli.run
"""The fixture."""

SIZES = "--ranks 4 --seq 64 --heads 4 --head-dim 8 --dtype float32 --causal"
REPLAY = f"replay {SIZES} --cluster h100 --device cpu --rounds 2 --methods ring,mesh,ulysses-mesh"
PROBLEM = Problem.self_attention(seq_len=64, heads=4, head_dim=8, ranks=4, dtype="float32", mask=causal())
METHODS = ("ring", "mesh", "ulysses+mesh")
WHATS = ("forward", "backward", "both")
BENCHMARK = Path(__file__).resolve().parent.parent / "benchmarks" / "how_close_to_one_kernel.py"


@pytest.fixture(scope="module")
def answer() -> Any:
    """Of one run with both passes."""
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(f"{REPLAY} --backward --json".split()) == 0
    return json.loads(out.getvalue())


def rows(out: str) -> list[list[str]]:
    """The cells of the table's rows, without the lines that their plans go on in."""
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("───")) + 1
    stop = next(i for i, line in enumerate(lines) if line.startswith("one kernel"))
    return [re.split(r" {2,}", line.strip()) for line in lines[start:stop] if not line.startswith(" ")]


# For people


@pytest.mark.parametrize("columns", [80, 160])
def test_a_table_has_a_row_for_each_method_and_pass_and_for_both(
    run: Run, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, err = run(f"{REPLAY} --backward")
    assert (code, err) == (0, "")
    assert max(len(line.rstrip()) for line in out.splitlines()) <= columns
    found = rows(out)
    assert [row[0] for row in found] == [f"{method} {what}" for method in METHODS for what in ("fwd", "bwd", "both")]
    assert all(re.search(r" [+-]?\d+\.\d$", " ".join(row)) for row in found)
    assert all(float(row[1].replace(",", "")) > 0 for row in found)
    words = " ".join(out.split())
    for part in (
        "replay of rank 2 of 4 on cpu, 1 thread: forward and backward; 64 tokens, 4 heads of 8,",
        f"torch {torch.__version__}",
        "kernel cpu flash, merging torch, 2 rounds step by step",
        "plans and forecasts for h100: 4 ranks in one node, 360 GB/s per rank",
        "Left out: other ranks being late, and contention in the network.",
    ):
        assert part in words
    assert re.search(r"a call of 32 tokens: \S+ TFLOP/s forward and \S+ TFLOP/s backward", words)


def test_one_pass_has_no_row_for_both(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert [row[0] for row in rows(run(REPLAY).out)] == [f"{method} fwd" for method in METHODS]


# For machines


def test_json_has_everything(answer: Any) -> None:
    assert set(answer) == {
        *("device", "kernel", "merging", "versions", "machine", "date", "problem", "layout", "cluster"),
        *("is_measured", "is_captured", "read_gb_per_s", "rank", "rounds", "rows", "one_kernel", "chart"),
    }
    assert {"mesh-attention", "torch", "python"} <= set(answer["versions"])
    assert (answer["rank"], answer["rounds"], answer["layout"]) == (2, 2, "zigzag")
    assert answer["problem"]["mask"] == "causal"
    assert answer["cluster"]["ranks"] == 4


def test_json_has_every_round_of_every_row(answer: Any) -> None:
    assert [(row["method"], row["what"]) for row in answer["rows"]] == [(m, w) for m in METHODS for w in WHATS]
    for row in answer["rows"]:
        assert len(row["times_s"]) == 2
        assert row["tflops"] == pytest.approx(row["flops"] / row["time_s"] / 1e12)
        assert row["forecast_error"] == pytest.approx(row["forecast_s"] / row["time_s"] - 1)
        assert row["exposed_s"] == pytest.approx(max(0.0, row["time_s"] - row["compute_s"])) or row["what"] == "both"
        assert row["plan_nbytes"] > 0
        assert (row["peak_nbytes"], row["memory_error"]) == (None, None)
    for one in answer["one_kernel"]:
        assert one["tokens"] == 32
        assert len(one["times_s"]) == 2


def test_without_a_cluster_this_device_and_its_link_are_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Problem] = []

    def measure(problem: Problem, **_: object) -> Topology:
        measured.append(problem)
        return cluster_named("laptopx4")

    monkeypatch.setattr("mesh_attention_lab.replay.device.measure_cluster", measure)
    found = as_json(run(f"replay {SIZES} --device cpu --rounds 1 --methods ring --json"))
    assert measured == [PROBLEM]
    assert found["is_measured"]
    words = " ".join(run(f"replay {SIZES} --device cpu --rounds 1 --methods ring").out.split())
    assert re.search(r"link \S+ GB/s each way at once, \S+ µs", words)


# Files


def test_the_chart_is_written(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "chart.png"
    outcome = run(f"{REPLAY} --backward --chart", path)
    assert outcome.out.endswith(f"wrote {path}\n")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plan_file_is_replayed_beside(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.txt"
    assert run(f"plan {SIZES} --tile 2x2 --save", path).code == 0
    found = as_json(run(f"{REPLAY} --backward --json --plan", path))
    row = found["rows"][-1]
    assert (row["method"], row["what"], row["plan"]) == (str(path), "forward", "mesh 2x2")
    assert row["times_ring"] == pytest.approx(found["rows"][0]["time_s"] / row["time_s"])
    alone = as_json(run(f"{REPLAY} --json --methods", "", "--plan", path))
    assert [row["method"] for row in alone["rows"]] == [str(path)]


def test_a_plan_of_another_method_is_replayed(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.txt"
    plan = make_plan(PROBLEM, method="ring", route="ring", keep=("kv",))
    path.write_text(str(replace(plan, method="my own")))
    found = as_json(run(f"{REPLAY} --json --methods", "", "--plan", path))
    assert found["rows"][0]["plan"] == "my own 1x4, route ring, keep kv"


# What is refused


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("device", ["cuda", "tpu"])
def test_a_device_that_is_not_there_is_refused(run: Run, device: str) -> None:
    assert_refused(run(f"{REPLAY} --device {device}"), f"device '{device}': torch", "sees cpu here")


def test_plans_that_do_not_fit_are_refused_before_anything_runs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh_attention_lab.replay.device.free_nbytes", lambda device: 1024)
    monkeypatch.setattr("mesh_attention_lab.replay.replay.replay", None)
    assert_refused(run(REPLAY), "ulysses+mesh and the one kernel need ", "but cpu has 1.00 KiB free; use more ranks")


# The picture


def test_bars_have_their_values_lines_and_marks() -> None:
    bars = {"ring": (250.0, 240.0), "mesh": (0.5, 260.0)}
    axes = rate_chart([Rates(name="forward", one_kernel=600.0, bars=bars)]).axes[0]
    assert [patch.get_height() for patch in axes.patches] == [250.0, 0.5]  # type: ignore[attr-defined]
    assert [line.get_ydata()[0] for line in axes.lines] == [240.0, 260.0]  # type: ignore[index]
    assert [text.get_text() for text in axes.texts] == ["250", "0.5"]
    assert axes.collections[0].get_segments()[0][0][1] == 600.0  # type: ignore[attr-defined]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["ring", "mesh", "one kernel", "forecast"]


def test_no_grid_line_goes_through_a_value_above_its_bar() -> None:
    axes = rate_chart([Rates(name="forward", one_kernel=0.0, bars={"ring": (600.0, 1.0), "mesh": (20.0, 1.0)})]).axes[0]
    for above in axes.texts:
        ground = above.get_bbox_patch()
        assert ground is not None
        assert ground.get_facecolor() == (1.0, 1.0, 1.0, 1.0)
        assert above.get_zorder() > max(line.get_zorder() for line in axes.get_ygridlines())


# The benchmark


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARK.parent)
    module = importlib.import_module(BENCHMARK.stem)
    monkeypatch.setattr(module, "measure_cluster", lambda problem, **_: cluster_named(f"h100x{problem.ranks}"))
    return module


def test_the_benchmark_prints_a_table_and_last_a_json_line(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"benchmark --quick --device cpu --rounds 1 --methods ring ulysses-mesh --out {tmp_path}"
    monkeypatch.setattr("sys.argv", line.split())
    assert benchmark.main() == 0
    out = Outcome(0, *capsys.readouterr()).out.splitlines()
    facts = json.loads(out[-1])
    assert facts == json.loads((tmp_path / f"{BENCHMARK.stem}.json").read_text())
    assert [row["method"] for row in facts["problems"][0]["rows"][::3]] == ["ring", "ulysses+mesh"]
    assert [text.split()[3] for text in out if text.startswith("1k 2 KV")] == ["ring", "ulysses+mesh", "one"]
    written = (tmp_path / f"{BENCHMARK.stem}.txt").read_text()
    assert f"\ncommit {facts['commit']}\n" in written
    assert all(text in written for text in out[:-1])
    assert (tmp_path / f"{BENCHMARK.stem}.png").read_bytes().startswith(b"\x89PNG")
