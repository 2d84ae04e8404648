"""CUDA graphs: a pass is captured once and launched from then on, so that the host queues one thing, not hundreds.

A graph reads and writes the same memory at every launch, so inputs are copied in and results copied out.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from mesh_attention.execution.warm_up import this_thread
from mesh_attention.kernels.base import tokens_first

Result = TypeVar("Result")
Tensors = Sequence[Mapping[str, Mapping[str, Tensor]]]
"""Tensors of each rank, by kind and field name."""


class CapturedGraph(Generic[Result]):
    """Work on one device as a graph. Do the work once beforehand: setting up at first use cannot be captured."""

    def __init__(self, work: Callable[[], Result], device: torch.device, *, pool: Any = None) -> None:
        """Capture `work`. Graphs that are never launched at the same time may share the memory of a `pool`."""
        self.graph = torch.cuda.CUDAGraph()
        # On a stream of this device: torch's default capture stream belongs to the device that was captured first.
        # Other threads may go on using the device; a data loader's copies are not part of the graph.
        with torch.cuda.device(device), _no_garbage():
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self.result = work()

    def launch(self) -> Result:
        """Queue the graph on the current stream. The next launch overwrites the result."""
        self.graph.replay()
        return self.result


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Keep the garbage collector from releasing another graph, which would spoil the one that is captured."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GraphMemory:
    """Memory shared by all graphs of a device. They run one after the other, on any streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.last: torch.cuda.Event | None = None

    def begin(self) -> None:
        """Make the current stream wait until the last graph is done with the memory."""
        if self.last is not None:
            torch.cuda.current_stream(self.device).wait_event(self.last)

    def end(self) -> None:
        self.last = torch.cuda.current_stream(self.device).record_event()


class CapturedPasses:
    """The passes of one configuration: run step by step the first time, captured the second, launched from then on.

    Each time they read copies with canonical strides. So every rank captures at the same call, whatever the strides of
    its caller's tensors, and finds what the first pass set up. Some of that is set up per thread.
    """

    def __init__(self, memory: GraphMemory) -> None:
        self.memory = memory
        self._seen: set[Hashable] = set()
        self._passes: dict[Hashable, tuple[Tensors, Tensor | None, CapturedGraph[Tensors]]] = {}

    def run(
        self,
        key: Hashable,
        inputs: Tensors,
        pass_id: Tensor | None,
        run_pass: Callable[[Tensors, Tensor | None], Tensors],
    ) -> Tensors:
        """The results for these inputs, copied out of the graph's memory. A graph reads the pass's id like an input."""
        if key not in self._passes:
            if (key, this_thread()) not in self._seen:
                self._seen.add((key, this_thread()))
                return run_pass(_copies(inputs, _canonical_copy), pass_id)
            with torch.inference_mode(False), torch.no_grad():  # later calls need not be in inference mode
                copies = _copies(inputs, _canonical_copy)
                copied_id = None if pass_id is None else pass_id.clone()
            graph = CapturedGraph(lambda: run_pass(copies, copied_id), self.memory.device, pool=self.memory.pool)
            self._passes[key] = copies, copied_id, graph
        own, own_id, graph = self._passes[key]
        self.memory.begin()
        if own_id is not None and pass_id is not None:
            own_id.copy_(pass_id)
        for own_fields, fields_by_kind in zip(own, inputs, strict=True):
            for kind, fields in own_fields.items():
                for name, tensor in fields.items():
                    tensor.copy_(fields_by_kind[kind][name])
        results = _copies(graph.launch(), Tensor.clone)
        self.memory.end()
        return results


def _canonical_copy(tensor: Tensor) -> Tensor:
    """A copy in memory (batch, tokens, heads, dim), or (batch, heads, tokens) of statistics; as a view heads first."""
    return tensor.clone(memory_format=torch.contiguous_format) if tensor.dim() == 3 else tokens_first(tensor)


def _copies(tensors: Tensors, copy: Callable[[Tensor], Tensor]) -> Tensors:
    return [
        {kind: {name: copy(tensor) for name, tensor in fields.items()} for kind, fields in rank.items()}
        for rank in tensors
    ]
