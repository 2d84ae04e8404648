"""Checks a plan against every rule; shows all breaches at once, with the step table and the row marked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mesh_attention.errors import PlanError
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.program import Program
from mesh_attention.plan.text import format_step
from mesh_attention.units import count
from mesh_attention.verification.evidence import Breach, Evidence
from mesh_attention.verification.forms import form, missing
from mesh_attention.verification.rules import RULES

WHOLE_TABLE = 40
"""Programs up to this many steps are shown in full; longer ones around the marked rows only."""
SURROUNDINGS = 4
SHOWN_BREACHES = 20
SHOWN_RANKS = 3


class BrokenPlanError(PlanError):
    """A plan that breaks rules; `breaches` holds all breaches, the message shows the first ones with their step
    tables."""

    def __init__(self, plan: Plan, breaches: tuple[Breach, ...]) -> None:
        super().__init__(format_breaches(plan, breaches))
        self.breaches = breaches


def check(plan: Plan, *, on_progress: Callable[[str, float], None] | None = None) -> tuple[Breach, ...]:
    """Every breach of the rule of forms or, if there is none, of the other rules, which rely on it.

    `on_progress` gets the current task and the fraction done.
    """
    tell = on_progress or (lambda doing, fraction: None)
    ranks = plan.problem.ranks

    def programs() -> Iterator[Program]:
        for program in plan.all_programs():
            tell("building programs", 0.5 * program.rank / ranks)
            yield program

    built = list(programs())
    breaches = [breach for program in built for breach in missing(plan, program)]
    if breaches:
        return tuple(breaches)
    evidence = Evidence(plan, built)
    for number, (name, rule) in enumerate(RULES.items()):
        tell(f"checking {name}", 0.5 + 0.5 * number / len(RULES))
        breaches.extend(rule(evidence))
        if breaches and rule is form:
            break  # the other rules rely on it
    tell("checked", 1.0)
    return tuple(breaches)


def verify(plan: Plan) -> None:
    """Raise `BrokenPlanError` unless the plan keeps every rule."""
    breaches = check(plan)
    if breaches:
        raise BrokenPlanError(plan, breaches)


def format_breaches(plan: Plan, breaches: Sequence[Breach]) -> str:
    """The list of breaches, then the step table of the first ranks that have any."""
    rules = ", ".join(sorted({breach.rule for breach in breaches}))
    lines = [f"{plan!r} breaks the rules in {count(len(breaches), 'place')}: {rules}"]
    for breach in breaches[:SHOWN_BREACHES]:
        where = f"rank {breach.rank}" + (f" step {breach.step}" if breach.step is not None else "")
        lines.append(f"  {breach.rule}: {where}: {breach.message}")
    if len(breaches) > SHOWN_BREACHES:
        lines.append(f"  … and {len(breaches) - SHOWN_BREACHES} more")
    ranks = list(dict.fromkeys(b.rank for b in breaches if b.step is not None and b.rank < plan.problem.ranks))
    for rank in ranks[:SHOWN_RANKS]:
        marked = {b.step for b in breaches if b.rank == rank and b.step is not None}
        lines += ["", f"rank {rank}", *_step_table(plan.program(rank), marked)]
    return "\n".join(lines)


def _step_table(program: Program, marked: set[int]) -> Iterator[str]:
    total = len(program.steps)
    shown = [
        index
        for index in range(total)
        if total <= WHOLE_TABLE or any(abs(index - mark) <= SURROUNDINGS for mark in marked)
    ]
    previous = -1
    for index in shown:
        if index != previous + 1:
            yield "          …"
        mark = "-->" if index in marked else "   "
        yield f"  {mark} {index:4d}  {format_step(program.steps[index])}"
        previous = index
    if previous != total - 1:
        yield "          …"
