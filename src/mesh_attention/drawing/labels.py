"""Labels beside the ends of lines: where they go so that they cover neither each other nor, if it can be, a line."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

Point = tuple[float, float]


class Box(NamedTuple):
    left: float
    bottom: float
    right: float
    top: float

    def covers(self, point: Point) -> bool:
        return self.left <= point[0] <= self.right and self.bottom <= point[1] <= self.top

    def meets(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.bottom < other.top and other.bottom < self.top
        )


def spread(wanted: Sequence[float], *, gap: float, low: float, high: float) -> list[float]:
    """The places nearest to those wanted, in their order, at least `gap` apart and from `low` to `high`.

    Where there is no room for all, they begin at `low` and go on above `high`.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    # Less the gaps below each, labels that push each other meet at one place: the mean of what they wanted.
    groups: list[list[float]] = []
    for number, i in enumerate(order):
        groups.append([wanted[i] - number * gap])
        while len(groups) > 1 and _mean(groups[-2]) > _mean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    highest = high - gap * (len(wanted) - 1)
    met = [max(low, min(highest, _mean(group))) for group in groups for _ in group]
    places = [0.0] * len(wanted)
    for number, i in enumerate(order):
        places[i] = met[number] + number * gap
    return places


def clearest(boxes: Sequence[Box], *, taken: Sequence[Box], points: Sequence[Point]) -> int:
    """Which box meets the fewest of those taken, and of these covers the fewest points; the first of several."""
    return min(
        range(len(boxes)),
        key=lambda i: (
            sum(boxes[i].meets(other) for other in taken),
            sum(boxes[i].covers(point) for point in points),
        ),
    )


def along(corners: Sequence[Point], *, every: float) -> list[Point]:
    """Points of the line through the corners, no farther apart than `every` either way."""
    found = list(corners[:1])
    for (x0, y0), (x1, y1) in pairwise(corners):
        steps = int(max(abs(x1 - x0), abs(y1 - y0)) / every) + 1
        found += [(x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps) for i in range(1, steps + 1)]
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
