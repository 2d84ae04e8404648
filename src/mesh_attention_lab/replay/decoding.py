"""Replay of decoding: one rank's step of one layer, with real K and V, the real kernel, and copies for exchanges.

Each exchange is one copy in each direction (see `transport.JoinedComm`). The layers of a small model take turns, so
that the device reads its memory and not its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from mesh_attention.plan.serving import BLOCK_TOKENS, DecodePlan

from mesh_attention.arguments import Softmax
from mesh_attention.comm.base import Comm, drive
from mesh_attention.comm.local import LocalGroup
from mesh_attention.errors import MemoryLimitError
from mesh_attention.execution.buffers import DTYPES
from mesh_attention.execution.graphs import CapturedGraph
from mesh_attention.kernels.decode import TorchDecode
from mesh_attention.machine.timing import Clock, within
from mesh_attention.problem import Problem
from mesh_attention.serving.book import WindowSize
from mesh_attention.serving.memory import CachedLayer, CacheMemory, cache_nbytes
from mesh_attention.serving.step_runner import StepEngine, StepState
from mesh_attention.topology import Topology
from mesh_attention.units import Progress, format_nbytes
from mesh_attention_lab.decoding import forecast_plan, kv_nbytes
from mesh_attention_lab.replay.device import free_nbytes
from mesh_attention_lab.replay.replay import timed_s
from mesh_attention_lab.replay.transport import JoinedComm

IN_TURN_NBYTES = {"cuda": 2**30, "cpu": 0}
"""K and V of all layers that take turns: many times the cache of a device."""
MOST_LAYERS = 64
READ_NBYTES = {"cuda": 4 * 2**30, "cpu": 2**24}
STEPS_IN_A_ROW = {"cuda": 20, "cpu": 1}
"""For each time that is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedStep:
    """A step of one plan: seconds of a layer in every round, and the forecast."""

    plan: DecodePlan
    times_s: tuple[float, ...]
    forecast_s: float

    @property
    def time_s(self) -> float:
        return median(self.times_s)

    @property
    def forecast_error(self) -> float:
        return self.forecast_s / self.time_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedDecoding:
    """The attention call by itself, seconds of every round; and the steps around it.

    `kv_nbytes` is what it reads of K and V, `read_gb_per_s` the rate of a large read on this device.
    """

    rank: int
    kernel: str
    is_captured: bool
    layers: int
    kv_nbytes: int
    read_gb_per_s: float
    attend_times_s: tuple[float, ...]
    steps: tuple[PlayedStep, ...]

    @property
    def attend_s(self) -> float:
        return median(self.attend_times_s)

    @property
    def read_s(self) -> float:
        """Seconds to read K and V of one layer at the device's rate."""
        return self.kv_nbytes / (self.read_gb_per_s * 1e9)

    @property
    def attend_gb_per_s(self) -> float:
        return self.kv_nbytes / self.attend_s / 1e9


def replay_decoding(
    problem: Problem,
    plans: Sequence[DecodePlan],
    topology: Topology,
    *,
    device: torch.device,
    rank: int,
    rounds: int,
    cuda_graphs: bool,
    report: Progress,
) -> PlayedDecoding:
    """Play the attention call alone and the step of each plan, one after the other in every round.

    Forecasts are for `topology`, which should describe this device and its link.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events and graphs use the current device
    report("reading memory", 0.0)
    read_gb_per_s = measure_read(device)
    report("filling the cache", 0.1)
    cache = FilledCache(problem, device=device)
    # A transport for each plan: graphs refer to its memory, which it replaces for larger messages.
    actors = [DecodeActor(plan, cache, JoinedComm(rank, problem.ranks, device=device)) for plan in plans]
    kernel = actors[0].kernel.name
    is_captured = cuda_graphs and device.type == "cuda" and kernel != TorchDecode.name
    runs: list[Callable[[], object]] = [actors[0].attend, *(actor.run for actor in actors)]
    for number, run in enumerate(runs):
        report("preparing steps", 0.2 + 0.4 * number / len(runs))
        run()  # sets up what a graph cannot capture
        if is_captured:
            runs[number] = CapturedGraph(run, device).launch
    times_s: list[list[float]] = [[] for _ in runs]
    for number in range(rounds):
        report("playing steps", 0.6 + 0.4 * number / rounds)
        for run, times in zip(runs, times_s, strict=True):
            times.append(timed_s(run, device, calls=STEPS_IN_A_ROW[device.type]) / cache.layers)
    attend_times_s, *step_times_s = map(tuple, times_s)
    return PlayedDecoding(
        rank=rank,
        kernel=kernel,
        is_captured=is_captured,
        layers=cache.layers,
        kv_nbytes=kv_nbytes(problem),
        read_gb_per_s=read_gb_per_s,
        attend_times_s=attend_times_s,
        steps=tuple(
            PlayedStep(plan=plan, times_s=times, forecast_s=forecast_plan(plan, problem, topology).time_s)
            for plan, times in zip(plans, step_times_s, strict=True)
        ),
    )


def measure_read(device: torch.device) -> float:
    """GB/s of a large read: the best of two reductions."""
    data = torch.ones(READ_NBYTES[device.type] // 4, device=device).view(-1, 4096)
    clock = Clock(comm=LocalGroup(1).comm(0), device=device)
    return data.nbytes / min(clock.call_s(lambda: data.sum(1)), clock.call_s(lambda: data.amax(1))) / 1e9


class FilledCache:
    """K and V of the layers that take turns, on the rank with the most tokens, and where each sequence's are."""

    def __init__(self, problem: Problem, *, device: torch.device) -> None:
        self.device = device
        self.tokens = -(-problem.seq_kv // problem.ranks)
        blocks = -(-self.tokens // BLOCK_TOKENS)
        layer = CachedLayer(kv_heads=problem.kv_heads, head_dim=problem.head_dim_qk, head_dim_v=problem.head_dim_v)
        blocks_by_window: dict[WindowSize, int] = {None: problem.batch * blocks}
        layer_nbytes = cache_nbytes([layer], blocks_by_window, BLOCK_TOKENS, problem.itemsize)
        self.layers = within(-(-IN_TURN_NBYTES[device.type] // layer_nbytes), 2, MOST_LAYERS)
        free = free_nbytes(device)
        if self.layers * layer_nbytes > free:
            raise MemoryLimitError(
                f"K and V of {self.layers} layers need {format_nbytes(self.layers * layer_nbytes)}, but {device} has "
                f"{format_nbytes(free)} free; use more ranks, fewer sequences or fewer cached tokens"
            )
        self.memory = CacheMemory([layer] * self.layers, blocks_by_window, BLOCK_TOKENS, DTYPES[problem.dtype], device)
        for stored in self.memory.stored:
            for tensor in stored:
                tensor.normal_()
        self.state = StepState.empty((problem.batch, problem.seq_q), blocks, device)
        self.state.update(
            [list(range(at * blocks, (at + 1) * blocks)) for at in range(problem.batch)],
            [[0] * problem.seq_q] * problem.batch,
            [[self.tokens] * problem.seq_q] * problem.batch,
            # Where the last token is; other ranks' new tokens, which a rank leaves out, cost as much.
            [at * blocks * BLOCK_TOKENS + self.tokens - 1 for at in range(problem.batch) for _ in range(problem.seq_q)],
        )


class DecodeActor:
    """One rank's steps under one plan, for all layers in turn."""

    def __init__(self, plan: DecodePlan, cache: FilledCache, comm: Comm) -> None:
        self.plan, self.cache = plan, cache
        self.engine = StepEngine(plan, comm, cache.device)
        self.softmax = Softmax(scale=plan.head_dim_qk**-0.5)
        self.kernel = self.engine.kernel_for(0.0)
        for rows in (self.engine.arrived, self.engine.merged, self.engine.partials):
            rows.out.normal_()
            rows.lse.normal_()
        self.engine.tokens.view(DTYPES[plan.dtype]).normal_()
        token_shapes = (
            (plan.heads, plan.head_dim_qk),
            (plan.kv_heads, plan.head_dim_qk),
            (plan.kv_heads, plan.head_dim_v),
        )
        noise = partial(torch.randn, device=cache.device, dtype=DTYPES[plan.dtype])
        self.tensors = [noise(len(plan.own[comm.rank]), plan.new_tokens, *shape) for shape in token_shapes]
        self.queries = noise(plan.sequences, plan.new_tokens, *token_shapes[0])

    def run(self) -> None:
        for layer in range(self.cache.layers):
            drive(self.engine.run(self.cache.memory, layer, self.cache.state, self.tensors, self.softmax))

    def attend(self) -> None:
        """The attention calls alone."""
        for stored in self.cache.memory.stored:
            self.engine.attend(self.queries, stored, self.cache.state.reach, self.softmax)
