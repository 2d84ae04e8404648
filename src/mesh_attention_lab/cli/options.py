"""The options that commands share, and the values that they stand for.

A command takes one dataclass whose fields are its options. Options of several commands are fields of its base classes,
or annotated types. `command` lists the fields for typer, which reads the parameters of a function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial, wraps
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_type_hints

import typer

from mesh_attention.clusters import PRESETS, cluster_named
from mesh_attention.errors import ParseError, UsageError
from mesh_attention.masks import Mask, causal, documents, full, window
from mesh_attention.plan.assignment import CUTS, Assignment, Cut, Tile
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.layout import LAYOUTS, Layout, TypicalTurn, layout_named
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.schedule import KEEPABLE, ROUTES, Route
from mesh_attention.planners.choice import METHODS, Choice, default_layout
from mesh_attention.planners.over_cache import QUERIES, Queries
from mesh_attention.problem import DIRECTIONS, ITEMSIZE, Direction, Problem
from mesh_attention.simulation.simulate import MANY_RANKS
from mesh_attention.topology import Topology
from mesh_attention.tuning.representative import part_of
from mesh_attention.units import BYTES, TOKENS, Progress, count
from mesh_attention_lab.cli.files import chart_file, checked_plan, output_file
from mesh_attention_lab.cli.terminal import mask_words
from mesh_attention_lab.comparison import single_block_plan

HEAD_DIM = 128
KEEPS = tuple(",".join(keep) for keep in KEEPABLE if keep)
PROBLEM, PLAN, OUTPUT = "Problem", "Plan", "Output"
"""Panels of the help."""
Parse = Callable[[str], Any]


def command(function: Callable[[Any], None]) -> Callable[..., None]:
    """The function with a parameter for each field of the dataclass that it takes."""
    options: Any = get_type_hints(function)["options"]
    hints = get_type_hints(options, include_extras=True)

    @wraps(function)
    def run(**values: Any) -> None:
        function(options(**values))

    fields_of = signature(options).parameters.values()
    run.__signature__ = Signature([field.replace(annotation=hints[field.name]) for field in fields_of])  # type: ignore[attr-defined]
    run.__annotations__ = {field.name: hints[field.name] for field in fields_of}
    return run


def option(
    help_text: str, metavar: str, parse: Parse | None = None, panel: str | None = None, *names: str, **settings: Any
) -> Any:
    """An option with the name of its field. If `parse` refuses its text, `main` says of which option."""

    def parser(text: Any) -> Any:  # also called with defaults, which are values already
        try:
            return parse(text) if parse is not None and isinstance(text, str) else text
        except UsageError as error:  # typer would replace the message of a ValueError
            raise typer.BadParameter(str(error)) from error

    settings |= {"parser": None if parse is None else parser}
    return typer.Option(*names, help=help_text, metavar=metavar, rich_help_panel=panel, **settings)


def flag(name: str, help_text: str, panel: str | None = None) -> Any:
    return typer.Option(name, help=help_text, rich_help_panel=panel)


def whole_number(help_text: str, panel: str | None = None, least: int = 1) -> Any:
    return option(help_text, "N", partial(_parse_whole, least=least), panel)


def tokens(help_text: str, panel: str | None = None, *names: str) -> Any:
    return option(help_text, "SIZE", parse_size, panel, *names)


def one_of(help_text: str, known: Iterable[str], panel: str | None = None) -> Any:
    def parse(text: str) -> str:
        if text not in known:
            raise ParseError(f" {text!r}: expected one of {' '.join(known)}")
        return text

    return option(help_text, "|".join(known), parse, panel)


def file(help_text: str, example: str) -> Any:
    """A file to write."""
    return option(help_text, "FILE", partial(output_file, example=example), OUTPUT)


# Parsers. A message that begins with a space follows the name of the option


def parse_size(text: str) -> int:
    """``4096``, ``128k`` or ``1m``; k is 1024."""
    match = re.fullmatch(r"([0-9]{1,18})([km]?)", text.strip().lower())
    if match is None:
        raise ParseError(f" {text!r}: expected a whole number such as 4096, 128k or 1m (k is 1024)")
    return int(match[1]) * TOKENS[match[2]]


def parse_nbytes(text: str) -> int:
    """``20GiB``, ``512MiB`` or ``20g``; g is 1024³. A number without a unit is refused, and so is GB."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) ?([kmgt])(?:ib)?", text.strip().lower())
    nbytes = 0 if match is None else int(float(match[1]) * _NBYTES[match[2]])
    if nbytes < 1:
        raise ParseError(f" {text!r}: expected bytes above 0 with a unit, such as 20GiB, 512MiB or 20g (GiB)")
    return nbytes


_NBYTES = {unit[0].lower(): scale for unit, scale in BYTES[1:]}


def _parse_whole(text: str, *, least: int) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text.strip()) or int(text) < least:
        raise ParseError(f" {text!r}: expected a whole number, {least} or more, of at most 18 digits")
    return int(text)


def _parse_window(text: str) -> Mask:
    reaches = [-1 if part.strip() == "-1" else parse_size(part) for part in text.split(",")]
    if len(reaches) != 2:
        raise ParseError(f" {text!r}: expected LEFT,RIGHT in tokens, such as 4096,0; -1 is unbounded")
    return window(*reaches)


def _parse_documents(text: str) -> Mask:
    return documents([parse_size(cut) for cut in text.split(",")])


def _parse_tile(text: str) -> Tile | None:
    return None if text == "auto" else Tile.parse(text)


# Options of several commands

Ranks = Annotated[int, whole_number("Number of ranks that share the work.", PROBLEM)]
Cluster = Annotated[
    str, option(f"NAMExRANKS ({', '.join(PRESETS)}), or a .toml file of 'calibrate'.", "CLUSTER", panel=PROBLEM)
]
Layers = Annotated[int, whole_number("Serving: layers of the model, which times and cache are multiplied by.", PROBLEM)]
BothPasses = Annotated[bool, flag("--backward", "Forward and backward together.", PLAN)]
AsJson = Annotated[bool, flag("--json", "Print one JSON object and nothing else.", OUTPUT)]
TraceFile = Annotated[Path | None, file("Write a timeline of the ranks for ui.perfetto.dev (JSON).", "trace.json")]
ChartFile = Annotated[Path | None, option("Draw a chart: .png, .svg or .pdf.", "FILE", chart_file, OUTPUT)]


# The problem


@dataclass(frozen=True, kw_only=True)
class ProblemOptions:
    """A problem and its layout.

    A problem of serving has new tokens and cached ones instead of a sequence. It is causal from the right, has the
    layout `TypicalTurn`, and no backward pass.
    """

    otherwise: ClassVar[str] = "give the length of the sequence, or for serving --new and --cached"

    context: typer.Context
    seq: Annotated[int | None, tokens("Tokens of the whole sequence: 4096, 128k, 1m (k is 1024).", PROBLEM)] = None
    heads: Annotated[int | None, whole_number("Query heads.", PROBLEM)] = None
    head_dim: Annotated[int, whole_number("Head size.", PROBLEM)] = HEAD_DIM
    seq_kv: Annotated[int | None, tokens("Number of keys, if it differs from --seq.", PROBLEM)] = None
    kv_heads: Annotated[int | None, whole_number("Key/value heads, if fewer.", PROBLEM)] = None
    head_dim_v: Annotated[int | None, whole_number("Head size of V, if it differs.", PROBLEM)] = None
    batch: Annotated[int, whole_number("Number of sequences in the batch.", PROBLEM)] = 1
    dtype: Annotated[str, option(f"One of {', '.join(ITEMSIZE)}.", "NAME", panel=PROBLEM)] = "bfloat16"
    causal: Annotated[bool, flag("--causal", "A query sees the keys up to its own position.", PROBLEM)] = False
    window: Annotated[
        Mask | None,
        option("A query sees LEFT keys before it and RIGHT after it; -1 is all.", "LEFT,RIGHT", _parse_window, PROBLEM),
    ] = None
    documents: Annotated[
        Mask | None,
        option(
            "Packed documents as running totals (cu_seqlens), such as 0,48k,128k.", "0,…,SEQ", _parse_documents, PROBLEM
        ),
    ] = None
    new: Annotated[
        int | None, tokens("Serving: new tokens of a prompt or a turn, not --seq.", PROBLEM, "--new", "--prefill")
    ] = None
    cached: Annotated[
        int | None, tokens("Serving: tokens before the new ones whose keys and values are cached; 0.", PROBLEM)
    ] = None
    layout: Annotated[
        Layout | None,
        option(f"{', '.join(LAYOUTS)}; the one that suits the mask if left out.", "NAME", layout_named, PLAN),
    ] = None

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
        return self._served(ranks, "--decode", new=1 if self.new is None else self.new, cached=self.cached)

    def _served(self, ranks: int, what: str, *, new: int, cached: int) -> Problem:
        self.refuse_with(what, "seq", "seq_kv", "window", "documents")
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

    @property
    def planned_layout(self) -> Layout | None:
        """The layout to plan with; None is the one that suits the mask."""
        if not self.is_turn:
            return self.layout
        if self.layout != TypicalTurn():
            self.refuse_with("--new", "layout")
        return TypicalTurn()

    def passes(self, *, both: bool) -> tuple[Direction, ...]:
        if self.is_turn:
            self.refuse_with("--new", "backward")
        return DIRECTIONS if both else DIRECTIONS[:1]

    def refuse_with(self, what: object, *names: str) -> None:
        """Raise if the command line states any of these parameters together with `what`."""
        sources = {name: self.context.get_parameter_source(name) for name in names}
        stated = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
        if stated:
            spelt = ", ".join(f"--{name.replace('_', '-')}" for name in stated)
            raise UsageError(
                f"{spelt} cannot be combined with {what}; leave {'it' if len(stated) == 1 else 'them'} out"
            )


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(ProblemOptions):
    """A problem, or one decoded step."""

    decode: Annotated[
        bool, flag("--decode", "Serving: one step of --batch sequences, each --new (1) tokens on --cached.", PROBLEM)
    ] = False
    queries: Annotated[
        Queries | None, one_of("With --decode: the same tokens on every rank, or some sequences.", QUERIES, PROBLEM)
    ] = None

    def __post_init__(self) -> None:
        if self.queries is not None and not self.decode:
            raise UsageError("--queries needs --decode")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """A cluster, and a number of ranks if it differs from the cluster's."""

    cluster: Cluster
    ranks: Annotated[int | None, whole_number("Number of ranks, if it differs from the cluster's.", PROBLEM)] = None

    @property
    def topology(self) -> Topology:
        topology = cluster_named(self.cluster)
        return topology if self.ranks is None else topology.with_ranks(self.ranks)


# The plan


@dataclass(frozen=True, kw_only=True)
class ChoiceOptions(ProblemOptions):
    """A problem, and a `Choice` of how to plan it."""

    method: Annotated[str, option(f"Planner: {', '.join(METHODS)}.", "NAME", panel=PLAN)] = "mesh"
    tile: Annotated[
        Tile | None,
        option("Query x KV shards of a rank; auto: fewest bytes.", "AxB|auto", _parse_tile, PLAN, show_default="auto"),
    ] = None
    ulysses_degree: Annotated[int | None, whole_number("Ranks that trade heads for tokens; 1 if left out.", PLAN)] = (
        None
    )
    inner: Annotated[Tile | None, option("The part of the grid that one node holds.", "AxB", Tile.parse, PLAN)] = None
    route: Annotated[Route | None, one_of("How shards travel; direct if left out.", ROUTES, PLAN)] = None
    partials: Annotated[Route | None, one_of("How partials travel; direct if left out.", ROUTES, PLAN)] = None
    blocks_per_call: Annotated[int | None, whole_number("Blocks that one kernel call attends.", PLAN)] = None
    keep: Annotated[
        str | None,
        one_of("Inputs that forward keeps for backward: own as exchanged by Ulysses, q and kv gathered.", KEEPS, PLAN),
    ] = None
    waves: Annotated[int | None, whole_number("Parts of the heads, or rows, that follow each other.", PLAN)] = None
    cut: Annotated[Cut | None, one_of("What waves are cut from; heads if left out.", CUTS, PLAN)] = None

    @property
    def choice(self) -> Choice:
        stated: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(Choice)}
        keep = None if self.keep is None else self.keep.split(",")
        return Choice.of(**stated | {"layout": self.planned_layout, "keep": keep})


@dataclass(frozen=True, kw_only=True)
class PlannedOptions(ChoiceOptions, ClusterOptions):
    """A problem and a choice on a cluster, or a plan file instead of both."""

    otherwise: ClassVar[str] = "describe the problem, or give a plan file instead"

    file: Annotated[
        Path | None,
        typer.Argument(metavar="PLAN", help="A plan file, instead of a problem and a choice.", show_default=False),
    ] = None

    def plans(self, report: Progress, *, both: bool) -> dict[Direction, Plan]:
        """The plan in the file, or those of the choice, with one block per call where it does not say."""
        topology = self.topology
        if self.file is not None:
            plan = self._plan_in(self.file, report)
            refuse_uneven(plan.problem, plan.layout, topology)
            return {plan.direction: plan}
        problem, choice = self.problem(topology.ranks), self.choice
        refuse_uneven(problem, choice.layout or default_layout(problem), topology)
        return {d: single_block_plan(topology, problem, choice, d) for d in self.passes(both=both)}

    def _plan_in(self, file: Path, report: Progress) -> Plan:
        """The plan in a file. It states the problem and the choice, so the command line must not."""
        self.refuse_with(
            f"{file}, which states the problem and the plan",
            *(field.name for field in fields(ChoiceOptions)),
            "backward",
        )
        plan = checked_plan(file, report)
        if plan.matrix.is_over_cache:
            raise UsageError(
                f"{file} is a decoded step, which does not say how much is cached; use 'mesh-attention tune --decode "
                "--cached TOKENS'"
            )
        if plan.problem.ranks != self.topology.ranks:
            raise UsageError(
                f"{file} is for {count(plan.problem.ranks, 'rank')}, but the cluster has {self.topology.ranks:,}; "
                f"use --ranks {plan.problem.ranks}"
            )
        return plan


# Refusals


def check_layers(layers: int, *, is_served: bool) -> None:
    if layers > 1 and not is_served:
        raise UsageError("--layers needs --new or --decode; other problems are of one layer")


def refuse_uneven(problem: Problem, layout: Layout, topology: Topology) -> None:
    """Raise where each of many ranks would have to be simulated, because a mask gives each its own steps."""
    if problem.ranks < MANY_RANKS or BlockMatrix(problem, layout, Assignment(Tile(1, problem.ranks))).is_uniform:
        return
    part, _ = part_of(problem, topology)
    hint = (
        f"a part takes as long as the whole: use --ranks {part.ranks} --seq {part.seq_q}"
        if part.ranks < MANY_RANKS
        else f"use fewer than {MANY_RANKS:,} ranks"
    )
    raise UsageError(
        f"{problem.ranks:,} ranks with the mask {mask_words(problem)} on the layout {layout.name}: each rank has its "
        f"own steps, and simulating all of them takes hours; {hint}"
    )
