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
from mesh_attention.errors import ParseError, TopologyError
from mesh_attention.topology import Device, KernelRate, Link, Topology
from mesh_attention_lab.cli.main import main

# Presets


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_known_by_its_name(name: str) -> None:
    preset = PRESETS[name]
    assert cluster_named(name) == preset
    assert preset.name == name
    assert cluster_named(f"{name}x24") == preset.with_ranks(24)


@pytest.mark.parametrize(("tokens", "tflops"), [(1024, 512), (8192, 657)])
def test_the_h200_forecasts_the_calls_that_were_measured(tokens: int, tflops: float) -> None:
    rate = cluster_named("h200").device.forward
    flops = 4 * tokens**2 * 32 * 128
    forecast = flops / (rate.call_us * 1e-6 + flops / (rate.tflops * 1e12)) / 1e12
    assert forecast == pytest.approx(tflops, rel=0.15)


# Files


@st.composite
def values(draw: st.DrawFn, value_class: type) -> Any:
    """A value with any fields, so that a field that is added later is drawn as well."""
    above_0 = st.one_of(st.integers(1, 10**12), st.floats(1e-12, 1e12))
    scalars = {
        "str": st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1),
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


@example(topology=replace(cluster_named("h100"), name='"\\#\U0001f600'), note="# [")
@given(topology=values(Topology), note=st.text(st.characters(exclude_categories=["Cs", "Cc"])))
def test_a_cluster_reads_back_from_its_file(topology: Topology, note: str) -> None:
    assert parse_cluster(cluster_to_toml(topology, note=note)) == topology


@given(name=st.text().filter(lambda name: not name.isprintable()) | st.sampled_from(["", "\x1b[31m", "a\x07", "\x9b"]))
def test_a_name_that_cannot_be_printed_is_refused(name: str) -> None:
    """Whatever is said of it, here and by the command line, can be printed: a terminal obeys some characters."""
    with pytest.raises(TopologyError, match="expected a text that can be printed") as caught:
        replace(cluster_named("h100"), name=name)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("command", ["simulate", "tune"])
@pytest.mark.parametrize(
    "line", ['name = "\\u001b]0;t\\u0007\\u009b"', '"\\u001b[31m\\u0007\\u009b" = 1\nname = "h100"']
)
def test_the_command_line_prints_no_control_characters_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, line: str
) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(cluster_to_toml(cluster_named("h100x8")).replace('name = "h100"', line, 1))
    assert main([command, "--seq", "1k", "--heads", "8", "--cluster", str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out + err).replace("\n", "").isprintable()


def test_a_file_is_read_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(cluster_to_toml(cluster_named("a100x16"), note="Two lines\nof a note."), encoding="utf-8")
    assert cluster_named(str(path)) == read_cluster(path) == cluster_named("a100x16")
    assert path.read_text(encoding="utf-8").startswith("# A cluster for mesh-attention.\n# Two lines\n# of a note.\n")


@pytest.mark.parametrize("ranks", ["16\ninside = 3", f"1{'0' * 9999}", "[" * 99999], ids=lambda ranks: ranks[:9])
def test_a_file_that_is_not_toml_is_refused_with_its_name(tmp_path: Path, ranks: str) -> None:
    """What is said of others is in tests/golden/cli/clusters.txt."""
    path = tmp_path / "wrong.toml"
    path.write_text(cluster_to_toml(cluster_named("h100x16")).replace("ranks = 16", f"ranks = {ranks}", 1))
    with pytest.raises(ParseError, match=r"wrong\.toml: not valid TOML"):
        read_cluster(path)
