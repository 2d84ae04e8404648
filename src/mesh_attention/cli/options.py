"""The options of `plan`, `tune` and `simulate`: how each is spelt and explained, and what its text stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mesh_attention.cli.sizes import parse_nbytes, parse_size, parse_whole
from mesh_attention.clusters import PRESETS, find_cluster
from mesh_attention.errors import ParseError
from mesh_attention.masks import Mask, causal, documents, full, window
from mesh_attention.plan.assignment import Tile
from mesh_attention.plan.layout import LAYOUTS, Layout, layout_named
from mesh_attention.plan.schedule import KEEPABLE, ROUTES, Route
from mesh_attention.plan.steps import Kind
from mesh_attention.planning.choice import METHODS
from mesh_attention.problem import ITEMSIZE, Problem
from mesh_attention.topology import Topology

KEEPS: dict[str, tuple[Kind, ...]] = {",".join(keep): keep for keep in KEEPABLE if keep}


def _option(panel: str, name: str, help_text: str, **settings: Any) -> Any:
    return typer.Option(name, help=help_text, rich_help_panel=panel, **settings)


def _problem(name: str, help_text: str, **settings: Any) -> Any:
    return _option("Problem", name, help_text, **settings)


def _plan(name: str, help_text: str, **settings: Any) -> Any:
    return _option("Plan", name, help_text, **settings)


def _output(name: str, help_text: str, **settings: Any) -> Any:
    return _option("Output", name, help_text, **settings)


Ranks = Annotated[str, _problem("--ranks", "How many ranks share the work.", metavar="N")]
Cluster = Annotated[
    str,
    _problem(
        "--cluster",
        f"NAMExRANKS, such as h100x256 ({', '.join(PRESETS)}), or a .toml file that 'calibrate' wrote.",
        metavar="CLUSTER",
    ),
]
ClusterRanks = Annotated[str | None, _problem("--ranks", "How many ranks, if not as the cluster says.", metavar="N")]
Seq = Annotated[str, _problem("--seq", "Tokens of the whole sequence: 4096, 128k, 1m (k is 1024).", metavar="SIZE")]
SeqKv = Annotated[str | None, _problem("--seq-kv", "Keys and values, if not as many as queries.", metavar="SIZE")]
PlannedSeq = Annotated[
    str | None, _problem("--seq", "Tokens of the whole sequence: 4096, 128k, 1m (k is 1024).", metavar="SIZE")
]
Heads = Annotated[str, _problem("--heads", "Query heads.", metavar="N")]
PlannedHeads = Annotated[str | None, _problem("--heads", "Query heads.", metavar="N")]
KvHeads = Annotated[str | None, _problem("--kv-heads", "Key/value heads, if fewer.", metavar="N")]
HeadDim = Annotated[str, _problem("--head-dim", "Head size.", metavar="N")]
HeadDimV = Annotated[str | None, _problem("--head-dim-v", "Head size of V, if another.", metavar="N")]
Batch = Annotated[str, _problem("--batch", "Sequences side by side.", metavar="N")]
Dtype = Annotated[str, _problem("--dtype", f"One of {', '.join(ITEMSIZE)}.", metavar="NAME")]
Causal = Annotated[bool, _problem("--causal", "A query sees the keys up to its own position.")]
Window = Annotated[
    str | None,
    _problem("--window", "A query sees LEFT keys before it and RIGHT after it; -1 is all.", metavar="LEFT,RIGHT"),
]
Documents = Annotated[
    str | None,
    _problem("--documents", "Packed documents as running totals (cu_seqlens), such as 0,48k,128k.", metavar="0,…,SEQ"),
]

MethodName = Annotated[str, _plan("--method", f"Planner: {', '.join(METHODS)}.", metavar="NAME")]
TileText = Annotated[
    str,
    _plan("--tile", "Query shards x KV shards that a rank computes; auto moves the fewest bytes.", metavar="AxB|auto"),
]
UlyssesDegree = Annotated[
    str | None, _plan("--ulysses-degree", "Ranks that trade heads for tokens; 1 if left out.", metavar="N")
]
InnerText = Annotated[
    str | None,
    _plan("--inner", "The part of the grid that one node holds: which places are neighbours.", metavar="AxB"),
]
LayoutName = Annotated[
    str | None, _plan("--layout", f"{', '.join(LAYOUTS)}; what suits the mask if left out.", metavar="NAME")
]
Backward = Annotated[bool, _plan("--backward", "Plan the backward pass instead of the forward one.")]
BothPasses = Annotated[bool, _plan("--backward", "Forward and backward together.")]
RouteName = Annotated[str | None, _plan("--route", "How shards travel; direct if left out.", metavar="|".join(ROUTES))]
PartialsName = Annotated[
    str | None, _plan("--partials", "How partials travel; direct if left out.", metavar="|".join(ROUTES))
]
BlocksPerCall = Annotated[
    str | None, _plan("--blocks-per-call", "Blocks that wait for each other to make one call.", metavar="N")
]
KeepText = Annotated[str | None, _plan("--keep", "What forward leaves gathered for backward.", metavar="|".join(KEEPS))]
Memory = Annotated[
    str | None,
    _plan("--memory", "What a call may allocate on a rank, such as 20GiB; the device's if left out.", metavar="SIZE"),
]

Rank = Annotated[str, _output("--rank", "The rank whose steps are shown.", metavar="N")]
AllSteps = Annotated[bool, _output("--all-steps", "Show its steps whole, however many.")]
Save = Annotated[
    Path | None, _output("--save", "Write every rank's steps here: .json as JSON, else as text.", metavar="FILE")
]
JsonOutput = Annotated[bool, _output("--json", "Print one JSON object and nothing else.")]
Trace = Annotated[
    Path | None, _output("--trace", "Write what ranks do when, for ui.perfetto.dev (JSON).", metavar="FILE")
]
Chart = Annotated[Path | None, _output("--chart", "Draw it: .png, .svg or .pdf. Needs matplotlib.", metavar="FILE")]


def cluster_from(text: str, ranks: str | None) -> Topology:
    """The cluster, with as many ranks as were asked for."""
    topology = find_cluster(text)
    return topology if ranks is None else topology.with_ranks(parse_whole("--ranks", ranks))


def problem_from(
    *,
    ranks: str,
    seq: tuple[str, str | None],
    heads: tuple[str, str | None],
    head_dim: tuple[str, str | None],
    batch: str,
    dtype: str,
    mask: Mask,
) -> Problem:
    """Pairs are (of queries, of keys and values); a second that was left out is as the first."""
    return Problem(
        seq_q=parse_size("--seq", seq[0]),
        seq_kv=parse_size("--seq-kv", seq[0] if seq[1] is None else seq[1]),
        heads=parse_whole("--heads", heads[0]),
        kv_heads=parse_whole("--kv-heads", heads[0] if heads[1] is None else heads[1]),
        head_dim_qk=parse_whole("--head-dim", head_dim[0]),
        head_dim_v=parse_whole("--head-dim-v", head_dim[0] if head_dim[1] is None else head_dim[1]),
        ranks=parse_whole("--ranks", ranks),
        batch=parse_whole("--batch", batch),
        dtype=dtype,
        mask=mask,
    )


def mask_from(*, is_causal: bool, window_text: str | None, documents_text: str | None) -> Mask:
    """All that were given, together."""
    mask = causal() if is_causal else full()
    if window_text is not None:
        mask &= _parse_window(window_text)
    if documents_text is not None:
        mask &= documents([parse_size("--documents", cut) for cut in documents_text.split(",")])
    return mask


def _parse_window(text: str) -> Mask:
    reaches = [-1 if part.strip() == "-1" else parse_size("--window", part) for part in text.split(",")]
    if len(reaches) != 2:
        raise ParseError(f"--window {text!r}: expected LEFT,RIGHT in tokens, such as 4096,0; -1 is unbounded")
    return window(*reaches)


def tile_from(text: str) -> Tile | None:
    """None stands for auto."""
    if text == "auto":
        return None
    try:
        return Tile.parse(text)
    except ParseError as error:
        raise ParseError(f"{error}, or auto") from error


def inner_from(text: str | None) -> Tile | None:
    try:
        return None if text is None else Tile.parse(text)
    except ParseError as error:
        raise ParseError(f"--inner: {error}") from error


def keep_from(text: str | None) -> tuple[Kind, ...]:
    if text is None:
        return ()
    if text not in KEEPS:
        raise ParseError(f"--keep {text!r}: expected one of {' '.join(KEEPS)}")
    return KEEPS[text]


def memory_from(text: str | None) -> int | None:
    return None if text is None else parse_nbytes("--memory", text)


def whole_from(option: str, text: str | None) -> int | None:
    return None if text is None else parse_whole(option, text)


def layout_from(name: str | None) -> Layout | None:
    return None if name is None else layout_named(name)


def route_from(option: str, name: str | None) -> Route | None:
    for route in ROUTES:
        if route == name:
            return route
    if name is None:
        return None
    raise ParseError(f"{option} {name!r}: expected one of {', '.join(ROUTES)}")
