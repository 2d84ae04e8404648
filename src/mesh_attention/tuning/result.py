"""The tuner's result: trials, ranked, with the reason each loser lost. Values, with a JSON form for the cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from mesh_attention.plan.steps import Direction
from mesh_attention.planning.choice import Choice, Family
from mesh_attention.timeline import Timeline
from mesh_attention.tuning.candidates import Complexity, complexity

RESULT_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The numbers of one pass of a choice. Bytes are those that an average rank sends."""

    time_s: float
    compute_s: float
    exposed_s: float
    inside_nbytes: float
    between_nbytes: float
    peak_nbytes: int
    tflops: float

    @property
    def sent_nbytes(self) -> float:
        return self.inside_nbytes + self.between_nbytes

    @classmethod
    def of(cls, timeline: Timeline) -> Forecast:
        ranks = len(timeline.ranks)
        return cls(
            time_s=timeline.time_s,
            compute_s=timeline.compute_s,
            exposed_s=timeline.exposed_s,
            inside_nbytes=timeline.sent_nbytes["inside"] / ranks,
            between_nbytes=timeline.sent_nbytes["between"] / ranks,
            peak_nbytes=timeline.peak_nbytes,
            tflops=timeline.tflops,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A choice for each pass that was asked for, with its forecast.

    `is_bound`: this library has no plan for the method, and the numbers are lower bounds (see `rivals`). `reason` says
    why it is not chosen.
    """

    family: Family
    choices: dict[Direction, Choice]
    forecasts: dict[Direction, Forecast]
    reason: str = ""
    is_bound: bool = False

    @property
    def time_s(self) -> float:
        return sum(forecast.time_s for forecast in self.forecasts.values())

    @property
    def compute_s(self) -> float:
        return sum(forecast.compute_s for forecast in self.forecasts.values())

    @property
    def exposed_s(self) -> float:
        return sum(forecast.exposed_s for forecast in self.forecasts.values())

    @property
    def sent_nbytes(self) -> float:
        return sum(forecast.sent_nbytes for forecast in self.forecasts.values())

    @property
    def between_nbytes(self) -> float:
        return sum(forecast.between_nbytes for forecast in self.forecasts.values())

    @property
    def peak_nbytes(self) -> int:
        return max(forecast.peak_nbytes for forecast in self.forecasts.values())

    @property
    def complexity(self) -> tuple[Complexity, ...]:
        return tuple(map(complexity, self.choices.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The chosen trial, then the best of every other family, fastest first. `left_out`: families that cannot be used.

    `bound_s` is the time to compute at the full kernel rate, `bound_nbytes` the fewest bytes that an average rank
    receives if forward keeps nothing for backward.
    """

    trials: tuple[Trial, ...]
    left_out: dict[str, str]
    bound_s: float
    bound_nbytes: float
    simulated: int

    @property
    def chosen(self) -> Trial:
        return self.trials[0]


def tuning_to_json(tuning: Tuning) -> dict[str, Any]:
    """The tuning as plain values, with choices as options that `Choice.of` reads back."""
    trials = [
        {**asdict(replace(trial, choices={})), "choices": {d: choice.options for d, choice in trial.choices.items()}}
        for trial in tuning.trials
    ]
    return {"version": RESULT_VERSION, **asdict(replace(tuning, trials=())), "trials": trials}


def tuning_from_json(written: Mapping[str, Any]) -> Tuning:
    """The opposite of `tuning_to_json`. Raises KeyError, TypeError or ValueError if `written` is something else."""
    if written["version"] != RESULT_VERSION:
        raise ValueError(f"version {written['version']!r}, expected {RESULT_VERSION}")
    return Tuning(
        trials=tuple(_trial(trial) for trial in written["trials"]),
        left_out=dict(written["left_out"]),
        bound_s=written["bound_s"],
        bound_nbytes=written["bound_nbytes"],
        simulated=written["simulated"],
    )


def _trial(written: Mapping[str, Any]) -> Trial:
    return Trial(
        family=written["family"],
        choices={
            direction: Choice.of(**options | {"keep": tuple(options["keep"])})
            for direction, options in written["choices"].items()
        },
        forecasts={direction: Forecast(**found) for direction, found in written["forecasts"].items()},
        reason=written["reason"],
        is_bound=written["is_bound"],
    )
