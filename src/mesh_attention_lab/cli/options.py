"""The options that commands share: annotated types and groups of them, and the values that they stand for.

A group is a dataclass whose fields are options. A command takes groups and single options, and `command` lists their
fields for typer, which reads the parameters of a function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_type_hints

import typer

from mesh_attention.clusters import PRESETS, cluster_named
from mesh_attention.errors import ParseError, UsageError
from mesh_attention.masks import Mask, causal, documents, full, window
from mesh_attention.plan.assignment import CUTS, Assignment, Cut, Tile
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.counts import MANY_RANKS
from mesh_attention.plan.layout import LAYOUTS, Layout, Turn, layout_named
from mesh_attention.plan.schedule import KEEPABLE, ROUTES, Route
from mesh_attention.plan.serving import MOST_DECODED, QUERIES, Queries
from mesh_attention.plan.steps import Keep
from mesh_attention.planning.choice import METHODS, Choice
from mesh_attention.problem import DIRECTIONS, ITEMSIZE, Direction, Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.coarse import part_of
from mesh_attention.units import parse_size, parse_whole
from mesh_attention_lab.cli.files import chart_file, output_file
from mesh_attention_lab.cli.terminal import mask_words

HEAD_DIM = 128
KEEPS: dict[str, tuple[Keep, ...]] = {",".join(keep): keep for keep in KEEPABLE if keep}


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The function with a parameter for each field of its groups instead of the groups."""
    hints = get_type_hints(function, include_extras=True)
    del hints["return"]
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}

    @wraps(function)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        function(**values)

    parameters: list[Parameter] = []
    for name, parameter in signature(function).parameters.items():
        if name in groups:
            of_group = get_type_hints(groups[name], include_extras=True)
            listed = signature(groups[name]).parameters.values()
            parameters += [field.replace(annotation=of_group[field.name]) for field in listed]
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY))
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


# Parsers


def parsed(name: str, parse: Callable[[str, str], Any]) -> Callable[[str], Any]:
    """A parser for typer, whose errors are the library's. It is called with defaults too, which are values already."""

    def parser(text: Any) -> Any:
        try:
            return parse(name, text) if isinstance(text, str) else text
        except UsageError as error:  # typer would replace the message of a ValueError
            raise typer.BadParameter(str(error)) from error

    return parser


def one_of(names: Sequence[str]) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        if text not in names:
            raise ParseError(f"{name} {text!r}: expected one of {', '.join(names)}")
        return text

    return parse


def _parse_window(name: str, text: str) -> Mask:
    reaches = [-1 if part.strip() == "-1" else parse_size(name, part) for part in text.split(",")]
    if len(reaches) != 2:
        raise ParseError(f"{name} {text!r}: expected LEFT,RIGHT in tokens, such as 4096,0; -1 is unbounded")
    return window(*reaches)


def _parse_documents(name: str, text: str) -> Mask:
    return documents([parse_size(name, cut) for cut in text.split(",")])


def _parse_tile(name: str, text: str) -> Tile:
    try:
        return Tile.parse(text)
    except ParseError as error:
        raise ParseError(f"{name}: {error}") from error


def _parse_tile_or_auto(name: str, text: str) -> Tile | None:
    try:
        return None if text == "auto" else _parse_tile(name, text)
    except ParseError as error:
        raise ParseError(f"{error}, or auto") from error


def _parse_keep(name: str, text: str) -> tuple[Keep, ...]:
    if text not in KEEPS:
        raise ParseError(f"{name} {text!r}: expected one of {' '.join(KEEPS)}")
    return KEEPS[text]


# Options of several commands, by the panel of the help in which they stand

OfProblem = partial(typer.Option, rich_help_panel="Problem")
OfPlan = partial(typer.Option, rich_help_panel="Plan")
OfOutput = partial(typer.Option, rich_help_panel="Output")


def whole_number(name: str, help_text: str, option: Any = OfProblem, least: int = 1) -> Any:
    """An option that is a whole number."""
    return option(name, help=help_text, metavar="N", parser=parsed(name, partial(parse_whole, least=least)))


def tokens(name: str, help_text: str, *names: str) -> Any:
    return OfProblem(name, *names, help=help_text, metavar="SIZE", parser=parsed(name, parse_size))


Ranks = Annotated[int, whole_number("--ranks", "Number of ranks that share the work.")]
Heads = whole_number("--heads", "Query heads.")
Layers = Annotated[
    int, whole_number("--layers", "Serving: layers of the model, which times and cache are multiplied by.")
]
BothPasses = Annotated[bool, OfPlan("--backward", help="Forward and backward together.")]
LayoutOption = Annotated[
    Layout | None,
    OfPlan(
        "--layout",
        help=f"{', '.join(LAYOUTS)}; the one that suits the mask if left out.",
        metavar="NAME",
        parser=parsed("--layout", lambda name, text: layout_named(text)),
    ),
]
AsJson = Annotated[bool, OfOutput("--json", help="Print one JSON object and nothing else.")]
TraceFile = Annotated[
    Path | None,
    OfOutput(
        "--trace",
        help="Write a timeline of the ranks for ui.perfetto.dev (JSON).",
        metavar="FILE",
        parser=parsed("--trace", partial(output_file, example="trace.json")),
    ),
]
ChartFile = Annotated[
    Path | None,
    OfOutput(
        "--chart",
        help="Draw a chart: .png, .svg or .pdf. Needs matplotlib.",
        metavar="FILE",
        parser=parsed("--chart", chart_file),
    ),
]


# The problem


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProblemOptions:
    """A problem, which is left out if a plan file states it.

    A problem of serving has new tokens and cached ones instead of a sequence. It is causal from the right, has the
    layout `Turn`, and no backward pass.
    """

    otherwise: ClassVar[str] = "describe the problem, or give a plan file instead"

    seq: Annotated[int | None, tokens("--seq", "Tokens of the whole sequence: 4096, 128k, 1m (k is 1024).")] = None
    heads: Annotated[int | None, Heads] = None
    head_dim: Annotated[int, whole_number("--head-dim", "Head size.")] = HEAD_DIM
    seq_kv: Annotated[int | None, tokens("--seq-kv", "Number of keys, if it differs from --seq.")] = None
    kv_heads: Annotated[int | None, whole_number("--kv-heads", "Key/value heads, if fewer.")] = None
    head_dim_v: Annotated[int | None, whole_number("--head-dim-v", "Head size of V, if it differs.")] = None
    batch: Annotated[int, whole_number("--batch", "Number of sequences in the batch.")] = 1
    dtype: Annotated[str, OfProblem("--dtype", help=f"One of {', '.join(ITEMSIZE)}.", metavar="NAME")] = "bfloat16"
    causal: Annotated[bool, OfProblem("--causal", help="A query sees the keys up to its own position.")] = False
    window: Annotated[
        Mask | None,
        OfProblem(
            "--window",
            help="A query sees LEFT keys before it and RIGHT after it; -1 is all.",
            metavar="LEFT,RIGHT",
            parser=parsed("--window", _parse_window),
        ),
    ] = None
    documents: Annotated[
        Mask | None,
        OfProblem(
            "--documents",
            help="Packed documents as running totals (cu_seqlens), such as 0,48k,128k.",
            metavar="0,…,SEQ",
            parser=parsed("--documents", _parse_documents),
        ),
    ] = None
    new: Annotated[
        int | None,
        tokens(
            "--new",
            "Serving: new tokens of a prompt or a turn, instead of --seq. Both names are the same option.",
            "--prefill",
        ),
    ] = None
    cached: Annotated[
        int | None, tokens("--cached", "Serving: tokens before the new ones whose keys and values are cached; 0.")
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
        new = 1 if self.new is None else self.new
        if new > MOST_DECODED:
            raise UsageError(
                f"--new {new:,} with --decode: expected at most {MOST_DECODED} new tokens of each sequence; leave out "
                "--decode for a prompt or a turn"
            )
        return self._served(ranks, "--decode", new=new, cached=self.cached)

    def _served(self, ranks: int, what: str, *, new: int, cached: int) -> Problem:
        others = {"--seq": self.seq, "--seq-kv": self.seq_kv, "--window": self.window, "--documents": self.documents}
        refuse_with(what, others)
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

    def layout(self, layout: Layout | None) -> Layout | None:
        """The layout to plan with; None is the one that suits the mask."""
        if not self.is_turn:
            return layout
        refuse_with("--new", {"--layout": None if layout == Turn() else layout})
        return Turn()

    def choice(self, choice: Choice) -> Choice:
        """The choice on the layout to plan with."""
        return replace(choice, layout=self.layout(choice.layout))

    def passes(self, *, both: bool) -> tuple[Direction, ...]:
        if self.is_turn:
            refuse_with("--new", {"--backward": both})
        return DIRECTIONS if both else DIRECTIONS[:1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemOptions(PlannedProblemOptions):
    """A problem that must be given."""

    otherwise: ClassVar[str] = "give the length of the sequence, or for serving --new and --cached"

    heads: Annotated[int, Heads]


def check_layers(layers: int, *, is_served: bool) -> None:
    if layers > 1 and not is_served:
        raise UsageError("--layers needs --new or --decode; other problems are of one layer")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    decode: Annotated[
        bool,
        OfProblem(
            "--decode",
            help="Serving: one decoded step; --batch sequences of --cached tokens, with --new tokens each (1 if left "
            "out).",
        ),
    ] = False
    queries: Annotated[
        Queries | None,
        OfProblem(
            "--queries",
            help="With --decode: every rank runs the same tokens, or each runs some of the sequences; any if left out.",
            metavar="|".join(QUERIES),
            parser=parsed("--queries", one_of(QUERIES)),
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.queries is not None and not self.decode:
            raise UsageError("--queries needs --decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """A cluster, and a number of ranks if it differs from the cluster's."""

    cluster: Annotated[
        str,
        OfProblem(
            "--cluster",
            help=f"NAMExRANKS, such as h100x256 ({', '.join(PRESETS)}), or a .toml file that 'calibrate' wrote.",
            metavar="CLUSTER",
        ),
    ]
    ranks: Annotated[int | None, whole_number("--ranks", "Number of ranks, if it differs from the cluster's.")] = None

    @property
    def topology(self) -> Topology:
        topology = cluster_named(self.cluster)
        return topology if self.ranks is None else topology.with_ranks(self.ranks)


# The plan


def _name(name: str, help_text: str, names: Sequence[str]) -> Any:
    """An option that is one of some names."""
    return OfPlan(name, help=help_text, metavar="|".join(names), parser=parsed(name, one_of(names)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceOptions:
    """Options of a `Choice`."""

    method: Annotated[str, OfPlan("--method", help=f"Planner: {', '.join(METHODS)}.", metavar="NAME")] = "mesh"
    tile: Annotated[
        Tile | None,
        OfPlan(
            "--tile",
            help="Query shards x KV shards that a rank computes; auto moves the fewest bytes.",
            metavar="AxB|auto",
            parser=parsed("--tile", _parse_tile_or_auto),
            show_default="auto",
        ),
    ] = None
    ulysses_degree: Annotated[
        int | None, whole_number("--ulysses-degree", "Ranks that trade heads for tokens; 1 if left out.", OfPlan)
    ] = None
    inner: Annotated[
        Tile | None,
        OfPlan(
            "--inner",
            help="The part of the grid that one node holds.",
            metavar="AxB",
            parser=parsed("--inner", _parse_tile),
        ),
    ] = None
    layout: LayoutOption = None
    route: Annotated[Route | None, _name("--route", "How shards travel; direct if left out.", ROUTES)] = None
    partials: Annotated[Route | None, _name("--partials", "How partials travel; direct if left out.", ROUTES)] = None
    blocks_per_call: Annotated[
        int | None, whole_number("--blocks-per-call", "Blocks that one kernel call attends.", OfPlan)
    ] = None
    keep: Annotated[
        Any,  # tuple[Keep, ...] | None, which typer would read as an option of several values
        OfPlan(
            "--keep",
            help="Inputs that forward keeps for backward: own as exchanged by Ulysses, q and kv gathered.",
            metavar="|".join(KEEPS),
            parser=parsed("--keep", _parse_keep),
        ),
    ] = None
    waves: Annotated[
        int | None, whole_number("--waves", "Parts of the heads, or rows, that follow each other.", OfPlan)
    ] = None
    cut: Annotated[Cut | None, _name("--cut", "What waves are cut from; heads if left out.", CUTS)] = None

    @property
    def choice(self) -> Choice:
        return Choice.of(**{field.name: getattr(self, field.name) for field in fields(self)})


# Refusals


def refuse_with(what: str, options: Mapping[str, object]) -> None:
    """Raise if any of these options is given together with `what`."""
    names = [name for name, value in options.items() if value not in (None, False)]
    if names:
        it = "it" if len(names) == 1 else "them"
        raise UsageError(f"{', '.join(names)} cannot be combined with {what}; leave {it} out")


def refuse_with_file(context: typer.Context, file: Path, *groups: Any, also: Sequence[str] = ()) -> None:
    """A plan file states the problem and the plan, so options that state them again are refused."""
    names = options_given(context, *(field.name for group in groups for field in fields(group)), *also)
    if names:
        it = "it" if len(names) == 1 else "them"
        raise UsageError(f"{', '.join(names)} cannot be combined with {file}, which states {it}; leave {it} out")


def options_given(context: typer.Context, *names: str) -> list[str]:
    """Which of these parameters the command line states, as it spells them."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [
        f"--{name.replace('_', '-')}"
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    ]


def check_rank(rank: int, ranks: int) -> int:
    if rank >= ranks:
        raise UsageError(f"--rank {rank}: expected a rank from 0 to {ranks - 1}, because there are {ranks}")
    return rank


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
