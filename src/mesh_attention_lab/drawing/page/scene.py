"""A scene: one choice of ranks, method and tile, with what is known about it. Checked here; drawn elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mesh_attention.errors import UsageError
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import DIRECTIONS, Direction
from mesh_attention.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One choice of ranks, method and tile.

    `forecasts` are simulated, of every pass that has a plan, with spans of the ranks whose timeline is to be shown;
    `measured` are the same passes as they really ran, where they did.
    """

    method: str
    plans: Mapping[Direction, Plan]
    forecasts: Mapping[Direction, Timeline]
    measured: Mapping[Direction, Timeline] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.plans or any(direction not in DIRECTIONS for direction in self.plans):
            raise UsageError(
                f"scene {self.method!r} has plans for {_listed(self.plans)}; expected forward, backward or both"
            )
        if set(self.forecasts) != set(self.plans):
            raise UsageError(
                f"scene {self.method!r} has plans for {_listed(self.plans)} and forecasts for "
                f"{_listed(self.forecasts)}; simulate each plan, and nothing else"
            )
        if not set(self.measured) <= set(self.plans):
            raise UsageError(
                f"scene {self.method!r} was measured for {_listed(self.measured)} and planned for "
                f"{_listed(self.plans)}; give the plans that were run"
            )
        self._check_plans()
        self._check_timelines()

    @property
    def ranks(self) -> int:
        return next(iter(self.plans.values())).problem.ranks

    @property
    def directions(self) -> tuple[Direction, ...]:
        return tuple(direction for direction in DIRECTIONS if direction in self.plans)

    @property
    def tile(self) -> str:
        """The tile as the page shows it; both tiles if the passes differ."""
        tiles = dict.fromkeys(str(self.plans[direction].assignment) for direction in self.directions)
        return " / ".join(tiles)

    def _check_plans(self) -> None:
        for direction, plan in self.plans.items():
            if plan.direction != direction:
                raise UsageError(f"scene {self.method!r}: the plan given as {direction} is a {plan.direction} plan")
        if len({plan.problem for plan in self.plans.values()}) > 1:
            raise UsageError(f"scene {self.method!r}: its forward and backward plans are for different problems")

    def _check_timelines(self) -> None:
        for name, timelines in (("forecast", self.forecasts), ("measured", self.measured)):
            for direction, timeline in timelines.items():
                given = [times.rank for times in timeline.ranks]
                if given != list(range(self.ranks)):
                    raise UsageError(
                        f"scene {self.method!r}: its {name} {direction} timeline has times of ranks {given}; "
                        f"expected those of each of the {self.ranks} ranks, in order"
                    )


def check_scenes(scenes: Sequence[Scene], opening: Scene | None) -> None:
    """Check that there is a scene, that `opening` is one of them, and that no two have the same ranks, method and
    tile."""
    if not scenes:
        raise UsageError("no scenes given; expected at least one to make a page of")
    if opening is not None and opening not in scenes:
        raise UsageError(
            f"the page cannot open on {opening.method!r} with tile {opening.tile}: expected one of the scenes given"
        )
    seen: set[tuple[int, str, str]] = set()
    for scene in scenes:
        choice = (scene.ranks, scene.method, scene.tile)
        if choice in seen:
            raise UsageError(
                f"two scenes have {scene.ranks} ranks, method {scene.method!r} and tile {scene.tile}; "
                "give one of them another method name, such as 'mesh, striped'"
            )
        seen.add(choice)


def _listed(directions: Mapping[Direction, object]) -> str:
    return " and ".join(directions) or "nothing"
