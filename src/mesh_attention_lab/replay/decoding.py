"""Replay of decoding: one rank's step of one layer, with real K and V, the real kernel, and copies for exchanges.

Each exchange is one copy in each direction (see `transport.JoinedComm`). The layers of a small model take turns, so
that the device reads its memory and not its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from mesh_attention.arguments import Softmax
from mesh_attention.comm.base import Comm, Parcel, drive
from mesh_attention.errors import MemoryLimitError
from mesh_attention.execution.buffers import DTYPES
from mesh_attention.execution.graphs import CapturedGraph
from mesh_attention.kernels.decode import TorchDecode
from mesh_attention.machine.fit import fit_line
from mesh_attention.machine.timing import rest, sample_s, within
from mesh_attention.plan.serving import BLOCK_TOKENS, DecodePlan
from mesh_attention.problem import Problem
from mesh_attention.serving.book import WindowSize
from mesh_attention.serving.memory import CachedLayer, CacheMemory, cache_nbytes
from mesh_attention.serving.step_runner import StepEngine, StepState
from mesh_attention.topology import MOST, Device, KernelRate, Link, Topology
from mesh_attention.units import GIB, Report, format_nbytes
from mesh_attention_lab.decoding import forecast_plan, kv_nbytes
from mesh_attention_lab.replay.device import free_nbytes
from mesh_attention_lab.replay.transport import JoinedComm, SilentComm

IN_TURN_NBYTES = {"cuda": 2**30, "cpu": 0}
"""K and V of all layers that take turns: many times the cache of a device."""
MOST_LAYERS = 64
READ_NBYTES = {"cuda": 4 * 2**30, "cpu": 2**24}
EXCHANGE_NBYTES = (2**14, 2**17, 2**20, 2**23)
EXCHANGES_IN_A_ROW = 8
SAMPLE_S, MOST_LAUNCHES = 0.05, 500
REST_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedStep:
    """A step of one plan: seconds of a layer in every round, with exchanges and without, and the forecast."""

    plan: DecodePlan
    times_s: tuple[float, ...]
    silent_times_s: tuple[float, ...]
    forecast_s: float

    @property
    def time_s(self) -> float:
        return median(self.times_s)

    @property
    def silent_s(self) -> float:
        return median(self.silent_times_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedDecoding:
    """The attention call by itself, seconds of every round; and the steps around it.

    `nbytes` is what it reads of K and V, `read_gb_per_s` the rate of a large read on this device. `topology` is what
    forecasts are for.
    """

    rank: int
    kernel: str
    is_captured: bool
    layers: int
    nbytes: int
    read_gb_per_s: float
    attend_times_s: tuple[float, ...]
    topology: Topology
    steps: tuple[PlayedStep, ...]

    @property
    def attend_s(self) -> float:
        return median(self.attend_times_s)

    @property
    def read_s(self) -> float:
        """Seconds to read K and V of one layer at the device's rate."""
        return self.nbytes / (self.read_gb_per_s * 1e9)

    @property
    def attend_gb_per_s(self) -> float:
        return self.nbytes / self.attend_s / 1e9


def replay_decoding(
    problem: Problem,
    plans: Sequence[DecodePlan],
    *,
    rank: int,
    device: torch.device,
    rounds: int = 5,
    cuda_graphs: bool = True,
    topology: Topology | None = None,
    on_progress: Report | None = None,
) -> PlayedDecoding:
    """Play the step of each plan, and the attention call alone, one after the other in every round.

    Without a topology, forecasts are for this device and its link to the host, which are measured.
    """
    report = on_progress or (lambda doing, fraction: None)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events and graphs use the current device
    report("reading memory", 0.0)
    read_gb_per_s = measure_read(device)
    report("filling the cache", 0.1)
    cache = FilledCache(problem, device=device)
    silence = SilentComm(rank, problem.ranks, device=device)
    first = DecodeActor(plans[0], cache, silence)
    is_captured = cuda_graphs and device.type == "cuda" and first.kernel.name != TorchDecode.name
    on = topology or _measured(problem, first, read_gb_per_s, device=device, is_captured=is_captured)
    runs: list[Callable[[], object]] = [first.attend]
    for plan in plans:
        # A transport for each plan: graphs refer to its memory, which it replaces for larger messages.
        comm = JoinedComm(rank, problem.ranks, device=device)
        runs += [DecodeActor(plan, cache, comm).run, DecodeActor(plan, cache, silence).run]
    timers = []
    for number, run in enumerate(runs):
        report("preparing steps", 0.2 + 0.4 * number / len(runs))
        timers.append(_Timer(run, device, is_captured=is_captured))
    for number in range(rounds):
        report("playing steps", 0.6 + 0.4 * number / rounds)
        for timer in timers:
            timer.once()
    attend, *rest_of = [tuple(s / cache.layers for s in timer.times_s) for timer in timers]
    return PlayedDecoding(
        rank=rank,
        kernel=first.kernel.name,
        is_captured=is_captured,
        layers=cache.layers,
        nbytes=kv_nbytes(problem),
        read_gb_per_s=read_gb_per_s,
        attend_times_s=attend,
        topology=on,
        steps=tuple(
            PlayedStep(
                plan=plan,
                times_s=times_s,
                silent_times_s=silent_times_s,
                forecast_s=forecast_plan(plan, problem, on).time_s,
            )
            for plan, times_s, silent_times_s in zip(plans, rest_of[::2], rest_of[1::2], strict=True)
        ),
    )


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
            self._slots(blocks),
        )

    def _slots(self, blocks: int) -> list[int]:
        """The last new token of each sequence goes to its last slot, others to the slot of tokens of other ranks."""
        nowhere = self.problem.batch * blocks * BLOCK_TOKENS
        others = [nowhere] * (self.problem.seq_q - 1)
        starts = (at * blocks * BLOCK_TOKENS for at in range(self.problem.batch))
        return [slot for start in starts for slot in (*others, start + self.tokens - 1)]


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
        self.tensors = [
            self._noise(heads, dim)
            for heads, dim in (
                (plan.heads, plan.head_dim_qk),
                (plan.kv_heads, plan.head_dim_qk),
                (plan.kv_heads, plan.head_dim_v),
            )
        ]

        self.queries = self._noise(plan.heads, plan.head_dim_qk, is_of_all=True)

    def _noise(self, heads: int, dim: int, *, is_of_all: bool = False) -> Tensor:
        plan = self.plan
        sequences = plan.sequences if is_of_all else len(plan.own[self.engine.comm.rank])
        size = (sequences, plan.new_tokens, heads, dim)
        return torch.randn(size, device=self.cache.device, dtype=DTYPES[plan.dtype])

    def run(self) -> None:
        for layer in range(self.cache.layers):
            drive(self.engine.run(self.cache.memory, layer, self.cache.state, self.tensors, self.softmax))

    def attend(self) -> None:
        """The attention calls alone."""
        for stored in self.cache.memory.stored:
            self.engine.attend(self.queries, stored, self.cache.state.reach, self.softmax)


class _Timer:
    """Times of one thing in every round, from a CUDA graph if it can be captured."""

    def __init__(self, run: Callable[[], object], device: torch.device, *, is_captured: bool) -> None:
        self.device = device
        run()  # sets up what a graph cannot capture
        self.run = CapturedGraph(run, device).launch if is_captured else run
        sample_s(self.run, device, calls=1)
        once_s = sample_s(self.run, device, calls=1)
        self.launches = within(int(SAMPLE_S / max(once_s, 1e-9)), 1, MOST_LAUNCHES) if device.type == "cuda" else 1
        self.times_s: list[float] = []

    def once(self) -> None:
        rest(self.device, REST_S)
        self.times_s.append(sample_s(self.run, self.device, calls=self.launches))

    def median_s(self, rounds: int) -> float:
        for _ in range(rounds):
            self.once()
        return median(self.times_s)


# This device as a cluster


def measure_read(device: torch.device) -> float:
    """GB/s of a large read: the best of two reductions."""
    data = torch.ones(READ_NBYTES[device.type] // 4, device=device).view(-1, 4096)
    is_cuda = device.type == "cuda"
    reads: list[Callable[[], object]] = [lambda: data.sum(1), lambda: data.amax(1)]
    times = [_Timer(read, device, is_captured=is_cuda).median_s(3) for read in reads]
    return data.nbytes / min(times) / 1e9


def measure_exchange(problem: Problem, *, device: torch.device) -> Link:
    """The link of exchanges that wait for each other: a copy out and a copy in, at once."""
    comm, points = JoinedComm(0, problem.ranks, device=device), []
    for nbytes in EXCHANGE_NBYTES:
        out, back = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
        parcels = [Parcel([out], 1, "")], [Parcel([back], 1, "")]

        def in_a_row(parcels: tuple[list[Parcel], list[Parcel]] = parcels) -> None:
            for _ in range(EXCHANGES_IN_A_ROW):
                comm.post(*parcels).wait()

        timer = _Timer(in_a_row, device, is_captured=device.type == "cuda")
        points.append((float(nbytes), timer.median_s(3) / EXCHANGES_IN_A_ROW))
    line = fit_line(points)
    return Link(
        gb_per_s=_three_digits(1e-9 / max(line.slope, 1e-15)), latency_us=_three_digits(max(0.0, line.base) * 1e6)
    )


def _measured(
    problem: Problem, actor: DecodeActor, read_gb_per_s: float, *, device: torch.device, is_captured: bool
) -> Topology:
    """This device and its link to the host. The fixed times of calls are those of calls that do next to nothing."""
    tiny = DecodeActor(
        actor.plan,
        FilledCache(replace(problem, seq_kv=max(problem.seq_q, problem.ranks)), device=device),
        actor.engine.comm,
    )
    call_s = _Timer(tiny.attend, device, is_captured=is_captured).median_s(3) / tiny.cache.layers
    part = torch.randn((1, 1, problem.head_dim_v), device=device, dtype=DTYPES[problem.dtype])
    lse = torch.zeros((1, 1), device=device, dtype=torch.float64 if problem.itemsize == 8 else torch.float32)
    merge = (part, lse, torch.empty_like(part[0]), torch.empty_like(lse[0]))
    merge_s = _Timer(lambda: actor.kernel.merge(*merge), device, is_captured=is_captured).median_s(3)
    link = measure_exchange(problem, device=device)
    free = KernelRate(tflops=MOST)  # what is computed is not measured: reading takes longer
    return Topology(
        name=device.type,
        ranks=problem.ranks,
        ranks_per_node=1,
        device=Device(
            forward=KernelRate(tflops=MOST, call_us=_three_digits(call_s * 1e6)),
            backward=free,
            memory_gb_per_s=_three_digits(read_gb_per_s),
            memory_gib=free_nbytes(device) / GIB,
            launch_us=_three_digits(merge_s * 1e6),
        ),
        inside=link,
        between=link,
    )


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")
