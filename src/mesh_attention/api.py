"""The front door: `MeshAttention` and `mesh_attention`. Wiring only: check arguments, find the plans, run them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from mesh_attention.arguments import (
    CALL_ARGUMENTS,
    NO_WINDOW,
    REFUSED,
    SIMPLE_ARGUMENTS,
    CallOptions,
    call_options,
    check_dimensions,
    check_softmax,
    check_tensors,
    describe,
    dtype_name,
    flag,
    form_of,
    needs_gradient,
    refuse_known,
    refuse_unknown,
    whole_length,
    window_types,
)
from mesh_attention.clusters import find_cluster
from mesh_attention.comm.base import Comm, Work
from mesh_attention.comm.local import LocalGroup, block, forget_posted, take_turns
from mesh_attention.comm.staged import comm_for
from mesh_attention.comm.torch_dist import Group, TorchComm, process_group
from mesh_attention.errors import ProblemError, UsageError
from mesh_attention.execution import sharding
from mesh_attention.execution.agreement import agree
from mesh_attention.execution.autograd import Engine, attend
from mesh_attention.execution.compiled import Compiled, compile_program
from mesh_attention.execution.executor import Softmax
from mesh_attention.execution.graphs import GraphMemory, RecordedPasses
from mesh_attention.execution.operators import Asked, are_observed, number_of, untraced
from mesh_attention.plan.layout import Zigzag
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import DIRECTIONS, Direction
from mesh_attention.planning.choice import Choice, ChoiceOptions
from mesh_attention.planning.costs import Costs
from mesh_attention.planning.registry import gpu_price, make_plan, make_priced_plan
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.planner import tuned_planner
from mesh_attention.tuning.tune import check_memory

MOST_ENGINES = 128
"""Configurations kept, those used last; ranks make the same calls, so they forget the same ones."""
Planner = Callable[..., Plan]
"""``planner(problem, direction=…, layout=…)`` gives a plan."""
TensorFormat = Literal["bshd", "bhsd"]


class MeshAttention:
    """Attention over a sequence that is sharded over a group.

    `group` is a torch.distributed group, one axis of a DeviceMesh, or None for the default group. A `LocalGroup` plays
    all ranks in this process, and then inputs and results are lists, one tensor a rank.

    How to plan is a `choice` (a value, or its text, such as ``"ulysses 8 × mesh 4x8"``) or its fields as keywords:
    `method`, `tile`, `ulysses_degree`, `inner`, `layout`, `route`, `partials`, `blocks_per_call`, `keep`. The layout is
    zigzag unless stated.

    With a `cluster` (``"h100x256"``, a .toml file or a Topology) the tuner chooses method, degree, tile, placement,
    route and grouping for it, under `memory_limit` bytes a call. The cluster's machines count, not its number of ranks:
    the ranks of the group fill its nodes one after the other. Without one, and with nothing else given, the tile is the
    one that moves the fewest bytes.

    With `cuda_graphs`, calls that come again are played from a CUDA graph, so that the host need not keep up with the
    device. Its memory is then held between calls, and inputs and results are copied. On one rank, where a call is one
    kernel, it changes nothing. Over NCCL this has not been tried with more than one rank.
    """

    def __init__(
        self,
        group: Group | LocalGroup | Comm | Sequence[Comm] | None = None,
        *,
        choice: Choice | str | None = None,
        tensor_format: TensorFormat = "bshd",
        cluster: Topology | str | None = None,
        memory_limit: int | None = None,
        planner: Planner | None = None,
        cuda_graphs: bool = False,
        costs: Costs | None = None,
        **options: Unpack[ChoiceOptions],
    ) -> None:
        self.comms, self.is_local = _comms(group)
        self._group = self.comms[0].group if isinstance(self.comms[0], TorchComm) else None
        self._comms_of: dict[torch.device, list[Comm]] = {}
        self._run = partial(_run_locally, self.comms) if self.is_local else _run_alone
        self._cuda_graphs = flag("cuda_graphs", cuda_graphs)
        self._graph_memories: dict[torch.device, GraphMemory] = {}
        if tensor_format not in ("bshd", "bhsd"):
            raise UsageError(f"tensor_format {tensor_format!r}: expected bshd or bhsd")
        self.tensor_format = tensor_format
        given = [name for name, value in (("choice", choice), ("costs", costs), *options.items()) if value is not None]
        if choice is not None and set(options) & set(given):
            raise UsageError(f"{', '.join(options)} cannot be combined with choice=; give one or the other")
        if choice is None:
            self._choice = Choice.of(**options)
        else:
            self._choice = choice if isinstance(choice, Choice) else Choice.parse(choice)
        self.layout = self._choice.layout or Zigzag()
        self._choice = replace(self._choice, layout=self.layout)
        self._costs = costs
        decided = [name for name in given if name != "layout" and options.get(name) != "auto"]
        if planner is not None and decided:
            raise UsageError(f"{', '.join(decided)} cannot be combined with planner=; give it to the planner")
        self._is_tuned = cluster is not None
        if cluster is not None:
            planner = self._tuned_planner(cluster, memory_limit, [*decided, *(["planner"] if planner else [])])
        elif memory_limit is not None:
            raise UsageError("memory_limit= needs cluster=, since the tuner is what honours it")
        self._planner = planner
        self._has_operator = not self.is_local and not self._choice.keep
        self._number = number_of(self)
        self.runs = 0
        """How many passes forward were asked for so far, but for one rank alone."""
        self._engines: dict[object, Engine] = {}
        self._options_of: dict[object, CallOptions] = {}
        self._alone: dict[
            object, Callable[..., Any]
        ] = {}  # where one kernel call is all there is, which may be a small one

    def _tuned_planner(self, cluster: Topology | str, memory_limit: int | None, given: list[str]) -> Planner:
        if given:
            raise UsageError(
                f"{', '.join(given)} cannot be combined with cluster=, for which the tuner decides; leave one out"
            )
        topology = find_cluster(cluster) if isinstance(cluster, str) else cluster
        if not isinstance(topology, Topology):
            raise UsageError(f"cluster {cluster!r}: expected a name such as h100x256, a .toml file or a Topology")
        if memory_limit is not None:
            check_memory(memory_limit)
        return tuned_planner(topology.with_ranks(self.ranks), memory_nbytes=memory_limit)

    @property
    def ranks(self) -> int:
        return self.comms[0].size

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshAttention:
        """Itself: a copy of a model runs on the same group, by the same plans."""
        return self

    def __reduce__(self) -> Any:
        raise UsageError(
            "a MeshAttention cannot be pickled, because its group belongs to this process; save a model's state_dict"
        )

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        causal: bool = False,
        softmax_scale: float | None = None,
        window_size: tuple[int, int] = NO_WINDOW,
        cu_seqlens_q: Sequence[int] | Tensor | None = None,
        cu_seqlens_k: Sequence[int] | Tensor | None = None,
        softcap: float = 0.0,
        deterministic: bool = False,
        return_lse: bool = False,
        seq_len: int | None = None,
        seq_len_k: int | None = None,
        **others: Any,
    ) -> Any:
        """The output for this rank's queries, in their format; with `return_lse`, also the LSE (batch, heads, seq).

        `cu_seqlens_*` are boundaries in the *whole* sequence. `seq_len` (and `seq_len_k`) is the whole length; without
        it, every rank holds the same number of tokens. Results do not depend on timing, but for the last bits of dQ on
        CUDA, where the fastest kernels add in no fixed order; with `deterministic` others are used, and they do not.
        """
        simple = (causal, softmax_scale, window_size, softcap, deterministic, seq_len, seq_len_k, return_lse)
        is_simple = not others and cu_seqlens_q is None and cu_seqlens_k is None
        if are_observed():
            if self._has_operator:
                return self._through_operator(q, k, v, simple, (cu_seqlens_q, cu_seqlens_k), others)
            if torch.compiler.is_compiling():
                given = dict(zip(SIMPLE_ARGUMENTS, simple, strict=True))
                return untraced(self, q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **given, **others)
        if is_simple and self._alone and isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor):
            try:
                found = self._alone.get(form_of(simple, q, k, v))
            except TypeError:  # a list for a tuple: to be checked as any new call
                found = None
            if found is not None:
                results = found(q, k, v)
                return results if return_lse else results[0]
        if is_simple:
            options = self._known_options(simple)
        else:
            refuse_known(others)
            refuse_unknown(others, CALL_ARGUMENTS, of="attention", allowed=REFUSED)
            options = call_options(*simple, cu_seqlens_q, cu_seqlens_k)
        ranks = self._by_rank(q, k, v)
        tensors = [[self._to_bshd(tensor) for tensor in rank] for rank in ranks]
        check_dimensions(ranks)
        engine = self.engine(tensors, options)
        if is_simple and not self.is_local and engine.only_call is not None and q is tensors[0][0]:
            self._remember(form_of(simple, q, k, v), _alone(engine, tensors))
        results = attend(engine, [tensor for rank in tensors for tensor in rank])
        outs = [self._from_bshd(out, like=rank[0]) for out, rank in zip(results[0::2], ranks, strict=True)]
        lses = [lse if rank[0].dim() == 4 else lse[0] for lse, rank in zip(results[1::2], ranks, strict=True)]
        if self.is_local:
            return (outs, lses) if return_lse else outs
        return (outs[0], lses[0]) if return_lse else outs[0]

    def _through_operator(self, q: Any, k: Any, v: Any, simple: Any, cuts: Any, others: dict[str, Any]) -> Any:
        """The same for those who look at operators: under torch.compile all of this is traced, with shapes alone."""
        refuse_known(others)
        refuse_unknown(others, CALL_ARGUMENTS, of="attention", allowed=REFUSED)
        call_options(*simple, *(None if isinstance(cut, Tensor) else cut for cut in cuts))
        *asked, return_lse = simple
        tensors = [self._to_bshd(tensor) for tensor in (q, k, v)]
        check_dimensions([(q, k, v)])
        cuts = (cut if cut is None or isinstance(cut, Tensor) else torch.tensor(cut) for cut in cuts)
        gradient = needs_gradient([tensors])
        out, lse = torch.ops.mesh_attention.attend(*tensors, *cuts, *asked, gradient, self._number)
        out = self._from_bshd(out, like=q)
        return (out, lse if q.dim() == 4 else lse[0]) if return_lse else out

    def engine_for(self, tensors: Sequence[Tensor], asked: Asked) -> Engine:
        """The engine of an operator's call."""
        options = call_options(
            asked.causal,
            asked.softmax_scale,
            tuple(asked.window_size),
            asked.softcap,
            asked.deterministic,
            asked.seq_len,
            asked.seq_len_k,
            False,
            asked.cu_seqlens_q,
            asked.cu_seqlens_k,
        )
        return self.engine([tensors], options, gradient=asked.gradient)

    def _known_options(self, simple: Any) -> CallOptions:
        """Checked once for the same values of the same types: a call should not take longer than its kernel."""
        key = (simple, *map(type, simple), *window_types(simple[2]))
        try:
            return self._options_of[key]
        except TypeError:  # a list for a tuple
            return call_options(*simple)
        except KeyError:
            if len(self._options_of) >= MOST_ENGINES:
                self._options_of.clear()
            return self._options_of.setdefault(key, call_options(*simple))

    def _remember(self, form: tuple[object, ...], call: Callable[..., Any]) -> None:
        try:
            if len(self._alone) >= MOST_ENGINES:
                self._alone.clear()
            self._alone[form] = call
        except TypeError:  # cannot be looked up, so never quicker
            return

    # Plans

    def engine(
        self, tensors: Sequence[Sequence[Tensor]], options: CallOptions, *, gradient: bool | None = None
    ) -> Engine:
        """Plans and programs for inputs like these; agreed on with the group the first time.

        `gradient` says whether there will be a backward pass, where tensors and grad mode do not.
        """
        self.runs += 1
        gradient = needs_gradient(tensors) if gradient is None else gradient
        shapes = ((tensor.shape, tensor.dtype, tensor.device) for rank in tensors for tensor in rank)
        key = (options, gradient, *shapes)
        engine = self._engines.pop(key, None) or self._new_engine(tensors, options, gradient)
        self._engines[key] = engine  # the one used last comes last
        if len(self._engines) > MOST_ENGINES:
            del self._engines[next(iter(self._engines))]
        return engine

    def _new_engine(self, tensors: Sequence[Sequence[Tensor]], options: CallOptions, gradient: bool) -> Engine:
        found: tuple[Problem, dict[Direction, Plan], Softmax] | UsageError
        try:
            found = self._work_out(tensors, options, gradient)
        except UsageError as error:
            found = error  # the others must hear of it, or they would wait
        comms = self._comms_on(tensors[0][0].device)
        self._run(
            [self._agree(comm, mine, options, gradient, found) for comm, mine in zip(comms, tensors, strict=True)]
        )
        if isinstance(found, UsageError):
            raise found
        problem, plans, softmax = found

        # Engines do not refer to us, so that a group is let go with the last reference to its MeshAttention: what is
        # left to the garbage collector may outlive the process group, and Gloo's threads do not survive that.
        run = self._run

        @lru_cache(maxsize=2)
        def programs(direction: Direction) -> list[Compiled]:
            return [compile_program(plans[direction], comm.rank) for comm in comms]

        return Engine(
            problem=problem,
            softmax=softmax,
            comms=comms,
            programs=programs,
            run=run,
            deterministic=options.deterministic,
            recorded=RecordedPasses(self._graph_memory(tensors[0][0].device)) if self._cuda_graphs else None,
        )

    def _graph_memory(self, device: torch.device) -> GraphMemory:
        if device not in self._graph_memories:
            self._graph_memories[device] = GraphMemory(device)
        return self._graph_memories[device]

    def _comms_on(self, device: torch.device) -> list[Comm]:
        """How to send what lies on a device: Gloo takes nothing from a GPU, so that is staged through the host."""
        if self._group is None:
            return self.comms
        if device not in self._comms_of:
            self._comms_of[device] = [comm_for(self._group, device)]
        return self._comms_of[device]

    def _work_out(
        self, tensors: Sequence[Sequence[Tensor]], options: CallOptions, gradient: bool
    ) -> tuple[Problem, dict[Direction, Plan], Softmax]:
        for rank in tensors:
            check_tensors(*rank)
        self._check_graphs(tensors[0][0].device)
        problem = self._problem(tensors[0], options)
        device = tensors[0][0].device
        plans = {direction: self._plan(problem, direction, device, gradient) for direction in DIRECTIONS}
        _check_keep(plans)
        if self._cuda_graphs and plans["forward"].schedule.keep:
            raise UsageError(
                f"{plans['forward']!r} keeps {', '.join(plans['forward'].schedule.keep)} for backward, and with "
                "cuda_graphs calls leave nothing to each other; leave cuda_graphs, keep or memory_limit out"
            )
        scale = options.softmax_scale if options.softmax_scale is not None else problem.head_dim_qk**-0.5
        return problem, plans, check_softmax(scale, options.softcap)

    def _plan(self, problem: Problem, direction: Direction, device: torch.device, gradient: bool) -> Plan:
        if self._planner is not None:
            asked = {"needs_gradient": gradient} if self._is_tuned else {}
            return self._planner(problem, direction=direction, layout=self.layout, **asked)
        if device.type == "cuda" and self._costs is None and self._choice.blocks_per_call is None:
            return make_priced_plan(problem, self._choice, direction, gpu_price)  # one block a call is too fine
        return make_plan(problem, self._choice, direction=direction, costs=self._costs)

    def _check_graphs(self, device: torch.device) -> None:
        if not self._cuda_graphs:
            return
        if device.type != "cuda":
            raise UsageError(f"cuda_graphs came, and tensors on {device}; expected them on a CUDA device")
        if not all(comm.is_recordable for comm in self._comms_on(device)):
            raise UsageError(
                "cuda_graphs came, and this group's transfers cannot be recorded; use NCCL, or leave it out"
            )

    def _problem(self, tensors: Sequence[Tensor], options: CallOptions) -> Problem:
        q, k, v = tensors
        seq_k = options.seq_len if options.seq_len_k is None else options.seq_len_k
        cuts_k = options.cu_seqlens_q if options.cu_seqlens_k is None else options.cu_seqlens_k
        return Problem(
            seq_q=whole_length(options.seq_len, options.cu_seqlens_q, q, self.ranks),
            seq_kv=whole_length(seq_k, cuts_k, k, self.ranks),
            heads=q.shape[2],
            kv_heads=k.shape[2],
            head_dim_qk=q.shape[3],
            head_dim_v=v.shape[3],
            ranks=self.ranks,
            batch=q.shape[0],
            dtype=dtype_name(q),
            mask=options.mask(),
        )

    def _agree(
        self,
        comm: Comm,
        tensors: Sequence[Tensor],
        options: CallOptions,
        gradient: bool,
        found: tuple[Problem, dict[Direction, Plan], Softmax] | UsageError,
    ) -> Generator[Work, None, None]:
        """One rank's part of agreeing: what its own tensors ask for, and what was worked out from rank 0's."""
        if isinstance(found, UsageError):
            return agree(comm, asked={}, holds={}, expected=lambda rank: {}, refusal=str(found))
        problem, plans, softmax = found
        own = self._problem(tensors, options)
        asked = {name: str(getattr(own, name)) for name in own.__slots__}
        asked |= {"softmax": str(softmax), "device": tensors[0].device.type}
        asked |= {"deterministic": str(options.deterministic), "cuda_graphs": str(self._cuda_graphs)}
        asked |= {"gradient": "needed" if gradient else "not needed"}
        asked |= {f"{direction} plan": f"{plan!r}" for direction, plan in plans.items()}

        def expected(rank: int) -> dict[str, int]:
            return {name: self._tokens(rank, total) for name, total in (("q", problem.seq_q), ("kv", problem.seq_kv))}

        holds = {"q": tensors[0].shape[1], "kv": tensors[1].shape[1]}
        return agree(comm, asked=asked, holds=holds, expected=expected)

    def _tokens(self, rank: int, total: int) -> int:
        return sum(map(len, self.layout.segments(rank, tokens=total, ranks=self.ranks)))

    # Tensors

    def _by_rank(self, q: Any, k: Any, v: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
        if not self.is_local:
            return [(q, k, v)]
        if not all(isinstance(x, list | tuple) and len(x) == self.ranks for x in (q, k, v)):
            raise UsageError(f"a local group of {self.ranks} ranks takes lists of {self.ranks} tensors, one a rank")
        return list(zip(q, k, v, strict=True))

    def _to_bshd(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Tensor) or tensor.dim() not in (3, 4):
            raise ProblemError(
                f"{describe(tensor)}: expected a tensor of 4 dimensions ({self.tensor_format}), "
                "or of 3 (tokens, heads, dim)"
            )
        if hasattr(tensor, "device_mesh"):
            raise UsageError(
                "a DTensor came; give it to mesh_attention.integrations.dtensors.attend_dtensor(attention, q, k, v), "
                "or give its to_local()"
            )
        if tensor.dim() == 3:
            return tensor[None]  # without cu_seqlens_q: one document
        return tensor.transpose(1, 2) if self.tensor_format == "bhsd" else tensor

    def _from_bshd(self, tensor: Tensor, *, like: Tensor) -> Tensor:
        if like.dim() == 3:
            return tensor[0]
        return tensor.transpose(1, 2) if self.tensor_format == "bhsd" else tensor

    # Sharding

    def shard(self, whole: Tensor, *, dim: int = 1) -> Any:
        """This rank's tokens of any per-token tensor of the whole sequence (in a local group: a list, one a rank)."""
        shards = [sharding.shard(whole, self.layout, comm.rank, ranks=self.ranks, dim=dim) for comm in self.comms]
        return shards if self.is_local else shards[0]

    def unshard(self, local: Any, *, dim: int = 1) -> Tensor:
        """The whole sequence on every rank; without gradient, except in a local group."""
        if self.is_local:
            return sharding.join_shards(list(local), self.layout, dim=dim)
        return sharding.unshard(local, self.layout, self._comms_on(local.device)[0], dim=dim)

    def position_ids(self, seq_len: int, *, device: torch.device | None = None) -> Any:
        """The position in the whole sequence of each of this rank's tokens (in a local group: a list, one a rank)."""
        ids = [
            sharding.position_ids(self.layout, comm.rank, tokens=seq_len, ranks=self.ranks, device=device)
            for comm in self.comms
        ]
        return ids if self.is_local else ids[0]


def mesh_attention(q: Tensor, k: Tensor, v: Tensor, *, group: Group | None = None, **arguments: Any) -> Any:
    """Attention over a sharded sequence as one function call; arguments are those of `MeshAttention` and of its call.

    Plans are kept between calls, for each group and each set of arguments.
    """
    settings = {name: arguments.pop(name) for name in _SETTINGS if name in arguments}
    for name in ("tile", "inner"):
        if isinstance(settings.get(name), list):
            settings[name] = tuple(settings[name])
    return _attention_of(process_group(group), tuple(settings.items()))(q, k, v, **arguments)


@lru_cache(maxsize=64)
def _attention_of(group: Group, settings: tuple[tuple[str, Any], ...]) -> MeshAttention:
    return MeshAttention(group, **dict(settings))


_SETTINGS = (
    *(name for name in signature(MeshAttention).parameters if name not in ("group", "options")),
    *ChoiceOptions.__annotations__,
)


def _comms(group: Group | LocalGroup | Comm | Sequence[Comm] | None) -> tuple[list[Comm], bool]:
    """The ranks played in this process, and whether they are all of them."""
    if isinstance(group, LocalGroup):
        return [group.comm(rank) for rank in range(group.size)], True
    if isinstance(group, list | tuple):
        return list(group), True
    if hasattr(group, "share"):
        return [group], False  # type: ignore[list-item]
    return [TorchComm(group)], False  # type: ignore[arg-type]


def _run_alone(ranks: Sequence[Any]) -> list[Any]:
    return [block(ranks[0])]


def _run_locally(comms: Sequence[Comm], ranks: Sequence[Any]) -> list[Any]:
    try:
        return take_turns(ranks)
    except BaseException:
        forget_posted(comms)
        raise


def _alone(engine: Engine, tensors: Sequence[Sequence[Tensor]]) -> Callable[..., Any]:
    """What to call next time."""
    device = tensors[0][0].device
    if needs_gradient(tensors) or torch.is_autocast_enabled(device.type):
        return lambda *given: attend(engine, given)
    return engine.alone(device)


def _check_keep(plans: dict[Direction, Plan]) -> None:
    forward, backward = plans["forward"], plans["backward"]
    same = (forward.schedule.keep, forward.assignment) == (backward.schedule.keep, backward.assignment)
    if (forward.schedule.keep or backward.schedule.keep) and not same:
        raise UsageError(
            f"{forward!r} keeps {forward.schedule.keep}, {backward!r} expects {backward.schedule.keep}: "
            "what is kept must be the same, on the same tile"
        )
