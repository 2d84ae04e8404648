"""The front door: `MeshAttention` and `mesh_attention`. Wiring only; a call is carried out in `execution`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode
from typing_extensions import Unpack

from mesh_attention.arguments import (
    NO_WINDOW,
    Boundaries,
    CallOptions,
    call_key,
    check_dimensions,
    check_plain,
    describe,
    flag,
    is_arriving,
    needs_gradient,
    refuse_others,
    refuse_transforms,
    refuse_unknown,
)
from mesh_attention.clusters import MEASURE, cluster_named
from mesh_attention.comm.base import Comm
from mesh_attention.comm.local import LocalGroup
from mesh_attention.comm.torch_dist import Group, process_group
from mesh_attention.errors import ProblemError, ScheduleError, UsageError
from mesh_attention.execution import sharding
from mesh_attention.execution.autograd import attend
from mesh_attention.execution.call import MAX_ENGINES, Calls
from mesh_attention.execution.engine import Engine
from mesh_attention.execution.operators import number_of, refused, untraced
from mesh_attention.machine.tuned_strategy import TunedStrategy
from mesh_attention.plan.layout import LAYOUTS, Cached, TypicalTurn, Zigzag
from mesh_attention.plan.plan import Plan
from mesh_attention.planners.choice import Choice, ChoiceOptions, as_choice
from mesh_attention.planners.costs import Costs
from mesh_attention.planners.make import Planner, StatedStrategy
from mesh_attention.session.session import Session
from mesh_attention.topology import Topology
from mesh_attention.tuning.tune import check_memory_limit
from mesh_attention.verification.rules import BrokenPlanError, verify

TensorFormat = Literal["bshd", "bhsd"]


class MeshAttention:
    """Attention over a sequence that is sharded over a group.

    `group` is a torch.distributed group, one axis of a DeviceMesh, or None for the default group. A `LocalGroup` plays
    all ranks in this process; inputs and results are then lists, one tensor per rank.

    How to plan is a `choice` (a value, or its text, such as ``"ulysses 8 + mesh 4x8"``) or its fields as keywords:
    `method`, `tile`, `ulysses_degree`, `inner`, `layout`, `route`, `partials`, `blocks_per_call`, `keep`. The layout is
    zigzag unless stated.

    With nothing given, the library chooses. On GPUs with NCCL the tuner takes what is fastest for the machine at hand:
    the device by its name, the nodes by the ranks' hosts, figures from `mesh-attention calibrate --keep` or a preset.
    Anywhere else it takes the degree and tile that move the fewest bytes. Rank 0 chooses and logs one line.

    With a `cluster` (``"h100x256"``, a .toml file or a Topology) the tuner chooses for that one, within `memory_limit`
    bytes a call. Only the cluster's machines count, not its number of ranks: the ranks of the group fill its nodes one
    after the other. With ``cluster="measure"`` the ranks measure their links and kernels at the first call, in about
    two seconds; the result is kept on disk.

    With `cuda_graphs`, repeated calls are launched as a CUDA graph, so that the host need not keep up with the device.
    The graph holds its memory between calls, and inputs and results are copied. On one rank, where a call is one
    kernel, it changes nothing. Over NCCL, every rank must make the same calls, because all of them record at the same
    one; the tests do so with up to eight ranks that share one GPU. Drop the MeshAttention before
    `destroy_process_group`, because NCCL waits there until graphs with its transfers are gone.
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
        self.session = Session(group)
        self.comms, self.is_local = self.session.comms, self.session.is_local
        if tensor_format not in ("bshd", "bhsd"):
            raise UsageError(f"tensor_format {tensor_format!r}: expected bshd or bhsd")
        self.tensor_format = tensor_format
        refuse_unknown(options, _SETTINGS, of="MeshAttention")
        given = [name for name, value in (("choice", choice), ("costs", costs), *options.items()) if value is not None]
        if planner is not None and not callable(planner):
            raise UsageError(f"planner {planner!r}: expected a function planner(problem, direction=…, layout=…)")
        if costs is not None and not isinstance(costs, Costs):
            raise UsageError(f"costs {costs!r}: expected a Costs")
        choice = as_choice(choice, **options)
        self.layout = choice.layout or Zigzag()
        if isinstance(self.layout, TypicalTurn | Cached):
            raise UsageError(f"layout {self.layout.name!r} describes a KV cache; inputs need {', '.join(LAYOUTS)}")
        decided = [name for name in given if name != "layout" and options.get(name) != "auto"]
        if planner is not None and decided:
            raise UsageError(f"{', '.join(decided)} cannot be combined with planner=; give it to the planner instead")
        prove = None if planner is None else _prove
        decided += ["planner"] if planner else []
        if cluster is not None and decided:
            raise UsageError(
                f"{', '.join(decided)} cannot be combined with cluster=, for which the tuner decides; leave one out"
            )
        if memory_limit is not None:
            if cluster is None:
                raise UsageError("memory_limit= needs cluster=, because it is the tuner that keeps to it")
            check_memory_limit(memory_limit)
        strategy: StatedStrategy | TunedStrategy
        if decided:
            strategy = StatedStrategy(choice, costs=costs, planner=planner, prove=prove)
        else:
            known = _find_cluster(cluster, self.session)
            strategy = TunedStrategy(self.layout, known, memory_limit, self.rank)
        self.calls = Calls(self.session, self.layout, strategy, cuda_graphs=flag("cuda_graphs", cuda_graphs))
        self._number = number_of(self.calls)
        self._has_operator = not self.is_local and not choice.keep
        self._is_one_rank = not self.is_local and self.ranks == 1
        self._ready: dict[object, Callable[..., tuple[Tensor, ...]]] = {}
        """On one rank, what to run for a call like an earlier one, without checking it again."""

    @property
    def rank(self) -> int:
        """This rank's number in the group; 0 in a local group."""
        return self.session.rank

    @property
    def ranks(self) -> int:
        """Ranks in the group."""
        return self.session.size

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshAttention:
        """The same object: a copy of a model runs on the same group, by the same plans."""
        return self

    def __reduce__(self) -> Any:
        raise UsageError(
            "a MeshAttention cannot be pickled, because its group belongs to this process; save the model's state_dict"
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
        cu_seqlens_q: Boundaries = None,
        cu_seqlens_k: Boundaries = None,
        softcap: float = 0.0,
        deterministic: bool = False,
        return_lse: bool = False,
        seq_len: int | None = None,
        seq_len_k: int | None = None,
        **others: Any,
    ) -> Any:
        """The output for this rank's queries, in their format; with `return_lse`, also the LSE (batch, heads, seq).

        `cu_seqlens_*` are boundaries in the *whole* sequence. `seq_len` (and `seq_len_k`) is the whole length; without
        it, every rank must hold the same number of tokens. Results do not depend on timing, except for the last bits of
        dQ on CUDA, where the fastest kernels add in no fixed order; with `deterministic`, other kernels are used.
        """
        options = CallOptions(
            causal=causal,
            softmax_scale=softmax_scale,
            window_size=window_size,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            softcap=softcap,
            deterministic=deterministic,
            seq_len=seq_len,
            seq_len_k=seq_len_k,
        )
        if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
            if self._has_operator:
                return self._through_operator(q, k, v, options, return_lse, others)
            if torch.compiler.is_compiling():
                return untraced(self, q, k, v, return_lse=return_lse, **options._asdict(), **others)
        is_plain = self._is_one_rank and not others and type(return_lse) is bool
        key = call_key(options, q, k, v) if is_plain else None
        ready = self._ready.get(key)
        if ready is not None:
            results = ready(q, k, v)
            return results if return_lse else results[0]
        with self.session.telling():
            flag("return_lse", return_lse)
            refuse_others(others)
            ranks = self._by_rank(q, k, v)
            tensors = [[self._to_bshd(tensor) for tensor in rank] for rank in ranks]
            check_dimensions(ranks)
            check_plain(tensor for rank in ranks for tensor in rank)
        engine = self.calls.engine(tensors, options)
        if key is not None and q is tensors[0][0]:
            self._remember(key, engine, tensors[0])
        results = attend(engine, [tensor for rank in tensors for tensor in rank])
        outs = [self._from_bshd(out, like=rank[0]) for out, rank in zip(results[0::2], ranks, strict=True)]
        lses = [lse if rank[0].dim() == 4 else lse[0] for lse, rank in zip(results[1::2], ranks, strict=True)]
        if self.is_local:
            return (outs, lses) if return_lse else outs
        return (outs[0], lses[0]) if return_lse else outs[0]

    def _through_operator(
        self, q: Any, k: Any, v: Any, options: CallOptions, return_lse: bool, others: dict[str, Any]
    ) -> Any:
        """The same as an operator of torch. Under torch.compile all of this is traced, with shapes alone."""
        try:
            flag("return_lse", return_lse)
            refuse_others(others)
            tensors = [self._to_bshd(tensor) for tensor in (q, k, v)]
            check_dimensions([(q, k, v)])
            if not torch.compiler.is_compiling():
                for tensor in tensors:
                    refuse_transforms(tensor)
            operands = (*options.as_operands(), needs_gradient(tensors), self._number)
        except UsageError as error:
            if torch.compiler.is_compiling():
                out = refused(error.args[0], q, self._number)  # before torch 2.13, str(error) cannot be traced
                return (out, out) if return_lse is True else out
            with self.session.telling():
                raise
        out, lse, _ = torch.ops.mesh_attention.attend(*tensors, *operands)
        out = self._from_bshd(out, like=q)
        return (out, lse if q.dim() == 4 else lse[0]) if return_lse else out

    def _remember(self, key: object, engine: Engine, tensors: Sequence[Tensor]) -> None:
        if engine.single_call is None or any(map(is_arriving, tensors)):
            return
        if len(self._ready) >= MAX_ENGINES:
            self._ready.clear()
        device = tensors[0].device
        if needs_gradient(tensors) or torch.is_autocast_enabled(device.type):
            self._ready[key] = lambda *given: attend(engine, given)
        else:
            self._ready[key] = engine.single_forward(device)

    # Tensors

    def _by_rank(self, q: Any, k: Any, v: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
        if not self.is_local:
            return [(q, k, v)]
        if not all(isinstance(x, list | tuple) and len(x) == self.ranks for x in (q, k, v)):
            raise UsageError(
                f"q, k and v must each be a list of {self.ranks} tensors, one per rank of the local group; got "
                f"{', '.join(map(_describe_list, (q, k, v)))}; use attention.shard(whole) to make the lists"
            )
        return list(zip(q, k, v, strict=True))

    def _to_bshd(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Tensor) or tensor.dim() not in (3, 4):
            raise ProblemError(
                f"{describe(tensor)}: expected a tensor of 4 dimensions ({self.tensor_format}), "
                "or of 3 (tokens, heads, dim)"
            )
        if hasattr(tensor, "device_mesh"):
            raise UsageError(
                "got a DTensor; use mesh_attention.context_parallel.attend_dtensor(attention, q, k, v) instead, "
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
        """This rank's tokens of any per-token tensor of the whole sequence (in a local group: a list, one per rank)."""
        shards = [sharding.shard(whole, self.layout, comm.rank, ranks=self.ranks, dim=dim) for comm in self.comms]
        return shards if self.is_local else shards[0]

    def unshard(self, local: Any, *, dim: int = 1) -> Tensor:
        """The whole sequence on every rank; without gradient, except in a local group."""
        if self.is_local:
            if not isinstance(local, list | tuple) or len(local) != self.ranks:
                raise UsageError(f"got {_describe_list(local)}; expected a list of {self.ranks} tensors, one per rank")
            return sharding.join_shards(local, self.layout, dim=dim)
        return sharding.unshard(local, self.layout, self.session, dim=dim)

    def position_ids(self, seq_len: int, *, device: torch.device | None = None) -> Any:
        """The position in the whole sequence of each of this rank's tokens (in a local group: a list, one per rank)."""
        ids = [
            sharding.position_ids(self.layout, comm.rank, seq_len=seq_len, ranks=self.ranks, device=device)
            for comm in self.comms
        ]
        return ids if self.is_local else ids[0]


def _describe_list(value: object) -> str:
    return f"a list of {len(value)}" if isinstance(value, list | tuple) else describe(value)


def mesh_attention(q: Tensor, k: Tensor, v: Tensor, *, group: Group | None = None, **arguments: Any) -> Any:
    """Attention over a sharded sequence as one function call; arguments are those of `MeshAttention` and of its call.

    Plans are kept between calls, for each group and each set of arguments of `MeshAttention`.
    """
    settings = {name: arguments.pop(name) for name in _SETTINGS if name in arguments}
    chosen = process_group(group)
    try:
        attention = attention_of(chosen, **settings)
    except Exception:
        with Session(chosen).telling():
            raise
    return attention(q, k, v, **arguments)


_ATTENTIONS: WeakKeyDictionary[Group, dict[object, MeshAttention]] = WeakKeyDictionary()
MOST_ATTENTIONS = 64
"""Kept for each group; the oldest are dropped."""


def attention_of(group: Group, **settings: Any) -> MeshAttention:
    """A MeshAttention that is kept with its plans, until its group is destroyed."""
    known = _ATTENTIONS.setdefault(group, {})
    values = ((name, tuple(value) if isinstance(value, list) else value) for name, value in settings.items())
    key = tuple((name, type(value), value) for name, value in values)  # True == 1
    try:
        attention = known.get(key)
    except TypeError:  # a planner that cannot be hashed, or an argument that is refused
        return MeshAttention(group, **settings)
    if attention is None:
        attention = known.setdefault(key, MeshAttention(group, **settings))
        while len(known) > MOST_ATTENTIONS:
            del known[next(iter(known))]
    return attention


_SETTINGS = (*list(signature(MeshAttention).parameters)[1:-1], *ChoiceOptions.__annotations__)


def _prove(plan: Plan) -> None:
    """Raise for a plan that breaks a rule, as a `UsageError`, which the other ranks hear of."""
    try:
        verify(plan)
    except BrokenPlanError as error:
        raise ScheduleError(f"the planner's plan is wrong: {error}") from error


def _find_cluster(cluster: Topology | str | None, session: Session) -> Topology | Literal["measure"] | None:
    if cluster is None:
        return None
    if cluster == MEASURE:
        if session.is_local:
            raise UsageError('cluster="measure" needs ranks in processes of their own; a local group has no links')
        return "measure"
    topology = cluster_named(cluster) if isinstance(cluster, str) else cluster
    if not isinstance(topology, Topology):
        raise UsageError(
            f'cluster {cluster!r}: expected a name such as h100x256, a .toml file, "measure" or a Topology'
        )
    return topology.with_ranks(session.size)
