"""A measurement by all ranks of a group at once: kernels, merging and links.

`measure` is thorough, for `mesh-attention calibrate`. `probe` takes about two seconds and little memory, with fewer
sizes and samples: a model may be there already.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mesh_attention.comm.base import Comm
from mesh_attention.machine.fit import CallTime, Measurement, MemoryTimes, MessageTime
from mesh_attention.machine.timing import BRIEF_EFFORT, Clock, kernel_for, time_kernel, time_links, time_memory
from mesh_attention.problem import Problem
from mesh_attention.units import Progress

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
