"""What ranks know about their machine: hosts, devices, presets, files; and the choice that follows from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_calibration import made_measurement

from mesh_attention import Problem, causal, cluster_named, make_plan, rank_costs, window
from mesh_attention.clusters import PRESETS, cluster_to_toml, read_cluster
from mesh_attention.machine.detected_cluster import (
    Facts,
    calibrated_file,
    keep_measured,
    known_machine,
    measured_file,
    ranks_per_node,
    read_kept,
)
from mesh_attention.machine.tuned_strategy import Chosen, Tuner, find_alike, volume_based
from mesh_attention.plan.assignment import divisors, tiles_of
from mesh_attention.plan.layout import Contiguous, Zigzag
from mesh_attention.plan.steps import DIRECTIONS
from mesh_attention.planners.choice import Choice, least_volume_choice
from mesh_attention.topology import Link
from mesh_attention_lab.cli.calibrate import keep_calibrated
from mesh_attention_lab.cli.main import main

H200 = "NVIDIA H200"


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def ranks_on(*hosts: str, device: str = H200) -> list[Facts]:
    """One rank on each named host, each with a GPU of its own."""
    return [Facts(host=host, device=device, uuid=str(r), generation=9) for r, host in enumerate(hosts)]


def problem_of(ranks: int, *, seq: int = 0, kv_heads: int = 8) -> Problem:
    seq = seq or 1024 * ranks
    return Problem.self_attention(seq_len=seq, heads=16, kv_heads=kv_heads, head_dim=64, ranks=ranks, mask=causal())


# Hosts


@given(st.lists(st.integers(0, 3).map(str), min_size=1, max_size=24))
def test_ranks_of_a_node_are_on_one_host_and_no_larger_node_would_do(hosts: list[str]) -> None:
    def fits(size: int) -> bool:
        return all(hosts[rank] == hosts[rank - rank % size] for rank in range(len(hosts)))

    found = ranks_per_node(hosts)
    assert fits(found)
    assert not any(fits(size) for size in range(found + 1, len(hosts) + 1))


@given(st.integers(1, 5), st.integers(1, 8), st.data())
def test_equal_runs_of_hosts_are_nodes_even_if_the_last_is_smaller(nodes: int, size: int, data: st.DataObject) -> None:
    hosts = [f"host{rank // size}" for rank in range(nodes * size)]
    cut = data.draw(st.integers(0, size - 1)) if nodes > 1 else 0
    assert ranks_per_node(hosts[: len(hosts) - cut]) == size


# Files


def test_a_calibrated_file_of_the_device_replaces_the_preset() -> None:
    facts = ranks_on("a", "a", "b", "b")
    assert known_machine(facts).source == "preset"
    link = Link(gb_per_s=11.0, latency_us=3.0)
    figures = replace(PRESETS["h200"], name="ours", inside=link, between=link)
    path = keep_calibrated(H200, cluster_to_toml(figures))
    assert path == calibrated_file(H200)
    machine = known_machine(facts)
    assert machine.source == f"calibrated, {path}"
    assert machine.topology is not None
    assert (machine.topology.name, machine.topology.ranks_per_node, machine.topology.inside) == ("ours", 2, link)
    assert machine.topology.between == PRESETS["h200"].between  # one node cannot measure it
    assert known_machine(ranks_on("a", "a", device="NVIDIA H100 80GB HBM3")).source == "preset"


def test_a_file_that_cannot_be_read_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    keep_calibrated(H200, "nonsense")
    assert known_machine(ranks_on("a", "a")).source == "preset"
    assert "it is not used" in caplog.text


def test_a_measurement_is_kept_for_the_same_ranks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    facts, topology = ranks_on("a boot1", "a boot1"), cluster_named("h200x2")
    path = measured_file(problem_of(2), facts, "nccl")
    assert read_kept(path) is None
    keep_measured(path, topology, "")
    rebooted = [replace(one, host="a boot2") for one in facts]
    assert read_kept(measured_file(problem_of(2, seq=4096), rebooted, "nccl")) == topology
    others = [
        measured_file(problem_of(2), ranks_on("b", "b"), "nccl"),
        measured_file(problem_of(2), facts, "gloo"),
        measured_file(replace(problem_of(2), dtype="float32"), facts, "nccl"),
    ]
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert path not in (*others, measured_file(problem_of(2), facts, "nccl"))


def test_calibrate_keeps_its_file_where_groups_look(
    folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    steady = replace(made_measurement(cluster_named("h200x2")), device="cpu", messages=())
    monkeypatch.setattr("mesh_attention_lab.cli.calibrate.run_processes", lambda *given, **named: [steady])
    out = folders / "here.toml"
    assert main(["calibrate", "--links-of", "h200", "--keep", "--out", str(out)]) == 0
    path = calibrated_file("cpu")
    assert path is not None
    assert f"wrote {out} and {path}" in capsys.readouterr().out.replace("\n", " ")
    assert read_cluster(path) == read_cluster(out)


# Choosing


@given(st.sampled_from((2, 3, 4, 6, 8, 12)), st.sampled_from((1, 2, 4, 12)), st.booleans(), st.booleans())
def test_the_volume_based_choice_moves_the_fewest(
    ranks: int, kv_heads: int, is_causal: bool, has_gradient: bool
) -> None:
    mask = causal() if is_causal else window(100, 100)
    problem = Problem.self_attention(
        seq_len=24 * 2 * ranks, heads=12, kv_heads=kv_heads, head_dim=8, ranks=ranks, dtype="float32", mask=mask
    )
    layout = Zigzag() if is_causal else Contiguous()
    directions = DIRECTIONS if has_gradient else DIRECTIONS[:1]

    def most_received(choice: Choice) -> float:
        plans = [make_plan(problem, choice, direction=direction) for direction in directions]
        totals = [[_payload(plan, rank) for rank in range(ranks)] for plan in plans]
        return sum(map(max, totals))

    chosen = most_received(least_volume_choice(problem, layout, directions))
    for degree in divisors(ranks):
        if kv_heads % degree == 0:
            for tile in tiles_of(ranks // degree):
                assert chosen <= most_received(Choice(tile=tile, ulysses_degree=degree, layout=layout)) * (1 + 1e-9)
    if has_gradient:
        with_kept = most_received(least_volume_choice(problem, layout, directions, may_keep=True))
        assert with_kept <= chosen
        if kv_heads % ranks == 0 and ranks > 1:
            assert with_kept <= most_received(Choice(method="ulysses", layout=layout, keep=("q", "kv"))) * (1 + 1e-9)


def _payload(plan: object, rank: int) -> int:
    return sum(nbytes.payload for nbytes in rank_costs(plan, rank).received.values())  # type: ignore[arg-type]


def test_a_choice_reads_back_and_makes_the_same_plans() -> None:
    problem, tuner = problem_of(8), Tuner(cluster_named("h200x8"), Zigzag(), None)
    for chosen in (
        tuner.choose(problem, needs_gradient=True)[0],
        volume_based(problem, least_volume_choice(problem, Zigzag(), DIRECTIONS)),
    ):
        read = Chosen.from_json(json.loads(json.dumps(chosen.to_json())))
        assert read == chosen
        assert read.plans(problem, tuner.layout) == chosen.plans(problem, tuner.layout)
        assert all(plan.problem == problem for plan in read.plans(problem, tuner.layout).values())


def test_a_new_length_of_a_model_is_not_tuned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = Tuner(cluster_named("h200x8"), Zigzag(), None)
    tuner.choose(problem_of(8, seq=2**16), needs_gradient=True)
    monkeypatch.setattr("mesh_attention.machine.tuned_strategy.cached_tune", None)
    for seq in (2**15, 2**16 + 1000, 2**17):
        chosen, _ = tuner.choose(problem_of(8, seq=seq), needs_gradient=True)
        assert {plan.problem.seq_q for plan in chosen.plans(problem_of(8, seq=seq), tuner.layout).values()} == {seq}
    for other in (problem_of(8, seq=2**19), problem_of(8, seq=2**16, kv_heads=4)):
        with pytest.raises(TypeError):  # it would be tuned
            tuner.choose(other, needs_gradient=True)


def test_a_choice_that_might_not_fit_does_not_serve_a_longer_problem() -> None:
    tuner = Tuner(cluster_named("h200x8"), Zigzag(), None)
    short, long = problem_of(8, seq=2**15), problem_of(8, seq=2**16)
    _, tuning = tuner.choose(short, needs_gradient=True)
    peak = tuning.chosen.peak_nbytes
    assert find_alike(long, {short: tuning}, most_nbytes=2.0 * peak) == short
    assert find_alike(long, {short: tuning}, most_nbytes=1.9 * peak) == long
