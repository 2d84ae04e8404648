"""The tuner's result: trials, ranked, with the reason each loser lost. Values, with a JSON form for the cache."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, get_args

from mesh_attention.errors import ParseError
from mesh_attention.plan.steps import DIRECTIONS, Direction
from mesh_attention.planning.choice import Choice, Family
from mesh_attention.timeline import Timeline
from mesh_attention.tuning.candidates import Complexity, complexity
from mesh_attention.units import brief

RESULT_VERSION = 3
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

    @property
    def near_ties(self) -> tuple[Trial, ...]:
        """Trials about as fast as the fastest, the chosen one among them."""
        fastest = min(trial.time_s for trial in self.trials)
        return tuple(trial for trial in self.trials if trial.time_s <= fastest * (1 + NEAR_TIE))

    @property
    def equals(self) -> tuple[Trial, ...]:
        """Trials that a forecast cannot tell from the fastest: the difference is within its error."""
        fastest = min(trial.time_s for trial in self.trials)
        return tuple(trial for trial in self.trials if trial.time_s <= fastest * (1 + FORECAST_ERROR))

    @property
    def simplest(self) -> Trial:
        """The simplest of the trials that are equal; another than the chosen one may be slower by the error."""
        return min(self.equals, key=lambda trial: trial.complexity)

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


def tuning_to_json(tuning: Tuning) -> dict[str, Any]:
    """The tuning as plain values, with choices as options that `Choice.of` reads back."""
    trials = list(map(trial_to_json, tuning.trials))
    return {"version": RESULT_VERSION, **asdict(replace(tuning, trials=())), "trials": trials}


def trial_to_json(trial: Trial) -> dict[str, Any]:
    choices = {direction: choice.options for direction, choice in trial.choices.items()}
    return {**asdict(replace(trial, choices={})), "choices": choices}


def tuning_from_json(written: object) -> Tuning:
    """The opposite of `tuning_to_json`. Raises a `UsageError` if `written` is something else."""
    values = _fields(written, "version", "trials", "left_out", "bound_s", "bound_nbytes", "simulated")
    if values["version"] != RESULT_VERSION:
        raise ParseError(f"version {brief(values['version'])}, expected {RESULT_VERSION}")
    trials, left_out = values["trials"], values["left_out"]
    if not isinstance(trials, list) or not trials:
        raise ParseError(f"trials {brief(trials)}: expected a list of at least one")
    if not isinstance(left_out, dict) or not all(isinstance(reason, str) for reason in left_out.values()):
        raise ParseError(f"left_out {brief(left_out)}: expected reasons")
    numbers = _numbers({name: values[name] for name in ("bound_s", "bound_nbytes", "simulated")})
    return Tuning(trials=tuple(map(_trial, trials)), left_out=left_out, **numbers)


def _trial(written: object) -> Trial:
    values = _fields(written, *_names(Trial))
    choices, forecasts = values["choices"], values["forecasts"]
    if not isinstance(choices, dict) or not isinstance(forecasts, dict) or choices.keys() != forecasts.keys():
        raise ParseError(f"choices {brief(choices)} and forecasts {brief(forecasts)}: expected the same passes")
    if not choices or not all(direction in DIRECTIONS for direction in choices):
        raise ParseError(f"passes {brief(list(choices))}: expected some of {', '.join(DIRECTIONS)}")
    if values["family"] not in get_args(Family):
        raise ParseError(f"family {brief(values['family'])}: expected one of {', '.join(get_args(Family))}")
    if not isinstance(values["reason"], str):
        raise ParseError("expected a text as reason")
    return Trial(
        family=values["family"],
        choices={d: Choice.of(**_fields(options, *_names(Choice))) for d, options in choices.items()},
        forecasts={d: Forecast(**_numbers(_fields(f, *_names(Forecast)))) for d, f in forecasts.items()},
        reason=values["reason"],
    )


def _names(kind: type[Trial] | type[Choice] | type[Forecast]) -> list[str]:
    return [field.name for field in fields(kind)]


def _fields(written: object, *names: str) -> dict[str, Any]:
    """The object, if it has exactly these fields."""
    if not isinstance(written, dict) or written.keys() != set(names):
        raise ParseError(f"{brief(written)}: expected an object with {', '.join(names)}")
    return written


def _numbers(numbers: dict[str, Any]) -> dict[str, Any]:
    for name, value in numbers.items():
        if type(value) not in (int, float) or not 0 <= value < float("inf"):
            raise ParseError(f"{name} {brief(value)}: expected a number, 0 or above")
    return numbers
