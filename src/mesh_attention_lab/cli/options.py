"""The options that commands share: how each is spelled and explained, and the value it stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import typer

from mesh_attention.clusters import PRESETS, find_cluster
from mesh_attention.errors import ParseError, UsageError
from mesh_attention.masks import Mask, causal, documents, full, window
from mesh_attention.plan.assignment import CUTS, Cut, Tile
from mesh_attention.plan.layout import LAYOUTS, Layout, Turn, layout_named
from mesh_attention.plan.schedule import KEEPABLE, ROUTES, Route
from mesh_attention.plan.serving import MOST_DECODED, WAYS, Way
from mesh_attention.plan.steps import DIRECTIONS, Direction, Keep
from mesh_attention.planning.choice import METHODS, Choice
from mesh_attention.problem import ITEMSIZE, Problem
from mesh_attention.topology import Topology
from mesh_attention.units import parse_size, parse_whole
from mesh_attention_lab.cli.command import Read, group, option, options_given
from mesh_attention_lab.cli.files import chart_file, output_file

HEAD_DIM = 128
KEEPS: dict[str, tuple[Keep, ...]] = {",".join(keep): keep for keep in KEEPABLE if keep}


# Readers


def one_of(names: Sequence[str]) -> Read:
    def read(name: str, text: str) -> str:
        if text not in names:
            raise ParseError(f"{name} {text!r}: expected one of {', '.join(names)}")
        return text

    return read


def read_rank(name: str, text: str) -> int:
    return parse_whole(name, text, least=0)


def _read_window(name: str, text: str) -> Mask:
    reaches = [-1 if part.strip() == "-1" else parse_size(name, part) for part in text.split(",")]
    if len(reaches) != 2:
        raise ParseError(f"{name} {text!r}: expected LEFT,RIGHT in tokens, such as 4096,0; -1 is unbounded")
    return window(*reaches)


def _read_documents(name: str, text: str) -> Mask:
    return documents([parse_size(name, cut) for cut in text.split(",")])


def _read_tile(name: str, text: str) -> Tile:
    try:
        return Tile.parse(text)
    except ParseError as error:
        raise ParseError(f"{name}: {error}") from error


def _read_tile_or_auto(name: str, text: str) -> Tile | None:
    try:
        return None if text == "auto" else _read_tile(name, text)
    except ParseError as error:
        raise ParseError(f"{error}, or auto") from error


def _read_layout(name: str, text: str) -> Layout:
    return layout_named(text)


def _read_keep(name: str, text: str) -> tuple[Keep, ...]:
    if text not in KEEPS:
        raise ParseError(f"{name} {text!r}: expected one of {' '.join(KEEPS)}")
    return KEEPS[text]


# The problem

of_problem = partial(option, panel="Problem")
of_plan = partial(option, panel="Plan")
of_output = partial(option, panel="Output")


def _seq(**settings: Any) -> Any:
    help_text = "Tokens of the whole sequence: 4096, 128k, 1m (k is 1024)."
    return of_problem("--seq", help_text, "SIZE", parse_size, **settings)


def _heads(**settings: Any) -> Any:
    return of_problem("--heads", "Query heads.", "N", parse_whole, **settings)


@group
class PlannedProblemOptions:
    """A problem, which is left out if a plan file states it.

    A problem of serving has new tokens and cached ones instead of a sequence. It is causal from the right, has the
    layout `Turn`, and no backward pass.
    """

    otherwise: ClassVar[str] = "describe the problem, or give a plan file instead"

    seq: int | None = _seq(default=None)
    heads: int | None = _heads(default=None)
    head_dim: int = of_problem("--head-dim", "Head size.", "N", parse_whole, HEAD_DIM)
    seq_kv: int | None = of_problem("--seq-kv", "Number of keys, if it differs from --seq.", "SIZE", parse_size, None)
    kv_heads: int | None = of_problem("--kv-heads", "Key/value heads, if fewer.", "N", parse_whole, None)
    head_dim_v: int | None = of_problem("--head-dim-v", "Head size of V, if it differs.", "N", parse_whole, None)
    batch: int = of_problem("--batch", "Number of sequences in the batch.", "N", parse_whole, 1)
    dtype: str = of_problem("--dtype", f"One of {', '.join(ITEMSIZE)}.", "NAME", default="bfloat16")
    causal: bool = of_problem("--causal", "A query sees the keys up to its own position.", default=False)
    window: Mask | None = of_problem(
        "--window", "A query sees LEFT keys before it and RIGHT after it; -1 is all.", "LEFT,RIGHT", _read_window, None
    )
    documents: Mask | None = of_problem(
        "--documents",
        "Packed documents as running totals (cu_seqlens), such as 0,48k,128k.",
        "0,…,SEQ",
        _read_documents,
        None,
    )
    new: int | None = of_problem(
        "--new",
        "Serving: new tokens of a prompt or a turn, instead of --seq. Both names are the same option.",
        "SIZE",
        parse_size,
        None,
        also="--prefill",
    )
    cached: int | None = of_problem(
        "--cached", "Serving: tokens before the new ones whose keys and values are cached; 0.", "SIZE", parse_size, None
    )

    @property
    def is_turn(self) -> bool:
        return self.new is not None

    def problem(self, ranks: int) -> Problem:
        if self.new is not None:
            return self._served(ranks, "--new", new=self.new, cached=self.cached or 0)
        if self.cached is not None:
            raise UsageError("--cached needs --new TOKENS (or --prefill), the tokens that follow the cached ones")
        if self.seq is None:
            raise UsageError(f"Missing option '--seq'; {self.otherwise}")
        mask = causal() if self.causal else full()
        for more in (self.window, self.documents):
            mask = mask if more is None else mask & more
        return self._problem(ranks, self.seq, self.seq if self.seq_kv is None else self.seq_kv, mask)

    def decoded(self, ranks: int) -> Problem:
        """The problem of one decoded step: every sequence of the batch has a few new tokens."""
        if self.cached is None:
            raise UsageError("--decode needs --cached TOKENS, the tokens that each sequence has cached")
        new = 1 if self.new is None else self.new
        if new > MOST_DECODED:
            raise UsageError(
                f"--new {new:,} with --decode: expected at most {MOST_DECODED} new tokens of each sequence; leave out "
                "--decode for a prompt or a turn"
            )
        return self._served(ranks, "--decode", new=new, cached=self.cached)

    def _served(self, ranks: int, what: str, *, new: int, cached: int) -> Problem:
        given = {"--seq": self.seq, "--seq-kv": self.seq_kv, "--window": self.window, "--documents": self.documents}
        refuse_with(what, given)
        return self._problem(ranks, new, new + cached, causal())

    def _problem(self, ranks: int, seq_q: int, seq_kv: int, mask: Mask) -> Problem:
        if self.heads is None:
            raise UsageError(f"Missing option '--heads'; {self.otherwise}")
        return Problem(
            seq_q=seq_q,
            seq_kv=seq_kv,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            head_dim_qk=self.head_dim,
            head_dim_v=self.head_dim_v or self.head_dim,
            ranks=ranks,
            batch=self.batch,
            dtype=self.dtype,
            mask=mask,
        )

    def layout(self, given: Layout | None) -> Layout | None:
        """The layout to plan with; None is the one that suits the mask."""
        if not self.is_turn:
            return given
        refuse_with("--new", {"--layout": None if given == Turn() else given})
        return Turn()

    def choice(self, given: Choice) -> Choice:
        """The choice on the layout to plan with."""
        return replace(given, layout=self.layout(given.layout))

    def passes(self, *, both: bool) -> tuple[Direction, ...]:
        if self.is_turn:
            refuse_with("--new", {"--backward": both})
        return DIRECTIONS if both else DIRECTIONS[:1]


@group
class ProblemOptions(PlannedProblemOptions):
    """A problem that must be given."""

    otherwise: ClassVar[str] = "give the length of the sequence, or for serving --new and --cached"

    heads: int = _heads()


@group
class LayersOption:
    layers: int = of_problem(
        "--layers", "Serving: layers of the model, which times and cache are multiplied by.", "N", parse_whole, 1
    )

    def check(self, *, is_served: bool) -> int:
        if self.layers > 1 and not is_served:
            raise UsageError("--layers needs --new or --decode; other problems are of one layer")
        return self.layers


@group
class DecodeOptions:
    decode: bool = of_problem(
        "--decode",
        "Serving: one decoded step; --batch sequences of --cached tokens, with --new tokens each (1 if left out).",
        default=False,
    )
    way: Way | None = of_problem(
        "--way",
        "With --decode: every rank runs the same tokens, or sequences are spread over ranks; any if left out.",
        "|".join(WAYS),
        one_of(WAYS),
        None,
    )

    def check(self) -> bool:
        if self.way is not None and not self.decode:
            raise UsageError("--way needs --decode")
        return self.decode


def refuse_with(what: str, given: Mapping[str, object]) -> None:
    """Raise if any of these options is given together with `what`."""
    found = [name for name, value in given.items() if value not in (None, False)]
    if found:
        it = "it" if len(found) == 1 else "them"
        raise UsageError(f"{', '.join(found)} cannot be combined with {what}; leave {it} out")


@group
class RanksOption:
    ranks: int = of_problem("--ranks", "Number of ranks that share the work.", "N", parse_whole)


@group
class ClusterOptions:
    """A cluster, and a number of ranks if it differs from the cluster's."""

    cluster: str = of_problem(
        "--cluster",
        f"NAMExRANKS, such as h100x256 ({', '.join(PRESETS)}), or a .toml file that 'calibrate' wrote.",
        "CLUSTER",
    )
    ranks: int | None = of_problem(
        "--ranks", "Number of ranks, if it differs from the cluster's.", "N", parse_whole, None
    )

    @property
    def topology(self) -> Topology:
        topology = find_cluster(self.cluster)
        return topology if self.ranks is None else topology.with_ranks(self.ranks)


# The plan


def layout_option() -> Any:
    help_text = f"{', '.join(LAYOUTS)}; the one that suits the mask if left out."
    return of_plan("--layout", help_text, "NAME", _read_layout, None)


def both_passes_option() -> Any:
    return of_plan("--backward", "Forward and backward together.", default=False)


@group
class ChoiceOptions:
    """Options of a `Choice`."""

    method: str = of_plan("--method", f"Planner: {', '.join(METHODS)}.", "NAME", default="mesh")
    tile: Tile | None = of_plan(
        "--tile",
        "Query shards x KV shards that a rank computes; auto moves the fewest bytes.",
        "AxB|auto",
        _read_tile_or_auto,
        None,
        show_default="auto",
    )
    ulysses_degree: int | None = of_plan(
        "--ulysses-degree", "Ranks that trade heads for tokens; 1 if left out.", "N", parse_whole, None
    )
    inner: Tile | None = of_plan("--inner", "The part of the grid that one node holds.", "AxB", _read_tile, None)
    layout: Layout | None = layout_option()
    route: Route | None = of_plan(
        "--route", "How shards travel; direct if left out.", "|".join(ROUTES), one_of(ROUTES), None
    )
    partials: Route | None = of_plan(
        "--partials", "How partials travel; direct if left out.", "|".join(ROUTES), one_of(ROUTES), None
    )
    blocks_per_call: int | None = of_plan(
        "--blocks-per-call", "Blocks that one kernel call attends.", "N", parse_whole, None
    )
    keep: tuple[Keep, ...] | None = of_plan(
        "--keep",
        "Inputs that forward keeps for backward: own as exchanged by Ulysses, q and kv gathered.",
        "|".join(KEEPS),
        _read_keep,
        None,
    )
    waves: int | None = of_plan(
        "--waves", "Parts of the heads, or rows, that follow each other.", "N", parse_whole, None
    )
    cut: Cut | None = of_plan(
        "--cut", "What waves are cut from; heads if left out.", "|".join(CUTS), one_of(CUTS), None
    )

    @property
    def choice(self) -> Choice:
        return Choice.of(**{one.name: getattr(self, one.name) for one in fields(self)})


def refuse_with_file(context: typer.Context, file: Path, *groups: Any) -> None:
    """A plan file states the problem and the plan, so options that state them again are refused."""
    given = options_given(context, *groups)
    if given:
        it = "it" if len(given) == 1 else "them"
        raise UsageError(f"{', '.join(given)} cannot be combined with {file}, which states {it}; leave {it} out")


def check_rank(rank: int, ranks: int) -> int:
    if rank >= ranks:
        raise UsageError(f"--rank {rank}: expected a rank from 0 to {ranks - 1}, because there are {ranks}")
    return rank


# The output


def json_option() -> Any:
    return of_output("--json", "Print one JSON object and nothing else.", default=False)


def trace_option() -> Any:
    help_text = "Write a timeline of the ranks for ui.perfetto.dev (JSON)."
    return of_output("--trace", help_text, "FILE", output_file("trace.json"), None)


def chart_option() -> Any:
    return of_output("--chart", "Draw a chart: .png, .svg or .pdf. Needs matplotlib.", "FILE", chart_file, None)
