"""What does the library cost on one rank, compared with the bare kernel? At 128 tokens (all host) and at 8K.

Compares forward with torch's operator for the same kernel, and forward and backward with torch's attention, in
alternating rounds; also as an operator of torch, which is how torch.compile and selective checkpointing call it.
Prints a table and a JSON line; exits with 1 above 20 µs at 128 tokens or 2 % at 8K.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from run_facts import start_result
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention import LocalGroup, MeshAttention
from mesh_attention.arguments import CallOptions
from mesh_attention.execution.operators import Operands

HEADS, DIM = 32, 128
LIMIT_US, LIMIT_SHARE = 20.0, 0.02
ROUNDS = 15


def tensors(tokens: int, device: torch.device, *, needs_gradient: bool) -> list[Tensor]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (1, tokens, HEADS, DIM)
    made = [torch.randn(shape, device=device, dtype=dtype) for _ in range(4)]
    return [tensor.requires_grad_(needs_gradient) for tensor in made[:3]] + made[3:]


def forward_calls(tokens: int, device: torch.device) -> dict[str, Callable[[], object]]:
    q, k, v, _ = tensors(tokens, device, needs_gradient=False)
    attention = MeshAttention(LocalGroup(1).comm(0))
    if device.type == "cuda":
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default

        def bare() -> object:
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            return cudnn(*heads_first, None, True, 0.0, True, False, scale=DIM**-0.5)
    else:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

        def bare() -> object:
            return flash(*(x.transpose(1, 2) for x in (q, k, v)), 0.0, True, scale=DIM**-0.5)

    calls = {"bare": bare, "library": lambda: attention(q, k, v, causal=True)}
    return calls | {"operator": lambda: _through_operator(attention, q, k, v)}


def both_calls(tokens: int, device: torch.device) -> dict[str, Callable[[], object]]:
    q, k, v, d_out = tensors(tokens, device, needs_gradient=True)
    attention = MeshAttention(LocalGroup(1).comm(0))

    def bare() -> object:
        out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
        return torch.autograd.grad(out.transpose(1, 2), (q, k, v), d_out)

    def library() -> object:
        return torch.autograd.grad(attention(q, k, v, causal=True), (q, k, v), d_out)

    def operator() -> object:
        return torch.autograd.grad(_through_operator(attention, q, k, v), (q, k, v), d_out)

    return {"bare": bare, "library": library, "operator": operator}


def _through_operator(attention: MeshAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    asked = Operands(CallOptions(causal=True), q.requires_grad, attention._number).pack()
    return torch.ops.mesh_attention.attend(q, k, v, *asked)[0]


def seconds(call: Callable[[], object], device: torch.device, calls: int) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / calls


def compare(calls: dict[str, Callable[[], object]], device: torch.device, repeats: int) -> dict[str, float]:
    """Medians of alternating rounds, in microseconds."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        seconds(call, device, 3)
    for _ in range(ROUNDS):
        for name, call in calls.items():
            found[name].append(1e6 * seconds(call, device, repeats))
    return {name: median(times) for name, times in found.items()}


def _same_kernel(device: torch.device) -> AbstractContextManager[object]:
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION]) if device.type == "cuda" else nullcontext()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(parser.parse_args().device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    facts = start_result("what_does_one_rank_cost", device=name)
    rows, is_within = [], True
    for tokens, repeats in ((128, 100), (8192, 5)):
        for what, make in (("forward", forward_calls), ("forward and backward", both_calls)):
            with torch.set_grad_enabled(make is both_calls), _same_kernel(device):
                times = compare(make(tokens, device), device, repeats)
            over = times["library"] - times["bare"]
            rows.append({"tokens": tokens, "pass": what, **times, "over_us": over, "over_share": over / times["bare"]})
            is_within &= over <= LIMIT_US if tokens == 128 else over / times["bare"] <= LIMIT_SHARE
    table = Table("tokens", "pass", "bare, µs", "library, µs", "over, µs", "over", "as an operator, µs")
    for row in rows:
        numbers = (f"{row['bare']:.1f}", f"{row['library']:.1f}", f"{row['over_us']:.1f}", f"{row['over_share']:.1%}")
        table.add_row(str(row["tokens"]), str(row["pass"]), *numbers, f"{row['operator']:.1f}")
    Console().print(table)
    print(json.dumps({**facts, "rows": rows}))
    sys.exit(not is_within)


if __name__ == "__main__":
    main()
