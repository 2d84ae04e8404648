"""`MeshAttention(group)` and `cluster=` on real ranks: rank 0 chooses, all run the same, and nobody is left waiting."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import said, shared_pool
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from mesh_attention import LocalGroup, UsageError
from mesh_attention.api import MeshAttention
from mesh_attention.arguments import CallOptions
from mesh_attention.clusters import cluster_named
from mesh_attention.comm.torch_dist import TorchComm
from mesh_attention.errors import TopologyError
from mesh_attention.execution import engine
from mesh_attention.execution.autograd import attend as attend_with
from mesh_attention.machine import tuned_strategy
from mesh_attention.plan.layout import Listed, Zigzag, join, position_ids, shifted
from mesh_attention.planners.choice import Choice

SEQ = 64


def whole(heads: int = 4, seq: int = SEQ) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, seq, heads, 8, generator=generator, dtype=torch.float64) for _ in range(3)]


def attend(attention: MeshAttention, heads: int = 4, seq: int = SEQ, **options: Any) -> float:
    """The largest error of a call, beside one process."""
    inputs = whole(heads, seq)
    out = attention.unshard(attention(*(attention.shard(x) for x in inputs), causal=True, seq_len=seq, **options))
    due = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in inputs), is_causal=True)
    return float((out - due.transpose(1, 2)).abs().max())


def plans_of(attention: MeshAttention) -> list[str]:
    return [repr(one.programs("forward")[0].plan) for one in attention.calls.engines.values()]


def fail(*given: Any, **named: Any) -> Any:
    raise ZeroDivisionError("a bug")


# One rank plans


def _with_own_cluster(group: Any, folder: str) -> tuple[list[str], float]:
    rank = TorchComm(group).rank
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        if rank != 0:
            patch.setattr(tuned_strategy, "tuned", fail)
        attention = MeshAttention(group, cluster="h100" if rank == 0 else "laptop")
        error = attend(attention)
        return plans_of(attention), error


def test_every_rank_runs_what_rank_0_chose_and_only_rank_0_tunes(tmp_path: Path) -> None:
    results = shared_pool().run(4, _with_own_cluster, str(tmp_path))
    assert all(error < 1e-12 for _, error in results)
    assert len({tuple(plans) for plans, _ in results}) == 1


BROKEN: dict[str, tuple[Any, str, set[int]]] = {
    "kernel": (engine, "choose_kernel", {2}),
    "tuner": (tuned_strategy.Tuner, "choose", {0, 1, 2}),
    "facts": (tuned_strategy, "facts_of", {1}),
}
"""What fails, and on which ranks."""


def _one_is_wrong(group: Any, folder: str, mistake: str) -> list[str]:
    rank = TorchComm(group).rank
    is_odd = rank == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        attention = MeshAttention(group, cluster="h100", memory_limit=1 if mistake == "memory" else None)
        if mistake == "decides" and is_odd:
            attention = MeshAttention(group, method="ring")
        owner, name, ranks = BROKEN.get(mistake, (None, "", ()))
        heads, softcap = 2 if mistake == "heads" and is_odd else 4, "x" if mistake == "argument" and is_odd else 0.0
        with patch.context() as broken:
            if rank in ranks:
                broken.setattr(owner, name, fail)
            first = said(lambda: attend(attention, heads=heads, softcap=softcap))
        return [first, str(attend(MeshAttention(group, cluster="h100")) < 1e-12)]


@pytest.mark.parametrize(
    ("mistake", "culprit", "own", "others"),
    [
        ("heads", None, "", "DisagreementError: ranks were called with different arguments: heads is 4 on rank(s) 0"),
        ("argument", 1, "softcap='x'", "DisagreementError: rank 1 refused the call: softcap='x'"),
        ("memory", 0, "MemoryLimitError: no plan stays below", "rank 0 refused the call: no plan stays below"),
        ("tuner", 0, "ZeroDivisionError: a bug", "rank 0 refused the call: ZeroDivisionError: a bug"),
        ("facts", 1, "ZeroDivisionError: a bug", "rank 1 refused the call: ZeroDivisionError: a bug"),
        ("kernel", 2, "ZeroDivisionError: a bug", "rank 2 refused the call: ZeroDivisionError: a bug"),
        ("decides", None, "", "forward plan is chosen by rank 0 on rank(s) 0,2, but <Plan ring 1x3"),
    ],
)
def test_all_ranks_hear_of_a_mistake_and_go_on(
    mistake: str, culprit: int | None, own: str, others: str, tmp_path: Path
) -> None:
    results = shared_pool().run(3, _one_is_wrong, str(tmp_path), mistake)
    for rank, (first, then) in enumerate(results):
        assert (own if rank == culprit else others) in first, first
        assert then == "True"


# Measuring


def _measure(group: Any, folder: str, is_known: bool) -> tuple[list[str], float]:
    """On a busy machine, times may be inconsistent: they are taken, but not fitted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        patch.setattr(
            tuned_strategy, "fit_topology", lambda times, **named: cluster_named("laptop").with_ranks(named["ranks"])
        )
        if is_known:
            patch.setattr(tuned_strategy, "probe", fail)
        attention = MeshAttention(group, cluster="measure")
        with torch.inference_mode():
            error = attend(attention)
        return plans_of(attention), max(error, attend(attention, seq=2 * SEQ))


def test_ranks_measure_once_and_the_next_job_reads_it(tmp_path: Path) -> None:
    first = shared_pool().run(4, _measure, str(tmp_path), False)
    again = shared_pool().run(4, _measure, str(tmp_path), True)
    assert len(list(tmp_path.glob("mesh-attention/measured-*.toml"))) == 1
    assert all(error < 1e-12 for _, error in first + again)
    assert len({tuple(plans) for plans, _ in first + again}) == 1


def _measure_noise(group: Any, folder: str) -> tuple[float, str]:
    def inconsistent(*given: Any, **named: Any) -> Any:
        raise TopologyError("the measured times are inconsistent")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        patch.setattr(tuned_strategy, "fit_topology", inconsistent)
        attention = MeshAttention(group, cluster="measure")
        error = attend(attention)
        return error, plans_of(attention)[0]


def test_times_that_make_no_sense_are_replaced_by_a_volume_based_choice(tmp_path: Path) -> None:
    for error, plan in shared_pool().run(4, _measure_noise, str(tmp_path)):
        assert error < 1e-12
        assert plan.startswith("<Plan ulysses 4·1x1")


# The log


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _logged(group: Any, folder: str, cluster: str | None) -> list[str]:
    handler, log = _Lines(), logging.getLogger("mesh_attention.machine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        patch.setattr(log, "level", logging.INFO)
        log.manager._clear_cache()  # type: ignore[attr-defined]
        log.addHandler(handler)
        attention = MeshAttention(group, cluster=cluster)
        attend(attention)
        attend(attention, seq=SEQ + 4)
        log.removeHandler(handler)
    log.manager._clear_cache()  # type: ignore[attr-defined]
    return handler.lines


@pytest.mark.parametrize(
    ("cluster", "parts"),
    [
        (None, ("ulysses 4, zigzag, 2 waves of rows for 64 tokens on 4 ranks", "fewest bytes")),
        ("h100", ("zigzag", "for 64 tokens on 4 ranks (h100, 1 node, given): forecast", "µs forward")),
    ],
)
def test_rank_0_logs_one_line_for_a_choice(cluster: str | None, parts: tuple[str, ...], tmp_path: Path) -> None:
    first, *others = shared_pool().run(4, _logged, str(tmp_path), cluster)
    assert others == [[]] * 3
    (line,) = first
    for part in (*parts, 'to decide yourself: MeshAttention(group, choice="…")'):
        assert part in line, line


def test_in_one_process_the_default_is_volume_based_and_what_is_decided_stays() -> None:
    cases = {
        "ulysses 4·1x1": MeshAttention(LocalGroup(4)),
        "mesh 2x2": MeshAttention(LocalGroup(4), method="mesh"),
        "mesh 1x4": MeshAttention(LocalGroup(4), tile=(1, 4)),
        "ring 1x4": MeshAttention(LocalGroup(4), method="ring"),
    }
    for name, attention in cases.items():
        assert attend(attention) < 1e-12
        assert plans_of(attention)[0].startswith(f"<Plan {name} "), plans_of(attention)


# What forward keeps for backward


def _trained(group: Any, folder: str, cluster: str | None) -> list[tuple[list[str], float]]:
    """What eager calls, compiled ones and calls without gradients keep, and the largest error of a gradient."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        for is_compiled, gradient in ((False, True), (True, True), (False, False)):
            attention = MeshAttention(group, cluster=cluster)
            if cluster is not None:
                patch.setattr(tuned_strategy, "tuned", _ulysses)
            call = torch.compile(attention, backend="eager") if is_compiled else attention
            leaves = [x.requires_grad_(gradient) for x in whole()]
            out = call(*(attention.shard(x) for x in leaves), causal=True)
            due = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves), is_causal=True)
            error = 0.0
            if gradient:
                weights = whole(seq=SEQ)[0]
                ours = torch.autograd.grad((out * attention.shard(weights)).sum(), leaves)
                for mine in ours:
                    torch.distributed.all_reduce(mine, group=group)
                theirs = torch.autograd.grad((due.transpose(1, 2) * weights).sum(), leaves)
                error = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
            (one,) = attention.calls.engines.values()
            found.append(([*one.programs("forward")[0].plan.schedule.keep], error))
    return found


TUNED = tuned_strategy.tuned


def _ulysses(problem: Any, *given: Any, **named: Any) -> Any:
    chosen, tuning = TUNED(problem, *given, **named)
    keep: Any = ("own",) if given[2] else ()
    passes = tuned_strategy.volume_based(problem, Choice(method="ulysses", layout=Zigzag(), keep=keep)).passes
    return replace(chosen, passes=passes), tuning


@pytest.mark.parametrize("cluster", [None, "h100"])
def test_ulysses_keeps_its_inputs_unless_nobody_could_hand_them_over(cluster: str | None, tmp_path: Path) -> None:
    for eager, compiled, without_gradient in shared_pool().run(4, _trained, str(tmp_path), cluster):
        assert eager[0] == ["own"]
        assert compiled[0] == without_gradient[0] == []
        assert max(eager[1], compiled[1]) < 1e-12


class OwnLayout(Zigzag):
    """The shards of zigzag, handed out in another order."""

    def segments(self, rank: int, *, seq_len: int, ranks: int) -> Any:
        return super().segments(ranks - 1 - rank, seq_len=seq_len, ranks=ranks)


def test_the_tuner_refuses_a_layout_that_it_could_not_name() -> None:
    assert attend(MeshAttention(LocalGroup(2), layout=OwnLayout())) < 1e-12
    with pytest.raises(UsageError, match=r"the tuner knows only .*zigzag"):
        MeshAttention(LocalGroup(2), layout=OwnLayout(), cluster="h100x8")


def _one_in_a_mode(group: Any, folder: str) -> list[str]:
    """Rank 0 counts FLOPs in the first call, and cannot keep anything then."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        attention = MeshAttention(group, cluster="h100x8")
        for counts in (TorchComm(group).rank == 0, False):
            leaves = [attention.shard(x).requires_grad_() for x in whole()]
            with FlopCounterMode(display=False) if counts else nullcontext():
                found.append(said(lambda given=leaves: attention(*given, causal=True)))
    return found


def test_a_rank_that_can_keep_nothing_is_told_apart(tmp_path: Path) -> None:
    for first, second in shared_pool().run(2, _one_in_a_mode, str(tmp_path)):
        assert "keeping inputs for backward is not allowed on rank(s) 0" in first
        assert second == "nothing was raised"


def test_a_layout_of_one_call_is_tuned_as_zigzag() -> None:
    """As packed documents of Megatron have it: the tuner cannot name the layout, and its choice runs on it."""
    cuts = (0, 8, 24)
    parts = [[shifted(Zigzag().segments(r, seq_len=b - a, ranks=2), a) for a, b in pairwise(cuts)] for r in range(2)]
    layout = Listed(tuple(join(chain.from_iterable(part)) for part in parts))
    attention = MeshAttention(LocalGroup(2), cluster="h100x8")
    tokens = torch.randn(1, 24, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shards = [tokens[:, position_ids(layout, rank, seq_len=24, ranks=2)] for rank in range(2)]
    tensors = [(shard, shard, shard) for shard in shards]
    options = CallOptions(causal=True, cu_seqlens_q=cuts)
    found = attention.calls.engine(tensors, options, layout=layout)
    outs = attend_with(found, [tensor for rank in tensors for tensor in rank])[0::2]
    heads_first = [tokens[:, a:b].transpose(1, 2) for a, b in pairwise(cuts)]
    due = torch.cat([scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2) for x in heads_first], 1)
    for rank, out in enumerate(outs):
        torch.testing.assert_close(out, due[:, position_ids(layout, rank, seq_len=24, ranks=2)])
