"""Calibration: fits find the figures that times were made from, and what is measured becomes a file that reads back."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool import run_script

from mesh_attention import LocalGroup, Problem, causal, full, make_plan, rank_costs
from mesh_attention.clusters import cluster_named, read_cluster
from mesh_attention.errors import TopologyError
from mesh_attention.machine.fit import (
    CallTime,
    Measurement,
    MemoryTimes,
    MessageTime,
    fit_kernel_rate,
    fit_line,
    fit_links,
    fit_topology,
)
from mesh_attention.machine.timing import THOROUGH_EFFORT, CallShape, call_flops, pair_sets
from mesh_attention.topology import Device, KernelRate, LinkClass, Topology
from mesh_attention_lab.cli.calibrate import kernel_seconds, median_error, message_seconds
from mesh_attention_lab.cli.main import main

# Made-up times


def noisy(share: float, seed: int = 0) -> Callable[[float], float]:
    """Times as a clock would show them, at most so far from the truth."""
    generator = random.Random(seed)
    return lambda seconds: seconds * (1 + share * generator.uniform(-1, 1))


def made_calls(device: Device, seen: Callable[[float], float] = float) -> list[CallTime]:
    """Both directions, full and causal, 32 heads of 128."""
    problem = Problem.self_attention(seq_len=1, heads=32, head_dim=128, ranks=1)
    calls = []
    for direction in ("forward", "backward"):
        for tokens in (512, 1024, 2048, 4096):
            for shape in (
                CallShape(tokens, tokens, False),
                CallShape(tokens, 2 * tokens, False),
                CallShape(tokens, tokens, True),
            ):
                call = CallTime(
                    direction=direction,  # type: ignore[arg-type]
                    heads=32,
                    q_tokens=shape.q_tokens,
                    kv_tokens=shape.kv_tokens,
                    is_causal=shape.is_causal,
                    flops=call_flops(shape, problem, direction),  # type: ignore[arg-type]
                    time_s=0.0,
                )
                calls.append(replace(call, time_s=seen(kernel_seconds(device, call))))
    return calls


def made_messages(
    topology: Topology,
    link_class: LinkClass,
    pairs: int,
    *,
    one_way: float = 1.0,
    seen: Callable[[float], float] = float,
) -> list[MessageTime]:
    """`one_way` is the time of one way, relative to that of both."""
    made = []
    for nbytes in THOROUGH_EFFORT.message_nbytes:
        blank = MessageTime(link_class=link_class, pairs=pairs, nbytes=nbytes, one_way_s=0, both_ways_s=0)
        both_ways_s = seen(message_seconds(topology, blank))
        made.append(replace(blank, both_ways_s=both_ways_s, one_way_s=both_ways_s * one_way))
    return made


# Fits

positive = st.floats(1e-6, 1e6)


@given(base=st.one_of(st.just(0.0), positive), slope=positive, count=st.integers(2, 8))
def test_a_line_is_found_again(base: float, slope: float, count: int) -> None:
    scale = max(base, slope) / slope  # so that the sizes matter
    points = [(scale * 4**i, base + slope * scale * 4**i) for i in range(count)]
    line = fit_line(points)
    assert [line.base + line.slope * x for x, _ in points] == pytest.approx([y for _, y in points])
    assert line.slope == pytest.approx(slope)


@given(points=st.lists(st.tuples(positive, positive), max_size=8))
def test_whatever_the_times_a_line_rises_from_0_or_above_or_is_refused(points: list[tuple[float, float]]) -> None:
    try:
        line = fit_line(points)
    except TopologyError:
        return
    assert line.base >= 0
    assert line.slope > 0


def test_masked_calls_that_are_faster_than_empty_ones_are_refused() -> None:
    calls = [call for call in made_calls(cluster_named("h200").device) if call.direction == "forward"]
    odd = [replace(call, time_s=1e-6) if call.is_causal else call for call in calls]
    with pytest.raises(TopologyError, match="a masked call is faster than an empty one"):
        fit_kernel_rate(odd)


@pytest.mark.parametrize("width", [1, 132])
@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 1e-3), (0.03, 0.08)])
def test_kernel_rates_are_found_again(width: int, noise: float, tolerance: float) -> None:
    true = replace(cluster_named("h200").device, forward=KernelRate(tflops=685, call_us=42, masked=0.7), width=width)
    calls = made_calls(true, noisy(noise))
    for rate, direction in ((true.forward, "forward"), (true.backward, "backward")):
        found = fit_kernel_rate([call for call in calls if call.direction == direction], width=width)
        assert asdict(found) == pytest.approx(asdict(rate), rel=tolerance)


def test_without_causal_calls_nothing_is_said_of_them() -> None:
    calls = [call for call in made_calls(cluster_named("a100").device) if not call.is_causal]
    assert fit_kernel_rate([call for call in calls if call.direction == "forward"], width=108).masked == 1.0


@pytest.mark.parametrize("nics", [1, 2, 4, 8])
def test_links_and_nics_are_found_again(nics: int) -> None:
    true = replace(cluster_named("h100x16"), nics_per_node=nics)
    seen = noisy(0.03)
    messages = chain(
        made_messages(true, "inside", 4, seen=seen),
        made_messages(true, "between", 1, seen=seen),
        made_messages(true, "between", 8, seen=seen),
    )
    links = fit_links(list(messages), ranks_per_node=8, unmeasured=None)
    assert (links.nics_per_node, links.full_duplex) == (nics, True)
    assert asdict(links.inside) == pytest.approx(asdict(true.inside), rel=0.06)
    assert asdict(links.between) == pytest.approx(asdict(true.between), rel=0.06)


@pytest.mark.parametrize(("one_way", "full_duplex", "gb_per_s"), [(0.9, True, 360), (0.5, False, 720)])
def test_a_link_is_duplex_if_both_ways_take_little_longer_than_one(
    one_way: float, full_duplex: bool, gb_per_s: float
) -> None:
    messages = made_messages(cluster_named("h100"), "inside", 1, one_way=one_way)
    links = fit_links(messages, ranks_per_node=2, unmeasured=None)
    assert links.full_duplex == full_duplex
    assert links.inside.gb_per_s == pytest.approx(gb_per_s)


@pytest.mark.parametrize(("measured", "ranks_per_node"), [("inside", 2), ("between", 1)])
def test_a_link_that_was_not_measured_is_like_the_other(measured: LinkClass, ranks_per_node: int) -> None:
    links = fit_links(
        made_messages(cluster_named("h100x16"), measured, 1), ranks_per_node=ranks_per_node, unmeasured=None
    )
    assert links.between == links.inside


def test_a_link_that_was_not_measured_is_that_of_the_cluster_that_was_named() -> None:
    true, other = cluster_named("h100"), cluster_named("mi300x")
    links = fit_links(made_messages(true, "inside", 1), ranks_per_node=4, unmeasured=other)
    assert asdict(links.inside) == pytest.approx(asdict(true.inside), rel=1e-3)
    assert (links.between, links.nics_per_node) == (other.between, 4)
    none = fit_links([], ranks_per_node=8, unmeasured=replace(other, full_duplex=False))
    assert none == (other.inside, other.between, 8, False)


def made_measurement(topology: Topology, seen: Callable[[float], float] = float) -> Measurement:
    device = topology.device
    launch_s = device.launch_us * 1e-6
    return Measurement(
        device="made up",
        threads=1,
        kernel="made up",
        width=device.width,
        calls=tuple(made_calls(device, seen)),
        memory=MemoryTimes(
            nbytes=10**9,
            large_s=seen(launch_s + 1 / device.memory_gb_per_s),
            tiny_s=launch_s,
            memory_gib=device.memory_gib,
        ),
        messages=(*made_messages(topology, "inside", 4, seen=seen), *made_messages(topology, "between", 1, seen=seen)),
    )


def test_a_whole_cluster_is_found_again() -> None:
    true = replace(cluster_named("h200x16"), nics_per_node=1)
    measurement = made_measurement(true)
    found = fit_topology(measurement, name="h200", ranks=16, ranks_per_node=8, unmeasured=None)
    assert flat(asdict(found)) == pytest.approx(flat(asdict(true)), rel=2e-3)
    assert median_error(measurement, found) < 1e-3


def flat(nested: dict[str, Any]) -> dict[str, Any]:
    """Numbers only, by dotted name."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            found |= {f"{key}.{inner}": number for inner, number in flat(value).items()}
        elif not isinstance(value, str):
            found[key] = value
    return found


# What is measured


@given(ranks=st.integers(1, 40), ranks_per_node=st.integers(1, 10))
def test_pairs_are_apart_and_of_the_link_they_are_for(ranks: int, ranks_per_node: int) -> None:
    topology = replace(cluster_named("laptop"), ranks=ranks, ranks_per_node=ranks_per_node)
    sets = pair_sets(ranks, ranks_per_node)
    for link_class, pairs in sets:
        ends = list(chain(*pairs))
        assert len(set(ends)) == len(ends)
        assert max(ends) < ranks
        assert {topology.link_class(*pair) for pair in pairs} == {link_class}
    assert len({(link_class, len(pairs)) for link_class, pairs in sets}) == len(sets)
    there = {topology.link_class(0, rank) for rank in range(1, ranks)}
    assert {link_class for link_class, _ in sets} == there
    assert "between" not in there or ("between", [(0, ranks_per_node)]) in sets
    assert sum(len(pairs) for link_class, pairs in sets if link_class == "inside") == min(ranks, ranks_per_node) // 2


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_operations_are_counted_as_plans_count_them(direction: Any, is_causal: bool) -> None:
    mask = causal() if is_causal else full()
    problem = Problem.self_attention(seq_len=37, heads=6, head_dim=8, ranks=1, mask=mask)
    plan = make_plan(problem, direction=direction)
    assert call_flops(CallShape(37, 37, is_causal), problem, direction) == rank_costs(plan, 0).flops


# The command

SMALL = ["calibrate", "--heads", "1", "--head-dim", "16", "--dtype", "float32"]


def fit_steady_times(measurement: Measurement, **named: Any) -> Topology:
    """The times of a busy machine may be inconsistent, and would be refused: others take their place in the fit."""
    steady = made_measurement(cluster_named("h200x16"))
    classes = {message.link_class for message in measurement.messages}
    messages = tuple(message for message in steady.messages if message.link_class in classes)
    return fit_topology(replace(steady, messages=messages, width=measurement.width), **named)


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh_attention_lab.cli.calibrate.fit_topology", fit_steady_times)


@pytest.mark.usefixtures("steady")
def test_a_measurement_becomes_a_file_that_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "here.toml"
    code = main([*SMALL, "--name", "here", "--json", "--out", str(path)])
    said = capsys.readouterr()
    assert (code, said.err) == (0, "")
    answer = json.loads(said.out)
    topology = read_cluster(path)
    assert answer["path"] == str(path)
    assert answer["topology"] == asdict(topology)
    assert (topology.name, topology.ranks, topology.nodes, topology.device.width) == ("here", 2, 1, 1)
    assert (answer["unmeasured"], topology.between) == (["between"], topology.inside)
    assert "# between: not measured, assumed equal to inside.\n" in path.read_text(encoding="utf-8")
    measurement = answer["measurement"]
    assert measurement["kernel"] == "cpu flash"
    assert measurement["width"] == 1
    shapes = {(call["direction"], call["is_causal"]) for call in measurement["calls"]}
    assert shapes == {(d, c) for d in ("forward", "backward") for c in (False, True)}
    assert len({call["q_tokens"] for call in measurement["calls"]}) >= 2
    assert [message["nbytes"] for message in measurement["messages"][:3]] == list(THOROUGH_EFFORT.message_nbytes[:3])
    assert min(call["time_s"] for call in measurement["calls"]) > 0
    assert min(min(m["one_way_s"], m["both_ways_s"]) for m in measurement["messages"]) > 0


SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from mesh_attention_lab.cli import calibrate
from mesh_attention_lab.cli.main import main
from test_calibration import fit_steady_times
calibrate.fit_topology = fit_steady_times
sys.exit(main())
"""


def test_under_torchrun_all_ranks_measure_and_one_writes(tmp_path: Path) -> None:
    script, path = tmp_path / "script.py", tmp_path / "three.toml"
    script.write_text(SCRIPT, encoding="utf-8")
    done = run_script(script, *SMALL, "--ranks-per-node", "2", "--out", str(path), ranks=3)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"wrote {path}") == 1
    assert "not measured" not in done.stdout
    for title in ("median error", "forward", "backward", "inside", "between", "tflops", "gb_per_s"):
        assert title in done.stdout
    topology = read_cluster(path)
    assert (topology.name, topology.ranks, topology.ranks_per_node, topology.nics_per_node) == ("cpu", 3, 2, 1)


class Rank1:
    """An end of a group of two, whose rank 0 has said something."""

    rank, size, is_capturable = 1, 2, False

    def __init__(self, said: str) -> None:
        self.said = said

    def share(self, text: str) -> Any:
        of_rank_0 = json.dumps(json.loads(text) | {"payload": self.said})
        return SimpleNamespace(wait=lambda: None, result=lambda: [of_rank_0, text])


@pytest.fixture
def joined_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Makes this process a rank of torchrun's, at this end of its group."""

    def join(comm: Any) -> None:
        @contextmanager
        def joined() -> Iterator[tuple[Any, torch.device]]:
            yield comm, torch.device("cpu")

        monkeypatch.setattr("mesh_attention_lab.cli.calibrate.joined_group", joined)
        monkeypatch.setenv("RANK", str(comm.rank))
        monkeypatch.setenv("WORLD_SIZE", str(comm.size))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(comm.size))

    return join


def test_under_torchrun_a_file_that_is_there_ends_every_rank(
    joined_as: Callable[[Any], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "there.toml"
    path.write_text("mine")
    line = [*SMALL, "--links-of", "h100", "--out", str(path)]
    joined_as(LocalGroup(1).comm(0))
    assert main(line) == 2
    assert "exists; choose another name, or use --force" in capsys.readouterr().err
    joined_as(Rank1("rank 0 refuses"))
    assert main(line) == 2
    assert capsys.readouterr() == ("", "")
    assert path.read_text() == "mine"


@pytest.mark.usefixtures("steady")
def test_one_rank_measures_its_kernels_and_is_given_links(
    joined_as: Callable[[Any], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setitem(THOROUGH_EFFORT.call_tokens, "cpu", (64, 128))
    path = tmp_path / "there.toml"
    path.write_text("old")
    joined_as(LocalGroup(1).comm(0))
    assert main([*SMALL, "--links-of", "h100", "--out", str(path), "--force"]) == 0
    out = capsys.readouterr().out
    assert out.count("not measured, taken from h100") == 2
    assert "messages" not in out
    topology, h100 = read_cluster(path), cluster_named("h100")
    assert (topology.inside, topology.between, topology.nics_per_node) == (h100.inside, h100.between, 8)
    assert (topology.ranks, topology.ranks_per_node) == (1, 8)


@pytest.mark.parametrize(
    ("ranks", "gpus", "started", "message"),
    [
        (2, 1, 0, "2 ranks, but this machine has 1 GPU: expected one for each rank; use 1 rank, or"),
        (9, 8, 0, "9 ranks, but this machine has 8 GPUs: expected one for each rank; use 8 ranks, or"),
        (8, 8, 16, "--ranks 8: torchrun started 16 ranks; leave --ranks out"),
    ],
)
def test_ranks_do_not_share_a_gpu_and_are_those_that_torchrun_started(
    ranks: int, gpus: int, started: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if started:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(started))
    assert main(["calibrate", "--ranks", str(ranks)]) == 2
    assert message in capsys.readouterr().err
