"""Times of attention calls, merges and messages, measured by all ranks of a group at the same time.

`measure` is thorough, for `mesh-attention calibrate`. `probe` takes about two seconds and little memory: a model may be
there already. Ranks that share a processor also compute at the same time. Tensors have the strides of the executor's
buffers; merging a result is not part of a call.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mesh_attention.comm.base import Comm, Parcel
from mesh_attention.execution.buffers import Buffer, Fields, token_format
from mesh_attention.execution.graphs import CapturedGraph
from mesh_attention.kernels.base import CallMask, Kernel, RowGradient, Scores
from mesh_attention.kernels.select import choose_merging, kernel_for
from mesh_attention.machine.fit import CallTime, Measurement, MemoryTimes, MessageTime
from mesh_attention.plan.steps import Kind
from mesh_attention.problem import Direction, Problem
from mesh_attention.session.agreement import Statement
from mesh_attention.session.session import Session
from mesh_attention.topology import LinkClass
from mesh_attention.units import GIB, Progress

MOST_CALLS = 1000
LEAST_SAMPLES, MOST_SAMPLES, BRIEF_SAMPLES = 3, 15, 5
LONGEST_CALL_S = 0.6
"""Sizes whose longest call would take more are left out."""


# How much to measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much to measure: thoroughly for a file that is kept, or briefly when a group meets.

    Lengths and bytes are by type of device.

    If it `is_thorough`, calls of every size are square and oblong, full and causal, and ranks compare their first times
    to take equally many samples. Otherwise causal calls are of the largest size only, and samples as few as can be.

    A sample of a call is as many calls in a row as fill `sample_s`; samples are taken for about `sampled_s`. A GPU
    rests for `rest_s` before a call is timed: at its power limit it slows down, by a tenth within a few tenths of a
    second, and earlier work should not count. No larger message is tried after one that took `longest_message_s`.
    """

    is_thorough: bool
    call_tokens: dict[str, tuple[int, ...]]
    sample_s: float
    sampled_s: float
    rest_s: float
    merged_nbytes: dict[str, int]
    message_nbytes: tuple[int, ...]
    longest_message_s: float
    messages_s: float


THOROUGH_EFFORT = Effort(
    call_tokens={"cpu": (64, 128, 256, 512, 1024), "cuda": (1024, 2048, 4096, 8192, 16384)},
    is_thorough=True,
    sample_s=0.01,
    sampled_s=0.06,
    rest_s=0.1,
    merged_nbytes={"cpu": 16 * 2**20, "cuda": 512 * 2**20},  # several times the caches
    message_nbytes=(8, 64 * 2**10, 2**20, 4 * 2**20, 16 * 2**20, 64 * 2**20),
    longest_message_s=0.03,
    messages_s=0.1,
)
BRIEF_EFFORT = Effort(
    call_tokens={"cpu": (64, 128), "cuda": (1024, 4096)},
    is_thorough=False,
    sample_s=0.005,
    sampled_s=0.015,
    rest_s=0.0,
    merged_nbytes={"cpu": 2**20, "cuda": 64 * 2**20},
    message_nbytes=(8, 2**20, 16 * 2**20),
    longest_message_s=0.005,
    messages_s=0.0,
)
"""About two seconds, and little memory."""

# The clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Takes times on all ranks at once. Every time is the same on every rank."""

    comm: Comm
    device: torch.device
    effort: Effort = THOROUGH_EFFORT

    def gather(self, value: float) -> list[float]:
        """Each rank's number, as the same list on all ranks; also a barrier."""
        return [float(rank.payload) for rank in Session(self.comm).agree(Statement(payload=value))]

    def call_s(self, call: Callable[[], object]) -> float:
        """Seconds of a call after warm-up: the median of the ranks' medians.

        Samples are of several calls: ranks that share a core alternate every few milliseconds, and a call that fits
        into such a slice would look as if it had the core to itself.
        """
        device, effort = self.device, self.effort
        sample_s(call, device, calls=1)
        own_s = sample_s(call, device, calls=1)
        first_s = self.gather(own_s) if effort.is_thorough else [own_s]
        calls = within(int(effort.sample_s / min(first_s)), 1, MOST_CALLS)  # others may have waited for the core
        samples = within(int(effort.sampled_s / (median(first_s) * calls)), LEAST_SAMPLES, MOST_SAMPLES)
        in_a_row = _repeated(call, calls, device)
        rest(device, effort.rest_s)
        return median(self.gather(median(sample_s(in_a_row, device, calls=1) / calls for _ in range(samples))))

    def exchange_s(self, exchange: Callable[[], None]) -> float:
        """Seconds of one exchange: the longest of the ranks' medians."""
        _exchange_s(exchange, self.device)
        samples = BRIEF_SAMPLES
        if self.effort.is_thorough:
            first_s = max(self.gather(_exchange_s(exchange, self.device)))
            samples = within(int(self.effort.messages_s / first_s), LEAST_SAMPLES, MOST_SAMPLES)
        return max(self.gather(median(_exchange_s(exchange, self.device) for _ in range(samples))))


def rest(device: torch.device, seconds: float) -> None:
    """Let a GPU finish and cool down; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        time.sleep(seconds)


def _repeated(call: Callable[[], object], calls: int, device: torch.device) -> Callable[[], object]:
    """Several calls in a row. On a GPU they run as a CUDA graph, since the host may be slower than a small call."""

    def repeat() -> None:
        for _ in range(calls):
            call()

    return CapturedGraph(repeat, device).launch if device.type == "cuda" else repeat


def sample_s(call: Callable[[], object], device: torch.device, *, calls: int) -> float:
    """Seconds per call of several calls in a row."""
    if device.type == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(calls):
            call()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e-3 / calls
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def within(number: int, least: int, most: int) -> int:
    return max(least, min(most, number))


# Attention calls: full and causal, forward and backward, from small ones to large


class CallShape(NamedTuple):
    q_tokens: int
    kv_tokens: int
    is_causal: bool


def time_kernel(setting: Problem, clock: Clock, report: Progress) -> list[CallTime]:
    """Times of calls with the heads, head sizes and dtype of a problem; its lengths, mask and ranks do not matter."""
    kernel, effort = kernel_for(setting, clock.device), clock.effort
    sizes, times = effort.call_tokens[clock.device.type], list[CallTime]()
    for number, tokens in enumerate(sizes):
        report(f"attention calls of {tokens} tokens, forward and backward", number / len(sizes))
        shapes = [CallShape(tokens, tokens, False)]
        shapes += [CallShape(tokens, 2 * tokens, False)] if effort.is_thorough else []
        shapes += [CallShape(tokens, tokens, True)] if effort.is_thorough or tokens == sizes[-1] else []
        measured = [t for shape in shapes for t in _time_shape(shape, setting, kernel, clock)]
        times += measured
        # Every rank has the same times, so all stop at the same size.
        if 4 * max(call.time_s for call in measured) > LONGEST_CALL_S and number > 0:
            break
    return times


def _time_shape(shape: CallShape, setting: Problem, kernel: Kernel, clock: Clock) -> Iterator[CallTime]:
    q = _random("q", shape.q_tokens, setting, clock.device)["q"]
    do = _random("do", shape.q_tokens, setting, clock.device)["do"]
    k, v = _random("kv", shape.kv_tokens, setting, clock.device).values()
    mask = CallMask.causal(shape.q_tokens) if shape.is_causal else CallMask.full(shape.q_tokens, shape.kv_tokens)
    scale = setting.head_dim_qk**-0.5
    out, lse = kernel.forward(q, k, v, Scores(mask, scale))
    delta = (out.to(lse.dtype) * do.to(lse.dtype)).sum(-1)

    def forward() -> object:
        return kernel.forward(q, k, v, Scores(mask, scale))

    def backward() -> object:
        return kernel.backward(q, k, v, RowGradient(do, lse, delta), Scores(mask, scale))

    runs: dict[Direction, Callable[[], object]] = {"forward": forward, "backward": backward}
    for direction, run in runs.items():
        yield CallTime(
            direction=direction,
            heads=setting.heads,
            q_tokens=shape.q_tokens,
            kv_tokens=shape.kv_tokens,
            is_causal=shape.is_causal,
            flops=call_flops(shape, setting, direction),
            time_s=clock.call_s(run),
        )


def call_flops(shape: CallShape, setting: Problem, direction: Direction) -> int:
    """Operations that the mask leaves, for one batch entry, counted as plans count them."""
    q, kv = shape.q_tokens, shape.kv_tokens
    pairs = q * (q + 1) // 2 if shape.is_causal else q * kv
    return setting.flops(direction, pairs=pairs) // setting.batch


def _random(kind: Kind, tokens: int, setting: Problem, device: torch.device, *, is_running: bool = False) -> Fields:
    fields = Buffer.empty(token_format(kind, setting, 1, is_running), tokens=tokens, batch=1, device=device).fields
    for tensor in fields.values():
        tensor.normal_()
    return fields


# Merges


def time_memory(setting: Problem, clock: Clock, *, ranks_here: int) -> MemoryTimes:
    """Times of a large and a tiny merge. `nbytes` counts every byte that a merge must read or write once."""
    device, a_token = clock.device, setting.heads * setting.head_dim_v * setting.accumulator_itemsize
    large = _merge_tensors(max(1, clock.effort.merged_nbytes[device.type] // a_token), setting, device)
    tiny = _merge_tensors(1, setting, device)
    total, total_lse, partial, lse = large
    merging = choose_merging(device)
    return MemoryTimes(
        nbytes=2 * (total.nbytes + total_lse.nbytes) + partial.nbytes + lse.nbytes,
        large_s=clock.call_s(lambda: merging.merge_output(*large)),
        tiny_s=clock.call_s(lambda: merging.merge_output(*tiny)),
        memory_gib=memory_nbytes(device, ranks_here=ranks_here) / GIB,
    )


def memory_nbytes(device: torch.device, *, ranks_here: int) -> float:
    """Memory of a GPU, or a rank's share of the machine's."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks_here


def _merge_tensors(tokens: int, setting: Problem, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A running sum and a partial, each with its LSE."""
    total, partial = (_random("o", tokens, setting, device, is_running=is_running) for is_running in (True, False))
    return total["o"], total["lse"], partial["o"], partial["lse"]


# Messages

Pair = tuple[int, int]


def time_links(clock: Clock, *, ranks_per_node: int, report: Progress) -> list[MessageTime]:
    """Times of every kind of link, the same on every rank; none for one rank.

    All pairs of a node send at once, as attention does. Between nodes, one pair alone is measured as well: the rate of
    all pairs together, relative to that of one, gives the number of NICs.
    """
    sets = pair_sets(clock.comm.size, ranks_per_node)
    times, sizes = list[MessageTime](), clock.effort.message_nbytes
    for number, (link_class, pairs) in enumerate(sets):
        what = "one pair" if len(pairs) == 1 else f"{len(pairs)} pairs at once"
        for step, nbytes in enumerate(sizes):
            report(f"messages {link_class}, {what}, {nbytes:,} bytes", (number + step / len(sizes)) / len(sets))
            ping_pong, exchange = _exchanges(clock.comm, pairs, nbytes, clock.device)
            message = MessageTime(
                link_class=link_class,
                pairs=len(pairs),
                nbytes=nbytes,
                one_way_s=clock.exchange_s(ping_pong) / 2,
                both_ways_s=clock.exchange_s(exchange),
            )
            times.append(message)
            if max(message.one_way_s, message.both_ways_s) > clock.effort.longest_message_s:
                break
    return times


def pair_sets(ranks: int, ranks_per_node: int) -> list[tuple[LinkClass, list[Pair]]]:
    """Pairs that send at once: neighbours within the first node; ranks of the first node and of the second."""
    here = min(ranks, ranks_per_node)
    inside = [(rank, rank + 1) for rank in range(0, here - 1, 2)]
    between = [(rank, rank + ranks_per_node) for rank in range(here) if rank + ranks_per_node < ranks]
    sets: list[tuple[LinkClass, list[Pair]]] = [("inside", inside)] if inside else []
    return sets + [("between", between[:count]) for count in sorted({1, len(between)}) if between]


def _exchanges(
    comm: Comm, pairs: Sequence[Pair], nbytes: int, device: torch.device
) -> tuple[Callable[[], None], Callable[[], None]]:
    """This rank's part of a message there and back, and of both ways at once; a rank without a pair does nothing."""
    first = dict(pairs)
    peer = (first | {b: a for a, b in pairs}).get(comm.rank)
    if peer is None:
        return lambda: None, lambda: None
    out = Parcel([torch.zeros(nbytes, dtype=torch.uint8, device=device)], peer, "calibration")
    back = Parcel([torch.zeros(nbytes, dtype=torch.uint8, device=device)], peer, "calibration")

    def both() -> None:
        comm.post([out], [back]).wait()

    def answer() -> None:
        comm.post([], [back]).wait()
        comm.post([out], []).wait()

    # The first sender posts the receive of the answer at once: a late receive holds up the other end.
    return both if comm.rank in first else answer, both


def _exchange_s(exchange: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    exchange()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


# All of them


KERNELS_UNTIL, MEMORY_UNTIL = 0.7, 0.75
"""Share of each part in the time of a measurement."""


def measure(setting: Problem, clock: Clock, *, ranks_per_node: int, ranks_here: int, report: Progress) -> Measurement:
    """Attention with a problem's heads, head sizes and dtype. `ranks_here` is how many ranks share this machine."""
    calls = time_kernel(setting, clock, lambda activity, done: report(activity, done * KERNELS_UNTIL))
    report("merging partials", KERNELS_UNTIL)
    memory = time_memory(setting, clock, ranks_here=ranks_here)
    messages = time_links(
        clock,
        ranks_per_node=ranks_per_node,
        report=lambda activity, done: report(activity, MEMORY_UNTIL + done * (1 - MEMORY_UNTIL)),
    )
    return measured_on(clock.device, setting, calls=calls, memory=memory, messages=messages)


def measured_on(
    device: torch.device,
    setting: Problem,
    *,
    calls: Sequence[CallTime],
    memory: MemoryTimes,
    messages: Sequence[MessageTime] = (),
) -> Measurement:
    """The times, with the device and software they were measured on."""
    is_cuda = device.type == "cuda"
    return Measurement(
        device=torch.cuda.get_device_name(device) if is_cuda else "cpu",
        threads=torch.get_num_threads(),
        kernel=kernel_for(setting, device).name,
        width=torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 1,
        calls=tuple(calls),
        memory=memory,
        messages=tuple(messages),
    )


def probe(problem: Problem, *, comm: Comm, device: torch.device, ranks_per_node: int) -> Measurement:
    """The measured times, the same on every rank."""
    with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
        measured = measure(
            problem,
            Clock(comm=comm, device=device, effort=BRIEF_EFFORT),
            ranks_per_node=ranks_per_node,
            ranks_here=min(comm.size, ranks_per_node),
            report=lambda activity, fraction: None,
        )
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the model may need the memory
    return measured
