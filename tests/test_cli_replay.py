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
from mesh_attention.errors import UsageError
from mesh_attention.topology import Topology
from mesh_attention_lab.cli.main import main
from mesh_attention_lab.cli.replay import parse_methods
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


def test_it_says_what_was_played_on_what_and_what_is_left_out(run: Run) -> None:
    code, out, err = run(f"{REPLAY} --backward")
    words = " ".join(out.split())
    assert (code, err) == (0, "")
    assert words.startswith("replay of rank 2 of 4 on cpu, 1 thread: forward and backward; 64 tokens, 4 heads of 8,")
    assert f"torch {torch.__version__}" in words
    assert "kernel cpu flash, merging torch, 2 rounds step by step" in words
    assert "plans and forecasts for h100: 4 ranks in one node, 360 GB/s per rank" in words
    assert "Left out: other ranks being late, and contention in the network." in words


def test_the_table_has_a_row_for_each_method_and_pass_and_for_both(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    out = run(f"{REPLAY} --backward").out
    found = rows(out)
    assert [row[0] for row in found] == [f"{method} {what}" for method in METHODS for what in ("fwd", "bwd", "both")]
    assert re.search(r"\nring fwd .*\n  ring 1x4", out)
    assert re.search(r"\nulysses\+mesh fwd .*\n  ulysses 2 \+ pass-q 2x1", out)
    for row in found:
        assert len(row) == 8
        assert float(row[1].replace(",", "")) > 0
    assert {row[4] for row in found[:3]} == {"1.00"}


def test_one_pass_has_no_row_for_both(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert [row[0] for row in rows(run(REPLAY).out)] == [f"{method} fwd" for method in METHODS]


def test_the_one_kernel_has_a_line_of_its_own(run: Run) -> None:
    out = " ".join(run(f"{REPLAY} --backward").out.split())
    assert re.search(r"a call of 32 tokens: \S+ TFLOP/s forward and \S+ TFLOP/s backward", out)


@pytest.mark.parametrize("columns", [80, 100])
def test_nothing_is_wider_than_the_terminal(run: Run, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = run(f"{REPLAY} --backward").out
    assert max(len(line.rstrip()) for line in out.splitlines()) <= columns
    with_figures = [" ".join(row) for row in rows(out)]
    assert len(with_figures) == 9
    assert all(re.search(r" [+-]?\d+\.\d$", row) for row in with_figures)


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


def test_plan_files_that_do_not_fit_are_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.txt"
    path.write_text(str(make_plan(PROBLEM, method="ring", direction="backward")))
    assert_refused(
        run(f"{REPLAY} --plan", path), f"--plan {path} is a plan of the backward pass; add --backward to play it"
    )
    other = run(f"{REPLAY} --backward --batch 2 --plan", path)
    assert_refused(other, f"--plan {path} is for another problem: its batch is 1, expected 2")
    unrolled = str(make_plan(PROBLEM, method="ring").unrolled())
    path.write_text(re.sub(r"\n  send kv\d+ to \d+", "", unrolled, count=1))
    code, out, err = run(f"{REPLAY} --plan", path)
    assert (code, out) == (1, "")
    assert f"{path} breaks the rules in " in err
    assert f"'mesh-attention verify {path}' shows all" in err


# What is refused


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--methods ring,mseh", "--methods 'mseh': expected some of ring, all-gather"),
        ("--methods 7", "expected some of ring, all-gather"),
        ("--methods ,", "nothing to replay: give --methods, or a --plan"),
        ("--rank 4", "--rank 4: expected a rank from 0 to 3"),
        ("--rank -1", "--rank '-1': expected a whole number"),
        ("--rounds 0", "--rounds '0': expected a whole number, 1 or more"),
        ("--device tpu", "device 'tpu': torch "),
        ("--kv-heads 2 --methods ulysses", "method ulysses: 2 KV heads cannot be spread over 4 ranks"),
        ("--dtype int8", "dtype='int8': expected one of float64"),
        ("--chart chart.gif", "--chart chart.gif: expected a file name that ends in"),
        ("--cluster nowhere", "nowhere"),
    ],
)
def test_what_cannot_be_done_is_one_line(run: Run, more: str, message: str) -> None:
    assert_refused(run(f"{REPLAY} {more}"), message)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused(run: Run) -> None:
    assert_refused(run(f"{REPLAY} --device cuda"), "device 'cuda': torch", "sees cpu here")


def test_plans_that_do_not_fit_are_refused_before_anything_runs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh_attention_lab.replay.device.free_nbytes", lambda device: 1024)
    monkeypatch.setattr("mesh_attention_lab.replay.replay.replay", None)
    assert_refused(run(REPLAY), "ulysses+mesh and the one kernel need ", "but cpu has 1.00 KiB free; use more ranks")


def test_methods_may_be_spelt_in_plain_letters() -> None:
    for text in ("ulysses+mesh", "ulysses-mesh", "Ulysses + Mesh", "ulysses_mesh"):
        assert parse_methods(text) == ("ulysses+mesh",)
    assert parse_methods("ring, double-ring,best ,ring") == ("ring", "double ring", "best")
    with pytest.raises(UsageError, match="expected some of ring, all-gather"):
        parse_methods("attention2")


def test_help_names_the_options(run: Run) -> None:
    code, out, _ = run("replay --help")
    assert code == 0
    for option in ("--methods", "--plan", "--rank", "--rounds", "--device", "--cluster", "--no-graphs", "--chart"):
        assert option in out


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
