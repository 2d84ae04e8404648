"""`replay`: runs plans on a device in alternation, so that a disturbance affects all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch

from mesh_attention.comm.base import Comm
from mesh_attention.execution.graphs import CapturedGraph
from mesh_attention.execution.warm_up import DryComm
from mesh_attention.machine.timing import rest, sample_s
from mesh_attention.problem import Direction
from mesh_attention.simulation.simulate import simulate
from mesh_attention.topology import Topology
from mesh_attention.units import Progress
from mesh_attention_lab.decode_simulator import decode_seconds, simulate_decode
from mesh_attention_lab.replay.actor import Actor, BaselineKernel
from mesh_attention_lab.replay.cache import FilledCache, StepActor
from mesh_attention_lab.replay.result import KernelPass, Part, Replayed, ReplayRow
from mesh_attention_lab.replay.transport import JoinedComm, ReplayComm

REST_S = 0.2
CAPTURES = 3


def replay(
    parts: Sequence[Part],
    topology: Topology,
    *,
    rank: int,
    device: torch.device,
    rounds: int = 5,
    cuda_graphs: bool = True,
    cache: FilledCache | None = None,
    on_progress: Progress | None = None,
) -> Replayed:
    """Run the passes of every part and the one kernel, one after the other, in every round.

    The simulator's forecasts are for `topology`, which should describe this device and its link. Without
    `cuda_graphs` the host queues every step, as it does for transports that a graph cannot capture. Plans over a cache
    are played on `cache`, whose attention call is the one kernel.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events and graphs use the current device
    report = on_progress or (lambda activity, fraction: None)
    is_captured = cuda_graphs and device.type == "cuda"
    takes = [_Take(part, rank, direction, device, is_captured, cache) for part in parts for direction in part.plans]
    problem = takes[0].actor.problem
    kernel = BaselineKernel(problem, device=device) if cache is None else cache
    shared = ReplayComm(rank, problem.ranks, device=device)
    shared.reserve(max(take.actor.largest_message_nbytes for take in takes))
    for number, take in enumerate(takes):
        report(f"preparing {take.name}", 0.5 * number / len(takes))
        # Graphs refer to the memory of a JoinedComm, which it replaces for larger messages.
        take.prepare(shared if cache is None else JoinedComm(rank, problem.ranks, device=device), topology)
    kernel_runs: dict[Direction, Callable[[], object]] = {
        take.direction: partial(kernel.run, take.direction) for take in takes
    }
    for direction, run in kernel_runs.items():
        run()
        if is_captured and cache is not None:
            kernel_runs[direction] = CapturedGraph(run, device).launch
    kernel_times: dict[Direction, list[float]] = {direction: [] for direction in kernel_runs}
    for number in range(rounds):
        report(f"round {number + 1} of {rounds}", 0.5 + 0.5 * number / rounds)
        for direction, times in kernel_times.items():
            times.append(timed_s(kernel_runs[direction], device, calls=kernel.calls) / kernel.passes)
        for take in takes:
            take.once()
    alone = {
        direction: KernelPass(
            direction=direction,
            tokens=kernel.tokens,
            kv_tokens=kernel.kv_tokens,
            flops=kernel.flops(direction),
            times_s=tuple(times),
        )
        for direction, times in kernel_times.items()
    }
    return Replayed(
        rank=rank, passes=tuple(take.row(alone[take.direction].tflops) for take in takes), kernel=tuple(alone.values())
    )


def timed_s(run: Callable[[], object], device: torch.device, *, calls: int = 1) -> float:
    """Seconds of a run, after the device has rested: a GPU that was busy may be slower, at its power limit."""
    rest(device, REST_S)
    return sample_s(run, device, calls=calls)


@dataclass
class _Take:
    """One pass of one part, and its measurements so far."""

    part: Part
    rank: int
    direction: Direction
    device: torch.device
    is_captured: bool
    cache: FilledCache | None
    times_s: list[float] = field(default_factory=list)
    silent_s: list[float] = field(default_factory=list)
    forecast_s: float = 0.0
    peak_nbytes: int | None = None

    def __post_init__(self) -> None:
        plan, cache = self.part.plans[self.direction], self.cache
        self.actor = Actor(plan, self.rank, device=self.device) if cache is None else StepActor(plan, self.rank, cache)
        self.run: Callable[[], object] = lambda: None
        self.run_silently: Callable[[], object] = lambda: None

    @property
    def name(self) -> str:
        return f"{self.part.name} {self.direction}"

    def prepare(self, comm: Comm, topology: Topology) -> None:
        """Run it step by step, to warm up and to measure its memory; then capture it as a CUDA graph, if asked to."""
        if self.cache is None:
            timeline = simulate(self.actor.plan, topology)
        else:
            attend_s = decode_seconds(topology.device, self.cache.problem)
            timeline = simulate_decode(self.actor.plan, topology, attend_s=attend_s)
        self.forecast_s = timeline.ranks[self.rank].stop_s
        silence = DryComm(self.rank, self.actor.problem.ranks)
        self.run, self.run_silently = (lambda: self.actor.run(comm)), (lambda: self.actor.run(silence))
        self.run()
        self.peak_nbytes = self._peak()
        if self.is_captured:
            graph = self._fastest_capture()
            pool = graph.graph.pool()
            silent = CapturedGraph(self.run_silently, self.device, pool=pool)
            self.run, self.run_silently = graph.launch, silent.launch

    def _fastest_capture(self) -> CapturedGraph[object]:
        """The pass as a CUDA graph, launched once: the silent graph, which receives nothing, finds noise in its memory.

        The driver decides when it makes a graph which of its branches share a queue. Now and then, copies in both
        directions do, and the link is half as fast (an H200, the same pass: 52 or 85 ms). So the best of some is taken.
        """
        graphs = [CapturedGraph(self.run, self.device) for _ in range(CAPTURES)]
        for graph in graphs:
            graph.launch()
        return min(graphs, key=lambda graph: timed_s(graph.launch, self.device))

    def once(self) -> None:
        for run, times in ((self.run, self.times_s), (self.run_silently, self.silent_s)):
            times.append(timed_s(run, self.device, calls=self.actor.calls) / self.actor.passes)

    def _peak(self) -> int | None:
        if self.device.type != "cuda" or self.cache is not None:  # steps keep their buffers
            return None
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.run()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def row(self, kernel_tflops: float) -> ReplayRow:
        return ReplayRow(
            method=self.part.name,
            plan=self.part.choices[self.direction],
            what=self.direction,
            flops=self.actor.flops,
            times_s=tuple(self.times_s),
            compute_s=median(self.silent_s),
            forecast_s=self.forecast_s,
            kernel_s=self.actor.flops / (kernel_tflops * 1e12),
            plan_nbytes=self.actor.device_nbytes,
            peak_nbytes=self.peak_nbytes,
        )
