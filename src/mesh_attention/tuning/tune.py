"""`tune`: the plan to use for a problem on a cluster, and why the others were not chosen."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf

from mesh_attention.errors import MemoryLimitError, ScheduleError, TopologyError, UsageError
from mesh_attention.plan.assignment import Cut
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import DIRECTIONS, Direction, Keep
from mesh_attention.planners.choice import FAMILIES, Choice, Family, default_layout
from mesh_attention.problem import Problem
from mesh_attention.simulation.simulate import ALL_RANKS, MANY_RANKS
from mesh_attention.topology import Topology
from mesh_attention.tuning.bounds import plan_on, traffic
from mesh_attention.tuning.candidates import complexity, of_fewest_bytes, shapes
from mesh_attention.tuning.representative import MOST_SHORTENED
from mesh_attention.tuning.result import FORECAST_ERROR, NEAR_TIE, Trial, Tuning, within
from mesh_attention.tuning.search import EFFORT_ON_MANY_RANKS, PassSearch, effort, quick_effort
from mesh_attention.units import GIB, Progress, format_nbytes, format_time, part_report

SAME_TIME = 0.005
"""Among choices of a pass within this share of the fastest, the simplest is taken."""
PRICED_RANKS, PRICED_RANKS_AT_LAST = 4, 8
"""Ranks whose calls are priced, where one could represent all: in a search, and for the trials that it ends with."""
FAR_BEHIND = 1.6
"""Trials that are this many times slower than the fastest are not priced again: no forecast is that far off."""
TRIED_EXCHANGED_ONCE = 3
ExchangeKey = tuple[int, int, Cut]
"""What decides the form of exchanged inputs: Ulysses degree, waves, and what they are cut from."""
KEEPS: tuple[tuple[Keep, ...], ...] = (("kv",), ("q", "kv"))


def tune(
    problem: Problem,
    topology: Topology,
    *,
    directions: Sequence[Direction] = ("forward",),
    layout: Layout | str | None = None,
    memory_limit: float | None = None,
    is_quick: bool = False,
    on_progress: Progress | None = None,
) -> Tuning:
    """The best trial of every family, the chosen one first; both passes together if both are asked for.

    If `is_quick`, only the most promising candidates are tried, so most families have no trial, or not their best; and
    there is room in the device's memory for every problem that this one may represent (see `coarse`).

    `memory_limit` is what a call may allocate on a rank; if it is None, the device's memory. Gathered inputs that
    forward keeps for backward take memory in every layer of a model, so that is tried only if a limit is given. With
    Ulysses, forward may keep a rank's own inputs as exchanged: they take the memory that the caller's would.
    """
    if problem.ranks != topology.ranks:
        raise TopologyError(
            f"the problem has {problem.ranks} ranks and {topology.name} has {topology.ranks}; use "
            f"topology.with_ranks({problem.ranks}), or a problem with {topology.ranks} ranks"
        )
    report = on_progress or (lambda activity, fraction: None)
    _check_directions(directions)
    is_limited = memory_limit is not None
    if memory_limit is None:
        memory_limit = topology.device.memory_gib * GIB / (MOST_SHORTENED if is_quick else 1)
    check_memory_limit(memory_limit)
    chosen_layout = Choice.of(layout=layout).layout or default_layout(problem)
    candidates = list(shapes(problem, topology, layout=chosen_layout))
    is_uniform = BlockMatrix(problem, chosen_layout, candidates[0].assignment).is_uniform
    is_many = is_uniform and problem.ranks >= MANY_RANKS
    if is_many:
        candidates = of_fewest_bytes(candidates, problem, directions)
    if is_quick and not is_uniform:  # few shards travel, and an inner tile does not bring near ranks nearer
        candidates = [choice for choice in candidates if choice.inner is None]
    searches: dict[Direction, PassSearch] = {}
    for number, direction in enumerate(directions):
        share = part_report(report, number, len(directions))
        wanted = quick_effort(problem.ranks, is_uniform=is_uniform) if is_quick else effort(problem.ranks)
        wanted = EFFORT_ON_MANY_RANKS if is_many else wanted
        searches[direction] = PassSearch(problem, topology, direction, wanted, memory_limit, share)
        # Against a cache, ranks compute calls of different shapes; and their memory differs a little.
        is_alike = is_many or (problem.seq_q == problem.seq_kv and (not is_limited or problem.ranks > ALL_RANKS))
        priced = problem.ranks if not is_uniform else 1 if is_alike or is_quick else PRICED_RANKS
        searches[direction].run(candidates, priced_ranks=priced, is_uniform=is_uniform)
    trials = _trials(searches, (*FAMILIES, None) if is_quick else FAMILIES)
    if len(directions) == 2:
        trials += _one_choice(searches, () if is_quick else trials)
        trials += _exchanged_once(searches)
        trials += _kept(searches, trials) if is_limited else []
    if not trials:
        raise _does_not_fit(searches, memory_limit)
    left_out: dict[str, str] = {}
    if not is_quick:
        left_out = cannot_be_used(problem, {trial.family for trial in trials}, searches, memory_limit, candidates)
    simulated = sum(len(search.tried) for search in searches.values())
    if is_uniform and not is_quick and not is_many:
        trials = _priced_again(trials, searches)
        if not trials:
            raise _does_not_fit(searches, memory_limit)
    return Tuning(
        trials=_ranked(trials),
        left_out=left_out,
        simulated=simulated,
    )


def tuned_plans(problem: Problem, topology: Topology, trial: Trial) -> dict[Direction, Plan]:
    """The plan of each pass of a trial."""
    return {direction: plan_on(topology, problem, choice, direction) for direction, choice in trial.choices.items()}


def check_memory_limit(memory_limit: object) -> None:
    if isinstance(memory_limit, bool) or not isinstance(memory_limit, int | float) or not memory_limit > 0:
        raise UsageError(f"memory limit {memory_limit!r}: expected a number of bytes above 0")


def _check_directions(directions: Sequence[Direction]) -> None:
    if isinstance(directions, str) or not directions or [d for d in DIRECTIONS if d in directions] != list(directions):
        raise ScheduleError(f"directions {directions!r}: expected ('forward',), ('backward',) or both in this order")


Searches = Mapping[Direction, PassSearch]


def _trials(searches: Searches, families: Sequence[Family | None]) -> list[Trial]:
    """A trial for every family, or of whatever family if it is None: the fastest choice of each pass, unless a simpler
    one is about as fast."""
    trials = []
    for family in families:
        by_pass = {direction: search.best(family) for direction, search in searches.items()}
        if all(by_pass.values()):
            trials.append(_trial(searches, {d: _simplest(searches[d], best) for d, best in by_pass.items()}))
    return trials


def _simplest(search: PassSearch, fastest_first: Sequence[Choice]) -> Choice:
    longest_s = search.tried[fastest_first[0]].time_s * (1 + SAME_TIME)
    return min((choice for choice in fastest_first if search.tried[choice].time_s <= longest_s), key=complexity)


def _trial(searches: Searches, choices: dict[Direction, Choice]) -> Trial:
    """A trial of these choices. If its passes are of different families, it is listed under the more complex family."""
    return Trial(
        family=max((choice.family for choice in choices.values()), key=FAMILIES.index),
        choices=choices,
        forecasts={direction: searches[direction].simulate(choice) for direction, choice in choices.items()},
    )


def _fits(trial: Trial, searches: Searches) -> bool:
    return all(searches[direction].fits(forecast) for direction, forecast in trial.forecasts.items())


def _one_choice(searches: Searches, trials: Sequence[Trial]) -> list[Trial]:
    """For every family, the fastest trial with one choice for both passes.

    Choices of `trials` within the forecast error of the fastest are first simulated in the other pass too.
    """
    fastest_s = min((trial.time_s for trial in trials), default=0.0)
    for trial in trials:
        if trial.time_s <= fastest_s * (1 + FORECAST_ERROR):
            for choice in dict.fromkeys(trial.choices.values()):
                for search in searches.values():
                    search.simulate(choice)
    by_family: dict[Family, Trial] = {}
    forward, backward = (search.best() for search in searches.values())
    in_both = set(backward)
    for choice in forward:
        if choice in in_both:
            trial = _trial(searches, dict.fromkeys(searches, choice))
            by_family[trial.family] = min(by_family.get(trial.family, trial), trial, key=lambda trial: trial.time_s)
    return list(by_family.values())


def _exchanged_once(searches: Searches) -> list[Trial]:
    """The fastest trials in which both passes exchange heads alike, and backward finds its inputs exchanged."""
    by_exchange: dict[ExchangeKey, dict[Direction, Choice]] = {}
    for direction, search in searches.items():
        for choice in search.best():
            grid = choice.assignment
            if grid.ulysses_degree > 1 and not choice.keep:
                passes = by_exchange.setdefault((grid.ulysses_degree, grid.waves, grid.cut), {})
                passes.setdefault(direction, choice)
    alike = [_trial(searches, passes) for passes in by_exchange.values() if len(passes) == len(searches)]
    alike.sort(key=lambda trial: trial.time_s)
    kept = [
        _trial(searches, {d: replace(choice, keep=("own",)) for d, choice in trial.choices.items()})
        for trial in alike[:TRIED_EXCHANGED_ONCE]
    ]
    return [trial for trial in kept if _fits(trial, searches)]


def _kept(searches: Searches, trials: Sequence[Trial]) -> list[Trial]:
    """Trials with the fastest trials' tiles in which forward keeps its inputs for backward."""
    kept = []
    for trial in sorted(trials, key=lambda trial: trial.time_s)[:3]:
        for shape in dict.fromkeys(c for c in trial.choices.values() if c.assignment.places > 1):
            kept += [_trial(searches, dict.fromkeys(searches, replace(shape, keep=keep))) for keep in KEEPS]
    return [trial for trial in kept if _fits(trial, searches)]


def _priced_again(trials: list[Trial], searches: Searches) -> list[Trial]:
    """Simulate the trials that are not far behind again, with the calls of more ranks priced. One that then takes more
    memory than is allowed is left out."""
    for search in searches.values():
        search.priced_ranks, search.tried = PRICED_RANKS_AT_LAST, {}
    fastest_s = inf
    again = []
    for trial in sorted(trials, key=lambda trial: trial.time_s):
        if trial.time_s <= FAR_BEHIND * (1 + NEAR_TIE) * fastest_s:
            trial = _trial(searches, trial.choices)
            if not _fits(trial, searches):
                continue
            fastest_s = min(fastest_s, trial.time_s)
        again.append(trial)
    return again


def _ranked(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """The chosen one, then the best of every other family with the reason why it is not chosen, fastest first."""
    best = [_best([t for t in trials if t.family == family]) for family in dict.fromkeys(t.family for t in trials)]
    best.sort(key=lambda trial: trial.time_s)
    chosen = min(within(NEAR_TIE, best), key=lambda trial: trial.complexity)
    losers = [replace(trial, reason=why_not(trial, chosen)) for trial in best if trial is not chosen]
    return (chosen, *losers)


def _best(trials: Sequence[Trial]) -> Trial:
    """The fastest trial of a family, unless one with a single choice for both passes is as fast."""
    return min(within(SAME_TIME, trials), key=lambda trial: (len(set(trial.choices.values())), trial.time_s))


def _does_not_fit(searches: Searches, memory_limit: float) -> MemoryLimitError:
    least = min(_least_nbytes(searches).values())
    return MemoryLimitError(
        f"no plan stays below {format_nbytes(memory_limit)} per rank; the smallest needs {format_nbytes(least)}. "
        "Allow more, or spread the sequence over more ranks"
    )


def _least_nbytes(searches: Searches) -> dict[Family, int]:
    """What every family that was simulated in each pass needs at least: it must fit in each."""
    least: dict[Family, int] = {}
    for family in FAMILIES:
        peaks = [[f.peak_nbytes for c, f in s.tried.items() if c.family == family] for s in searches.values()]
        if all(peaks):
            least[family] = max(map(min, peaks))
    return least


# Why the others lost


def why_not(loser: Trial, chosen: Trial) -> str:
    """One line that names the largest cost of the loser."""
    lost = loser.time_s - chosen.time_s
    if lost <= NEAR_TIE * chosen.time_s:
        return "about as fast, and not as simple" if loser.time_s < chosen.time_s or lost > 0 else "as fast"
    exposed, computed = loser.exposed_s - chosen.exposed_s, loser.compute_s - chosen.compute_s
    if computed > exposed:
        return f"more and smaller kernel calls: computes {_ratio(loser.compute_s, chosen.compute_s)} as long"
    times = f"{format_time(loser.exposed_s)} exposed, with the chosen {format_time(chosen.exposed_s)}"
    if all(choice.is_collective for choice in loser.choices.values()):
        return f"nothing overlaps: {times}"
    if loser.between_nbytes > 1.2 * chosen.between_nbytes > 0:
        return f"sends {_ratio(loser.between_nbytes, chosen.between_nbytes)} the bytes between nodes: {times}"
    if loser.sent_nbytes > 1.2 * chosen.sent_nbytes > 0:
        return f"sends {_ratio(loser.sent_nbytes, chosen.sent_nbytes)} the bytes: {times}"
    return f"hides less behind compute: {times}"


def cannot_be_used(
    problem: Problem,
    usable: Collection[str],
    searches: Searches,
    memory_limit: float,
    candidates: Sequence[Choice],
) -> dict[str, str]:
    """The families that have no trial, and why."""
    left_out: dict[str, str] = {}
    needed = _least_nbytes(searches)
    for family in FAMILIES:
        if family in usable:
            continue
        if family in needed:
            left_out[family] = f"needs {format_nbytes(needed[family])}, {format_nbytes(memory_limit)} allowed"
        elif same := [choice for choice in candidates if choice.family == family]:
            least_s = sum(
                min(traffic(c, problem, search.topology, direction).bound_s for c in same)
                for direction, search in searches.items()
            )
            left_out[family] = f"not simulated; takes at least {format_time(least_s)}"
        elif family == "ulysses":
            left_out[family] = f"{problem.kv_heads} KV heads cannot be spread over {problem.ranks} ranks"
        elif family == "double ring":
            left_out[family] = "needs several nodes of several ranks"
        else:
            left_out[family] = "every tile and degree possible here belongs to another method"
    return left_out


def _ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.{2 if ours < 1.1 * theirs else 1}f} times" if theirs else "more"
