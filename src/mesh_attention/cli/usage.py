"""Python code for a tuner's choice: it runs, and makes the plans that were forecast."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import INPUTS, OUTPUTS, Direction
from mesh_attention.planning.choice import Choice
from mesh_attention.planning.costs import CALL_PRICES, Costs
from mesh_attention.planning.registry import make_plan
from mesh_attention.topology import Topology
from mesh_attention.tuning.traffic import costs_on

DIGITS = (1, 2, 3, 4, 6, 9, 17)
"""Significant digits of a cost; the fewest that make the same plan are written."""
DEFAULT_LAYOUT = "zigzag"
"""The default of `MeshAttention`."""


def cluster_code(cluster: str, *, layout: str, memory_nbytes: int | None, width: int) -> str:
    """Code that lets every rank tune."""
    arguments = [f"cluster={json.dumps(cluster)}"]
    if layout != DEFAULT_LAYOUT:
        arguments.append(f'layout="{layout}"')
    if memory_nbytes is not None:
        power = next(power for power in (30, 20, 10, 0) if memory_nbytes % 2**power == 0)
        arguments.append(f"memory_limit={memory_nbytes >> power}" + (f" * 2**{power}" if power else ""))
    return filled(f"attention = MeshAttention(group, {', '.join(arguments)})", width=width)


def explicit_code(
    choices: Mapping[Direction, Choice], plans: Mapping[Direction, Plan], topology: Topology, *, width: int
) -> str:
    """Code that states the choice, without a tuner or a cluster."""
    written = {d: _arguments(choice, plans[d], topology) for d, choice in choices.items()}
    first, *others = written.values()
    if all(other == first for other in others):
        names = ["Costs", "MeshAttention"] if "costs=" in first else ["MeshAttention"]
        statements = [f"attention = MeshAttention(group, {first})"]
    else:
        has_costs = any("costs=" in arguments for arguments in written.values())
        names = ["Costs"] * has_costs + ["MeshAttention", "make_plan"]
        by_pass = ", ".join(f'"{direction}": dict({arguments})' for direction, arguments in written.items())
        layout = f'layout="{next(iter(plans.values())).layout.name}"'
        statements = [
            f"options = {{{by_pass}}}",
            f"attention = MeshAttention(group, {layout}, planner=lambda problem, direction, layout: "
            "make_plan(problem, direction=direction, **options[direction]))",
        ]
    lines = [f"from mesh_attention import {', '.join(names)}", *statements]
    return "\n".join(filled(line, width=width) for line in lines)


def filled(statement: str, *, width: int) -> str:
    """The statement wrapped at spaces outside strings and tiles, which are all in brackets, where lines may end."""
    lines = [""]
    for word in re.findall(r'(?:"(?:\\.|[^"\\])*"|\(\d+, \d+\)|[^\s"])+', statement):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def _arguments(choice: Choice, plan: Plan, topology: Topology) -> str:
    costs = _least_costs(choice, plan, topology)
    written = ", ".join(f"{kind}={cost!r}" for kind, cost in costs.items())
    return f'choice="{choice}"' + (f", costs=Costs({written})" if costs else "")


def _least_costs(choice: Choice, plan: Plan, topology: Topology) -> dict[str, float]:
    """Costs that make this plan, with as few digits as do; empty if the plan is the same without."""
    for costs in _rounded(choice, plan, topology):
        given: dict[str, Any] = {"costs": Costs(**costs)} if costs else {}
        if make_plan(plan.problem, choice, direction=plan.direction, **given) == plan:
            return costs
    raise AssertionError("the exact costs do not make the same plan again")


def _rounded(choice: Choice, plan: Plan, topology: Topology) -> Iterator[dict[str, float]]:
    yield {}
    costs = asdict(costs_on(topology, plan.problem, choice, plan.direction))
    kinds = (*INPUTS[plan.direction], *OUTPUTS[plan.direction])
    names = [*kinds, *(price for price in CALL_PRICES if costs[price])]
    for digits in DIGITS:
        yield {name: float(f"{costs[name]:.{digits}g}") for name in names}
