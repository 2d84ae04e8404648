"""Clusters by name and from files: `h100x256`, or what `mesh-attention calibrate` wrote.

Presets are starting points. Kernels and memory of `h200` and all of `laptop` were measured. The other devices are
estimates from public kernel benchmarks, every fabric is its data sheet less what programs usually lose (a fifth of
NVLink, a tenth of a NIC), and latencies are estimates. Memory rates are those of a merge in one kernel. A rested H200
computes at 715 and 605 TFLOP/s, one at its power limit at 638 and 559; the preset is between. `calibrate` replaces all
this with what a machine really does.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

from mesh_attention.errors import ParseError, TopologyError, UsageError
from mesh_attention.topology import Device, KernelRate, Link, Topology

WRITES_ONE = "'mesh-attention calibrate' writes one"


# Presets


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A cluster with as many ranks as its name alone stands for, and where its figures come from."""

    topology: Topology
    source: str


NVLINK_SHARE, NIC_SHARE = 0.8, 0.9
"""What programs reach of a fabric's data sheet, in one direction."""


def _node_of_8(
    name: str, *, device: Device, port_gb_per_s: float, nic_gbit_per_s: float, latencies_us: tuple[float, float]
) -> Topology:
    """Eight GPUs a node, a NIC for each. Rates are the data sheet's, in one direction."""
    inside_us, between_us = latencies_us
    return Topology(
        name=name,
        ranks=8,
        ranks_per_node=8,
        nics_per_node=8,
        device=device,
        inside=Link(gb_per_s=round(port_gb_per_s * NVLINK_SHARE, 1), latency_us=inside_us),
        between=Link(gb_per_s=round(nic_gbit_per_s / 8 * NIC_SHARE, 1), latency_us=between_us),
    )


_A100 = _node_of_8(
    "a100",
    device=Device(
        forward=KernelRate(tflops=225, call_us=12, masked=0.88),
        backward=KernelRate(tflops=190, call_us=43, masked=0.88),
        memory_gb_per_s=1750,
        memory_gib=79.2,
        launch_us=5,
        width=108,
    ),
    port_gb_per_s=300,
    nic_gbit_per_s=200,
    latencies_us=(10, 20),
)
_H100 = _node_of_8(
    "h100",
    device=Device(
        forward=KernelRate(tflops=640, call_us=12, masked=0.85),
        backward=KernelRate(tflops=560, call_us=43, masked=0.85),
        memory_gb_per_s=2950,
        memory_gib=79.1,
        launch_us=5,
        width=132,
    ),
    port_gb_per_s=450,
    nic_gbit_per_s=400,
    latencies_us=(10, 20),
)
_H200 = _node_of_8(
    "h200",
    device=Device(
        forward=KernelRate(tflops=675, call_us=7, masked=0.83),
        backward=KernelRate(tflops=570, call_us=55, masked=0.85),
        memory_gb_per_s=3480,
        memory_gib=139.8,
        launch_us=3.3,
        width=132,
    ),
    port_gb_per_s=450,
    nic_gbit_per_s=400,
    latencies_us=(10, 20),
)
_B200 = _node_of_8(
    "b200",
    device=Device(
        forward=KernelRate(tflops=1550, call_us=12, masked=0.92),
        backward=KernelRate(tflops=1370, call_us=43, masked=0.89),
        memory_gb_per_s=7000,
        memory_gib=178.4,
        launch_us=5,
        width=148,
    ),
    port_gb_per_s=900,
    nic_gbit_per_s=400,
    latencies_us=(10, 20),
)
_MI300X = _node_of_8(
    "mi300x",
    device=Device(
        forward=KernelRate(tflops=500, call_us=20, masked=0.8),
        backward=KernelRate(tflops=350, call_us=60, masked=0.8),
        memory_gb_per_s=4200,
        memory_gib=192.0,
        launch_us=8,
        width=304,
    ),
    port_gb_per_s=64,
    nic_gbit_per_s=400,
    latencies_us=(15, 25),
)
_LAPTOP = Topology(
    name="laptop",
    ranks=8,
    ranks_per_node=8,
    device=Device(
        forward=KernelRate(tflops=0.019, call_us=1200, masked=0.51),
        backward=KernelRate(tflops=0.0186, call_us=22_000, masked=0.56),
        memory_gb_per_s=0.82,
        memory_gib=2.9,
        launch_us=68,
    ),
    inside=Link(gb_per_s=1.5, latency_us=1600),
    between=Link(gb_per_s=1.5, latency_us=1600),
    full_duplex=False,
)
_PAPER = Topology(
    name="paper",
    ranks=8,
    ranks_per_node=8,
    nics_per_node=4,
    device=Device(
        forward=KernelRate(tflops=185, call_us=40),
        backward=KernelRate(tflops=157, call_us=40),
        memory_gb_per_s=1500,
        memory_gib=80,
        launch_us=5,
    ),
    inside=Link(gb_per_s=2.75, latency_us=20),
    between=Link(gb_per_s=2.23, latency_us=20),
    full_duplex=False,
)
"""The cluster that the Mesh-Attention paper (arXiv 2512.20968) does not name: kernel and link rates, NICs and duplex as
`benchmarks/papers/fit.py` finds them, fitted once to ten published times and ratios. Ours against published: Ring's
growth in weak scaling -22 %, all others within 7 %, rms 9 %. Rates are what programs saw, not a data sheet's."""

PRESETS = {
    preset.topology.name: preset
    for preset in (
        Preset(
            topology=_A100,
            source="80 GB SXM; kernels estimated from FlashAttention-2's published figures; NVLink 3, 200 Gb/s NICs",
        ),
        Preset(
            topology=_H100,
            source="80 GB SXM; kernels estimated from FlashAttention-3 and cuDNN benchmarks; NVLink 4, 400 Gb/s NICs",
        ),
        Preset(
            topology=_H200,
            source="kernels and memory measured (cuDNN, 32 heads of 128, bfloat16); NVLink 4, 400 Gb/s NICs",
        ),
        Preset(
            topology=_B200,
            source="kernels estimated from FlashAttention-4's published B200 figures; NVLink 5, 400 Gb/s NICs",
        ),
        Preset(
            topology=_MI300X,
            source="kernels estimated from AITER benchmarks; one 64 GB/s link for each pair of GPUs, 400 Gb/s NICs",
        ),
        Preset(
            topology=_LAPTOP,
            source="measured by calibrate --ranks 8 on 2 cores of an AMD EPYC (Zen 4): 8 processes, Gloo on loopback",
        ),
        Preset(
            topology=_PAPER,
            source="rates, NICs and duplex fitted to the published times of the Mesh-Attention paper, rms 9 %",
        ),
    )
}


def cluster_named(text: str) -> Topology:
    """A preset with so many ranks: ``h100x256``. A name alone stands for one node."""
    wanted = text.strip().lower()
    for name, preset in PRESETS.items():
        if wanted == name:
            return preset.topology
        if wanted.startswith(name):
            return _with_ranks(preset.topology, text, wanted.removeprefix(name))
    near = get_close_matches(re.sub(r"x[0-9]*$", "", wanted), PRESETS, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise TopologyError(
        f"cluster {text!r}: {hint}expected a .toml file, or NAMExRANKS such as h100x256, where NAME is one of "
        f"{', '.join(PRESETS)}"
    )


def _with_ranks(topology: Topology, text: str, rest: str) -> Topology:
    # mi300x256 is 256 of them, as is mi300xx256.
    found = re.fullmatch(r"x?([0-9]{1,9})" if topology.name.endswith("x") else r"x([0-9]{1,9})", rest)
    if found is None or int(found[1]) < 1:
        example = f"{topology.name.removesuffix('x')}x64"
        raise ParseError(f"cluster {text!r}: expected a number of ranks after the name, 1 or more, such as {example}")
    return topology.with_ranks(int(found[1]))


def find_cluster(text: str) -> Topology:
    """A preset by name, or a .toml file by its path."""
    path = Path(text)
    if path.suffix.lower() == ".toml" or len(path.parts) > 1:
        return read_cluster(path)
    return cluster_named(text)


# Files


def read_cluster(path: Path) -> Topology:
    """The cluster in a TOML file; whatever is wrong with it is said with the file and the key."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ParseError(f"{path}: expected a cluster, but byte {error.start} is not UTF-8; {WRITES_ONE}") from error
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte in it
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path}: expected a cluster file: {reason.lower()}; {WRITES_ONE}") from error
    try:
        return cluster_from_toml(text)
    except UsageError as error:
        raise type(error)(f"{path}: {error}") from error


def cluster_from_toml(text: str) -> Topology:
    """The opposite of `cluster_to_toml`. Keys that have a default may be left out."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParseError(f"is no TOML: {error}; {WRITES_ONE}") from error
    topology: Topology = _read_table(Topology, table, at="")
    return topology


_VALUES = {"Device": Device, "KernelRate": KernelRate, "Link": Link}
_SCALARS: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), 'a string, such as "h100"'),
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((float, int), "a number"),
}
LARGEST_WHOLE = 2**63 - 1
"""As TOML has it."""


def _read_table(value_class: type, table: object, *, at: str) -> Any:
    if not isinstance(table, dict):
        raise ParseError(f"{at} = {table!r}: expected a table, [{at}]")
    known = {f.name: f for f in fields(value_class)}
    for key in table:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ParseError(f"unknown key {_dotted(at, key)}; {hint}expected some of {', '.join(known)}")
    missing = [f for f in known.values() if f.default is MISSING and f.name not in table]
    if missing:
        wanted = ", ".join(f"{_dotted(at, f.name)} ({_wanted(f)})" for f in missing)
        raise ParseError(f"missing {wanted}; {WRITES_ONE}")
    values = {key: _read_value(known[key], value, at=_dotted(at, key)) for key, value in table.items()}
    try:
        return value_class(**values)
    except TopologyError as error:
        raise TopologyError(f"[{at}] {error}" if at else str(error)) from error


def _read_value(field: Field[Any], value: object, *, at: str) -> Any:
    if field.type in _VALUES:
        return _read_table(_VALUES[str(field.type)], value, at=at)
    kinds, _ = _SCALARS[str(field.type)]
    if type(value) not in kinds or (isinstance(value, int) and abs(value) > LARGEST_WHOLE):
        raise ParseError(f"{at} = {_shown(value)}: expected {_wanted(field)}")
    return value


def _wanted(field: Field[Any]) -> str:
    return "a table" if field.type in _VALUES else _SCALARS[str(field.type)][1]


def _shown(value: object) -> str:
    """As TOML spells it, cut short."""
    text = str(value).lower() if isinstance(value, bool | float) else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


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
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML escapes one character more
    return repr(value)
