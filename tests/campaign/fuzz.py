"""Random calls of `MeshAttention`, each compared with dense attention in float64 (`tests/attending.py`).

    PYTHONPATH=src python tests/campaign/fuzz.py --seconds 60 --processes 2 [--seed 0] [--count N] [--device cuda]

An episode is one `MeshAttention` and a few calls on it, valid and invalid ones, in any order. Everything about it is
plain data, drawn from its seed and number. A failure is made smaller and printed as a script of a few lines.

A valid call fails if it raises, or if a result is off by more than rounding explains (see its `Truth`). An invalid call
fails if it is accepted, if it raises anything but the library's own errors, or if its message is empty.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from attending import Attended, Call, Memory, MismatchError, arguments_of, wholes_of

from mesh_attention import LocalGroup, MeshAttention, make_plan
from mesh_attention.errors import MeshAttentionError

LAYOUTS = ("contiguous", "zigzag", "striped", "chunks")


@dataclass(frozen=True)
class Object:
    """A `MeshAttention`. One that `plays_one` has one rank, and takes tensors instead of lists of them."""

    ranks: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    plays_one: bool = False
    has_planner: bool = False

    def make(self) -> MeshAttention:
        group: Any = LocalGroup(self.ranks)
        settings = self.settings | ({"planner": _planner} if self.has_planner else {})
        return MeshAttention(group.comm(0) if self.plays_one else group, **settings)


def _planner(problem: Any, *, direction: Any, layout: Any) -> Any:
    return make_plan(problem, direction=direction, layout=layout, blocks_per_call=2)


# Running


def check(given: Object, *calls: Call, device: str = "cpu", late: bool = False) -> None:
    """Make the object, make the calls, and compare; raises on the first that is wrong. `late`: backward at the end."""
    attention = given.make()
    pending = []
    for call in calls:
        if call.wrong is not None:
            _check_refusal(attention, given, call, device)
            continue
        pending.append(Attended(attention, call, device))
        if not late:
            pending.pop().compare()
    for attended in reversed(pending):
        attended.compare()


def _check_refusal(attention: MeshAttention, given: Object, call: Call, device: str) -> None:
    wrong = call.wrong
    assert wrong is not None
    ids = [attention.position_ids(seq) for seq in (call.seq_q, call.seq_k)]
    ids = [[at] if given.plays_one else at for at in ids]
    wholes = wholes_of(call, device)[:3]
    sides = [[whole[:, at.to(device)] for at in ids[number > 0]] for number, whole in enumerate(wholes)]
    if attention.tensor_format == "bhsd":
        sides = [[x.transpose(1, 2) for x in side] for side in sides]
    arguments = arguments_of(call, device)
    sides, arguments = WRONG[wrong](sides, arguments)
    inputs = [side[0] if given.plays_one and isinstance(side, list) else side for side in sides]
    try:
        attention(*inputs, **arguments)
    except MeshAttentionError as error:
        if len(str(error)) < 20:
            raise MismatchError(f"{wrong}: refused without a reason: {error!r}") from None
        return
    raise MismatchError(f"{wrong}: accepted")


# Invalid calls: each changes the inputs, by rank, or the arguments of a call that would be valid. Those that
# tests/test_api_refusals.py makes, one by one and with their messages, are left out.

Change = Callable[[Any, dict[str, Any]], tuple[Any, dict[str, Any]]]


def _giving(**arguments: Any) -> Change:
    return lambda sides, others: (sides, others | arguments)


def _changing(which: int, change: Callable[[Tensor], Any]) -> Change:
    def apply(sides: Any, arguments: dict[str, Any]) -> Any:
        return [[change(x) for x in side] if number == which else side for number, side in enumerate(sides)], arguments

    return apply


def _without_length(sides: Any, arguments: dict[str, Any]) -> Any:
    return sides, arguments | {"seq_len": sum(x.shape[1] for x in sides[0]) + 1000, "cu_seqlens_q": None}


WRONG: dict[str, Change] = {
    "scale is inf": _giving(softmax_scale=float("inf")),
    "scale is text": _giving(softmax_scale="0.5"),
    "causal is 1": _giving(causal=1),
    "deterministic is None": _giving(deterministic=None),
    "return_lse is 1": _giving(return_lse=1),
    "window has one side": _giving(window_size=(3,)),
    "window is -2": _giving(window_size=(-2, 0)),
    "window is 1.5": _giving(window_size=(1.5, 0)),
    "window is a number": _giving(window_size=4),
    "cuts are empty": _giving(cu_seqlens_q=[], cu_seqlens_k=None),
    "cuts start at 1": _giving(cu_seqlens_q=[1, 8], cu_seqlens_k=None),
    "cuts are too long": _giving(cu_seqlens_q=[0, 100000], cu_seqlens_k=[0, 100000]),
    "cuts are floats": _giving(cu_seqlens_q=[0.0, 8.0], cu_seqlens_k=None),
    "cuts are a float tensor": _giving(cu_seqlens_q=torch.tensor([0.0, 8.0]), cu_seqlens_k=None),
    "cuts are text": _giving(cu_seqlens_q="08", cu_seqlens_k=None),
    "cuts are a number": _giving(cu_seqlens_q=8, cu_seqlens_k=None),
    "cuts differ in number": _giving(cu_seqlens_q=[0, 1, 2], cu_seqlens_k=[0, 8]),
    "length is 0": _giving(seq_len=0),
    "length is negative": _giving(seq_len=-8),
    "length is 8.0": _giving(seq_len=8.0),
    "length is True": _giving(seq_len=True),
    "length is text": _giving(seq_len="8"),
    "length of keys is -1": _giving(seq_len_k=-1),
    "length is of other tokens": _without_length,
    "q is None": lambda sides, arguments: ([None, *sides[1:]], arguments),
    "q is a list of None": _changing(0, lambda x: None),
    "k is a number": _changing(1, lambda x: 3.0),
    "k is too short a list": lambda sides, arguments: ([sides[0], sides[1] + sides[1], sides[2]], arguments),
    "q has 2 dimensions": _changing(0, lambda x: x[0].flatten(0, 1)),
    "q has 5 dimensions": _changing(0, lambda x: x[None]),
    "k has another head size": _changing(1, lambda x: torch.cat([x, x], -1)),
    "q is of whole numbers": lambda sides, arguments: ([[x.long() for x in side] for side in sides], arguments),
    "k has another batch": _changing(1, lambda x: torch.cat([x, x])),
    "v has another batch": _changing(2, lambda x: torch.cat([x, x])),
    "no head": lambda sides, arguments: ([[x[:, :, :0] for x in side] for side in sides], arguments),
    "no head size": lambda sides, arguments: ([[x[..., :0] for x in side] for side in sides], arguments),
    "no batch": lambda sides, arguments: ([[x[:0] for x in side] for side in sides], arguments),
}

WRONG_SETTINGS: list[dict[str, Any]] = [
    {"tile": (0, 4)},
    {"tile": "4x"},
    {"tile": (1, 2, 3)},
    {"method": 3},
    {"layout": 4},
    {"route": "detour"},
    {"partials": True},
    {"ulysses_degree": 0},
    {"ulysses_degree": 1.0},
    {"blocks_per_call": 0},
    {"blocks_per_call": 1.5},
    {"keep": ("o",)},
    {"keep": "kv"},
    {"planner": 3},
    {"costs": 3},
    {"choice": "mesh 3x5"},
    {"choice": "nonsense"},
    {"choice": 5},
    {"tensor_format": None},
    {"cuda_graphs": "yes"},
    {"memory_limit": 100},
    {"cluster": "no such cluster"},
    {"cluster": 3},
    {"method": "ring", "tile": (2, 2)},
    {"method": "attention2d", "route": "ring"},
]


def check_settings(ranks: int, settings: dict[str, Any]) -> None:
    """Settings that cannot be: refused when the object is made, or at its first call."""
    try:
        attention = MeshAttention(LocalGroup(ranks), **settings)
        x = attention.shard(torch.randn(1, 8, 1, 8))
        attention(x, x, x, seq_len=8)
    except MeshAttentionError as error:
        if len(str(error)) < 20:
            raise MismatchError(f"refused without a reason: {error!r}") from None
        return
    raise MismatchError("accepted")


# Drawing


def draw_episode(rng: random.Random, device: str) -> tuple[Object, list[Call], bool]:
    given, multiple = _draw_object(rng)
    calls: list[Call] = []
    for _ in range(rng.choice((1, 1, 2, 3, 5))):
        if calls and rng.random() < 0.4:  # like an earlier one, with other values, or other details
            call = replace(rng.choice(calls), seed=rng.randrange(10**6), wrong=None)
            if rng.random() < 0.5:
                call = replace(call, **_draw_details(rng, call, given))
        else:
            call = draw_call(rng, given, multiple, device)
        if rng.random() < 0.1:
            call = replace(call, **_draw_nan(rng, call), memory=tuple(replace(x, expanded=()) for x in call.memory))
        if rng.random() < 0.12:
            call = replace(call, wrong=rng.choice(_possible_faults(call, given)), is_packed=False)
        calls.append(call)
    return given, calls, rng.random() < 0.2


def _possible_faults(call: Call, given: Object) -> list[str]:
    faults = list(WRONG)
    if given.plays_one:
        faults.remove("k is too short a list")
    if "cu_seqlens_q" in call.arguments:
        faults.remove("length is of other tokens")
    return faults


def _draw_object(rng: random.Random) -> tuple[Object, int]:
    """An object, and what its calls' KV heads must be a multiple of."""
    ranks = rng.choice((1, 2, 2, 3, 4, 4, 5, 6, 7, 8))
    settings: dict[str, Any] = {}
    if rng.random() < 0.7:
        settings["layout"] = rng.choice(LAYOUTS)
    if rng.random() < 0.3:
        settings["tensor_format"] = rng.choice(("bshd", "bhsd"))
    if rng.random() < 0.08:
        return Object(ranks, settings, has_planner=True), 1
    if rng.random() < 0.01:
        settings["cluster"] = rng.choice(("h100x8", "h200x8"))
        return Object(ranks, settings), 1
    multiple = 1
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    method = rng.choice((None, "ring", "pass-q", "mesh", "mesh", "mesh", "attention2d", "ulysses"))
    if method is not None:
        settings["method"] = method
    if method == "ulysses":
        multiple = ranks
    elif rng.random() < 0.25:
        multiple = settings["ulysses_degree"] = rng.choice(divisors)
    places = ranks // multiple
    if method in ("mesh", "attention2d") and rng.random() < 0.8:
        rows = rng.choice([n for n in range(1, places + 1) if places % n == 0])
        settings["tile"] = rng.choice(((rows, places // rows), f"{rows}x{places // rows}"))
    if method in (None, "mesh", "ring", "pass-q"):
        for name, values in (("route", ("direct", "ring")), ("partials", ("direct", "ring"))):
            if rng.random() < 0.4:
                settings[name] = rng.choice(values)
        if rng.random() < 0.4:
            settings["blocks_per_call"] = rng.randint(1, 5)
    if rng.random() < 0.25:
        settings["keep"] = rng.choice(((), ("q",), ("kv",), ("q", "kv")))
    elif method == "mesh" and "tile" in settings and "ring" not in settings.values() and rng.random() < 0.3:
        rows, cols = settings["tile"] if isinstance(settings["tile"], tuple) else map(int, settings["tile"].split("x"))
        inner = [rng.choice([n for n in range(1, side + 1) if side % n == 0]) for side in (rows, cols)]
        if rng.random() < 0.5:
            settings["inner"] = tuple(inner)
        elif set(settings) <= {"method", "tile", "layout", "tensor_format"}:
            text = f"mesh {rows}x{cols}, {settings.pop('layout', 'zigzag')}, inner {inner[0]}x{inner[1]}"
            settings = {"choice": text} | {key: settings[key] for key in settings if key == "tensor_format"}
    plays_one = ranks == 1 and rng.random() < 0.6
    return Object(ranks, settings, plays_one), multiple


def draw_call(rng: random.Random, given: Object, multiple: int, device: str) -> Call:
    most = rng.choice((8, 24, 48)) if device == "cpu" else rng.choice((8, 48, 200, 600))
    seq_q = rng.randint(1, most)
    seq_k = seq_q if rng.random() < 0.7 else rng.randint(1, most)
    if rng.random() < 0.3:
        seq_q, seq_k = (-(-seq // given.ranks) * given.ranks for seq in (seq_q, seq_k))
    kv_heads = multiple * rng.choice((1, 1, 2))
    dims = (1, 2, 3, 4, 8, 8, 16, 33) if device == "cpu" or rng.random() < 0.3 else (8, 16, 64, 64, 128, 256)
    dim = rng.choice(dims)
    dtype = rng.choice(("float64", "float32", "float32", "bfloat16", "bfloat16", "float16"))
    call = Call(
        seq_q=seq_q,
        seq_k=seq_k,
        batch=rng.choice((1, 1, 1, 2, 3)),
        heads=kv_heads * rng.choice((1, 1, 2, 3)),
        kv_heads=kv_heads,
        dim=dim,
        dim_v=dim if rng.random() < 0.8 else rng.choice(dims),
        dtype=dtype,
        seed=rng.randrange(10**6),
    )
    return replace(call, **_draw_details(rng, call, given), arguments=_draw_arguments(rng, call, given))


def _draw_arguments(rng: random.Random, call: Call, given: Object) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if rng.random() < 0.5:
        found["causal"] = rng.random() < 0.9
    if rng.random() < 0.3:
        reach = max(call.seq_q, call.seq_k)
        sides = [rng.choice((-1, 0, 1, rng.randint(0, reach), 10**6)) for _ in range(2)]
        found["window_size"] = rng.choice((tuple(sides), sides))
    if rng.random() < 0.2:
        found["softmax_scale"] = rng.choice((None, 1.0, 1, 0.1, 0.02, 1.7, 1e-30, 1e-3))
    if rng.random() < 0.15:
        found["softcap"] = rng.choice((0.0, 0, 0.5, 3.0, 30.0, 1e-3, 1e30, 1))
    if rng.random() < 0.2:
        found["deterministic"] = rng.random() < 0.8
    if rng.random() < 0.6:
        found["return_lse"] = rng.random() < 0.9
    if rng.random() < 0.3:
        inner = rng.randint(0, 4)
        found["cu_seqlens_q"] = _draw_cuts(rng, call.seq_q, inner)
        if call.seq_k != call.seq_q or rng.random() < 0.3:
            found["cu_seqlens_k"] = _draw_cuts(rng, call.seq_k, inner)
    is_even = all(seq % given.ranks == 0 for seq in (call.seq_q, call.seq_k))
    if not (is_even or "cu_seqlens_q" in found) or rng.random() < 0.4:
        found["seq_len"] = call.seq_q
        if call.seq_k != call.seq_q or rng.random() < 0.3:
            found["seq_len_k"] = call.seq_k
    return found


def _draw_cuts(rng: random.Random, seq: int, inner: int) -> list[int]:
    return [0, *sorted(rng.randint(0, seq) for _ in range(inner)), seq]


def _draw_details(rng: random.Random, call: Call, given: Object) -> dict[str, Any]:
    """Whatever does not make it another configuration: values, memory, gradients."""
    return {
        "sizes": _draw_sizes(rng, call),
        "cuts_as": rng.choice(("list", "tuple", "int32", "int64")),
        "is_packed": call.batch == 1 and rng.random() < 0.2,
        "memory": tuple(_draw_memory(rng) for _ in range(4)),
        "needs": rng.choice(
            ((True, True, True),) * 4 + tuple((bool(n & 1), bool(n & 2), bool(n & 4)) for n in range(8))
        ),
        "into": rng.choice((("out",), ("out",), ("lse",), ("out", "lse"))),
        "skips": rng.randrange(2**given.ranks) if rng.random() < 0.2 else 0,
        "mode": rng.choice(("grad",) * 8 + ("no_grad", "inference", "autocast", "meta")),
        "is_repeated": rng.random() < 0.05,
        "poison": None,
        "spoiled": None,
    }


def _draw_nan(rng: random.Random, call: Call) -> dict[str, Any]:
    """One number, or a document or row of the batch of which no trace may be in the others."""
    if rng.random() < 0.3:
        return {"poison": rng.choice("qk"), "spoiled": None}
    place = rng.randrange(call.batch), rng.randrange(5)
    return {"poison": None, "spoiled": (rng.choice(("q", "k", "v", "o", "qkvo")), *place, rng.choice(("nan", "inf")))}


def _draw_sizes(rng: random.Random, call: Call) -> tuple[float, float, float, float]:
    if rng.random() < 0.7:
        return (1.0, 1.0, 1.0, 1.0)
    if call.dtype == "float16":  # which overflows at 65504
        return (
            rng.choice((0.0, 0.1, 30.0)),
            rng.choice((0.1, 1.0, 10.0)),
            rng.choice((0.1, 3.0)),
            rng.choice((0.1, 1.0)),
        )
    q = rng.choice((0.0, 1e-3, 1.0, 10.0, 1e3, 1e5, 1e8))
    return (
        q,
        rng.choice((1e-3, 1.0, 1.0, 10.0)),
        rng.choice((1e-6, 1.0, 1e3, 1e6)),
        rng.choice((0.0, 1e-12, 1.0, 1e3)),
    )


def _draw_memory(rng: random.Random) -> Memory:
    if rng.random() < 0.5:
        return Memory()
    order = list(range(4))
    rng.shuffle(order)
    expanded = () if rng.random() < 0.6 else tuple(sorted(rng.sample(range(4), rng.choice((1, 1, 2, 4)))))
    return Memory(tuple(order), rng.choice((0, 0, 1, 3)), expanded)


# Failures


def smaller(given: Object, calls: list[Call], late: bool, fails: Callable[..., bool], seconds: float = 20.0) -> Any:
    """A simpler episode that fails as well: fewer calls, and as many details as possible at their defaults."""
    end = time.monotonic() + seconds

    def still(*episode: Any) -> bool:
        return time.monotonic() < end and fails(*episode)

    for at in reversed(range(len(calls))):
        fewer = calls[:at] + calls[at + 1 :]
        if fewer and still(given, fewer, late):
            calls = fewer
    if late and still(given, calls, False):
        late = False
    for name in list(given.settings):
        plainer = replace(given, settings={key: value for key, value in given.settings.items() if key != name})
        if still(plainer, calls, late):
            given = plainer
    for at in range(len(calls)):
        for changed in _plainer(calls[at]):
            tried = [*calls[:at], replace(calls[at], **changed), *calls[at + 1 :]]
            if still(given, tried, late):
                calls = tried
    return given, calls, late


def _plainer(call: Call) -> Iterator[dict[str, Any]]:
    """Fields to be set to something simpler, one after the other."""
    plain = Call()
    kept = ("wrong", "arguments", "memory", "seq_q", "seq_k")
    values = {spec.name: getattr(plain, spec.name) for spec in fields(Call) if spec.name not in kept}
    yield from ({name: value} for name, value in values.items() if getattr(call, name) != value)
    for number in range(4):
        yield {"memory": tuple(Memory() if at == number else one for at, one in enumerate(call.memory))}
    yield {"memory": plain.memory}
    for name in call.arguments:
        yield {"arguments": {key: value for key, value in call.arguments.items() if key != name}}


def script(given: Object, calls: list[Call], late: bool, device: str) -> str:
    """The episode as a script of at most ten lines, to run in the root of the repository."""
    shown = [_spell(call) for call in calls]
    if len(shown) > 6:
        shown = [*shown[:5], ", ".join(shown[5:])]
    options = (f", device={device!r}" if device != "cpu" else "") + (", late=True" if late else "")
    lines = ["import sys", 'sys.path[:0] = ["src", "tests/campaign"]', "from fuzz import Call, Memory, Object, check"]
    return "\n".join([*lines, f"check({_spell(given)},", *(f"    {one}," for one in shown), f"    {options[2:]})"])


def _spell(value: Any) -> str:
    """A value with the fields that are not at their defaults."""
    if isinstance(value, tuple) and value and isinstance(value[0], Memory):
        return f"({', '.join(map(_spell, value))})"
    if not isinstance(value, Object | Call | Memory):
        return repr(value)
    plain = type(value)()
    given = {spec.name: getattr(value, spec.name) for spec in fields(value)}
    parts = [f"{name}={_spell(one)}" for name, one in given.items() if one != getattr(plain, name)]
    return f"{type(value).__name__}({', '.join(parts)})"


def _failure(given: Object, calls: list[Call], late: bool, device: str) -> str | None:
    """What is wrong with an episode; None if nothing is."""
    try:
        check(given, *calls, device=device, late=late)
    except MismatchError as error:
        return str(error)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
    return None


def report(given: Object, calls: list[Call], late: bool, device: str, failure: str) -> str:
    kind = failure.split(" of rank")[0][:40]

    def fails(*episode: Any) -> bool:
        found = _failure(*episode, device)
        return found is not None and found.split(" of rank")[0][:40] == kind

    given, calls, late = smaller(given, calls, late, fails)
    return f"{_failure(given, calls, late, device) or failure}\n{script(given, calls, late, device)}\n"


# Campaign


@dataclass
class Tally:
    episodes: int = 0
    calls: int = 0
    refusals: int = 0
    passes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def run(
    seed: int,
    *,
    seconds: float,
    count: int | None,
    device: str = "cpu",
    start: int = 0,
    log: Path | None = None,
    most_failures: int = 20,
) -> Tally:
    """Episodes of one seed, until the time is over, `count` calls are made or there are that many failures."""
    tally, end = Tally(), time.monotonic() + seconds
    number = start
    while time.monotonic() < end and (count is None or tally.calls < count) and len(tally.failures) < most_failures:
        if log is not None:
            log.write_text(str(number))
        rng = random.Random(f"{seed}/{number}")
        number += 1
        tally.episodes += 1
        given, calls, late = draw_episode(rng, device)
        tally.calls += len(calls)
        tally.refusals += sum(call.wrong is not None for call in calls)
        tally.passes.update(call.dtype for call in calls if call.wrong is None)
        failure = _failure(given, calls, late, device)
        if failure is not None:
            tally.failures.append(f"[seed {seed}, episode {number - 1}] {report(given, calls, late, device, failure)}")
            print(tally.failures[-1], flush=True)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--count", type=int, help="calls of each process, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first episode")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.processes > 1:
        return _in_processes(given)
    torch.set_num_threads(1)
    begun = time.monotonic()
    tally = run(
        given.seed, seconds=given.seconds, count=given.count, device=given.device, start=given.start, log=given.log
    )
    print(json.dumps(vars(tally) | {"failures": len(tally.failures), "seconds": round(time.monotonic() - begun, 1)}))
    return bool(tally.failures)


def _in_processes(given: argparse.Namespace) -> int:
    """Each process has its own seed, and a file with the number of its episode: it may crash."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    options = ["--seconds", str(given.seconds), "--device", given.device, "--start", str(given.start)]
    options += [] if given.count is None else ["--count", str(given.count)]
    started = []
    for number in range(given.processes):
        own = ["--seed", str(given.seed * 1000 + number), "--log", str(folder / str(number))]
        command = [sys.executable, __file__, *options, *own]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ))
    total: Counter[str] = Counter()
    for number, process in enumerate(started):
        text, _ = process.communicate()
        *lines, last = text.strip().split("\n")
        print("\n".join(lines), end="\n" if lines else "")
        if process.returncode in (0, 1) and last.startswith("{"):
            found = json.loads(last)
            total.update(
                {name: found[name] for name in ("episodes", "calls", "refusals", "failures")} | found["passes"]
            )
        else:
            total["failures"] += 1
            print(f"{last}\nended with {process.returncode} in --seed {given.seed * 1000 + number} --start", end=" ")
            print((folder / str(number)).read_text(), "--count 1")
    print(json.dumps(dict(total)))
    return bool(total["failures"])


if __name__ == "__main__":
    sys.exit(main())
