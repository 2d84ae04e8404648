"""The tuner's result: trials, ranked, with the reason each loser lost. Values, with a JSON form for the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mesh_attention.plan.steps import Direction
from mesh_attention.planners.choice import Choice, Family
from mesh_attention.timeline import Timeline
from mesh_attention.tuning.candidates import Complexity, complexity

NEAR_TIE = 0.02
"""Among trials within this share of the fastest, the simplest is chosen. Forecasts cannot tell them apart, and a choice
that is simpler but not the fastest may cost this much, no more."""
FORECAST_ERROR = 0.09
"""Forecasts of 32 passes replayed on an H200 differ at most this much from the measured times
(benchmarks/results/how_close_to_one_kernel.txt); those on an emulated network by 8 % (how_fast_on_a_slow_network.txt).
"""


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

    `reason` says why it is not chosen.
    """

    family: Family
    choices: dict[Direction, Choice]
    forecasts: dict[Direction, Forecast]
    reason: str = ""

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
    def complexity(self) -> tuple[int, tuple[Complexity, ...]]:
        """A key by which the simpler of two trials compares lower: one choice for both passes before two, then by the
        choices themselves."""
        return len(set(self.choices.values())), tuple(map(complexity, self.choices.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The chosen trial, then the best of every other family, fastest first. `left_out` has families without a trial."""

    trials: tuple[Trial, ...]
    left_out: dict[str, str]
    simulated: int

    @property
    def chosen(self) -> Trial:
        return self.trials[0]

    @property
    def near_ties(self) -> tuple[Trial, ...]:
        """Trials about as fast as the fastest, the chosen one among them."""
        return within(NEAR_TIE, self.trials)

    @property
    def tie_words(self) -> str:
        """A sentence that says how many methods are about as fast as the chosen one; empty if no other is."""
        number = len(self.near_ties)
        if number < 2:
            return ""
        return (
            f"{number} methods are within {NEAR_TIE:.0%}, and forecasts are good to {FORECAST_ERROR:.0%}: the simplest "
            "of them is chosen."
        ).replace("%", " %")


def within(share: float, trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """The trials that take at most this share longer than the fastest."""
    fastest_s = min(trial.time_s for trial in trials)
    return tuple(trial for trial in trials if trial.time_s <= fastest_s * (1 + share))


def tuning_to_json(tuning: Tuning) -> dict[str, Any]:
    """The tuning as plain values, with choices as options that `Choice.of` reads back."""
    trials = list(map(trial_to_json, tuning.trials))
    return {**asdict(replace(tuning, trials=())), "trials": trials}


def trial_to_json(trial: Trial) -> dict[str, Any]:
    choices = {direction: choice.options for direction, choice in trial.choices.items()}
    return {**asdict(replace(trial, choices={})), "choices": choices}


def tuning_from_json(written: dict[str, Any]) -> Tuning:
    """The opposite of `tuning_to_json`."""
    return Tuning(**written | {"trials": tuple(map(_trial, written["trials"]))})


def _trial(written: dict[str, Any]) -> Trial:
    choices = {direction: Choice.of(**options) for direction, options in written["choices"].items()}
    forecasts = {direction: Forecast(**numbers) for direction, numbers in written["forecasts"].items()}
    return Trial(**written | {"choices": choices, "forecasts": forecasts})
