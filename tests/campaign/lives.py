"""Random lives of caches, each turn and step compared with dense attention (`tests/serving_cases.py`).

    PYTHONPATH=src python tests/campaign/lives.py --count 2000                 # on local ranks, in this process
    PYTHONPATH=src python tests/campaign/lives.py --count 200 --processes 3    # on processes over Gloo
    PYTHONPATH=src python tests/campaign/lives.py --seed 17 --count 1 --show   # and what was done in that one

A life is one `MeshAttention` with some caches, whose layers differ in every size, and what is done to them in turn,
with calls of training in between. It is plain data, drawn from its seed. A life fails if anything raises, or if a
result is off by more than rounding explains.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from attending import Attended, Call
from run_ranks import RankPool
from serving_cases import HEADS, Model

from mesh_attention import LocalGroup, MeshAttention
from mesh_attention.planners.over_cache import COMBININGS, QUERIES
from mesh_attention.serving import CachedLayer, ShardedCache

LAYOUTS = ("zigzag", "striped", "contiguous", "chunks")
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
Deed = tuple[str, int, tuple[Any, ...]]
"""What is done, to which cache, and with what: numbers count the sequences that are alive, in order."""


@dataclass(frozen=True)
class Life:
    """Settings of the attention and the caches, and all deeds."""

    ranks: int
    layout: str
    caches: tuple[dict[str, Any], ...]
    deeds: tuple[Deed, ...]
    softcap: float
    seed: int


def draw_life(seed: int, ranks: int | None = None) -> Life:
    rng = random.Random(seed)
    caches = tuple(
        {
            "layers": tuple(_draw_layer(rng) for _ in range(rng.randint(1, 3))),
            "dtype": rng.choices(list(TOLERANCES), (6, 2, 1))[0],
            "block_tokens": rng.choice((1, 3, 8, 64)),
            "max_rollback": rng.choice((0, 4)),
        }
        for _ in range(rng.choice((1, 1, 2)))
    )
    deeds = tuple(_draw_deed(rng, len(caches)) for _ in range(rng.randint(3, 10)))
    most = ranks or rng.choice((1, 2, 3, 4, 5, 8))
    return Life(most, rng.choice(LAYOUTS), caches, deeds, rng.choice((0.0, 0.0, 2.0)), seed)


def _draw_layer(rng: random.Random) -> CachedLayer:
    dims = rng.choice((4, 8, 3)), rng.choice((None, 1, 5))
    return CachedLayer(
        kv_heads=rng.choice((1, 2, HEADS)), head_dim=dims[0], head_dim_v=dims[1], window=rng.choice((None, None, 0, 5))
    )


def _draw_deed(rng: random.Random, caches: int) -> Deed:
    what = rng.choice(
        ("prefill", "prefill", "decode", "decode", "decode", "new", "fork", "cut", "remove", "reserve", "train")
    )
    some = tuple(sorted(rng.sample(range(4), rng.randint(1, 2))))
    numbers: dict[str, tuple[Any, ...]] = {
        "prefill": tuple((each, rng.choice((1, 2, 7, 7, 16, 23))) for each in some),
        "decode": (
            tuple((each, rng.choice((1, 1, 1, 4))) for each in some),
            rng.choice(QUERIES),
            rng.choice(COMBININGS),
        ),
        "cut": (some[0], rng.random()),
        "reserve": (rng.randint(1, 900),),
        "train": (rng.randint(8, 20), rng.random() < 0.5),
    }
    return what, rng.randrange(caches), numbers.get(what, some[:1])


def play(life: Life, attention: MeshAttention | None = None) -> None:
    """Live it on local ranks, or on an attention over processes; raises if anything is wrong."""
    attention = attention or MeshAttention(LocalGroup(life.ranks), layout=life.layout)
    device = torch.device("cpu")
    models = [
        Model(ShardedCache(attention, tokens=900, sequences=6, device=device, **made), life.softcap, life.seed)
        for made in life.caches
    ]
    for model in models:
        for memory in model.cache.memories:  # so that reading what was never written is noticed
            for tensor in (tensor for stored in memory.stored for tensor in stored):
                tensor.fill_(torch.nan)
        model.new()
    for what, number, given in life.deeds:
        _do(attention, models[number], what, given)
        for model in models:
            if model.error > TOLERANCES[model.cache.dtype]:
                raise AssertionError(f"off by {model.error:.1e} after {what} {given}")


def _do(attention: MeshAttention, model: Model, what: str, given: tuple[Any, ...]) -> None:
    alive, cache = list(model.known), model.cache
    if what == "prefill":
        model.prefill({alive[each % len(alive)]: tokens for each, tokens in given})
    elif what == "decode":
        new, queries, combine = given
        chosen = {alive[each % len(alive)]: tokens for each, tokens in new}
        model.decode(chosen, queries=queries, combine=combine if queries == "replicated" else None)
    elif what == "new" and len(alive) < 6:
        model.new()
    elif what == "fork" and len(alive) < 6:
        model.fork(alive[given[0] % len(alive)])
    elif what == "cut":
        which, share = alive[given[0] % len(alive)], given[1]
        least = cache.book.entry(which).min_length
        model.truncate(which, least + int(share * (cache.length(which) - least)))
    elif what == "remove" and len(alive) > 1:
        cache.remove(alive[given[0] % len(alive)])
        del model.known[alive[given[0] % len(alive)]]
    elif what == "reserve":
        cache.reserve(*given)
    elif what == "train":
        tokens, causal = given
        Attended(attention, Call(seq_q=tokens, seq_k=tokens, arguments={"causal": causal, "seq_len": tokens})).compare()


def lives(seeds: range, ranks: int | None, group: Any = None) -> list[tuple[int, str]]:
    """The seeds of lives that fail, and how."""
    failed = []
    for seed in seeds:
        life = draw_life(seed, ranks)
        try:
            play(life, None if group is None else MeshAttention(group, layout=life.layout))
        except Exception:
            failed.append((seed, traceback.format_exc(limit=-4)))
            if group is not None:
                break  # nothing more is sent on a group that failed
    return failed


def lives_on_rank(group: Any, first: int, count: int, ranks: int) -> list[tuple[int, str]]:
    torch.set_num_threads(1)
    return lives(range(first, first + count), ranks, group)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first life")
    parser.add_argument("--processes", type=int, help="as many ranks, each a process")
    parser.add_argument("--show", action="store_true", help="print each life before it is lived")
    given = parser.parse_args()
    torch.set_num_threads(1)
    begun, seeds = time.monotonic(), range(given.seed, given.seed + given.count)
    if given.show:
        print(*(draw_life(seed, given.processes) for seed in seeds), sep="\n")
    if given.processes is None:
        failed = lives(seeds, None)
    else:
        with RankPool(given.processes, sizes=(given.processes,)) as pool:
            by_rank = pool.run(
                given.processes, lives_on_rank, given.seed, given.count, given.processes, timeout_s=3600.0
            )
        failed = [failure for of_rank in by_rank for failure in of_rank]
    for seed, text in failed:
        print(f"--seed {seed} --count 1\n{text}")
    print(f"{given.count} lives, {len(failed)} wrong, {time.monotonic() - begun:.0f} s")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
