"""Break a good plan in one way at a time: for each rule there are mutations that this rule catches and no other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from mesh_attention import Contiguous, Plan, Problem, Tile, causal, full, make_plan, verify, window
from mesh_attention.errors import ScheduleError
from mesh_attention.plan.assignment import Assignment
from mesh_attention.plan.buffer_sizes import held_nbytes
from mesh_attention.plan.format import format_step
from mesh_attention.plan.parse import parse_item, parse_step
from mesh_attention.plan.schedule import Fetch, Meet, Return, Schedule
from mesh_attention.plan.steps import Attend, Collective, Exchange, Finish, Free, Merge, Recv, Send, Step
from mesh_attention.planners.over_cache import Combining, Queries, StepShape, plan_decode
from mesh_attention.verification.rules import RULES, Breach, BrokenPlanError, check

Steps = list[Step]


def problem(ranks: int = 4, **changes: object) -> Problem:
    base = Problem.self_attention(seq_len=16 * ranks, heads=4, head_dim=8, ranks=ranks, mask=causal())
    return replace(base, **changes)


mesh = partial(make_plan, problem(), tile=(2, 2))
contiguous_mesh = partial(make_plan, problem(), tile=(2, 2), layout=Contiguous())
ring = partial(make_plan, problem(), method="ring", route="ring")
backward = partial(make_plan, problem(), tile=(2, 2), direction="backward", route="ring", partials="ring")
attention2d = partial(make_plan, problem(), method="attention2d", tile=(2, 2))
windowed_attention2d = partial(make_plan, problem(mask=window(4, 0)), method="attention2d", tile=(1, 4))
ulysses = partial(make_plan, problem(), tile=(1, 2), ulysses_degree=2)
pass_q = partial(make_plan, problem(2), method="pass-q")
keeping = partial(make_plan, problem(), tile=(2, 2), keep=("kv",))


def decoding(queries: Queries = "replicated", combining: Combining | None = None) -> Plan:
    sizes = {"ranks": 3, "heads": 2, "kv_heads": 1, "head_dim_qk": 4, "head_dim_v": 4}
    return plan_decode(StepShape(new_tokens=(1, 2, 1), dtype="float64", **sizes), queries=queries, combining=combining)


decoding_slices = partial(decoding, combining="reduce_scatter")
decoding_sharded = partial(decoding, "sharded")


def edit(plan: Plan, rank: int, change_steps: Callable[[Steps], None], *, honest: bool = True) -> Plan:
    """The plan with one rank's steps changed; an honest change also states the memory it needs."""
    programs = list(plan.unrolled().programs or ())
    steps = list(programs[rank].steps)
    change_steps(steps)
    kept = plan.matrix.kept(plan.schedule.keep, rank)
    peak = max(held_nbytes(steps, plan.matrix, kept=kept)) if honest else programs[rank].peak_nbytes
    programs[rank] = replace(programs[rank], steps=tuple(steps), peak_nbytes=max(peak, programs[rank].peak_nbytes))
    return plan.with_programs(tuple(programs))


def find(steps: Steps, text: str) -> int:
    return steps.index(parse_step(text))


def last(steps: Steps, kind: type[Step]) -> int:
    return max(index for index, step in enumerate(steps) if isinstance(step, kind))


# Changes of one rank's steps, as tests/mutations.txt writes them

PLACE = re.compile(r"(.*?)(?: (?:before|at) ([^&]+))?")


def change(steps: Steps, text: str) -> None:
    verb, _, rest = text.partition(" ")
    found = PLACE.fullmatch(rest)
    assert found is not None
    what, place = found.groups()
    match verb:
        case "drop":
            steps.remove(parse_step(rest))
        case "put" | "move":
            if verb == "move":
                steps.remove(parse_step(what))
            at = place_of(steps, place)
            steps[at:at] = parse_steps(what)
        case "turn":
            old, new = rest.split(" => ")
            at = find(steps, old)
            steps[at : at + 1] = parse_steps(new)
        case "only":
            steps[:] = parse_steps(rest)
        case "end":
            del steps[find(steps, rest.removeprefix("before ")) :]
        case _:
            OTHERS[verb](steps, *rest.split())


def parse_steps(text: str) -> Steps:
    return [parse_step(step) for step in text.split(" & ")]


def place_of(steps: Steps, text: str | None) -> int:
    if text is None:
        return len(steps)
    return last(steps, Attend) if text == "the last attend" else int(text) if text.isdigit() else find(steps, text)


def idle(steps: Steps, *group: str) -> None:
    """Take part in a gather of nothing."""
    steps.insert(0, Collective("gather", tuple(map(int, group)), (), ()))


def double(steps: Steps, side: str, at: str) -> None:
    """What a collective step sends or receives, twice."""
    step = steps[int(at)]
    assert isinstance(step, Collective | Exchange)
    steps[int(at)] = replace(step, **{side: getattr(step, side) * 2})


def send_for(steps: Steps, other: str, _: str, own: str) -> None:
    """Send another item in collectives."""
    for index, step in enumerate(steps):
        if isinstance(step, Collective):
            steps[index] = parse_step(format_step(step).replace(f"send {own} to ", f"send {other} to "))


def lose(steps: Steps, side: str, piece: str) -> None:
    for index, step in enumerate(steps):
        if isinstance(step, Exchange):
            kept = tuple(end for end in getattr(step, side) if end.item != parse_item(piece))
            steps[index] = replace(step, **{side: kept})


def swap_the_first_two(steps: Steps) -> None:
    assert all(isinstance(step, Exchange) for step in steps[:2])
    steps[:2] = steps[1::-1]


def change_peer(steps: Steps, own: str, other: str) -> None:
    for index, step in enumerate(steps):
        if isinstance(step, Send) and step.dest == int(own):
            steps[index] = replace(step, dest=int(other))
        if isinstance(step, Recv) and step.source == int(own):
            steps[index] = replace(step, source=int(other))


def merge_again(steps: Steps, _: str) -> None:
    index = next(index for index, step in enumerate(steps) if isinstance(step, Merge))
    steps.insert(index, steps[index])


OTHERS: dict[str, Callable[..., None]] = {
    "idle": idle,
    "double": double,
    "send": send_for,
    "lose": lose,
    "swap": swap_the_first_two,
    "peer": change_peer,
    "merge": merge_again,
}


def changed(plan: Plan, *changes: str) -> Plan:
    """Each change begins with the rank, as in "0: drop attend q1 x kv2"; several of one rank are apart by |."""
    for line in changes:
        rank, _, texts = line.partition(": ")

        def change_all(steps: Steps, texts: str = texts) -> None:
            for text in texts.split(" | "):
                change(steps, text)

        plan = edit(plan, int(rank), change_all)
    return plan


def understate_the_peak() -> Plan:
    plan = mesh()
    programs = tuple(replace(program, peak_nbytes=program.peak_nbytes - 1) for program in plan.all_programs())
    return plan.with_programs(programs)


def mutations() -> Iterator[tuple[str, str, list[str]]]:
    """The rule, the name and the lines of each mutation."""
    rule = ""
    for block in (Path(__file__).parent / "mutations.txt").read_text().split("\n\n")[1:]:
        rule, *lines = [line for line in block.splitlines() if not line.strip().startswith("#")]
        starts = [at for at, line in enumerate(lines) if not line.startswith("    ")]
        for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
            yield rule, lines[start].strip(), [line.strip() for line in lines[start + 1 : stop]]


CAUGHT_BY = list(mutations())
DISHONEST: dict[str, Callable[[], Plan]] = {
    "tidiness": lambda: edit(mesh(), 0, lambda steps: steps.pop(last(steps, Free)), honest=False),
    "memory": lambda: edit(ring(), 0, lambda steps: change(steps, "move free kv3"), honest=False),
}
"""A step that frees is dropped, or comes at the end, and the stated peak stays."""
BASES: dict[str, Callable[[], Plan]] = {
    "mesh": mesh,
    "contiguous_mesh": contiguous_mesh,
    "ring": ring,
    "backward": backward,
    "attention2d": attention2d,
    "windowed_attention2d": windowed_attention2d,
    "ulysses": ulysses,
    "pass_q": pass_q,
    "keeping": keeping,
    "decoding": decoding,
    "decoding_slices": decoding_slices,
    "decoding_sharded": decoding_sharded,
}


@pytest.mark.parametrize("base", BASES)
def test_the_plans_before_mutation_are_right(base: str) -> None:
    assert check(BASES[base]()) == ()


@pytest.mark.parametrize(("rule", "name", "lines"), CAUGHT_BY, ids=[name for _, name, _ in CAUGHT_BY])
def test_a_mutation_is_caught_by_its_rule_and_no_other(rule: str, name: str, lines: list[str]) -> None:
    base = BASES[lines[0].split()[0]]
    assert {breach.rule for breach in check(changed(base(), *(line.partition(" ")[2] for line in lines)))} == {rule}


@pytest.mark.parametrize("rule", DISHONEST)
def test_memory_that_is_not_stated_is_noticed(rule: str) -> None:
    assert {breach.rule for breach in check(DISHONEST[rule]())} == {rule}
    assert {breach.rule for breach in check(understate_the_peak())} == {"memory"}


def with_step(step: Step) -> tuple[Breach, ...]:
    """What is wrong with a plan with one more step; tests/golden/python/steps.txt has steps that are none."""
    return check(edit(mesh(), 0, lambda steps: steps.insert(3, step), honest=False))


def test_kept_items_share_a_buffer_with_nothing_else() -> None:
    """Rank 0 attends a column of another rank's together with those it keeps: backward would find them elsewhere."""
    plan_before = make_plan(problem(mask=full()), method="attention2d", tile=(2, 2), keep=("kv",))
    assert check(plan_before) == ()
    plan = changed(
        plan_before,
        "1: turn attend q0,q1 x kv1,kv3 => send kv1 to 0 & attend q0,q1 x kv3",
        "0: turn attend q0,q1 x kv0,kv2 => recv kv1 from 1 & attend q0,q1 x kv0,kv1,kv2 & free kv1",
    )
    assert [(b.rule, b.rank, b.message.partition(":")[0]) for b in check(plan)] == [("tidiness", 0, "kv1")]


def test_a_result_of_zeros_after_the_real_one_is_noticed() -> None:
    plan = changed(mesh(), "0: put clear o0~ & finish home:o0")
    assert {breach.rule for breach in check(plan)} == {"presence", "homecoming"}


def test_every_rule_has_a_mutation_of_its_own() -> None:
    assert {rule for rule, _, _ in CAUGHT_BY} | set(DISHONEST) == set(RULES)


@pytest.mark.parametrize("base", BASES)
def test_no_step_can_be_dropped_unnoticed(base: str) -> None:
    plan = BASES[base]()
    for program in plan.all_programs():
        for index, step in enumerate(program.steps):
            broken = edit(plan, program.rank, lambda steps, index=index: steps.pop(index))
            assert check(broken), f"rank {program.rank} step {index} ({step}) was dropped and nobody noticed"


def test_all_breaches_come_at_once_with_the_row_marked() -> None:
    plan = changed(mesh(), "0: drop attend q1 x kv2", "1: put free q3")
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
    def finish_early(steps: Steps) -> None:
        index = next(index for index, step in enumerate(steps) if isinstance(step, Finish))
        attend = max(i for i in range(index) if isinstance(steps[i], Attend))
        steps.insert(attend, steps.pop(index))

    assert "homecoming" in {breach.rule for breach in check(edit(mesh(), 0, finish_early))}


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
