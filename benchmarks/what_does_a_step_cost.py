"""What does a step cost on the host? Times a cached call with kernels and transports that do nothing.

Prints a table and a JSON line; exits with 1 if a step takes more than 15 microseconds.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from run_facts import start_result
from torch import Tensor

from mesh_attention import Problem, causal, make_plan
from mesh_attention.arguments import Softmax
from mesh_attention.comm.base import Parcel, Work, drive
from mesh_attention.execution.compiled import compile_program
from mesh_attention.execution.engine import Outputs
from mesh_attention.execution.executor import Executor
from mesh_attention.kernels.base import Demand, Gradients, RowGradient, Scores
from mesh_attention.kernels.merging import TorchMerging
from mesh_attention.plan.steps import DIRECTIONS, Direction

LIMIT_US = 15.0
REPEATS = 30


class NoWork:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class NoNetwork:
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.work = rank, size, NoWork()

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        return self.work

    def share(self, text: str) -> Any:
        raise NotImplementedError("a cached call shares nothing")


class NoKernel:
    """Returns its inputs, in the right shapes."""

    name = "nothing"

    def unsupported_reason(self, demand: Demand) -> str | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        return q, q[..., 0]

    def backward(self, q: Tensor, k: Tensor, v: Tensor, row: RowGradient, scores: Scores) -> Gradients:
        return Gradients(q, k, v)


class NoMerging(TorchMerging):
    """Merges nothing."""

    def start_output(self, *_: Tensor) -> None: ...

    def merge_output(self, *_: Tensor) -> None: ...

    def copy(self, *_: Tensor) -> None: ...

    def add(self, *_: Tensor) -> None: ...


def microseconds_a_step(
    ranks: int, tile: tuple[int, int], blocks_per_call: int, direction: Direction
) -> tuple[float, int]:
    problem = Problem.self_attention(
        seq_len=ranks * 2, heads=1, head_dim=2, ranks=ranks, mask=causal(), dtype="float32"
    )
    plan = make_plan(problem, tile=tile, direction=direction, layout="zigzag", blocks_per_call=blocks_per_call)
    compiled = compile_program(plan, 1)
    tensor = torch.zeros(1, 1, 2, 2)
    statistic = torch.zeros(1, 1, 2)
    given = {"q": {"q": tensor}, "kv": {"k": tensor, "v": tensor}}
    given["do"] = {"lse": statistic, "delta": statistic, "do": tensor}
    outputs = Outputs(problem, {"q": 2, "kv": 2}, torch.device("cpu"))
    seconds = []
    for _ in range(REPEATS):
        executor = Executor(
            compiled=compiled,
            comm=NoNetwork(1, ranks),
            kernel=NoKernel(),
            softmax=Softmax(scale=1.0),
            inputs=given,
            device=torch.device("cpu"),
            new_output=outputs,
            merging=NoMerging(),
        )
        start = time.process_time()
        drive(executor.run())
        seconds.append(time.process_time() - start)
    return 1e6 * statistics.median(seconds) / len(compiled.steps), len(compiled.steps)


def main() -> None:
    facts = start_result("what_does_a_step_cost")
    torch.set_num_threads(1)
    rows = []
    for ranks, tile in ((16, (4, 4)), (256, (16, 16)), (256, (1, 256))):
        for blocks_per_call in (1, 4):
            for direction in DIRECTIONS:
                cost, steps = microseconds_a_step(ranks, tile, blocks_per_call, direction)
                what = {"ranks": ranks, "tile": f"{tile[0]}x{tile[1]}", "blocks_per_call": blocks_per_call}
                rows.append({**what, "direction": direction, "steps": steps, "us_a_step": round(cost, 2)})
    table = Table("ranks", "tile", "blocks a call", "direction", "steps", "µs a step")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    print(json.dumps({**facts, "rows": rows}))
    sys.exit(max(float(row["us_a_step"]) for row in rows) > LIMIT_US)


if __name__ == "__main__":
    main()
