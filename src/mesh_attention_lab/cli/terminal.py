"""What commands print: tables, facts, words (problems, times, clusters) and the progress bar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from textwrap import wrap
from typing import Literal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

from mesh_attention.plan.assignment import Assignment
from mesh_attention.plan.blocks import token_nbytes
from mesh_attention.plan.buffer_sizes import blocks_of_rank, layer_nbytes
from mesh_attention.plan.layout import Cached, TypicalTurn
from mesh_attention.planners.choice import Choice
from mesh_attention.problem import Direction, Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.result import Trial
from mesh_attention.units import (
    BYTES,
    TIMES,
    Progress,
    Units,
    count,
    format_nbytes,
    format_size,
    format_time,
    format_together,
)

NO_NUMBER = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Cells below a header. Numbers are never wrapped; text is, down to `least_width` if it has one."""

    header: str
    cells: Sequence[str]
    is_text: bool = False
    least_width: int | None = None

    @classmethod
    def of_amounts(
        cls, header: str, values: Sequence[float], units: Units, *, below: int = 10_000, digits: int = 4
    ) -> Column:
        """Amounts in one unit, which stands below the header."""
        unit, cells = format_together(list(map(round, values)), units, below=below, digits=digits)
        return cls(header=f"{header}\n{unit}", cells=cells)

    @property
    def narrow_width(self) -> int:
        whole = max(len(line) for cell in (self.header, *self.cells) for line in cell.split("\n"))
        return whole if self.least_width is None else min(self.least_width, whole)


def plain_console() -> Console:
    """Prints text as it is: brackets, colons and numbers are not interpreted."""
    return Console(highlight=False, markup=False, emoji=False)


def print_table(console: Console, columns: Sequence[Column], *, bold: Sequence[bool] = ()) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        align: Literal["left", "right"] = "left" if column.is_text else "right"
        table.add_column(
            column.header, justify=align, no_wrap=column.least_width is None, min_width=column.narrow_width
        )
    for cells, is_bold in zip_longest(zip(*(column.cells for column in columns), strict=True), bold):
        table.add_row(*map(_indented, cells), style="bold" if is_bold else None)
    console.print(table)


NAME_WIDTH, REASON_WIDTH = 19, 20
"""Methods and reasons are wrapped to these widths where there is little room."""
SHORT = {"forward": "fwd", "backward": "bwd", "both": "both"}


def print_trials(console: Console, trials: Sequence[Trial], topology: Topology) -> None:
    """Times, bytes and memory of each; the first is the one that the others are compared with."""
    first_s = trials[0].time_s
    slower = [f"{trial.time_s / first_s:.2f}" if first_s else NO_NUMBER for trial in trials]
    sent = ("between\nnodes", "between_nbytes") if topology.nodes > 1 else ("sent", "sent_nbytes")
    columns = [
        Column(header="method\n  choice", cells=list(map(_name, trials)), is_text=True, least_width=NAME_WIDTH),
        Column.of_amounts("time", [1e9 * trial.time_s for trial in trials], TIMES, below=1000),
        Column(header="×\nfirst", cells=slower),
        Column.of_amounts("exposed", [max(0.0, 1e9 * trial.exposed_s) for trial in trials], TIMES, below=1000),
        Column.of_amounts(sent[0], [getattr(trial, sent[1]) for trial in trials], BYTES),
        Column.of_amounts("peak", [trial.peak_nbytes for trial in trials], BYTES, below=1000, digits=3),
    ]
    reasons = [trial.reason for trial in trials]
    if any(reasons):
        columns.append(Column(header="why not", cells=reasons, is_text=True, least_width=REASON_WIDTH))
    print_table(console, columns, bold=[trial is trials[0] for trial in trials])


def _name(trial: Trial) -> str:
    """The method, and below it the choice for each pass, or for both; the headline has the layout."""
    texts = {direction: str(replace(choice, layout=None)) for direction, choice in trial.choices.items()}
    lines = dict.fromkeys(texts.values())
    if len(lines) > 1:
        lines = dict.fromkeys(f"{SHORT[direction]} {text}" for direction, text in texts.items())
    return "\n".join([trial.family, *(f"  {line}" for line in lines)])


def _indented(cell: str) -> RenderableType:
    """The lines of a cell; what an indented line continues on is indented as well."""
    lines = cell.split("\n")
    if len(lines) == 1:
        return cell
    return Group(*(Padding(line.lstrip(), (0, 0, 0, len(line) - len(line.lstrip()))) for line in lines))


# Facts: a label, and a text beside it


LABEL_WIDTH = 11


def print_fact(console: Console, label: str, text: str, *, style: str | None = None, is_code: bool = False) -> None:
    """A line with its label; a longer text goes on below, but code stays one line, to be copied."""
    lines = [text] if is_code else wrap(text, max(20, console.width - LABEL_WIDTH), break_on_hyphens=False)
    for number, line in enumerate(lines):
        console.print(f"{label if not number else '':{LABEL_WIDTH}}{line}", style=style, soft_wrap=True)


def print_first(console: Console, **facts: str) -> None:
    """The lines that a person wants first, by their labels, and an empty one."""
    for label, text in facts.items():
        print_fact(console, label, text, style="bold", is_code=label == "write")
    console.print()


def times(ratio: float | None) -> str:
    if ratio is None:
        return NO_NUMBER
    return f"{ratio:.2f}" if ratio >= 0.01 or not ratio else f"{ratio:.1g}"


def percent(share: float, *, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


# Words


def time_words(times_s: Mapping[Direction, float], bound_s: float, of_layers: str = "") -> str:
    """The time of all passes and of each, unless it is stated for layers, as a share of one kernel's rate."""
    whole_s = sum(times_s.values())
    words = ", ".join(f"{format_time(seconds)} {direction}" for direction, seconds in times_s.items())
    if len(times_s) > 1:
        words = f"{format_time(whole_s)}: {words}"
    return f"{of_layers or words}; {percent(bound_s / whole_s)} of one kernel's rate"


LONGEST_MASK = 40
"""Characters of a mask in a headline; one of documents may have thousands."""


def mask_words(problem: Problem) -> str:
    mask = str(problem.mask)
    return mask if len(mask) <= LONGEST_MASK else mask[:LONGEST_MASK] + "…"


def problem_words(problem: Problem, layout: str) -> str:
    """Everything about a problem on a layout. Turns and decoded steps are all masked alike."""
    if layout in (TypicalTurn.name, Cached.name):
        return f"{new_words(problem)}, {head_words(problem)}"
    return f"{size_words(problem)}, {mask_words(problem)}, {layout}"


def new_words(problem: Problem) -> str:
    """New and cached tokens of each sequence."""
    sequences = f"{count(problem.batch, 'sequence')}, each " if problem.batch > 1 else ""
    new = f"{format_size(problem.seq_q)} new token" + ("" if problem.seq_q == 1 else "s")
    cached = problem.seq_kv - problem.seq_q
    return f"{sequences}{new} on {format_size(cached)} cached" if cached else f"{sequences}{new}"


def size_words(problem: Problem) -> str:
    """Lengths, heads and dtype."""
    tokens = f"{problem.batch} x " if problem.batch > 1 else ""
    tokens += format_size(problem.seq_q)
    if problem.seq_kv != problem.seq_q:
        tokens += f" on {format_size(problem.seq_kv)}"
    return f"{tokens} tokens, {head_words(problem)}"


def head_words(problem: Problem) -> str:
    heads = count(problem.heads, "head") + (f" ({problem.kv_heads} KV)" if problem.kv_heads != problem.heads else "")
    size = f"{problem.head_dim_qk}"
    if problem.head_dim_v != problem.head_dim_qk:
        size += f" and {problem.head_dim_v}"
    return f"{heads} of {size}, {problem.dtype}"


def choice_words(choice: Choice) -> str:
    """The text of a choice. A cache states where its tokens are, so the layout of a turn is not a part of it."""
    return str(replace(choice, layout=None) if choice.layout == TypicalTurn() else choice)


def tile_reason(assignment: Assignment) -> str:
    """The reason why a tile moves fewer bytes than ring."""
    tile, others = assignment.tile, assignment.ulysses_degree * assignment.places - 1
    shards = [(tile.rows - 1, "query shard"), (tile.cols - 1, "KV shard")]
    received = " and ".join(count(number, noun) for number, noun in shards if number)
    returned = f" and returns {count(tile.rows - 1, 'partial result')}" if tile.rows > 1 else ""
    traded = (
        f", once {assignment.ulysses_degree} ranks have traded heads for tokens,"
        if assignment.ulysses_degree > 1
        else ""
    )
    return (
        f"with ring, a rank receives the K and V of all {others} others; with a {tile} tile{traded} it receives "
        f"{received or 'no shards'}{returned}."
    )


def cluster_words(topology: Topology) -> str:
    """Ranks, nodes and rates."""
    ranks, device = count(topology.ranks, "rank"), topology.device
    rates = f"{device.forward.tflops:g} and {device.backward.tflops:g} TFLOP/s per rank forward and backward"
    if topology.nodes == 1:
        return f"{topology.name}: {ranks} in one node, {topology.inside.gb_per_s:g} GB/s per rank; {rates}"
    return (
        f"{topology.name}: {ranks} in {topology.nodes:,} nodes of {topology.ranks_per_node}, "
        f"{topology.inside.gb_per_s:g} GB/s per rank inside a node, {topology.between.gb_per_s:g} GB/s per NIC "
        f"between nodes ({count(topology.nics_per_node, 'NIC')} per node); {rates}"
    )


# Serving: times and cache of all layers, and what of a turn or a decoded step travels


def travel_words(problem: Problem, choice: Choice) -> str:
    """The sizes of queries and of keys and values, and which of them travel under a choice of a turn."""
    tile, ulysses = choice.assignment.tile, choice.assignment.ulysses_degree
    queries = problem.batch * problem.seq_q * problem.heads * problem.head_dim_qk * problem.itemsize
    kv = problem.batch * problem.seq_kv * token_nbytes("kv", problem)
    sizes = (
        f"{problem.seq_q:,} new queries are {format_nbytes(queries)}, keys and values {format_nbytes(kv)}, "
        f"{format_nbytes(kv / problem.ranks)} a rank"
    )
    travels = {
        (False, False): "nothing else travels" if ulysses > 1 else "nothing travels",
        (True, False): "queries travel",
        (False, True): "keys and values travel",
        (True, True): f"both travel, {tile.rows} shards of queries and {tile.cols} of keys and values to a rank",
    }[tile.rows > 1, tile.cols > 1]
    traded = f"{ulysses} ranks trade heads for tokens, then " if ulysses > 1 else ""
    return f"{sizes}: {traded}{travels}."


def layers_words(time_s: float, layers: int) -> str:
    return _of_layers(format_time(time_s), format_time(layers * time_s), layers)


def cache_nbytes(problem: Problem, *, layers: int = 1) -> int:
    """Bytes of a cache on one rank that holds the keys and values of a problem in every layer of a model."""
    blocks = blocks_of_rank(problem.batch * problem.seq_kv, sequences=problem.batch, ranks=problem.ranks)
    return layers * layer_nbytes(blocks, token_nbytes=token_nbytes("kv", problem))


def cache_words(problem: Problem, layers: int) -> str:
    a_layer, in_all = (format_nbytes(cache_nbytes(problem, layers=n)) for n in (1, layers))
    return f"{_of_layers(a_layer, in_all, layers)}, on each rank"


def _of_layers(text: str, text_of_all: str, layers: int) -> str:
    return text if layers == 1 else f"{text} a layer, {text_of_all} for {layers:,} layers"


# Progress, on stderr: nothing is left behind, and nothing shown where stderr is not a terminal


@contextmanager
def progress(activity: str, *, is_shown: bool = True) -> Iterator[Progress]:
    """A bar that pulses until the first fraction is reported."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with ProgressBar(*columns, console=console, transient=True, disable=not (is_shown and console.is_terminal)) as bar:
        task = bar.add_task(activity, total=None)

        def report(activity: str, fraction: float) -> None:
            bar.update(task, total=1.0, completed=fraction, description=activity)

        yield report
