"""How fast are kernels? Useful TFLOP/s of one attention call, by mask: the kernel that is chosen, and others.

    python benchmarks/how_fast_are_kernels.py --store FILE              # 8192 tokens on a GPU; 90 s
    python benchmarks/how_fast_are_kernels.py --device cpu --tokens 256

32 heads of 128, 8 KV heads, bfloat16. Pairs of a query and a key that it sees count, others do not: 4 operations
forward and 14 for both passes, for each pair, head and element. "before" is what a call took before the interval kernel
was there: the reference in slices, or one call for each document. flex is torch's compiled `flex_attention`, for four
masks; varlen is `torch.nn.attention.varlen`. Each is first compared with float32, and left out if it is wrong or
raises; below the table is why. Prints a JSON line and a table.
"""

from __future__ import annotations

import argparse
import inspect
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from run_facts import start_result
from torch import Tensor

from mesh_attention import causal, documents, full, window
from mesh_attention.kernels import windowed
from mesh_attention.kernels.base import CallMask, Demand, Kernel, RowGradient, Scores
from mesh_attention.kernels.reference import REFERENCE
from mesh_attention.kernels.select import choose_kernel

HEADS, KV_HEADS, DIM = 32, 8, 128
INTERVALS = windowed.INTERVALS
SOFTCAP = 20.0
LEFT_OUT = "left out"
REPEATS, SLOW_REPEATS, SLOW_S = 10, 2, 0.05
OUTPUT_ERROR, GRADIENT_ERROR = 0.01, 0.03
"""Relative to float32; bfloat16 rounds to 0.004. A mask that is off by one key in a row is off by more."""

Pass = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call, and how others spell it. `cuts`: documents; `in_flex`: whether flex is compiled for it."""

    name: str
    mask: CallMask
    softcap: float = 0.0
    lse_gradient: bool = False
    deterministic: bool = False
    cuts: tuple[int, ...] = ()
    in_flex: bool = False


class Way(NamedTuple):
    """Forward gives the output; backward gives dQ, dK and dV, and `runs_forward` if it includes forward."""

    forward: Pass
    backward: Pass
    runs_forward: bool = False


class Given(NamedTuple):
    """Inputs of a call, and what float32 makes of them."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    d_lse: Tensor
    row: RowGradient
    exact: tuple[Tensor, ...]


def cases(n: int) -> list[Case]:
    tokens = (range(n),)
    plain = CallMask("causal", causal(), tokens, tokens, n, n)
    found = [
        Case(name="causal", mask=plain, in_flex=True),
        Case(name="full", mask=CallMask("full", full(), tokens, tokens, n, n)),
        Case(name=f"window {n // 8}", mask=CallMask("positions", window(n // 8, 0), tokens, tokens, n, n)),
        Case(name="causal, softcap", mask=plain, softcap=SOFTCAP, in_flex=True),
        Case(name="causal, LSE gradient", mask=plain, lse_gradient=True, in_flex=True),
        Case(name="causal, deterministic", mask=plain, deterministic=True),
    ]
    for count in (4, 8, 64):
        cuts = tuple(range(0, n + 1, n // count))
        mask = CallMask("positions", causal() & documents(cuts), tokens, tokens, n, n)
        found.append(Case(name=f"{count} documents of {n // count}", mask=mask, cuts=cuts, in_flex=count == 8))
    mixed = CallMask("positions", causal(), (range(n, 3 * n, 2),), (range(0, 3 * n, 3),), 3 * n, 3 * n)
    return [*found, Case(name="strides 2 and 3", mask=mixed)]


def scores_of(case: Case) -> Scores:
    return Scores(case.mask, DIM**-0.5, case.softcap)


def pairs(mask: CallMask, device: torch.device) -> int:
    """Pairs of a query and a key that it sees."""
    queries, keys = (sum(map(len, side)) for side in (mask.q, mask.kv))
    return queries * keys if mask.form == "full" else int(mask.dense(device).sum())


def given_for(case: Case, n: int, device: torch.device, dtype: torch.dtype) -> Given:
    torch.manual_seed(0)
    q, do = (torch.randn(1, n, HEADS, DIM, device=device).to(dtype).transpose(1, 2) for _ in range(2))
    k, v = (torch.randn(1, n, KV_HEADS, DIM, device=device).to(dtype).transpose(1, 2) for _ in range(2))
    d_lse = torch.randn(1, HEADS, n, device=device) * case.lse_gradient
    scores = scores_of(case)
    out, lse = REFERENCE.forward(q.float(), k.float(), v.float(), scores)
    row = RowGradient(do, lse, (out * do.float()).sum(-1) - d_lse)
    gradients = REFERENCE.backward(q.float(), k.float(), v.float(), row, scores)
    return Given(q, k, v, do, d_lse, row, (out, *gradients))


# Ways to make a call


def by_kernel(kernel: Kernel, case: Case, given: Given) -> Way:
    q, k, v, scores = given.q, given.k, given.v, scores_of(case)
    return Way(lambda: kernel.forward(q, k, v, scores)[:1], lambda: kernel.backward(q, k, v, given.row, scores))


def chosen(case: Case, given: Given) -> Kernel:
    return choose_kernel(
        Demand(
            device=given.q.device.type,
            dtype=given.q.dtype,
            head_dim_qk=DIM,
            head_dim_v=DIM,
            softcap=case.softcap,
            lse_gradient=case.lse_gradient,
            deterministic=case.deterministic,
        )
    )


def by_intervals(case: Case, given: Given) -> Way:
    if given.q.device.type != "cuda":
        raise NotImplementedError(LEFT_OUT)
    return by_kernel(INTERVALS, case, given)


def before(case: Case, given: Given) -> Way:
    """The call as it was made before; `one_by_one` must be in force."""
    kernel = chosen(case, given)
    return by_kernel(REFERENCE if kernel is INTERVALS else kernel, case, given)


class _Nobody:
    """A kernel that takes nothing."""

    name = "nobody"

    def unsupported_reason(self, demand: Demand) -> str | None:
        return "takes nothing"


@contextmanager
def one_by_one() -> Iterator[None]:
    """Windows are calls of their own, and what has no windows goes to the reference in slices."""
    windowed._dispatch.cache_clear()
    windowed.INTERVALS = _Nobody()  # type: ignore[assignment]
    try:
        yield
    finally:
        windowed.INTERVALS = INTERVALS
        windowed._dispatch.cache_clear()


def by_flex(case: Case, given: Given) -> Way:
    if not case.in_flex:
        raise NotImplementedError(LEFT_OUT)
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n = given.q.shape[2]
    number = torch.zeros(n, dtype=torch.int32, device=given.q.device)
    for cut in case.cuts[1:-1]:
        number[cut:] += 1

    def seen(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (number[i] == number[j]) if case.cuts else i >= j

    def bent(score: Tensor, *_: Tensor) -> Tensor:
        return SOFTCAP * torch.tanh(score / SOFTCAP)

    blocks = create_block_mask(seen, None, None, n, n, device=str(given.q.device))
    compiled = torch.compile(flex_attention, dynamic=False)
    options: dict[str, Any] = {"block_mask": blocks, "enable_gqa": True, "score_mod": bent if case.softcap else None}
    if case.lse_gradient and "return_aux" in inspect.signature(flex_attention).parameters:
        from torch.nn.attention.flex_attention import AuxRequest

        options["return_aux"] = AuxRequest(lse=True)
    elif case.lse_gradient:
        options["return_lse"] = True

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        found: Any = compiled(q, k, v, **options)
        if not case.lse_gradient:
            return (found,)
        return found[0], getattr(found[1], "lse", found[1])

    return by_autograd(attend, case, given)


def by_varlen(case: Case, given: Given) -> Way:
    if case.softcap or case.lse_gradient or case.deterministic or not (case.cuts or case.name == "causal"):
        raise NotImplementedError(LEFT_OUT)
    from torch.nn.attention.varlen import varlen_attn

    n = given.q.shape[2]
    cuts = case.cuts or (0, n)
    cu = torch.tensor(cuts, dtype=torch.int32, device=given.q.device)
    longest = max(b - a for a, b in pairwise(cuts))
    parameters = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"is_causal": True} if "is_causal" in parameters else {"window_size": (-1, 0)}
    if "enable_gqa" in parameters:
        options["enable_gqa"] = True

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        flat = (x.transpose(1, 2).squeeze(0) for x in (q, k, v))
        found: Any = varlen_attn(*flat, cu, cu, longest, longest, **options)
        return (found.unsqueeze(0).transpose(1, 2),)

    return by_autograd(attend, case, given)


def by_autograd(attend: Callable[..., tuple[Tensor, ...]], case: Case, given: Given) -> Way:
    leaves = [x.detach().requires_grad_() for x in (given.q, given.k, given.v)]

    def forward() -> Sequence[Tensor]:
        with torch.no_grad():
            return attend(*leaves)[:1]

    def both() -> Sequence[Tensor]:
        found = attend(*leaves)
        return torch.autograd.grad(found, leaves, [given.do, given.d_lse][: len(found)])

    return Way(forward, both, runs_forward=True)


# Measuring


def seconds(act: Pass, device: torch.device) -> float:
    """Median, on the device's clock if it has one; slow calls are repeated less."""
    first = _second(act, device)
    repeats = SLOW_REPEATS if first > SLOW_S else REPEATS
    return median(_second(act, device) for _ in range(repeats))


def _second(act: Pass, device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        act()
        return time.perf_counter() - start
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(400_000)  # the host is ahead
    before.record()
    act()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


def measured(way: Way, given: Given) -> tuple[float, float]:
    """Seconds of forward and of both passes, after a comparison with float32."""
    found = (*way.forward(), *way.backward())
    for name, mine, due in zip(("output", "dQ", "dK", "dV"), found, given.exact, strict=True):
        error = float((mine.float() - due).norm() / due.norm())
        if not error <= (OUTPUT_ERROR if name == "output" else GRADIENT_ERROR):
            raise ArithmeticError(f"{name} is off by {error:.1e} of its size")
    device = given.q.device
    forward, backward = (seconds(act, device) for act in way[:2])
    return forward, backward if way.runs_forward else forward + backward


COLUMNS: dict[str, Callable[[Case, Given], Way]] = {
    "chosen": lambda case, given: by_kernel(chosen(case, given), case, given),
    "triton intervals": by_intervals,
    "before": before,
    "flex": by_flex,
    "varlen": by_varlen,
}


def row_of(case: Case, n: int, device: torch.device, dtype: torch.dtype, notes: list[str]) -> dict[str, Any]:
    given = given_for(case, n, device, dtype)
    work = pairs(case.mask, device) * HEADS * DIM / 1e12
    row: dict[str, Any] = {"mask": case.name, "kernel": chosen(case, given).name}
    for column, make in COLUMNS.items():
        try:
            if column == "before":
                with one_by_one():
                    forward, both = measured(make(case, given), given)
            else:
                forward, both = measured(make(case, given), given)
        except Exception as error:
            if str(error) != LEFT_OUT:
                text = (str(error).strip() or "no message").splitlines()[0]
                notes.append(f"{case.name}, {column}: {type(error).__name__}: {text[:200]}")
            continue
        row[column] = {
            "forward_us": round(1e6 * forward, 1),
            "both_us": round(1e6 * both, 1),
            "forward_tflops": round(4 * work / forward, 1),
            "both_tflops": round(14 * work / both, 1),
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, default=8192, help="a multiple of 64")
    parser.add_argument("--store", type=Path, metavar="FILE", help="write the result as JSON")
    arguments = parser.parse_args()
    device, start = torch.device(arguments.device), time.perf_counter()
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("how_fast_are_kernels needs a CUDA device, and torch sees none; use --device cpu --tokens 256 instead")
    is_cuda = device.type == "cuda"
    facts = start_result("how_fast_are_kernels", device=torch.cuda.get_device_name() if is_cuda else "cpu")
    notes: list[str] = []
    rows = []
    for case in cases(arguments.tokens):
        rows.append(row_of(case, arguments.tokens, device, torch.bfloat16 if is_cuda else torch.float32, notes))
        print(f"{time.perf_counter() - start:.0f} s: {case.name}", flush=True)
    result = {
        **facts,
        "command": shlex.join(["python", *sys.argv]),
        "tokens": arguments.tokens,
        "rows": rows,
        "notes": notes,
    }
    if arguments.store is not None:
        arguments.store.parent.mkdir(parents=True, exist_ok=True)
        arguments.store.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(result))
    table = Table("mask", "chosen kernel", *COLUMNS, title=f"{arguments.tokens} tokens, TFLOP/s, forward / both passes")
    for row in rows:
        cells = (row.get(column) for column in COLUMNS)
        digits = 0 if is_cuda else 3
        texts = (f"{c['forward_tflops']:.{digits}f} / {c['both_tflops']:.{digits}f}" if c else "" for c in cells)
        table.add_row(row["mask"], row["kernel"], *texts)
    console = Console(width=130)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)


if __name__ == "__main__":
    main()
