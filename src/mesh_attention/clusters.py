"""Clusters by name and from files: `h100x256`, or a file from `mesh-attention calibrate`.

Presets are starting points. Kernels and memory of `h200` and all of `laptop` were measured. The other devices are
estimates from public kernel benchmarks, every fabric is its data sheet less what programs usually lose (a fifth of
NVLink, a tenth of a NIC), and latencies are estimates. Memory rates are those of a merge in one kernel. A rested H200
computes at 715 and 605 TFLOP/s, one at its power limit at 638 and 559; the preset is between. `calibrate` measures a
machine and replaces all of this.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

from mesh_attention.errors import ParseError, TopologyError, UsageError
from mesh_attention.topology import Device, KernelRate, Link, Topology

MEASURE = "measure"
"""Stands for a measurement by the ranks themselves, where there are ranks."""
WRITES_ONE = "'mesh-attention calibrate' writes one"


# Presets


NVLINK_SHARE, NIC_SHARE = 0.8, 0.9
"""The share of its data sheet that programs reach on a fabric, in one direction."""


_Three = tuple[float, float, float]

# Nodes of eight GPUs with a NIC each. Forward and backward: TFLOP/s, µs a call, share of that rate in masked calls.
# Memory: GB/s, GiB, µs of the smallest merge. Width. Fabric, from its data sheet: a port's GB/s, a NIC's Gbit/s, in one
# direction; latencies in µs inside and between nodes.
_NODES_OF_8 = (
    # 80 GB SXM; kernels estimated from FlashAttention-2's published figures; NVLink 3, 200 Gb/s NICs
    ("a100", (225, 12, 0.88), (190, 43, 0.88), (1750, 79.2, 5), 108, (300, 200), (10, 20)),
    # 80 GB SXM; kernels estimated from FlashAttention-3 and cuDNN benchmarks; NVLink 4, 400 Gb/s NICs
    ("h100", (640, 12, 0.85), (560, 43, 0.85), (2950, 79.1, 5), 132, (450, 400), (10, 20)),
    # kernels and memory measured (cuDNN, 32 heads of 128, bfloat16); NVLink 4, 400 Gb/s NICs
    ("h200", (675, 7, 0.83), (570, 55, 0.85), (3480, 139.8, 3.3), 132, (450, 400), (10, 20)),
    # kernels estimated from FlashAttention-4's published B200 figures; NVLink 5, 400 Gb/s NICs
    ("b200", (1550, 12, 0.92), (1370, 43, 0.89), (7000, 178.4, 5), 148, (900, 400), (10, 20)),
    # kernels estimated from AITER benchmarks; one 64 GB/s link for each pair of GPUs, 400 Gb/s NICs
    ("mi300x", (500, 20, 0.8), (350, 60, 0.8), (4200, 192.0, 8), 304, (64, 400), (15, 25)),
)


def _node_of_8(
    name: str,
    forward: _Three,
    backward: _Three,
    memory: _Three,
    width: int,
    fabric: tuple[float, float],
    latencies_us: tuple[float, float],
) -> Topology:
    port_gb_per_s, nic_gbit_per_s = fabric
    return Topology(
        name=name,
        ranks=8,
        ranks_per_node=8,
        nics_per_node=8,
        device=_device(forward, backward, memory, width),
        inside=Link(gb_per_s=round(port_gb_per_s * NVLINK_SHARE, 1), latency_us=latencies_us[0]),
        between=Link(gb_per_s=round(nic_gbit_per_s / 8 * NIC_SHARE, 1), latency_us=latencies_us[1]),
    )


def _device(forward: _Three, backward: _Three, memory: _Three, width: int = 1) -> Device:
    rates = [KernelRate(tflops=tflops, call_us=us, masked=masked) for tflops, us, masked in (forward, backward)]
    memory_gb_per_s, memory_gib, launch_us = memory
    return Device(
        forward=rates[0],
        backward=rates[1],
        memory_gb_per_s=memory_gb_per_s,
        memory_gib=memory_gib,
        launch_us=launch_us,
        width=width,
    )


_LAPTOP = Topology(
    name="laptop",
    ranks=8,
    ranks_per_node=8,
    device=_device((0.019, 1200, 0.51), (0.0186, 22_000, 0.56), (0.82, 2.9, 68)),
    inside=Link(gb_per_s=1.5, latency_us=1600),
    between=Link(gb_per_s=1.5, latency_us=1600),
    full_duplex=False,
)
"""Measured by calibrate --ranks 8 on 2 cores of an AMD EPYC (Zen 4): 8 processes, Gloo on loopback."""
_PAPER = Topology(
    name="paper",
    ranks=8,
    ranks_per_node=8,
    nics_per_node=4,
    device=_device((185, 40, 1.0), (157, 40, 1.0), (1500, 80, 5)),
    inside=Link(gb_per_s=2.75, latency_us=20),
    between=Link(gb_per_s=2.23, latency_us=20),
    full_duplex=False,
)
"""The cluster that the Mesh-Attention paper (arXiv 2512.20968) does not name: kernel and link rates, NICs and duplex as
`benchmarks/papers/fit.py` finds them, fitted once to ten published times and ratios. Ours against published: Ring's
growth in weak scaling -22 %, all others within 7 %, rms 9 %. Rates are what programs saw, not a data sheet's."""

UNKNOWN = Topology(
    name="gpu",
    ranks=8,
    ranks_per_node=1,
    device=_device((600, 5, 1.0), (600, 55, 1.0), (3500, 80, 5)),
    inside=Link(gb_per_s=50),
    between=Link(gb_per_s=50),
)
"""About Hopper GPUs, each behind a 400 Gb/s link: what is assumed where no machine is known."""

PRESETS = {preset.name: preset for preset in (*(_node_of_8(*row) for row in _NODES_OF_8), _LAPTOP, _PAPER, UNKNOWN)}
"""Clusters by name: of one node, `gpu` of eight."""


def cluster_named(name: str) -> Topology:
    """A preset with a number of ranks (``h100x256``; a name alone means one node), or a .toml file by its path."""
    path = Path(name)
    if path.suffix.lower() == ".toml" or len(path.parts) > 1:
        return read_cluster(path)
    wanted = name.strip().lower()
    if wanted == MEASURE:
        raise TopologyError(
            f"cluster {name!r}: only a group of running ranks can be measured, with MeshAttention(group, "
            "cluster='measure'); use a preset such as h100x256, or a file that 'mesh-attention calibrate' writes"
        )
    for known, preset in PRESETS.items():
        if wanted == known:
            return preset
        if wanted.startswith(known):
            return _with_ranks(preset, name, wanted.removeprefix(known))
    near = get_close_matches(re.sub(r"x[0-9]*$", "", wanted), PRESETS, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise TopologyError(
        f"cluster {name!r}: {hint}expected a .toml file, or NAMExRANKS such as h100x256, where NAME is one of "
        f"{', '.join(PRESETS)}"
    )


def _with_ranks(topology: Topology, name: str, rest: str) -> Topology:
    # mi300x256 is 256 of them, as is mi300xx256.
    ranks = re.fullmatch(r"x?([0-9]{1,9})" if topology.name.endswith("x") else r"x([0-9]{1,9})", rest)
    if ranks is None or int(ranks[1]) < 1:
        example = f"{topology.name.removesuffix('x')}x64"
        raise ParseError(f"cluster {name!r}: expected a number of ranks after the name, 1 or more, such as {example}")
    return topology.with_ranks(int(ranks[1]))


# Files


def read_cluster(path: Path) -> Topology:
    """The cluster in a TOML file; errors name the file and the key."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ParseError(f"{path}: expected a cluster, but byte {error.start} is not UTF-8; {WRITES_ONE}") from error
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte in it
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path}: expected a cluster file: {reason.lower()}; {WRITES_ONE}") from error
    try:
        return parse_cluster(text)
    except UsageError as error:
        raise type(error)(f"{path}: {error}") from error


def parse_cluster(text: str) -> Topology:
    """The inverse of `cluster_to_toml`. Keys that have a default may be left out."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParseError(f"not valid TOML: {error}; {WRITES_ONE}") from error
    topology: Topology = _read_table(Topology, table, at="")
    return topology


_TABLES = {"Device": Device, "KernelRate": KernelRate, "Link": Link}


def _read_table(value_class: type, table: object, *, at: str) -> Any:
    if not isinstance(table, dict):
        raise ParseError(f"{at} = {table!r}: expected a table, [{at}]")
    known = {f.name: f for f in fields(value_class)}
    for key in table:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ParseError(f"unknown key {_dotted(at, key)}; {hint}expected some of {', '.join(known)}")
    missing = [_dotted(at, f.name) for f in known.values() if f.default is MISSING and f.name not in table]
    if missing:
        raise ParseError(f"missing {', '.join(missing)}; {WRITES_ONE}")
    values = dict(table)
    for key in table:
        if known[key].type in _TABLES:
            values[key] = _read_table(_TABLES[str(known[key].type)], table[key], at=_dotted(at, key))
    try:
        return value_class(**values)
    except TopologyError as error:
        raise TopologyError(f"[{at}] {error}" if at else str(error)) from error


def _dotted(at: str, key: str) -> str:
    return f"{at}.{key}" if at else key


_COMMENTS = {
    "ranks_per_node": "rank r is in node r // ranks_per_node",
    "nics_per_node": "a node's ranks share them evenly",
    "full_duplex": "whether a link carries both directions at once",
    "inside": "a rank's port to its node",
    "between": "a NIC",
    "gb_per_s": "payload in one direction, 10^9 bytes a second",
    "latency_us": "of the smallest message",
    "device": "what a rank computes on",
    "memory_gb_per_s": "what merging a partial reads and writes",
    "memory_gib": "for one rank",
    "launch_us": "of the smallest merge",
    "width": "runs of 128 tokens of one head worked on at once; 1: no rounds",
    "device.forward": "a call takes call_us + operations / tflops",
    "masked": "share of that rate a masked call reaches, useful operations only",
}


def cluster_to_toml(topology: Topology, *, note: str = "") -> str:
    """A commented file that `read_cluster` reads. The note goes above it."""
    head = [f"# {line}".rstrip() for line in ("A cluster for mesh-attention.", *note.splitlines())]
    return "\n".join([*head, "", *_table_lines(topology, at="")]) + "\n"


def _table_lines(value: Any, *, at: str) -> Iterator[str]:
    named = [(f.name, getattr(value, f.name)) for f in fields(value)]
    yield from _aligned([(f"{key} = {_toml(v)}", _COMMENTS.get(key, "")) for key, v in named if not is_dataclass(v)])
    for key, inner in named:
        if is_dataclass(inner):
            yield ""
            path = _dotted(at, key)
            yield from _aligned([(f"[{path}]", _COMMENTS.get(path, ""))])
            yield from _table_lines(inner, at=path)


def _aligned(lines: Iterable[tuple[str, str]]) -> list[str]:
    lines = list(lines)
    width = max(len(text) for text, _ in lines)
    return [f"{text:<{width}}  # {comment}" if comment else text for text, comment in lines]


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
