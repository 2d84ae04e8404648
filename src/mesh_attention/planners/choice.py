"""`Choice`: how to plan, as one value. Planners, tuner, command line, tables and pages all speak of it.

A choice says which method on which tile, times which Ulysses degree, on which layout and routes. Fields left open are
filled in for a problem by `resolved`; `make_plan` turns a resolved choice into the plan of one pass. Its text reads
back, in upper or lower case:

    mesh
    ring 1x8, zigzag
    ulysses 8 + mesh 4x8, zigzag, inner 2x2, route ring, 4 blocks per call, keep q+kv
    ulysses 8, 2 waves of rows

The names of families are taken too: `usp 8`, `double ring, inner 1x8`, `all-gather 1x16`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Literal, TypedDict, get_args

from typing_extensions import Unpack

from mesh_attention.errors import ParseError, ScheduleError, TileError, UsageError
from mesh_attention.plan.assignment import Assignment, Cut, Tile, as_tile, check_assignment, check_degree, check_waves
from mesh_attention.plan.layout import LAYOUTS, PLANNED_LAYOUTS, Contiguous, Layout, Zigzag, parse_layout
from mesh_attention.plan.schedule import Route, Schedule
from mesh_attention.plan.steps import Direction, Keep
from mesh_attention.planners.costs import least_volume_degree, least_volume_tile
from mesh_attention.problem import Problem, check_whole
from mesh_attention.units import brief

Method = Literal["mesh", "ring", "pass-q", "attention2d", "ulysses"]
METHODS: tuple[Method, ...] = get_args(Method)
COLLECTIVE_METHODS: tuple[Method, ...] = ("attention2d", "ulysses")
"""Methods without an order of transfers, and so without routes, grouping and costs."""
Family = Literal[
    "ring",
    "all-gather",
    "pass-q",
    "ulysses",
    "attention2d",
    "mesh",
    "usp",
    "double ring",
    "ulysses+attention2d",
    "ulysses+mesh",
]
_HEAD = re.compile(r"(?:ulysses (?P<degree>\d{1,9}) ?\+ ?)?(?P<name>double ring|[a-z0-9-]+)(?: (?P<rest>\S+))?")
_NAMED_FAMILIES = {
    "usp": ("ring", "ulysses_degree", "usp 8"),
    "double ring": ("ring", "inner", "double ring, inner 1x8"),
    "all-gather": ("attention2d", "tile", "all-gather 1x16"),
}
"""Families that are named otherwise than their method: the method, and the field that makes it this family."""
FAMILIES: tuple[Family, ...] = get_args(Family)
"""Simplest first."""


class ChoiceOptions(TypedDict, total=False):
    """A choice as keyword arguments; None, or a tile of "auto", leaves a field open."""

    method: Method | None
    tile: Tile | tuple[int, int] | str | None
    ulysses_degree: int | None
    inner: Tile | tuple[int, int] | str | None
    layout: Layout | str | None
    route: Route | None
    partials: Route | None
    blocks_per_call: int | None
    keep: tuple[Keep, ...] | None
    waves: int | None
    cut: Cut | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to plan. Without a tile, the one that moves the fewest bytes; without a layout, the one that suits the
    mask.

    `inner` is the part of the grid that one node holds (see `plan.assignment`). `route` is how shards travel and
    `partials` how partial results do. Without `blocks_per_call`, costs that state what a call costs decide how large
    each call is; without such costs a call is one block. `keep` names what forward leaves gathered for backward, and
    "own", the inputs of its own place as exchanged. In `waves`, heads or rows (`cut`) go through the moves one part
    after another, so that exchanges and first fetches hide behind compute.
    """

    method: Method = "mesh"
    tile: Tile | None = None
    ulysses_degree: int | None = None
    inner: Tile | None = None
    layout: Layout | None = None
    route: Route = "direct"
    partials: Route = "direct"
    blocks_per_call: int | None = None
    keep: tuple[Keep, ...] = ()
    waves: int = 1
    cut: Cut = "heads"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ScheduleError(f"method {brief(self.method)}: expected one of {', '.join(METHODS)}")
        # These raise for what does not exist, or does not go together.
        Schedule(moves=(), route=self.route, partials=self.partials, keep=self.keep)
        Assignment(Tile(1, 1), waves=self.waves, cut=self.cut)
        if not isinstance(self.layout, Layout | None):
            raise ScheduleError(f"layout {brief(self.layout)}: expected one of {', '.join(LAYOUTS)}")
        blocks = self.blocks_per_call
        if blocks is not None:
            check_whole(ScheduleError, blocks_per_call=blocks)
        if self.is_collective:
            ordered = {"route": self.route == "ring", "partials": self.partials == "ring", "blocks_per_call": blocks}
            surplus = [name for name, value in ordered.items() if value]
            if surplus:
                raise ScheduleError(f"{self.method} uses collectives and has no {', '.join(surplus)}; use mesh instead")
        if self.tile is not None and self.inner is not None:  # the same placement has one spelling
            object.__setattr__(self, "inner", self.assignment.inner)

    @classmethod
    def of(cls, **options: Unpack[ChoiceOptions]) -> Choice:
        """A choice from what a caller may write, such as ``tile="4x8", layout="zigzag"``."""
        stated: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        if stated.get("tile") == "auto":
            del stated["tile"]
        known = [field.name for field in fields(cls)]
        for name in stated:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise UsageError(f"unknown argument {name!r}; {hint}expected some of {', '.join(known)}")
        for name in ("tile", "inner"):
            if name in stated:
                stated[name] = as_tile(stated[name])
        if isinstance(stated.get("layout"), str):
            stated["layout"] = parse_layout(stated["layout"])
        if isinstance(stated.get("keep"), list):
            stated["keep"] = tuple(stated["keep"])
        return cls(**stated)

    @property
    def options(self) -> dict[str, Any]:
        """The fields as plain values, for JSON; `Choice.of` reads them back."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        texts = {name: None if values[name] is None else str(values[name]) for name in ("tile", "inner")}
        return values | texts | {"layout": None if self.layout is None else self.layout.text}

    # The grid

    @property
    def is_collective(self) -> bool:
        return self.method in COLLECTIVE_METHODS

    @property
    def assignment(self) -> Assignment:
        """The grid of a choice that has a tile."""
        if self.tile is None:
            raise ScheduleError(f"{self} has no tile yet; use choice.resolved(problem, direction) first")
        return Assignment(self.tile, self.ulysses_degree or 1, self.inner, self.waves, self.cut)

    def resolved(self, problem: Problem, direction: Direction) -> Choice:
        """The choice with tile, degree and layout filled in for a pass of the problem, or an error if it does not fit.

        What is kept gathered must suit both passes, so both take forward's tile.
        """
        layout = default_layout(problem) if self.layout is None else self.layout
        degree = self._degree(problem)
        check_degree(degree, problem)
        check_waves(self.waves, self.cut, degree, problem)
        if "own" in self.keep and degree == 1:
            raise ScheduleError("keep own needs a Ulysses degree above 1: without one, no input changes its form")
        tile = self._tile(problem, degree)
        if tile is None:
            same = "forward" if set(self.keep) - {"own"} else direction
            tile = least_volume_tile(problem, layout, same, ulysses_degree=degree)
        return replace(self, tile=tile, ulysses_degree=degree, layout=layout)

    def _degree(self, problem: Problem) -> int:
        if self.method != "ulysses":
            return 1 if self.ulysses_degree is None else self.ulysses_degree
        if self.ulysses_degree not in (None, problem.ranks):
            raise TileError(
                f"method ulysses spreads heads over all {problem.ranks} ranks, got ulysses_degree="
                f"{self.ulysses_degree}; leave it out, or use another method with that ulysses_degree"
            )
        return problem.ranks

    def _tile(self, problem: Problem, degree: int) -> Tile | None:
        places = problem.ranks // degree
        fixed = {"ring": Tile(1, places), "pass-q": Tile(places, 1), "ulysses": Tile(1, 1)}.get(self.method)
        if fixed is not None and self.tile not in (None, fixed):
            raise TileError(
                f"method {self.method} uses the {fixed} tile here, got {self.tile}; leave the tile out or use mesh"
            )
        if fixed is None and self.tile is not None:
            check_assignment(Assignment(self.tile, degree), problem)
        return fixed or self.tile

    # Names

    @property
    def family(self) -> Family:
        """The name this choice has in the literature; of a choice that has a tile."""
        assignment = self.assignment
        tile, ulysses = assignment.tile, assignment.ulysses_degree
        if tile == Tile(1, 1):
            return "ulysses"
        if self.is_collective:
            if tile.rows == 1 and ulysses == 1:
                return "all-gather"
            return "attention2d" if ulysses == 1 else "ulysses+attention2d"
        if tile.rows == 1 and 1 < assignment.inner_size("col") < tile.cols and self.route == "ring":
            return "double ring"
        if ulysses > 1:
            return "usp" if tile.rows == 1 else "ulysses+mesh"
        return "ring" if tile.rows == 1 else "pass-q" if tile.cols == 1 else "mesh"

    def __str__(self) -> str:
        degree = self.ulysses_degree
        if self.method == "ulysses":
            method = "ulysses" if degree is None else f"ulysses {degree}"
        else:
            method = self.method if degree in (None, 1) else f"ulysses {degree} + {self.method}"
        tile = "" if self.tile is None or self.method == "ulysses" else f" {self.tile}"
        return ", ".join([method + tile, *self._details()])

    def _details(self) -> list[str]:
        blocks = self.blocks_per_call
        details = [
            "" if self.layout is None else self.layout.name,
            "" if self.inner is None else f"inner {self.inner}",
            "" if self.route == "direct" else f"route {self.route}",
            "" if self.partials == "direct" else f"partials {self.partials}",
            "" if blocks is None else f"{blocks} block{'s' * (blocks > 1)} per call",
            f"keep {'+'.join(self.keep)}" if self.keep else "",
            "" if self.waves == 1 else Assignment(Tile(1, 1), waves=self.waves, cut=self.cut).waves_text,
        ]
        return [detail for detail in details if detail]

    @classmethod
    def parse(cls, text: str) -> Choice:
        """Reads back what `str` gives, and the families' names, such as ``usp 8``; in upper or lower case."""
        head, *details = (part.strip() for part in text.lower().split(","))
        match = _HEAD.fullmatch(head)
        if match is None:
            raise ParseError(f"choice {text!r}: expected text such as 'mesh 4x8, zigzag' or 'ulysses 8 + mesh 4x8'")
        name, rest = match["name"], match["rest"]
        method, needed, example = _NAMED_FAMILIES.get(name, (name, None, ""))
        stated: list[tuple[str, Any]] = [("method", method)]
        if match["degree"] is not None:
            stated.append(("ulysses_degree", int(match["degree"])))
        if name == "double ring":
            stated.append(("route", "ring"))
        if rest is not None:
            is_degree = name in ("ulysses", "usp") and rest.isdecimal() and len(rest) < 10
            stated.append(("ulysses_degree", int(rest)) if is_degree else ("tile", rest))
        for detail in details:
            stated += _detail(detail, text).items()
        names = [name for name, _ in stated]
        twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        if twice:
            raise ParseError(f"choice {text!r} states {', '.join(twice)} twice; state it once")
        if needed is not None and needed not in names:
            raise ParseError(f"choice {text!r}: {name} needs its {needed}, such as '{example}'")
        options: dict[str, Any] = dict(stated)
        choice = cls.of(**options)
        if name == "all-gather" and choice.assignment.tile.rows != 1:
            raise ParseError(f"choice {text!r}: all-gather uses a tile of one row, got {choice.tile}; use attention2d")
        return choice


def as_choice(choice: Choice | str | None, **options: Unpack[ChoiceOptions]) -> Choice:
    """A choice from any form a caller may use: a Choice, its text, or its fields as keywords."""
    if choice is None:
        return Choice.of(**options)
    stated = [name for name, value in options.items() if value is not None]
    if stated:
        raise UsageError(f"{', '.join(stated)} cannot be combined with a choice; give one or the other")
    if isinstance(choice, str):
        return Choice.parse(choice)
    if not isinstance(choice, Choice):
        raise UsageError(f"choice {brief(choice)}: expected a Choice, or its text, such as 'mesh 4x8, zigzag'")
    return choice


def _detail(detail: str, text: str) -> Mapping[str, Any]:
    if detail in PLANNED_LAYOUTS:
        return {"layout": detail}
    name, _, value = detail.partition(" ")
    if name in ("inner", "route", "partials") and value:
        return {name: value}
    if name == "keep" and value:
        return {"keep": tuple(value.split("+"))}
    if name.isdecimal() and len(name) < 10 and value in ("block per call", "blocks per call"):
        return {"blocks_per_call": int(name)}
    if name.isdecimal() and len(name) < 10 and value in ("wave", "waves", "waves of rows"):
        return {"waves": int(name), "cut": "rows" if value.endswith("rows") else "heads"}
    raise ParseError(
        f"choice {text!r}: cannot read {detail!r}; expected a layout ({', '.join(LAYOUTS)}), inner AxB, route NAME, "
        "partials NAME, N blocks per call, keep KINDS, N waves or N waves of rows"
    )


UNPRICED_WAVES = 2
"""With Ulysses, where no machine is known. More hide more of the exchanges, but cut calls into smaller ones. Waves of
rows need blocks of two ranks: the exchanges of two ranks are short."""


def least_volume_choice(
    problem: Problem, layout: Layout, directions: Sequence[Direction], *, may_keep: bool = False
) -> Choice:
    """The choice that moves the fewest bytes over these passes. Its tile is open, so that each pass has its own."""
    degree = least_volume_degree(problem, layout, directions, may_keep=may_keep)
    choice = Choice(ulysses_degree=degree, layout=layout)
    if degree == 1:
        return choice
    if degree == problem.ranks:
        choice = replace(choice, method="ulysses")
    choice = replace(choice, keep=("own",) if may_keep else ())
    if problem.kv_heads // degree % UNPRICED_WAVES == 0:
        return replace(choice, waves=UNPRICED_WAVES)
    if degree % (2 * UNPRICED_WAVES) == 0:
        return replace(choice, waves=UNPRICED_WAVES, cut="rows")
    return choice


def default_layout(problem: Problem) -> Layout:
    """Zigzag where a mask makes later tokens see more; otherwise contiguous, which keeps windows local."""
    mask = problem.mask
    return Zigzag() if mask.right is not None and mask.left is None else Contiguous()
