"""Clusters by name and from files: every preset is one, every cluster survives its file, and errors name the key."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mesh_attention.clusters import (
    PRESETS,
    cluster_named,
    cluster_to_toml,
    parse_cluster,
    read_cluster,
)
from mesh_attention.errors import ParseError, TopologyError, UsageError
from mesh_attention.topology import Device, KernelRate, Link, Topology

# Presets


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_known_by_its_name(name: str) -> None:
    preset = PRESETS[name]
    assert cluster_named(name) == preset
    assert preset.name == name
    assert cluster_named(f"{name}x24") == preset.with_ranks(24)


@pytest.mark.parametrize("text", ["mi300x256", "mi300xx256", " MI300X256 "])
def test_a_name_that_ends_in_x_needs_no_second_one(text: str) -> None:
    topology = cluster_named(text)
    assert (topology.name, topology.ranks, topology.nodes) == ("mi300x", 256, 32)


@pytest.mark.parametrize(("tokens", "tflops"), [(1024, 512), (8192, 657)])
def test_the_h200_forecasts_the_calls_that_were_measured(tokens: int, tflops: float) -> None:
    rate = cluster_named("h200").device.forward
    flops = 4 * tokens**2 * 32 * 128
    forecast = flops / (rate.call_us * 1e-6 + flops / (rate.tflops * 1e12)) / 1e12
    assert forecast == pytest.approx(tflops, rel=0.15)


def test_what_is_no_cluster_is_refused() -> None:
    """What is said of it is in tests/golden/cli."""
    for text, error in {
        "zzz": TopologyError,
        "h100x0": ParseError,
        "no/where": UsageError,
        "nul\0.toml": UsageError,
    }.items():
        with pytest.raises(error, match="expected a"):
            cluster_named(text)


# Files


@st.composite
def values(draw: st.DrawFn, value_class: type) -> Any:
    """A value with any fields, so that a field that is added later is drawn as well."""
    above_0 = st.one_of(st.integers(1, 10**12), st.floats(1e-12, 1e12))
    scalars = {
        "str": st.text(st.characters(exclude_categories=["Cs"])),
        "bool": st.booleans(),
        "int": st.integers(1, 1000),
        "float": above_0,
    }
    nested = {"Device": Device, "KernelRate": KernelRate, "Link": Link}
    drawn = {
        f.name: draw(values(nested[str(f.type)]) if f.type in nested else scalars[str(f.type)])
        for f in fields(value_class)
    }
    if value_class is Topology:
        drawn["ranks_per_node"] += drawn["nics_per_node"]
    return value_class(**drawn)


@example(topology=replace(cluster_named("h100"), name='\x00\x1f\x7f\x80"\\\r\n#'), note="# [")
@given(topology=values(Topology), note=st.text(st.characters(exclude_categories=["Cs", "Cc"])))
def test_a_cluster_reads_back_from_its_file(topology: Topology, note: str) -> None:
    assert parse_cluster(cluster_to_toml(topology, note=note)) == topology


def test_a_file_is_read_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(cluster_to_toml(cluster_named("a100x16"), note="Two lines\nof a note."), encoding="utf-8")
    assert cluster_named(str(path)) == read_cluster(path) == cluster_named("a100x16")
    assert path.read_text(encoding="utf-8").startswith("# A cluster for mesh-attention.\n# Two lines\n# of a note.\n")


def test_what_has_a_default_may_be_left_out() -> None:
    topology = parse_cluster(
        """
        name = "small"
        ranks = 2
        ranks_per_node = 2
        inside = { gb_per_s = 10 }
        between = { gb_per_s = 1.5 }
        [device]
        memory_gb_per_s = 100
        memory_gib = 16
        forward = { tflops = 1 }
        backward = { tflops = 2 }
        """
    )
    assert topology == Topology(
        name="small",
        ranks=2,
        ranks_per_node=2,
        inside=Link(gb_per_s=10),
        between=Link(gb_per_s=1.5),
        device=Device(forward=KernelRate(tflops=1), backward=KernelRate(tflops=2), memory_gb_per_s=100, memory_gib=16),
    )


GOOD = cluster_to_toml(cluster_named("h100x16"))


@pytest.mark.parametrize(
    ("before", "after", "error", "message"),
    [
        ("ranks = 16", "ranks = 16\ninside = 3", ParseError, "not valid TOML"),
        ("ranks = 16", f"ranks = 1{'0' * 9999}", ParseError, "not valid TOML"),
        ("ranks = 16", f"ranks = {'[' * 99999}", ParseError, "not valid TOML"),
        ("tflops = 640", f"tflops = 1{'0' * 999}", TopologyError, "expected a number"),
        ("tflops = 640", "tflops = nan", TopologyError, "[device.forward] KernelRate tflops=nan: expected a number"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name(
    tmp_path: Path, before: str, after: str, error: type[UsageError], message: str
) -> None:
    """tests/golden/cli has more, word for word."""
    assert before in GOOD
    path = tmp_path / "wrong.toml"
    path.write_text(GOOD.replace(before, after, 1), encoding="utf-8")
    with pytest.raises(error) as caught:
        read_cluster(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
