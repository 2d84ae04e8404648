"""The executor: walks one rank's instructions, calls kernels and posts transfers. Decides nothing.

A generator that yields what it waits for, so that one thread can drive one rank or many.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import assert_never

from mesh_attention.arguments import Softmax
from mesh_attention.comm.base import Comm, Parcel, Work, posts_apart
from mesh_attention.errors import DisagreementError, TransportError
from mesh_attention.execution.buffers import Allocation, Buffer, Fields, Meter, Span, TokenSpan, part
from mesh_attention.execution.compiled import Compiled, CompiledCall, Exchanged, Instruction, Stretch
from mesh_attention.kernels.base import DTYPES, Gradients, Kernel, Merging, RowGradient, Scores
from mesh_attention.kernels.merging import TorchMerging
from mesh_attention.plan import steps as ops
from mesh_attention.plan.format import format_item, format_step
from mesh_attention.plan.program import turns
from mesh_attention.plan.steps import AXIS_OF, INPUTS, Item, in_flight, running, staged, transfers


class CacheKernel(Protocol):
    """Appends to one layer of a cache and attends to it; fields are of tokens, (tokens, heads, dim)."""

    def decode(self, tokens: Fields, partials: Fields) -> None:
        """Store what the cache keeps of the tokens' K and V, then attend to all it has: O and LSE."""

    def combine(self, partials: Fields, total: Fields) -> None:
        """Merge partials, (ranks, tokens, heads, dim)."""


def _no_output(kind: str) -> Fields:
    raise AssertionError(f"a pass over a cache leaves {kind} where it was merged")


@dataclass
class Executor:
    """One pass of one rank. `inputs` are the caller's fields by kind; `run` returns the results by kind.

    `kept` is what the forward pass kept for this one. A pass over a `cache` leaves its results in the buffers of
    `pool`, which the next one like it overwrites.
    """

    compiled: Compiled
    comm: Comm
    inputs: Mapping[str, Fields]
    device: torch.device
    kernel: Kernel | None = None
    softmax: Softmax | None = None
    new_output: Callable[[str], Fields] = _no_output
    cache: CacheKernel | None = None
    pool: dict[tuple[Item, ...], Buffer] | None = None
    merging: Merging = field(default_factory=TorchMerging)
    kept: Mapping[Item, Buffer] = field(default_factory=dict)
    meter: Meter = field(default_factory=Meter)
    outputs: dict[str, Fields] = field(default_factory=dict)
    buffers: dict[Item, Buffer] = field(default_factory=dict)
    works: dict[Item, list[Work]] = field(default_factory=dict)
    leaving: dict[Item, list[Work]] = field(default_factory=dict)
    rounded: set[Item] = field(default_factory=set)

    def __post_init__(self) -> None:
        plan = self.compiled.plan
        self.posts_apart = posts_apart(self.comm)
        self.problem, self.matrix, self.assignment = plan.problem, plan.matrix, plan.assignment
        for kind in INPUTS[plan.direction] if self.cache is None else ("q",):
            for number in self.assignment.parts(AXIS_OF[kind]):
                item = Item(kind, self.compiled.rank, "home", part=number)
                self.buffers[item] = Buffer(self._of_wave(self.inputs[kind], number))
        self.buffers |= self.kept
        for buffer in {id(buffer): buffer for buffer in self.kept.values()}.values():
            self.meter.take(buffer.nbytes)

    def run(self) -> Generator[Work, None, dict[str, Fields]]:
        """Run the pass, yielding what it waits for."""
        for instruction in self.compiled.instructions:
            self.at = instruction
            for posted, items in ((self.works, instruction.arrivals), (self.leaving, instruction.departures)):
                waited_for: list[Work] | None = None
                for item in items:
                    works = posted.pop(item)
                    if works != waited_for:  # items that were posted together arrive together
                        yield from self._wait(works, instruction, item)
                    waited_for = works
            for item in instruction.opens:
                self._allocate(item)
            match instruction.step:
                case ops.Attend():
                    self._attend(instruction.calls)
                case ops.Recv() | ops.Send():
                    self._post_turn(instruction.turn)
                case ops.Free(item):
                    self._release(item)
                case ops.Pack(before, after):
                    self._pack(before, after)
                case ops.Finish(item):
                    self._finish(item, instruction)
                case ops.Merge(partial):
                    self._merge(partial, instruction.stretches)
                case ops.Decode(rows, _, partials):
                    self._decode(rows, partials)
                case ops.Combine(partials, total):
                    self._combine(partials, total)
                case ops.Clear():
                    pass  # opened above; its blanks are filled when it is finished
                case ops.Collective():
                    self._post_items(instruction.step.sends, instruction.step.recvs)
                case ops.Exchange():
                    self._exchange(instruction.step)
                case ops.Unpack(before, after):
                    self._unpack(before, after)
                case _:
                    assert_never(instruction.step)
        # No step has waited for the sends of kept items; a request that is dropped would be cancelled.
        for posted in (self.works, self.leaving):
            for item in tuple(posted):
                yield from self._wait(posted.pop(item), self.compiled.instructions[-1], item)
        return self.outputs

    @property
    def result(self) -> Buffer | None:
        """After a pass over a cache: the rows that this rank wants; None if it has none."""
        return next((buffer for item, buffer in self.buffers.items() if item.form == "total"), None)

    @property
    def result_bytes(self) -> list[Tensor]:
        """The result of a pass over a cache as one piece of memory."""
        raw = None if self.result is None else self.result.raw
        return [] if raw is None else [raw.view(DTYPES[self.problem.dtype])]

    def kept_for_backward(self) -> dict[Item, Buffer]:
        """The items that the plan keeps, after a forward pass."""
        return {item: self.buffers[item] for item in self.compiled.kept}

    # Waiting

    def _wait(self, works: list[Work], instruction: Instruction, item: Item) -> Generator[Work, None, None]:
        """The driver resumes this generator when the work is done, or throws in why it failed."""
        try:
            yield from works
        except DisagreementError:
            raise
        except Exception as error:
            raise TransportError(
                f"{self._here()}: waited for {self._waited_for(instruction, item)}: {error}"
            ) from error

    def _here(self) -> str:
        return f"rank {self.compiled.rank}, step {self.at.index} '{format_step(self.at.step)}'"

    def _waited_for(self, instruction: Instruction, item: Item) -> str:
        """The other ends of the post that the item was part of, for an error message."""
        is_end = instruction is self.compiled.instructions[-1]
        steps = self.compiled.steps if is_end else self.compiled.steps[: instruction.index]
        posts: Sequence[ops.Step] = ()
        alone = [range(at, at + 1) for at, step in enumerate(steps) if isinstance(step, ops.Collective | ops.Exchange)]
        for post in sorted([*turns(steps), *alone], key=lambda found: found.start):
            if any(item in side for at in post for side in in_flight(steps[at])):
                posts = [steps[at] for at in post]
        sends = [send for step in posts for send in transfers(step)[0]]
        recvs = [recv for step in posts for recv in transfers(step)[1]]
        awaited = [f"{format_item(recv.item)} from rank {recv.source}" for recv in recvs]
        return ", ".join([*awaited, *(f"{format_item(send.item)} to reach rank {send.dest}" for send in sends)])

    def _post(
        self, sends: Sequence[ops.Send], recvs: Sequence[ops.Recv], chunks: Callable[[Item], list[Tensor]]
    ) -> tuple[Work, Work]:
        """Post transfers; returns what to wait for before arrivals are read, and before what leaves is freed."""
        outgoing = [Parcel(chunks(send.item), send.dest, send.item.kind) for send in sends]
        incoming = [Parcel(chunks(recv.item), recv.source, recv.item.kind) for recv in recvs]
        try:
            if not outgoing or not incoming or not self.posts_apart:
                work = self.comm.post(outgoing, incoming)
                return work, work
            received = self.comm.post([], incoming)
            return received, self.comm.post(outgoing, [])
        except Exception as error:
            raise TransportError(f"{self._here()}: could not be posted: {error}") from error

    # Buffers

    def _allocate(self, item: Item) -> Buffer:
        allocation = self.compiled.allocations[item]
        neighbour = next((other for other in allocation.items if other in self.buffers), None)
        buffer = self.buffers[item] = self._new_buffer(allocation) if neighbour is None else self.buffers[neighbour]
        return buffer

    def _new_buffer(self, allocation: Allocation) -> Buffer:
        if self.pool is None:
            buffer = self._empty(allocation)
        elif allocation.items in self.pool:
            buffer = self.pool[allocation.items]
        else:
            with torch.inference_mode(False):  # later passes need not be in inference mode
                buffer = self.pool[allocation.items] = self._empty(allocation)
        self.meter.take(buffer.nbytes)
        return buffer

    def _empty(self, allocation: Allocation) -> Buffer:
        tokens, batch = allocation.tokens, self.problem.batch
        return Buffer.empty(allocation.fmt, tokens=tokens, batch=batch, device=self.device)

    def _release(self, item: Item) -> None:
        buffer = self.buffers.pop(item)
        if not any(other in self.buffers for other in self.compiled.allocations[item].items):
            self.meter.give(buffer.nbytes)

    def _chunks(self, item: Item) -> list[Tensor]:
        buffer = self.buffers[item]
        return [buffer.chunk(*span) for span in self.compiled.allocations[item].spans[item]]

    # Steps

    def _attend(self, calls: tuple[CompiledCall, ...]) -> None:
        assert self.kernel is not None
        assert self.softmax is not None
        for call in calls:
            q = self.buffers[call.q].view("q", call.q_span)
            kv = self.buffers[call.kv]
            k, v = kv.view("k", call.kv_span), kv.view("v", call.kv_span)
            scores = Scores(call.mask, self.softmax.scale, self.softmax.softcap)
            if call.do is None:
                self._add_output(call, *self.kernel.forward(q, k, v, scores))
            else:
                row, at = self.buffers[call.do], call.do_span
                upstream = RowGradient(row.view("do", at), row.view("lse", at), row.view("delta", at))
                # Not in a variable, which would keep them alive during the next call.
                self._add_gradients(call, self.kernel.backward(q, k, v, upstream, scores))

    def _decode(self, rows: tuple[Item, ...], partials: tuple[Item, ...]) -> None:
        assert self.cache is not None
        for partial in partials:
            self._allocate(partial)
        if rows[0].form == "home":  # the caller's tokens are those of all ranks
            tokens = self.buffers[Item("q", self.compiled.rank, "home")].by_token(None)
        else:
            tokens = self._side_by_side(rows)
        self.cache.decode(tokens, self._side_by_side(partials))

    def _combine(self, partials: tuple[Item, ...], total: Item) -> None:
        assert self.cache is not None
        self._allocate(total)
        self.cache.combine(self._side_by_side(partials, parts=len(partials)), self._side_by_side((total,)))

    def _side_by_side(self, items: tuple[Item, ...], parts: int = 0) -> Fields:
        """The fields of items that follow each other in a buffer, by token."""
        spans = self.compiled.allocations[items[0]].spans
        span = TokenSpan(spans[items[0]][0].start, spans[items[-1]][-1].stop)
        return self.buffers[items[0]].by_token(span, parts)

    def _add_output(self, call: CompiledCall, out: Tensor, lse: Tensor) -> None:
        for stretch in call.rows:
            self._merge_output(stretch, part(out, stretch.other), part(lse, stretch.other))

    def _merge_output(self, stretch: Stretch, out: Tensor, lse: Tensor) -> None:
        sums = self.buffers[stretch.item]
        merge = self.merging.start_output if stretch.is_first else self.merging.merge_output
        merge(sums.view("o", stretch.inside), sums.view("lse", stretch.inside), out, lse)

    def _add_gradients(self, call: CompiledCall, gradients: Gradients) -> None:
        for stretch in call.rows:
            self._add(stretch, "dq", part(gradients.dq, stretch.other))
        for stretch in call.cols:
            self._add(stretch, "dk", part(gradients.dk, stretch.other))
            self._add(stretch, "dv", part(gradients.dv, stretch.other))

    def _add(self, stretch: Stretch, name: str, partial: Tensor) -> None:
        add = self.merging.copy if stretch.is_first else self.merging.add
        add(self.buffers[stretch.item].view(name, stretch.inside), partial)

    def _merge(self, partial: Item, stretches: tuple[Stretch, ...]) -> None:
        arrived = self.buffers[partial]
        if partial.kind == "o":
            self._round_lse(running(partial), arrived)
        for stretch in stretches:
            if partial.kind == "o":
                self._merge_output(stretch, arrived.view("o", stretch.other), arrived.view("lse", stretch.other))
            else:
                for name in arrived.fields:
                    self._add(stretch, name, arrived.view(name, stretch.other))

    def _round_lse(self, own: Item, arrived: Buffer) -> None:
        """Round the LSE of this rank's own partial once, to what others sent: equal partials then weigh the same."""
        if own in self.rounded:
            return
        self.rounded.add(own)
        lse = self.buffers[own].fields["lse"]
        lse.copy_(lse.to(arrived.fields["lse"].dtype))

    def _pack(self, before: Item, after: Item) -> None:
        source, dest = self.buffers[before].fields, self._allocate(after).fields
        for ours, theirs in self.compiled.copied[after]:
            self._copy(_parts(dest, theirs), _parts(source, ours))

    def _finish(self, item: Item, instruction: Instruction) -> None:
        total = running(item)
        sums = self.buffers[total]
        for stretch in instruction.blanks:
            _clear(sums, stretch.inside)
        dest = self._output(item) if item.form == "home" else self._allocate(item).fields
        for stretch in instruction.stretches:
            there = _parts(dest, stretch.other)
            here = {name: sums.view(name, stretch.inside) for name in dest}
            self._copy(there, here)
        self._release(total)

    def _copy(self, dest: Fields, source: Fields) -> None:
        if "lse" in dest and "o" in dest:  # both in one go
            self.merging.start_output(dest["o"], dest["lse"], source["o"], source["lse"])
        else:
            for name, tensor in source.items():
                self.merging.copy(dest[name], tensor)

    def _output(self, item: Item) -> Fields:
        """The caller's result, as far as it belongs to the item's wave."""
        if item.kind not in self.outputs:
            fields = self.outputs[item.kind] = self.new_output(item.kind)
            self.meter.take(sum(tensor.nbytes for tensor in fields.values()))
        return self._of_wave(self.outputs[item.kind], item.part)

    def _of_wave(self, fields: Fields, part: int) -> Fields:
        """The heads of the caller's tensors that belong to a wave, if that is a matter of heads alone."""
        return self._heads(fields, 0, part) if self.assignment.ulysses_degree == 1 else fields

    def _post_turn(self, turn: Sequence[ops.Step]) -> None:
        sends = [step for step in turn if isinstance(step, ops.Send)]
        recvs = [step for step in turn if isinstance(step, ops.Recv)]
        for step in turn:
            if isinstance(step, ops.Pack):
                self._pack(step.before, step.after)
        self._post_items(sends, recvs)

    def _post_items(self, sends: Sequence[ops.Send], recvs: Sequence[ops.Recv]) -> None:
        for recv in recvs:
            self._allocate(recv.item)
        received, sent = self._post(sends, recvs, self._chunks)
        for recv in recvs:
            self.works[recv.item] = [received]
        for send in sends:
            self.leaving.setdefault(send.item, []).append(sent)

    def _exchange(self, step: ops.Exchange) -> None:
        """Trade heads for tokens, or back. The whole item is sent from and received into its own buffer. At home all
        heads are side by side, so tokens go through a staging buffer with a place for each peer."""
        inward = step.before.form == "home"
        home, whole = (step.before, step.after) if inward else (step.after, step.before)
        staging = self._allocate(staged(home))
        if inward:
            at_whole = self._allocate(whole)
            for piece in self._staged_pieces(whole):
                here = {name: staging.view(name, piece.at_home) for name in staging.fields}
                self._copy(here, self._heads(self.inputs[home.kind], piece.item.source or 0, piece.item.part))
            self._keep_own_piece(whole, at_whole, self.inputs[home.kind], inward=True)
        pieces = {piece.item: piece for piece in self.compiled.exchanged[whole]}
        received, sent = self._post(
            step.sends, step.recvs, lambda item: self._exchange_chunks(pieces[item], whole, staging)
        )
        self.works[step.after] = [received]
        self.leaving.setdefault(staged(home) if inward else whole, []).append(sent)

    def _unpack(self, whole: Item, home: Item) -> None:
        """The caller's tokens, from the staged pieces and this rank's own."""
        staging, at_home = self.buffers[staged(home)], self._output(home)
        for piece in self._staged_pieces(whole):
            here = {name: staging.view(name, piece.at_home) for name in staging.fields}
            self._copy(self._heads(at_home, piece.item.source or 0, piece.item.part), here)
        self._keep_own_piece(whole, self.buffers[whole], at_home, inward=False)

    def _staged_pieces(self, whole: Item) -> list[Exchanged]:
        return [piece for piece in self.compiled.exchanged[whole] if piece.at_home is not None]

    def _heads(self, fields: Fields, head_slice: int, part: int) -> Fields:
        """The fields' heads of one slice, or of a part of it."""
        shares = self.assignment.head_shares
        if shares == 1:
            return fields
        at = head_slice if shares == self.assignment.ulysses_degree else head_slice * self.assignment.waves + part
        return {name: t.narrow(1, at * (t.shape[1] // shares), t.shape[1] // shares) for name, t in fields.items()}

    def _exchange_chunks(self, piece: Exchanged, whole: Item, staging: Buffer) -> list[Tensor]:
        buffer = self.buffers[whole] if piece.at_home is None else staging
        return [buffer.chunk(*span) for span in piece.chunks]

    def _keep_own_piece(self, whole: Item, at_whole: Buffer, at_home: Fields, *, inward: bool) -> None:
        own = self._heads(at_home, self.assignment.head_slice(self.compiled.rank), whole.part)
        for at, inside in self.compiled.copied.get(whole, ()):  # in a later wave of rows, it has no piece
            here, there = _parts(own, at), _parts(at_whole.fields, inside)
            self._copy(there, here) if inward else self._copy(here, there)


def _clear(sums: Buffer, span: Span | None) -> None:
    """Fill sums that nothing was added to: zeros, and for outputs an LSE of -inf."""
    for name in sums.fields:
        sums.view(name, span).fill_(-torch.inf if name == "lse" else 0.0)


def _parts(fields: Fields, span: Span | None) -> Fields:
    return {name: part(tensor, span) for name, tensor in fields.items()}
