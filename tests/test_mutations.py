"""Break a good plan in one way at a time: for each rule there are mutations that this rule catches and no other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from mesh_attention import Contiguous, Plan, Problem, Tile, causal, full, make_plan, verify, window
from mesh_attention.errors import ScheduleError
from mesh_attention.plan.assignment import Assignment
from mesh_attention.plan.buffer_sizes import held_nbytes
from mesh_attention.plan.format import format_step
from mesh_attention.plan.parse import parse_item, parse_step
from mesh_attention.plan.schedule import Fetch, Meet, Return, Schedule
from mesh_attention.plan.steps import Attend, Collective, Exchange, Finish, Free, Item, Merge, Recv, Send, Step
from mesh_attention.planners.over_cache import Combining, Queries, StepShape, plan_decode
from mesh_attention.verification.rules import RULES, BrokenPlanError, check

Steps = list[Step]


def problem(ranks: int = 4, **changes: object) -> Problem:
    base = Problem.self_attention(seq_len=16 * ranks, heads=4, head_dim=8, ranks=ranks, mask=causal())
    return replace(base, **changes)


def mesh() -> Plan:
    return make_plan(problem(), tile=(2, 2))


def contiguous_mesh() -> Plan:
    return make_plan(problem(), tile=(2, 2), layout=Contiguous())


def ring() -> Plan:
    return make_plan(problem(), method="ring", route="ring")


def backward() -> Plan:
    return make_plan(problem(), tile=(2, 2), direction="backward", route="ring", partials="ring")


def attention2d() -> Plan:
    return make_plan(problem(), method="attention2d", tile=(2, 2))


def windowed_attention2d() -> Plan:
    return make_plan(problem(mask=window(4, 0)), method="attention2d", tile=(1, 4))


def ulysses() -> Plan:
    return make_plan(problem(), tile=(1, 2), ulysses_degree=2)


def keeping() -> Plan:
    return make_plan(problem(), tile=(2, 2), keep=("kv",))


def decoding(queries: Queries = "replicated", combining: Combining | None = None) -> Plan:
    sizes = {"ranks": 3, "heads": 2, "kv_heads": 1, "head_dim_qk": 4, "head_dim_v": 4}
    return plan_decode(StepShape(new_tokens=(1, 2, 1), dtype="float64", **sizes), queries=queries, combining=combining)


def decoding_slices() -> Plan:
    return decoding(combining="reduce_scatter")


def decoding_sharded() -> Plan:
    return decoding("sharded")


def edit(plan: Plan, rank: int, change: Callable[[Steps], None], *, honest: bool = True) -> Plan:
    """The plan with one rank's steps changed; an honest change also states the memory it needs."""
    programs = list(plan.unrolled().programs or ())
    steps = list(programs[rank].steps)
    change(steps)
    kept = plan.matrix.kept(plan.schedule.keep, rank)
    peak = max(held_nbytes(steps, plan.matrix, kept=kept)) if honest else programs[rank].peak_nbytes
    programs[rank] = replace(programs[rank], steps=tuple(steps), peak_nbytes=max(peak, programs[rank].peak_nbytes))
    return plan.with_programs(tuple(programs))


def find(steps: Steps, text: str) -> int:
    return steps.index(parse_step(text))


def last(steps: Steps, kind: type[Step]) -> int:
    return max(index for index, step in enumerate(steps) if isinstance(step, kind))


# Changes of one rank's steps

Change = Callable[[Steps], None]


def drop(text: str) -> Change:
    return lambda steps: steps.remove(parse_step(text))


def put(*texts: str, before: str | None = None, at: int | None = None) -> Change:
    """Insert steps before another one, or at an index; without either, at the end."""

    def change(steps: Steps) -> None:
        where = find(steps, before) if before else len(steps) if at is None else at
        steps[where:where] = map(parse_step, texts)

    return change


def turn(text: str, *texts: str) -> Change:
    """Replace a step by others."""

    def change(steps: Steps) -> None:
        at = find(steps, text)
        steps[at : at + 1] = map(parse_step, texts)

    return change


def move(text: str, *, before: str | None = None, to: int | None = None) -> Change:
    """Move a step before another one, or to an index; without either, to the end."""

    def change(steps: Steps) -> None:
        steps.remove(parse_step(text))
        put(text, before=before, at=to)(steps)

    return change


def idle(*group: int) -> Change:
    """Take part in a gather of nothing."""
    return lambda steps: steps.insert(0, Collective("gather", group, (), ()))


def double(side: str, at: int) -> Change:
    """What a collective step sends or receives, twice."""

    def change(steps: Steps) -> None:
        step = steps[at]
        assert isinstance(step, Collective | Exchange)
        steps[at] = replace(step, **{side: getattr(step, side) * 2})

    return change


def only(*texts: str) -> Change:
    """These steps and no others."""
    return lambda steps: steps.__setitem__(slice(None), map(parse_step, texts))


def in_transfers(own: str, other: str) -> Change:
    """Send another item in collectives."""

    def change(steps: Steps) -> None:
        for index, step in enumerate(steps):
            if isinstance(step, Collective):
                text = f"send {own} to "
                steps[index] = parse_step(format_step(step).replace(text, f"send {other} to "))

    return change


def lose(side: str, piece: str) -> Change:
    def change(steps: Steps) -> None:
        for index, step in enumerate(steps):
            if isinstance(step, Exchange):
                kept = tuple(end for end in getattr(step, side) if end.item != parse_item(piece))
                steps[index] = replace(step, **{side: kept})

    return change


def swap_the_first_two(steps: Steps) -> None:
    assert all(isinstance(step, Exchange) for step in steps[:2])
    steps[:2] = steps[1::-1]


def change_peer(own: int, other: int) -> Change:
    def change(steps: Steps) -> None:
        for index, step in enumerate(steps):
            if isinstance(step, Send) and step.dest == own:
                steps[index] = replace(step, dest=other)
            if isinstance(step, Recv) and step.source == own:
                steps[index] = replace(step, source=other)

    return change


def merge_again(steps: Steps) -> None:
    index = next(index for index, step in enumerate(steps) if isinstance(step, Merge))
    steps.insert(index, steps[index])


def wait_for_a_turn(rank: int, other: int) -> Change:
    """It frees its queries, whose turn also receives a partial that the other computes only afterwards."""
    texts = (
        f"recv q{other} from {other}",
        f"attend home:q{rank} x home:kv{rank}",
        f"recv o{rank}@{other} from {other}",
        f"pack home:q{rank} -> q{rank}",
        f"send q{rank} to {other}",
        f"free q{rank}",
        f"attend q{other} x home:kv{rank}",
        f"free q{other}",
        f"finish o{other}",
        f"send o{other} to {other}",
        f"merge o{rank}@{other}",
        f"free o{rank}@{other}",
        f"finish home:o{rank}",
        f"free o{other}",
    )
    return lambda steps: steps.__setitem__(slice(None), map(parse_step, texts))


def pass_q() -> Plan:
    return make_plan(problem(2), method="pass-q")


def changed(base: Callable[[], Plan], changes: Mapping[int, Sequence[Change]]) -> Plan:
    plan = base()
    for rank, some in changes.items():

        def change(steps: Steps, some: Sequence[Change] = some) -> None:
            for one in some:
                one(steps)

        plan = edit(plan, rank, change)
    return plan


def understate_the_peak() -> Plan:
    plan = mesh()
    programs = tuple(replace(program, peak_nbytes=program.peak_nbytes - 1) for program in plan.all_programs())
    return plan.with_programs(programs)


CAUGHT_BY: dict[str, dict[str, tuple[Callable[[], Plan], Mapping[int, Sequence[Change]]]]] = {
    "form": {
        "attend with the gradient of another row": (
            backward,
            {3: [turn("attend q2 x kv1 with do2", "attend q2 x kv1 with do3"), move("free do3")]},
        ),
        "attend keys as queries": (mesh, {0: [turn("attend q0 x kv0", "attend q0 x q0")]}),
        "pack the wrong input": (mesh, {0: [turn("pack home:q0 -> q0", "pack home:kv0 -> q0")]}),
        "lose a piece on both sides": (ulysses, {0: [lose("sends", "q0/1")], 1: [lose("recvs", "q0/1")]}),
        # Ranks 0 and 1 hold the same place for different heads; each sends its KV to the other one's peer.
        "trade partials between heads": (
            ulysses,
            {0: [change_peer(2, 3)], 1: [change_peer(3, 2)], 2: [change_peer(0, 1)], 3: [change_peer(1, 0)]},
        ),
        "let a stranger into a group": (attention2d, {rank: [idle(1, 3)] for rank in (0, 1, 3)}),
        "attend the caller's tensors with received shards": (
            attention2d,
            {0: [turn("attend q0,q1 x kv0,kv2", "attend home:q0,q1 x kv0,kv2")]},
        ),
        # It would replace the rank's own result by zeros.
        "finish the result of another rank": (mesh, {0: [put("clear o3~", "finish home:o3")]}),
        "finish some heads as the result": (
            ulysses,
            {0: [lambda steps: steps.__delitem__(slice(find(steps, "finish o0"), None)), put("finish home:o0")]},
        ),
        # Merged twice under a name that no sender has.
        "take a partial under another name": (
            mesh,
            {
                0: [
                    turn("recv o0@1 from 1", "recv o0@3 from 1"),
                    turn("free o0@1", "free o0@3"),
                    turn("merge o0@1", "merge o0@3", "merge o0@3"),
                ]
            },
        ),
        "pass on a partial that arrived": (mesh, {0: [put("send o0@1 to 2", before="merge o0@1")]}),
        "name a rank twice in a group": (attention2d, {0: [idle(0, 1, 1)], 1: [idle(0, 1, 1)]}),
        "trade a piece twice": (ulysses, {0: [double("sends", 0)], 1: [double("recvs", 0)]}),
        "free a running sum and start again": (mesh, {0: [put("free o0~", before="attend q0 x kv2")]}),
        "free the result": (mesh, {0: [put("free home:o0")]}),
        # Queries would not see the new tokens that another rank's cache keeps.
        "decode with another rank's cache": (
            decoding,
            {0: [turn("decode home:q0 x home:kv0 -> o0@0", "decode home:q0 x home:kv1 -> o0@0")]},
        ),
        "decode rows in another order": (
            decoding_sharded,
            {0: [turn("decode q0,q1,q2 x home:kv0 -> o0,o1,o2", "decode q1,q0,q2 x home:kv0 -> o1,o0,o2")]},
        ),
        # Their buffer would have those of other ranks in between.
        "decode partials of several rows where they are merged": (
            decoding_slices,
            {
                0: [
                    turn(
                        "decode home:q0,home:q1,home:q2 x home:kv0 -> o0,o1,o2",
                        "decode home:q0,home:q1,home:q2 x home:kv0 -> o0@0,o1@0,o2@0",
                    ),
                    in_transfers("o1", "o1@0"),
                    in_transfers("o2", "o2@0"),
                    drop("pack o0 -> o0@0"),
                    drop("free o0"),
                    turn("free o1", "free o1@0"),
                    turn("free o2", "free o2@0"),
                ]
            },
        ),
        "merge in another order": (
            decoding,
            {0: [turn("combine o0@0,o0@1,o0@2 -> total:o0", "combine o0@1,o0@0,o0@2 -> total:o0")]},
        ),
        "leave a partial out": (
            decoding_slices,
            {0: [turn("combine o0@0,o0@1,o0@2 -> total:o0", "combine o0@0,o0@1 -> total:o0"), put("free o0@2")]},
        ),
        "merge another rank's partials as this one's": (
            decoding_slices,
            {0: [turn("combine o0@0,o0@1,o0@2 -> total:o0", "combine o0@0,o0@1,o0@2 -> total:o1")]},
        ),
        "pack a partial under another rank's name": (
            decoding_slices,
            {0: [turn("pack o0 -> o0@0", "pack o0 -> o0@1")]},
        ),
        "attend over a cache": (decoding, {0: [put("attend home:q0 x home:kv0")]}),
        "decode without a cache": (mesh, {0: [put("decode home:q0 x home:kv0 -> o0")]}),
        "pack queries that every rank has": (decoding, {0: [put("pack home:q0 -> q0", "free q0")]}),
        "pack the cache": (decoding_sharded, {0: [put("pack home:kv0 -> kv0", "free kv0")]}),
    },
    "coverage": {
        "drop an attend": (mesh, {0: [drop("attend q1 x kv2")]}),
        "attend twice": (mesh, {0: [put("attend q1 x kv2", before="attend q1 x kv2")]}),
        "attend an empty block": (contiguous_mesh, {3: [put("attend q2 x home:kv3", at=4)]}),
    },
    "presence": {
        "free early": (mesh, {0: [lambda steps: move("free kv2", to=last(steps, Attend))(steps)]}),
        "attend before the receive": (mesh, {0: [move("attend q0 x kv2", to=0)]}),
        "free twice": (mesh, {0: [put("free kv2")]}),
        # An empty partial is sent, then the real one is computed and thrown away.
        "finish before the work is done": (mesh, {0: [put("clear o1~", "finish o1", "free o1", at=0)]}),
        "clear a sum that has something": (mesh, {0: [put("clear o1~", before="finish o1")]}),
        "merge a result twice": (decoding, {0: [put("combine o0@0,o0@1,o0@2 -> total:o0", before="free o0@0")]}),
        "gather a shard twice": (attention2d, {0: [double("recvs", 1)], 1: [double("sends", 1)]}),
    },
    "matching": {
        "send to the wrong rank": (mesh, {0: [turn("send q0 to 1", "send q0 to 3")]}),
        "drop a send": (ring, {2: [drop("send kv2 to 3")]}),
        "send the wrong shard": (mesh, {2: [turn("send kv2 to 0", "send kv0 to 0")]}),
        "receive in another order": (ring, {3: [move("recv kv1 from 2", to=0)]}),
        "swap two collectives": (ulysses, {1: [swap_the_first_two]}),
        # Rank 3 sends nothing and gets something; rank 0 gets nothing and sends; rank 2 does neither.
        "stay out of a collective": (windowed_attention2d, {0: [idle(0, 1, 2, 3)], 1: [idle(0, 1, 2, 3)]}),
    },
    "progress": {
        "send a turn before posting the receive": (
            mesh,
            {
                0: [move("recv q1 from 1", before="attend q0 x kv0")],
                1: [move("recv q0 from 0", before="attend q1 x kv1")],
            },
        ),
        "wait for a turn where something sent is freed": (
            pass_q,
            {0: [wait_for_a_turn(0, 1)], 1: [wait_for_a_turn(1, 0)]},
        ),
        # Posts run in order: the receive of a partial holds up the queries that the partial is computed from.
        "hold up a send by a receive posted before it": (
            pass_q,
            {
                0: [
                    move("recv o0@1 from 1", to=1),
                    move("attend q0 x home:kv0", before="send q0 to 1"),
                    lambda steps: move("free q0", to=len(steps) - 1)(steps),
                ]
            },
        ),
    },
    "homecoming": {
        "merge twice": (mesh, {0: [put("merge o0@1", before="merge o0@1")]}),
        "merge twice along a ring": (backward, {1: [merge_again]}),
        "return one rank's partial as the whole": (
            decoding,
            {rank: [only(f"decode home:q0 x home:kv{rank} -> total:o0")] for rank in range(3)},
        ),
    },
    "purpose": {
        "send what nobody reads": (
            mesh,
            {3: [put("send q3 to 0", before="send q3 to 2")], 0: [put("recv q3 from 3", at=0), put("free q3")]},
        ),
    },
    "tidiness": {"throw away what is to be kept": (keeping, {0: [put("free kv2")]})},
    "memory": {},
}
DISHONEST: dict[str, Callable[[], Plan]] = {
    "tidiness": lambda: edit(mesh(), 0, lambda steps: steps.pop(last(steps, Free)), honest=False),
    "memory": lambda: edit(ring(), 0, move("free kv3"), honest=False),
}
"""A step that frees is dropped, or comes at the end, and the stated peak stays."""
BASES = (
    *(mesh, contiguous_mesh, ring, backward, attention2d, windowed_attention2d, ulysses, keeping),
    *(decoding, decoding_slices, decoding_sharded),
)


@pytest.mark.parametrize("base", BASES)
def test_the_plans_before_mutation_are_right(base: Callable[[], Plan]) -> None:
    assert check(base()) == ()


@pytest.mark.parametrize(
    ("rule", "mutation"), [(rule, mutation) for rule, mutations in CAUGHT_BY.items() for mutation in mutations]
)
def test_a_mutation_is_caught_by_its_rule_and_no_other(rule: str, mutation: str) -> None:
    assert {breach.rule for breach in check(changed(*CAUGHT_BY[rule][mutation]))} == {rule}


@pytest.mark.parametrize("rule", DISHONEST)
def test_memory_that_is_not_stated_is_noticed(rule: str) -> None:
    assert {breach.rule for breach in check(DISHONEST[rule]())} == {rule}
    assert {breach.rule for breach in check(understate_the_peak())} == {"memory"}


NO_STEPS: tuple[Any, ...] = (
    None,
    "free kv0",
    Item("kv", 0),
    Free(None),  # type: ignore[arg-type]
    Free(("kv", 0, "whole", None)),  # type: ignore[arg-type]
    Free(Item("kv", "0")),  # type: ignore[arg-type]
    Free(Item("kv", True)),
    Free(Item("kv", 0, "lost")),  # type: ignore[arg-type]
    Free(Item("nothing", 0)),  # type: ignore[arg-type]
    Free(Item(["kv"], 0)),  # type: ignore[arg-type]
    Free(Item("kv", 0, "piece")),
    Send(Item("kv", 0), None),  # type: ignore[arg-type]
    Attend([Item("q", 0)], (Item("kv", 0),)),  # type: ignore[arg-type]
    Attend((Item("q", 0),), (None,)),  # type: ignore[arg-type]
    Collective("scatter", (0,), (), ()),  # type: ignore[arg-type]
    Collective("gather", (0, "1"), (), ()),  # type: ignore[arg-type]
    Collective("gather", (0, 1), (Recv(Item("kv", 0), 1),), ()),  # type: ignore[arg-type]
)


@pytest.mark.parametrize("step", NO_STEPS, ids=repr)
def test_a_plan_has_nothing_but_steps(step: Any) -> None:
    with pytest.raises(ScheduleError, match=r"rank 0, step 3: .* is not a step"):
        edit(mesh(), 0, lambda steps: steps.insert(3, step), honest=False)


OF_ANOTHER_PLAN = (
    Free(Item("kv", -1)),
    Free(Item("kv", 10**30)),
    Free(Item("dq", 0)),
    Free(Item("o", 0, "whole", 9)),
    Free(Item("kv", 0, "piece", 1)),
    Recv(Item("kv", 0), 4),
    Recv(Item("kv", 0), -1),
    Collective("gather", (0, 10**30), (), ()),
)


@pytest.mark.parametrize("step", OF_ANOTHER_PLAN, ids=repr)
def test_what_a_plan_does_not_have_is_reported_alone(step: Step) -> None:
    plan = edit(mesh(), 0, lambda steps: steps.insert(3, step), honest=False)
    assert [(breach.rule, breach.rank, breach.step) for breach in check(plan)] == [("form", 0, 3)]
    with pytest.raises(BrokenPlanError, match=r"form: rank 0 step 3: (this plan has no|rank -?\d+ does not exist)"):
        verify(plan)


def test_kept_items_share_a_buffer_with_nothing_else() -> None:
    """Rank 0 attends a column of another rank's together with those it keeps: backward would find them elsewhere."""
    plan_before = make_plan(problem(mask=full()), method="attention2d", tile=(2, 2), keep=("kv",))
    assert check(plan_before) == ()
    taking = ("recv kv1 from 1", "attend q0,q1 x kv0,kv1,kv2", "free kv1")
    changes = {
        1: [turn("attend q0,q1 x kv1,kv3", "send kv1 to 0", "attend q0,q1 x kv3")],
        0: [turn("attend q0,q1 x kv0,kv2", *taking)],
    }
    plan = changed(lambda: plan_before, changes)
    assert [(b.rule, b.rank, b.message.partition(":")[0]) for b in check(plan)] == [("tidiness", 0, "kv1")]


def test_a_result_of_zeros_after_the_real_one_is_noticed() -> None:
    plan = changed(mesh, {0: [put("clear o0~", "finish home:o0")]})
    assert {breach.rule for breach in check(plan)} == {"presence", "homecoming"}


def test_every_rule_has_a_mutation_of_its_own() -> None:
    assert set(CAUGHT_BY) == set(RULES)


@pytest.mark.parametrize("base", BASES)
def test_no_step_can_be_dropped_unnoticed(base: Callable[[], Plan]) -> None:
    plan = base()
    for program in plan.all_programs():
        for index, step in enumerate(program.steps):
            broken = edit(plan, program.rank, lambda steps, index=index: steps.pop(index))
            assert check(broken), f"rank {program.rank} step {index} ({step}) was dropped and nobody noticed"


def test_all_breaches_come_at_once_with_the_row_marked() -> None:
    plan = changed(mesh, {0: [drop("attend q1 x kv2")], 1: [put("free q3")]})
    with pytest.raises(BrokenPlanError) as caught:
        verify(plan)
    message = str(caught.value)
    assert {breach.rule for breach in caught.value.breaches} == {"coverage", "presence"}
    assert "block (q1, kv2) is in this rank's tile, but no rank attends it" in message
    marked = [line for line in message.splitlines() if line.startswith("  -->")]
    assert len(marked) == 1
    assert marked[0].endswith("free q3")


@pytest.mark.parametrize("inner", [None, (2, 2), (1, 4), (4, 2)])
def test_a_block_that_nobody_attends_is_missed_where_it_belongs(inner: tuple[int, int] | None) -> None:
    plan = make_plan(problem(16), tile=(4, 4), inner=inner, blocks_per_call=1)
    for program in plan.all_programs():
        index = last(list(program.steps), Attend)
        broken = edit(plan, program.rank, lambda steps, index=index: steps.pop(index))
        missed = [breach for breach in check(broken) if breach.rule == "coverage"]
        assert [breach.rank for breach in missed] == [program.rank]


def test_a_finish_that_comes_too_early_loses_a_partial() -> None:
    def change(steps: Steps) -> None:
        index = next(index for index, step in enumerate(steps) if isinstance(step, Finish))
        attend = max(i for i in range(index) if isinstance(steps[i], Attend))
        steps.insert(attend, steps.pop(index))

    assert "homecoming" in {breach.rule for breach in check(edit(mesh(), 0, change))}


def test_ranks_that_pass_on_for_each_other_in_one_turn_make_a_circle() -> None:
    """Rings of inner rings under a mask that leaves out shards: each of two waits for the other's turn to be over."""
    asked = Problem.self_attention(seq_len=64, heads=2, head_dim=8, ranks=4, mask=causal())
    moves = (*(Fetch("kv", offset) for offset in (1, 2, 3)), Meet((0,), (0,)), Meet((0,), (1, 2, 3)), Return("o", 0))
    plan = Plan(
        method="mesh",
        direction="forward",
        problem=asked,
        layout=Contiguous(),
        assignment=Assignment(Tile(1, 4), 1, Tile(1, 2)),
        schedule=Schedule(moves=moves, route="ring", partials="ring"),
    )
    breaches = check(plan)
    assert {breach.rule for breach in breaches} == {"progress"}, breaches
    with pytest.raises(ScheduleError, match="use direct routes"):
        make_plan(asked, tile=(1, 4), inner=(1, 2), route="ring", layout="contiguous")
