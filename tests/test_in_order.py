"""Plans get through on a transport that runs posts strictly one after the other, as NCCL does on its one stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from attention_cases import methods
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import Recv, Send, Step, transfers
from mesh_attention.plan.waits import stops
from mesh_attention.planning.registry import make_plan
from mesh_attention.problem import Problem
from mesh_attention.testing.strategies import plans

Transfer = tuple[int, int, int]
"""Source, destination, and the how manieth between these two."""


def posts(steps: Sequence[Step], rank: int) -> list[list[Transfer]]:
    """The transfers of each post of a rank, as one end sees them."""
    counts: Counter[tuple[int, int]] = Counter()
    found = []
    for stop in stops(steps):
        here: list[Transfer] = []
        for step in steps[stop.span.start : stop.span.stop]:
            sends, recvs = transfers(step)
            for source, dest in [(rank, send.dest) for send in sends] + [(recv.source, rank) for recv in recvs]:
                here.append((source, dest, counts[source, dest]))
                counts[source, dest] += 1
        if here:
            found.append(here)
    return found


def stuck_ranks(programs: Sequence[Sequence[Step]]) -> list[int]:
    """Ranks that never get through, if a post begins when the one before it is over, and is over when all its
    transfers have begun at their other ends."""
    queues = [posts(steps, rank) for rank, steps in enumerate(programs)]
    begun: Counter[Transfer] = Counter(transfer for queue in queues if queue for transfer in queue[0])
    at, moved = [0] * len(queues), True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            while at[rank] < len(queue) and all(begun[transfer] == 2 for transfer in queue[at[rank]]):
                at[rank] += 1
                moved = True
                begun.update(queue[at[rank]] if at[rank] < len(queue) else ())
    return [rank for rank, queue in enumerate(queues) if at[rank] < len(queue)]


@settings(max_examples=200, deadline=None)
@given(plans())
def test_no_plan_gets_stuck_in_order(plan: Plan) -> None:
    assert not stuck_ranks([plan.program(rank).steps for rank in range(plan.problem.ranks)])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([2, 6, 8, 12]), st.sampled_from(["forward", "backward"]), st.data())
def test_no_planner_gets_stuck_in_order(ranks: int, direction: str, data: st.DataObject) -> None:
    problem = Problem.self_attention(seq=96, heads=4, kv_heads=2, head_dim=8, ranks=ranks)
    options = data.draw(st.sampled_from(methods(ranks, 2)))
    plan = make_plan(problem, direction=direction, **options)  # type: ignore[arg-type]
    assert not stuck_ranks([plan.program(rank).steps for rank in range(ranks)])


def test_the_test_for_order_can_fail() -> None:
    """Two ranks that each send first and receive later, in posts of their own, wait for each other."""
    plan = make_plan(Problem.self_attention(seq=8, heads=1, head_dim=8, ranks=2), method="ring")
    programs = [plan.program(rank).steps for rank in range(2)]
    recvs, sends = ([step for steps in programs for step in steps if isinstance(step, kind)] for kind in (Recv, Send))
    others = [step for step in programs[0] if not isinstance(step, Recv | Send)][:1]
    apart = [(sends[rank], *others, recvs[rank]) for rank in range(2)]
    assert stuck_ranks(apart) == [0, 1]
