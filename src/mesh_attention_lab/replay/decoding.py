"""Replay of decoding: one rank's step of one layer, with real K and V, the real kernel, and copies for exchanges.

Each exchange is one copy in each direction (see `transport.JoinedComm`). The layers of a small model take turns, so
that the device reads its memory and not its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from mesh_attention.arguments import Softmax
from mesh_attention.comm.base import Comm, drive
from mesh_attention.comm.local import LocalGroup
from mesh_attention.errors import MemoryLimitError
from mesh_attention.execution.buffers import DTYPES
from mesh_attention.execution.graphs import CapturedGraph
from mesh_attention.kernels.decode import TorchDecode
from mesh_attention.machine.timing import Clock, within
from mesh_attention.plan.footprint import BLOCK_TOKENS, kv_nbytes
from mesh_attention.plan.plan import Plan
from mesh_attention.problem import Problem
from mesh_attention.serving.book import WindowSize
from mesh_attention.serving.memory import CachedLayer, CacheMemory, cache_nbytes
from mesh_attention.serving.step_runner import LayerCache, StepBuffers, StepState
from mesh_attention.units import Progress, format_nbytes
from mesh_attention_lab.decoding import DecodeForecast
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

    forecast: DecodeForecast
    times_s: tuple[float, ...]

    @property
    def time_s(self) -> float:
        return median(self.times_s)

    @property
    def forecast_error(self) -> float:
        return self.forecast.time_s / self.time_s - 1


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
    forecasts: Sequence[DecodeForecast],
    *,
    device: torch.device,
    rank: int,
    rounds: int,
    cuda_graphs: bool,
    report: Progress,
) -> PlayedDecoding:
    """Play the attention call alone and each step of `forecasts`, one after the other in every round."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events and graphs use the current device
    report("reading memory", 0.0)
    read_gb_per_s = measure_read(device)
    report("filling the cache", 0.1)
    cache = FilledCache(problem, device=device)
    # A transport for each plan: graphs refer to its memory, which it replaces for larger messages.
    actors = [DecodeActor(f.plan, cache, JoinedComm(rank, problem.ranks, device=device)) for f in forecasts]
    kernel = actors[0].layers[0].kernel.name
    is_captured = cuda_graphs and device.type == "cuda" and kernel != TorchDecode.name
    runs: list[Callable[[], object]] = [actors[0].attend, *(actor.run for actor in actors)]
    for number, run in enumerate(runs):
        report("preparing steps", 0.2 + 0.4 * number / len(runs))
        run()  # sets up what a graph cannot capture
        if number:
            actors[number - 1].fill()
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
            PlayedStep(forecast=forecast, times_s=times)
            for forecast, times in zip(forecasts, step_times_s, strict=True)
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
        self.problem, self.device = problem, device
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

    def __init__(self, plan: Plan, cache: FilledCache, comm: Comm) -> None:
        problem, softmax = cache.problem, Softmax(scale=cache.problem.head_dim_qk**-0.5)
        shape = problem.batch, problem.seq_q
        self.buffers = StepBuffers(plan, shape, [comm], cache.device)
        kernel = self.buffers.kernel_for(0.0)
        self.layers = [LayerCache(stored, cache.state, kernel, softmax, shape) for stored in cache.memory.stored]
        segments = plan.matrix.home_segments("row", comm.rank)
        own = problem.batch * problem.seq_q if plan.matrix.is_replicated else sum(map(len, segments))
        qk, v = problem.head_dim_qk, problem.head_dim_v
        sizes = (problem.heads, qk), (problem.kv_heads, qk), (problem.kv_heads, v)
        dtype = DTYPES[problem.dtype]
        self.tensors = [torch.randn((own, 1, *size), device=cache.device, dtype=dtype) for size in sizes]
        rows = problem.batch * problem.seq_q
        self.queries = torch.randn((rows, problem.heads, qk), device=cache.device, dtype=dtype)
        self.partials = {
            "o": torch.empty((rows, problem.heads, v), device=cache.device, dtype=dtype),
            "lse": torch.empty((rows, problem.heads), device=cache.device),
        }

    def run(self) -> None:
        for layer in self.layers:
            drive(self.buffers.executor(0, layer, self.tensors).run())

    def fill(self) -> None:
        """Noise in the buffers of a first run, because what arrives goes elsewhere."""
        for buffer in self.buffers.pools[0].values():
            for field in buffer.fields.values():
                field.normal_()

    def attend(self) -> None:
        """The attention calls alone."""
        for layer in self.layers:
            layer.attend(self.queries, self.partials)
