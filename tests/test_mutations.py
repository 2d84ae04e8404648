"""Break a good plan in one way at a time: for each rule there are mutations that this rule catches and no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mesh_attention import Contiguous, Plan, Problem, Tile, causal, full, make_plan, verify, window
from mesh_attention.errors import ScheduleError
from mesh_attention.plan.assignment import Assignment
from mesh_attention.plan.buffers import held_nbytes
from mesh_attention.plan.schedule import Fetch, Meet, Return, Schedule
from mesh_attention.plan.steps import Attend, Collective, Exchange, Finish, Free, Item, Merge, Recv, Send, Step
from mesh_attention.plan.text import parse_item, parse_step
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


def move(steps: Steps, text: str, to: int) -> None:
    step = steps.pop(find(steps, text))
    steps.insert(to, step)


def last(steps: Steps, kind: type[Step]) -> int:
    return max(index for index, step in enumerate(steps) if isinstance(step, kind))


# coverage


def drop_an_attend() -> Plan:
    return edit(mesh(), 0, lambda steps: steps.remove(parse_step("attend q1 x kv2")))


def attend_twice() -> Plan:
    plan = mesh()
    return edit(plan, 0, lambda steps: steps.insert(find(steps, "attend q1 x kv2"), parse_step("attend q1 x kv2")))


def attend_an_empty_block() -> Plan:
    return edit(contiguous_mesh(), 3, lambda steps: steps.insert(4, parse_step("attend q2 x home:kv3")))


def attend_with_the_gradient_of_another_row() -> Plan:
    def change(steps: Steps) -> None:
        steps[find(steps, "attend q2 x kv1 with do2")] = parse_step("attend q2 x kv1 with do3")
        move(steps, "free do3", len(steps) - 1)

    return edit(backward(), 3, change)


def attend_keys_as_queries() -> Plan:
    def change(steps: Steps) -> None:
        steps[find(steps, "attend q0 x kv0")] = parse_step("attend q0 x q0")

    return edit(mesh(), 0, change)


def attend_the_callers_tensors_with_received_shards() -> Plan:
    def change(steps: Steps) -> None:
        steps[find(steps, "attend q0,q1 x kv0,kv2")] = parse_step("attend home:q0,q1 x kv0,kv2")

    return edit(attention2d(), 0, change)


def finish_the_result_of_another_rank() -> Plan:
    """It would replace the rank's own result by zeros."""
    return edit(mesh(), 0, lambda steps: steps.extend([parse_step("clear o3~"), parse_step("finish home:o3")]))


def finish_some_heads_as_the_result() -> Plan:
    def change(steps: Steps) -> None:
        steps[find(steps, "finish o0")] = parse_step("finish home:o0")
        del steps[find(steps, "finish home:o0") + 1 :]

    return edit(ulysses(), 0, change)


def take_a_partial_under_another_name() -> Plan:
    """Merged twice under a name that no sender has."""

    def change(steps: Steps) -> None:
        steps[find(steps, "recv o0@1 from 1")] = parse_step("recv o0@3 from 1")
        steps[find(steps, "free o0@1")] = parse_step("free o0@3")
        at = find(steps, "merge o0@1")
        steps[at : at + 1] = [parse_step("merge o0@3"), parse_step("merge o0@3")]

    return edit(mesh(), 0, change)


def pass_on_a_partial_that_arrived() -> Plan:
    return edit(mesh(), 0, lambda steps: steps.insert(find(steps, "merge o0@1"), parse_step("send o0@1 to 2")))


def name_a_rank_twice_in_a_group() -> Plan:
    idle = Collective("gather", (0, 1, 1), (), ())
    plan = edit(attention2d(), 0, lambda steps: steps.insert(0, idle))
    return edit(plan, 1, lambda steps: steps.insert(0, idle))


def trade_a_piece_twice() -> Plan:
    plan = ulysses()
    for rank, side in ((0, "sends"), (1, "recvs")):

        def change(steps: Steps, side: str = side) -> None:
            first = steps[0]
            assert isinstance(first, Exchange)
            steps[0] = replace(first, **{side: getattr(first, side) * 2})

        plan = edit(plan, rank, change)
    return plan


def free_a_running_sum_and_start_again() -> Plan:
    return edit(mesh(), 0, lambda steps: steps.insert(find(steps, "attend q0 x kv2"), parse_step("free o0~")))


def free_the_result() -> Plan:
    return edit(mesh(), 0, lambda steps: steps.append(parse_step("free home:o0")))


def let_a_stranger_into_a_group() -> Plan:
    idle = Collective("gather", (1, 3), (), ())
    plan = attention2d()
    for rank in (0, 1, 3):
        plan = edit(plan, rank, lambda steps: steps.insert(0, idle))
    return plan


# presence


def finish_before_the_work_is_done() -> Plan:
    """An empty partial is sent, then the real one is computed and thrown away."""

    def change(steps: Steps) -> None:
        steps[0:0] = [parse_step("clear o1~"), parse_step("finish o1"), parse_step("free o1")]

    return edit(mesh(), 0, change)


def clear_and_finish_the_result_twice() -> Plan:
    return edit(mesh(), 0, lambda steps: steps.extend([parse_step("clear o0~"), parse_step("finish home:o0")]))


def clear_a_sum_that_has_something() -> Plan:
    return edit(mesh(), 0, lambda steps: steps.insert(find(steps, "finish o1"), parse_step("clear o1~")))


def gather_a_shard_twice() -> Plan:
    plan = attention2d()
    for rank, side in ((0, "recvs"), (1, "sends")):

        def change(steps: Steps, side: str = side) -> None:
            gather = steps[1]
            assert isinstance(gather, Collective)
            steps[1] = replace(gather, **{side: getattr(gather, side) * 2})

        plan = edit(plan, rank, change)
    return plan


def pack_the_wrong_input() -> Plan:
    def change(steps: Steps) -> None:
        steps[find(steps, "pack home:q0 -> q0")] = parse_step("pack home:kv0 -> q0")

    return edit(mesh(), 0, change)


def free_early() -> Plan:
    return edit(mesh(), 0, lambda steps: move(steps, "free kv2", last(steps, Attend)))


def attend_before_the_receive() -> Plan:
    return edit(mesh(), 0, lambda steps: move(steps, "attend q0 x kv2", 0))


def free_twice() -> Plan:
    return edit(mesh(), 0, lambda steps: steps.append(parse_step("free kv2")))


def lose_a_piece_on_both_sides() -> Plan:
    def lose(plan: Plan, rank: int, side: str, piece: str) -> Plan:
        def change(steps: Steps) -> None:
            for index, step in enumerate(steps):
                if isinstance(step, Exchange):
                    kept = tuple(end for end in getattr(step, side) if end.item != parse_item(piece))
                    steps[index] = replace(step, **{side: kept})

        return edit(plan, rank, change)

    return lose(lose(ulysses(), 0, "sends", "q0/1"), 1, "recvs", "q0/1")


# matching


def send_to_the_wrong_rank() -> Plan:
    def change(steps: Steps) -> None:
        steps[find(steps, "send q0 to 1")] = parse_step("send q0 to 3")

    return edit(mesh(), 0, change)


def drop_a_send() -> Plan:
    return edit(ring(), 2, lambda steps: steps.remove(parse_step("send kv2 to 3")))


def send_the_wrong_shard() -> Plan:
    def change(steps: Steps) -> None:
        steps[find(steps, "send kv2 to 0")] = parse_step("send kv0 to 0")

    return edit(mesh(), 2, change)


def receive_in_another_order() -> Plan:
    return edit(ring(), 3, lambda steps: move(steps, "recv kv1 from 2", 0))


def swap_two_collectives() -> Plan:
    def change(steps: Steps) -> None:
        first, second = (index for index, step in enumerate(steps[:2]) if isinstance(step, Exchange))
        steps[first], steps[second] = steps[second], steps[first]

    return edit(ulysses(), 1, change)


def stay_out_of_a_collective() -> Plan:
    """Rank 3 sends nothing and gets something; rank 0 gets nothing and sends; take a rank that does neither."""
    plan = windowed_attention2d()
    idle = Collective("gather", (0, 1, 2, 3), (), ())
    plan = edit(plan, 0, lambda steps: steps.insert(0, idle))
    return edit(plan, 1, lambda steps: steps.insert(0, idle))


def trade_partials_between_heads() -> Plan:
    """Ranks 0 and 1 hold the same place for different heads; each sends its KV to the other one's peer."""
    plan = ulysses()
    for rank, own, other in ((0, 2, 3), (1, 3, 2), (2, 0, 1), (3, 1, 0)):

        def change(steps: Steps, own: int = own, other: int = other) -> None:
            for index, step in enumerate(steps):
                if isinstance(step, Send) and step.dest == own:
                    steps[index] = replace(step, dest=other)
                if isinstance(step, Recv) and step.source == own:
                    steps[index] = replace(step, source=other)

        plan = edit(plan, rank, change)
    return plan


# progress


def send_a_turn_before_posting_the_receive() -> Plan:
    plan = mesh()
    for rank, text in ((0, "recv q1 from 1"), (1, "recv q0 from 0")):
        attend = f"attend q{rank} x kv{rank}"
        plan = edit(plan, rank, lambda steps, text=text, attend=attend: move(steps, text, find(steps, attend)))
    return plan


def wait_for_a_turn_where_something_sent_is_freed() -> Plan:
    """Each frees its queries, whose turn also receives a partial that the other computes only afterwards."""
    plan = make_plan(problem(2), method="pass-q")
    for rank, other in ((0, 1), (1, 0)):
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
        plan = edit(plan, rank, lambda steps, texts=texts: steps.__setitem__(slice(None), map(parse_step, texts)))
    return plan


def hold_up_a_send_by_a_receive_posted_before_it() -> Plan:
    """Posts run in order: the receive of a partial holds up the queries that the partial is computed from."""

    def change(steps: Steps) -> None:
        move(steps, "recv o0@1 from 1", 1)
        move(steps, "attend q0 x home:kv0", find(steps, "send q0 to 1"))
        move(steps, "free q0", len(steps) - 1)

    return edit(make_plan(problem(2), method="pass-q"), 0, change)


# homecoming


def merge_twice() -> Plan:
    return edit(mesh(), 0, lambda steps: steps.insert(find(steps, "merge o0@1"), parse_step("merge o0@1")))


def merge_twice_along_a_ring() -> Plan:
    def change(steps: Steps) -> None:
        index = next(index for index, step in enumerate(steps) if isinstance(step, Merge))
        steps.insert(index, steps[index])

    return edit(backward(), 1, change)


# purpose


def send_what_nobody_reads() -> Plan:
    def receive_and_free(steps: Steps) -> None:
        steps.insert(0, parse_step("recv q3 from 3"))
        steps.append(parse_step("free q3"))

    plan = edit(mesh(), 3, lambda steps: steps.insert(find(steps, "send q3 to 2"), parse_step("send q3 to 0")))
    return edit(plan, 0, receive_and_free)


# tidiness


def forget_the_last_free() -> Plan:
    return edit(mesh(), 0, lambda steps: steps.pop(last(steps, Free)), honest=False)


def throw_away_what_is_to_be_kept() -> Plan:
    return edit(keeping(), 0, lambda steps: steps.append(parse_step("free kv2")))


# memory


def free_late() -> Plan:
    return edit(ring(), 0, lambda steps: move(steps, "free kv3", len(steps) - 1), honest=False)


def understate_the_peak() -> Plan:
    plan = mesh()
    programs = tuple(replace(program, peak_nbytes=program.peak_nbytes - 1) for program in plan.all_programs())
    return plan.with_programs(programs)


CAUGHT_BY = {
    "form": (
        attend_with_the_gradient_of_another_row,
        attend_keys_as_queries,
        pack_the_wrong_input,
        lose_a_piece_on_both_sides,
        trade_partials_between_heads,
        let_a_stranger_into_a_group,
        attend_the_callers_tensors_with_received_shards,
        finish_the_result_of_another_rank,
        finish_some_heads_as_the_result,
        take_a_partial_under_another_name,
        pass_on_a_partial_that_arrived,
        name_a_rank_twice_in_a_group,
        trade_a_piece_twice,
        free_a_running_sum_and_start_again,
        free_the_result,
    ),
    "coverage": (drop_an_attend, attend_twice, attend_an_empty_block),
    "presence": (
        free_early,
        attend_before_the_receive,
        free_twice,
        finish_before_the_work_is_done,
        clear_a_sum_that_has_something,
        gather_a_shard_twice,
    ),
    "matching": (
        send_to_the_wrong_rank,
        drop_a_send,
        send_the_wrong_shard,
        receive_in_another_order,
        swap_two_collectives,
        stay_out_of_a_collective,
    ),
    "progress": (
        send_a_turn_before_posting_the_receive,
        wait_for_a_turn_where_something_sent_is_freed,
        hold_up_a_send_by_a_receive_posted_before_it,
    ),
    "homecoming": (merge_twice, merge_twice_along_a_ring),
    "purpose": (send_what_nobody_reads,),
    "tidiness": (forget_the_last_free, throw_away_what_is_to_be_kept),
    "memory": (free_late, understate_the_peak),
}
BASES = (mesh, contiguous_mesh, ring, backward, attention2d, windowed_attention2d, ulysses, keeping)


@pytest.mark.parametrize("base", BASES)
def test_the_plans_before_mutation_are_right(base: Callable[[], Plan]) -> None:
    assert check(base()) == ()


@pytest.mark.parametrize(
    ("rule", "mutation"), [(rule, mutation) for rule, mutations in CAUGHT_BY.items() for mutation in mutations]
)
def test_a_mutation_is_caught_by_its_rule_and_no_other(rule: str, mutation: Callable[[], Plan]) -> None:
    assert {breach.rule for breach in check(mutation())} == {rule}


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
    plan = make_plan(problem(mask=full()), method="attention2d", tile=(2, 2), keep=("kv",))
    assert check(plan) == ()
    given, taken = parse_step("attend q0,q1 x kv1,kv3"), parse_step("attend q0,q1 x kv3")

    def hand_over(steps: Steps) -> None:
        steps[steps.index(given)] = taken

    def take_over(steps: Steps) -> None:
        at = find(steps, "attend q0,q1 x kv0,kv2")
        steps[at] = parse_step("attend q0,q1 x kv0,kv1,kv2")
        steps[at + 1 : at + 1] = [parse_step("free kv1")]
        steps.insert(at, parse_step("recv kv1 from 1"))

    plan = edit(edit(plan, 1, hand_over), 0, take_over)
    plan = edit(plan, 1, lambda steps: steps.insert(find(steps, "attend q0,q1 x kv3"), parse_step("send kv1 to 0")))
    assert [(b.rule, b.rank, b.message.partition(":")[0]) for b in check(plan)] == [("tidiness", 0, "kv1")]


def test_a_result_of_zeros_after_the_real_one_is_noticed() -> None:
    assert {breach.rule for breach in check(clear_and_finish_the_result_twice())} == {"presence", "homecoming"}


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
    plan = edit(drop_an_attend(), 1, lambda steps: steps.append(parse_step("free q3")))
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
