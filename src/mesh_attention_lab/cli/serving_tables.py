"""Serving in the answers of commands: times and cache of all layers, and what of a turn or a decoded step travels."""

from __future__ import annotations

from mesh_attention.plan.blocks import token_nbytes
from mesh_attention.plan.buffer_sizes import blocks_of_rank, layer_nbytes
from mesh_attention.planners.choice import Choice
from mesh_attention.problem import Problem
from mesh_attention.units import format_nbytes, format_time
from mesh_attention_lab.decode_simulator import kv_nbytes


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


def decode_words(problem: Problem) -> str:
    """The reason why partial results of a decoded step travel, and not keys and values."""
    partials = format_nbytes(problem.batch * problem.seq_q * token_nbytes("o", problem))
    kv = format_nbytes(kv_nbytes(problem))
    return f"Partial results are {partials} a rank, keys and values {kv}: partial results travel."


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
