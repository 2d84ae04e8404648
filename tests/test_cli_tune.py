"""`tune` and `simulate` as their users meet them: what is printed, what is written, what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import test_cli
from test_cli import Run, as_json

from mesh_attention import LocalGroup, MeshAttention, Problem, causal, make_plan, parse_plan
from mesh_attention.clusters import cluster_named, cluster_to_toml
from mesh_attention.plan.assignment import tiles_of
from mesh_attention.plan.plan import Plan, PlanRequest
from mesh_attention.plan.steps import DIRECTIONS
from mesh_attention.planners.choice import Choice
from mesh_attention.simulation.simulate import simulate
from mesh_attention.topology import Topology
from mesh_attention.tuning.result import NEAR_TIE, Trial, Tuning, tuning_from_json
from mesh_attention.tuning.stored import cached_tune
from mesh_attention.tuning.tune import tune, tuned_plans
from mesh_attention_lab.cli.tune import explicit_code
from mesh_attention_lab.comparison import choice_without_costs, usual_ring_plan
from mesh_attention_lab.drawing.charts import ChartPoint
from mesh_attention_lab.sweep import MAIN_METHODS

run = test_cli.run
"""The fixture."""

SIZES = "--seq 64k --heads 8 --kv-heads 4 --causal"
TUNE = f"tune --cluster h100x16 {SIZES}"
TUNE_4 = "tune --cluster h100x4 --seq 4k --heads 4 --causal"
SIMULATE = f"simulate --cluster h100x16 {SIZES}"
PROBLEM = Problem.self_attention(seq_len=65536, heads=8, kv_heads=4, head_dim=128, ranks=16, mask=causal())


@pytest.fixture(scope="module")
def kept_tunings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _cache(kept_tunings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads what the user has; what one has tuned, the next may use."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept_tunings))


@pytest.fixture(scope="module")
def topology() -> Topology:
    return cluster_named("h100x16")


@pytest.fixture(scope="module")
def tuning(topology: Topology, kept_tunings: Path) -> Tuning:
    """What the library says to `TUNE --backward`."""
    return cached_tune(PROBLEM, topology, directions=DIRECTIONS, folder=kept_tunings / "mesh-attention")[0]


def section(out: str, heading: str) -> str:
    """What stands below a heading, up to the next empty line."""
    lines = out.splitlines()
    start = lines.index(heading) + 1
    stop = next((i for i in range(start, len(lines)) if not lines[i].strip()), len(lines))
    return "\n".join(lines[start:stop])


def table_rows(out: str) -> dict[str, list[str]]:
    """The first line of each row of the table, by its method: the cells after it."""
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("───")) + 1
    stop = next(i for i, line in enumerate(lines) if line.startswith("The first is chosen"))
    firsts = (line for line in lines[start:stop] if not line.startswith(" "))
    return {re.split(r" {2,}", line)[0]: re.split(r" {2,}", line.rstrip())[1:] for line in firsts}


# tune, for people


@pytest.mark.parametrize("columns", [80, 140])
@pytest.mark.parametrize("options", ["", "--backward", "--backward --memory 20GiB"])
def test_nothing_is_wider_than_the_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, columns: int, options: str
) -> None:
    answer = as_json(run(f"{TUNE} {options} --json"))
    families = {trial["family"] for trial in answer["tuning"]["trials"]}
    monkeypatch.setenv("COLUMNS", str(columns))
    out = run(f"{TUNE} {options}").out
    assert max(len(line) for line in out.splitlines() if not is_code(line)) <= columns
    assert "…" not in out
    rows = table_rows(out)
    assert set(rows) == families, "a method is cut or wrapped"
    numbers = [cell for cells in rows.values() for cell in cells if not re.match("[a-z]", cell)]
    assert all(re.fullmatch(r"[\d,]+(\.\d+)?|–", cell) for cell in numbers), "a number is cut or wrapped"
    assert {len(cells) for cells in rows.values()} <= {5, 6}


# tune, in numbers


def test_tune_as_json_agrees_with_the_library(run: Run, tuning: Tuning, topology: Topology) -> None:
    answer = as_json(run(f"{TUNE} --backward --no-cache --json"))
    plans = tuned_plans(PROBLEM, topology, tuning.chosen)
    assert tuning_from_json(answer["tuning"]) == tuning
    assert answer["digests"] == {direction: plan.digest for direction, plan in plans.items()}
    assert answer["problem"] == asdict(PROBLEM) | {"mask": "causal"}
    assert answer["cluster"] == asdict(topology)
    assert answer["memory_limit"] is None


def test_options_reach_the_tuner(run: Run) -> None:
    line = "tune --cluster h100x256 --ranks 8 --seq 8k --seq-kv 16k --heads 4 --head-dim-v 64 --batch 2"
    answer = as_json(run(f"{line} --dtype float16 --window 100,7 --layout striped --memory 1g --json"))
    problem = answer["problem"]
    assert (problem["ranks"], answer["cluster"]["ranks"]) == (8, 8)
    assert (problem["seq_q"], problem["seq_kv"], problem["head_dim_qk"], problem["head_dim_v"]) == (
        8192,
        16384,
        128,
        64,
    )
    assert (problem["batch"], problem["dtype"], problem["mask"]) == (2, "float16", "window(100,7)")
    assert answer["memory_limit"] == 2**30
    assert {c["layout"] for t in answer["tuning"]["trials"] for c in t["choices"].values()} == {"striped"}


def test_memory_leaves_out_what_needs_more(run: Run) -> None:
    answer = as_json(run(f"{TUNE} --memory 80MiB --json"))["tuning"]
    peaks = [f["peak_nbytes"] for t in answer["trials"] for f in t["forecasts"].values()]
    assert max(peaks) <= 80 * 2**20
    assert re.fullmatch(r"needs \S+ MiB, 80.0 MiB allowed", answer["left_out"]["all-gather"])


def test_a_tuning_is_kept_unless_it_is_not_wanted(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = as_json(run(f"{TUNE_4} --no-cache --json"))
    assert list(tmp_path.rglob("tuning-*")) == []
    again = [as_json(run(f"{TUNE_4} --json")) for _ in range(2)]
    assert len(list(tmp_path.rglob("tuning-*"))) == 1
    assert [answer["is_from_cache"] for answer in (first, *again)] == [False, False, True]
    assert first["tuning"] == again[0]["tuning"] == again[1]["tuning"]
    assert "Read from the cache." in " ".join(run(TUNE_4).out.split())
    assert "plans simulated." in " ".join(run(f"{TUNE_4} --no-cache").out.split())


@pytest.mark.parametrize("file", ["a100.toml", "my cluster.toml"])
def test_a_cluster_file_is_a_cluster(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path(file).write_text(cluster_to_toml(cluster_named("a100x8")))
    line = ["tune --seq 8k --heads 4 --layout zigzag --json --cluster", file]
    answer = as_json(run(*line))
    assert answer["cluster"] == asdict(cluster_named("a100x8"))
    assert " ".join(answer["code"]["cluster"].split()) == f'attention = MeshAttention(group, cluster="{file}")'
    assert as_json(run(*line, "--ranks", "4"))["cluster"]["ranks"] == 4


# The code that uses it


def planned(code: str, problem: Problem) -> dict[str, str]:
    """The digests of the plans that a `MeshAttention` makes which the code makes."""
    names: dict[str, Any] = {"group": LocalGroup(problem.ranks), "MeshAttention": MeshAttention}
    exec(code, names)
    attention = names["attention"]
    request = PlanRequest(problem=problem, layout=attention.layout, on_gpu=False, needs_gradient=True)
    plans = attention.calls.strategy.plans(request, None)
    return {direction: plan.digest for direction, plan in plans.items()}


def test_the_code_makes_the_plans_that_were_forecast(run: Run) -> None:
    answer = as_json(run(f"{TUNE} --backward --json"))
    assert planned(answer["code"]["explicit"], PROBLEM) == answer["digests"]
    assert planned(answer["code"]["cluster"], PROBLEM).keys() == answer["digests"].keys()


def test_memory_and_layout_are_in_the_code(run: Run) -> None:
    problem = Problem.self_attention(seq_len=4096, heads=4, head_dim=128, ranks=4, mask=causal())
    answer = as_json(run(f"{TUNE_4} --backward --memory 512MiB --layout striped --json"))
    call = 'MeshAttention(group, cluster="h100x4", layout="striped", memory_limit=536870912)'
    assert answer["code"]["cluster"] == f"attention = {call}"
    assert planned(answer["code"]["explicit"], problem) == answer["digests"]
    assert planned(answer["code"]["cluster"], problem) == answer["digests"]


CHOICES = [
    ('"attention2d 4x4", None', ["attention2d 4x4, striped"]),
    ("keep kv", ["attention2d 4x4, striped, keep kv"]),
    ("inner 2x4", ["mesh 4x4, striped, inner 2x4, 1 block per call"]),
    ("ulysses 4 + mesh 2x2", ["ulysses 4 + mesh 2x2, striped, 1 block per call"]),
    ('"mesh 2x8, 1 block per call", Costs(q=', ["mesh 2x8, striped, 1 block per call"]),
    ("2 blocks per call", ["mesh 4x4, striped, route ring, 2 blocks per call"]),
    ('"backward":', ["mesh 4x4, striped, 1 block per call", "attention2d 4x4, striped"]),
]


@pytest.mark.parametrize(("says", "texts"), CHOICES, ids=[says for says, _ in CHOICES])
def test_whatever_is_chosen_has_code(says: str, texts: list[str], topology: Topology) -> None:
    choices = {d: Choice.parse(text) for d, text in zip(DIRECTIONS, (texts * 2)[:2], strict=True)}
    plans = tuned_plans(PROBLEM, topology, Trial(family="mesh", choices=choices, forecasts={}))
    code = explicit_code(choices, PROBLEM, topology)
    assert says in code
    assert planned(code, PROBLEM) == {direction: plan.digest for direction, plan in plans.items()}


def test_the_code_on_a_narrow_terminal_is_the_code(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = as_json(run(f"{TUNE} --backward --json"))
    for columns in (60, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        out = run(f"{TUNE} --backward").out
        assert planned(section(out, "to run exactly this"), PROBLEM) == answer["digests"]
        chosen_by_calls = section(out, "or let calls choose, by a quick search")
        assert planned(chosen_by_calls, PROBLEM) == planned(answer["code"]["cluster"], PROBLEM)


def is_code(line: str) -> bool:
    """Code is printed as it is, to be copied."""
    return "MeshAttention(" in line or "Costs(" in line or "make_plan(" in line


def test_the_first_line_is_a_call_that_is_as_fast(run: Run, tuning: Tuning, topology: Topology) -> None:
    answer, chosen = as_json(run(f"{TUNE} --backward --json")), tuning.chosen
    plain = choice_without_costs(PROBLEM, topology, chosen)
    if plain is None:
        assert answer["code"]["short"] == 'MeshAttention(group, cluster="h100x16")'
        return
    assert answer["code"]["short"] == f'MeshAttention(group, choice="{plain}")'
    attention = MeshAttention(LocalGroup(16), choice=plain)
    request = PlanRequest(problem=PROBLEM, layout=attention.layout, on_gpu=True, needs_gradient=True)
    plans = attention.calls.strategy.plans(request, None)
    assert sum(simulate(plan, topology).time_s for plan in plans.values()) <= chosen.time_s * (1 + NEAR_TIE)


def test_no_choice_without_costs_stands_for_two_or_for_one_that_is_faster(tuning: Tuning, topology: Topology) -> None:
    one = Choice.parse("ring 1x16, zigzag")
    trial = replace(tuning.chosen, choices=dict.fromkeys(DIRECTIONS, one))
    slow = {d: replace(forecast, time_s=9.0) for d, forecast in trial.forecasts.items()}
    fast = {d: replace(forecast, time_s=1e-9) for d, forecast in trial.forecasts.items()}
    assert choice_without_costs(PROBLEM, topology, replace(trial, forecasts=slow)) == one
    assert choice_without_costs(PROBLEM, topology, replace(trial, forecasts=fast)) is None
    two = {"forward": one, "backward": Choice.parse("mesh 2x8, zigzag")}
    assert choice_without_costs(PROBLEM, topology, replace(trial, choices=two, forecasts=slow)) is None  # type: ignore[arg-type]


# tune --chart and --trace


def test_a_chart_against_ranks_has_the_tunings_of_each(run: Run, tmp_path: Path, topology: Topology) -> None:
    file = tmp_path / "chart.png"
    chart = as_json(run(f"{TUNE} --json --against ranks --chart", file))["chart"]
    assert file.read_bytes().startswith(b"\x89PNG")
    assert (chart["path"], chart["x"], chart["left_out"]) == (str(file), "ranks", [])
    assert {point["x"] for point in chart["points"]} == {8, 16}
    tuning = tune(PROBLEM, topology)
    drawn = [trial for trial in tuning.trials if trial.family in (*MAIN_METHODS, tuning.chosen.family)]
    expected = [ChartPoint(t.family, 16, t.time_s, t.exposed_s) for t in drawn]
    found = [ChartPoint(**point) for point in chart["points"] if point["x"] == 16]
    assert sorted(found, key=str) == sorted(expected, key=str)


def test_a_chart_against_seq_keeps_the_ranks(run: Run, tmp_path: Path) -> None:
    line = "tune --cluster h100x8 --seq 192k --seq-kv 96k --heads 4 --json --against seq --chart"
    chart = as_json(run(line, tmp_path / "chart.svg"))["chart"]
    assert {point["x"] for point in chart["points"]} == {65536, 131072, 196608}
    other = as_json(run("tune --cluster h100x8 --seq 64k --seq-kv 32k --heads 4 --json"))["tuning"]["trials"][0]
    shown = [p for p in chart["points"] if (p["method"], p["x"]) == (other["family"], 65536)]
    assert [point["time_s"] for point in shown] == [other["forecasts"]["forward"]["time_s"]]


def test_a_chart_against_tiles_has_every_tile_of_the_chosen_degree(run: Run, tmp_path: Path) -> None:
    answer = as_json(run(f"{TUNE} --backward --json --against tile --chart", tmp_path / "chart.pdf"))
    choice = tuning_from_json(answer["tuning"]).chosen.choices["forward"].assignment
    assert choice.ulysses_degree > 1
    tiles = [f"{choice.ulysses_degree}·{tile}" for tile in tiles_of(16 // choice.ulysses_degree)]
    for method in ("mesh", "attention2d"):
        assert [p["x"] for p in answer["chart"]["points"] if p["method"] == method] == tiles
    assert answer["chart"]["title"].endswith("forward and backward, on 16 ranks of h100")
    chosen = f"{choice.ulysses_degree}·{choice.tile}"
    mesh = next(p for p in answer["chart"]["points"] if (p["method"], p["x"]) == ("mesh", chosen))
    best = sum(f["time_s"] for f in answer["tuning"]["trials"][0]["forecasts"].values())
    assert best * 0.99 <= mesh["time_s"] <= best * 1.1


def test_a_trace_has_both_passes_of_the_choice(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    answer = as_json(run(f"{TUNE} --backward --json --trace", file))
    assert answer["trace"] == str(file)
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {f"rank {rank}" for rank in range(16)}
    last_s = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") / 1e6
    times = [f["time_s"] for f in answer["tuning"]["trials"][0]["forecasts"].values()]
    assert last_s == pytest.approx(sum(times), rel=0.02)
    assert f"wrote {file}" in run(f"{TUNE} --backward --trace", file).out.replace("\n", "")


# simulate


def simulated(answer: dict[str, Any], plan: Plan, topology: Topology, *, number: int = 0) -> None:
    """Asserts that a forecast is what the library says of the plan."""
    trial = answer["trials"][number]
    found = trial["forecasts"][plan.direction]
    timeline = simulate(plan, topology)
    assert trial["digests"][plan.direction] == plan.digest
    for name in ("time_s", "compute_s", "exposed_s", "tflops", "peak_nbytes"):
        assert found[name] == getattr(timeline, name), name
    sent = timeline.sent_nbytes
    assert (found["inside_nbytes"], found["between_nbytes"]) == (sent["inside"] / 16, sent["between"] / 16)


def test_simulate_agrees_with_the_library(run: Run, topology: Topology, tuning: Tuning) -> None:
    counted = replace(tuning.chosen.choices["forward"], blocks_per_call=2, keep=(), waves=1, cut="heads")
    chosen = replace(tuning.chosen, choices={"forward": counted})
    options = counted.options
    line = f"{SIMULATE} --method {options['method']} --tile {options['tile']} --route {options['route']}"
    line += f" --ulysses-degree {options['ulysses_degree']} --partials {options['partials']}"
    line += f" --blocks-per-call {options['blocks_per_call']}"
    line += f" --inner {options['inner']}" if options["inner"] else ""
    answer = as_json(run(f"{line} --json"))
    plan = tuned_plans(PROBLEM, topology, chosen)["forward"]
    simulated(answer, plan, topology)
    assert answer["is_exact"] is True
    assert (answer["problem"]["seq_q"], answer["layout"]) == (65536, "zigzag")


def test_ring_stands_beside_it(run: Run, topology: Topology) -> None:
    answer = as_json(run(f"{SIMULATE} --backward --method attention2d --tile 2x8 --layout striped --json"))
    assert [trial["family"] for trial in answer["trials"]] == ["attention2d 2x8", "ring 1x16"]
    for direction in DIRECTIONS:
        plan = make_plan(PROBLEM, method="attention2d", tile=(2, 8), layout="striped", direction=direction)
        simulated(answer, plan, topology)
        found = answer["trials"][1]["forecasts"][direction]
        ring = usual_ring_plan(plan, topology)
        assert found["time_s"] == pytest.approx(simulate(ring, topology).time_s, rel=0.01)
    assert len(as_json(run(f"{SIMULATE} --method ring --route ring --partials ring --json"))["trials"]) == 1


def test_a_plan_file_is_simulated_as_it_is(run: Run, tmp_path: Path, topology: Topology) -> None:
    file = tmp_path / "plan.txt"
    run(f"plan --ranks 16 {SIZES} --head-dim 128 --tile 2x8 --inner 2x4 --backward --save", file)
    plan = parse_plan(file.read_text(encoding="utf-8"))
    assert str(plan.assignment.inner) == "2x4"
    answer = as_json(run("simulate --cluster h100 --ranks 16 --json", file))
    assert list(answer["trials"][0]["forecasts"]) == ["backward"]
    simulated(answer, plan, topology)


def test_the_inner_tile_reaches_plan_and_forecast(run: Run) -> None:
    options = f"{SIZES} --tile 4x4 --route ring --partials ring"
    for inner in ("2x4", "4x2"):
        answer = as_json(run(f"plan --ranks 16 {options} --head-dim 128 --inner {inner} --json"))
        assert str(parse_plan(answer["plan"]).assignment.inner) == inner
    between = [
        as_json(run(f"simulate --cluster h100x16 {options} {inner} --json"))["trials"][0]["forecasts"]["forward"]
        for inner in ("", "--inner 2x4")
    ]
    assert between[0]["between_nbytes"] != between[1]["between_nbytes"]


def test_what_is_kept_is_not_sent_again(run: Run) -> None:
    line = f"{SIMULATE} --tile 2x8 --backward --json"
    plain, kept = (as_json(run(f"{line} {keep}"))["trials"][0]["forecasts"] for keep in ("", "--keep q,kv"))
    assert kept["backward"]["inside_nbytes"] < plain["backward"]["inside_nbytes"]


def test_an_odd_length_is_not_priced_exactly(run: Run) -> None:
    assert as_json(run(f"{SIMULATE} --seq 65537 --json"))["is_exact"] is False


@pytest.mark.parametrize("columns", [80, 140])
def test_a_forecast_fits_the_terminal(run: Run, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run(f"{SIMULATE} --backward").out.splitlines()
    assert max(map(len, lines)) <= columns
    rows = [re.split(" {2,}", line.rstrip()) for line in lines[8:] if re.match(r"(mesh|ring) \d+x\d+", line)]
    assert [len(row) for row in rows] == [6, 6], "a number is cut or wrapped"


def test_simulate_writes_a_trace(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    assert run(f"{SIMULATE} --backward --trace {trace}").out.endswith(f"wrote {trace}\n")
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert sum(event["name"] == "process_name" for event in events) == 16
    assert as_json(run(f"{SIMULATE} --json --trace {trace}"))["trace"] == str(trace)


# Parts
