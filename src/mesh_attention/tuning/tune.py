"""`tune`: the plan to use for a problem on a cluster, and why the others were not chosen."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf

from mesh_attention.errors import MemoryLimitError, ScheduleError, TopologyError, UsageError
from mesh_attention.plan.assignment import Cut
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.counts import ALL_RANKS, MANY_RANKS
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import DIRECTIONS, Direction, Keep
from mesh_attention.planning.choice import FAMILIES, Choice, Family, default_layout
from mesh_attention.planning.costs import limits
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.candidates import complexity, of_fewest_bytes, shapes
from mesh_attention.tuning.coarse import LONGER
from mesh_attention.tuning.result import FORECAST_ERROR, NEAR_TIE, Trial, Tuning
from mesh_attention.tuning.search import LARGE, PassSearch, Tried, effort, quick_effort
from mesh_attention.tuning.traffic import plan_on, traffic
from mesh_attention.units import GIB, Report, format_nbytes, format_time

SAME_TIME = 0.005
"""Among choices of a pass within this share of the fastest, the simplest is taken."""
PRICED_RANKS, PRICED_RANKS_AT_LAST = 4, 8
"""Ranks whose calls are priced, where one could represent all: in a search, and for the trials that it ends with."""
FAR_BEHIND = 1.6
"""Trials that are this many times slower than the fastest are not priced again: no forecast is that far off."""
TRIED_EXCHANGED_ONCE = 3
Exchange = tuple[int, int, Cut]
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
    on_progress: Report | None = None,
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
    report = on_progress or (lambda doing, fraction: None)
    _check_directions(directions)
    is_limited = memory_limit is not None
    if memory_limit is None:
        memory_limit = topology.device.memory_gib * GIB / (LONGER if is_quick else 1)
    check_memory_limit(memory_limit)
    chosen_layout = Choice.of(layout=layout).layout or default_layout(problem)
    candidates = list(shapes(problem, topology, layout=chosen_layout))
    is_uniform = BlockMatrix(problem, chosen_layout, candidates[0].assignment).is_uniform
    is_many = is_uniform and problem.ranks >= MANY_RANKS
    if is_many:
        candidates = of_fewest_bytes(candidates, problem, directions)
    if is_quick and not is_uniform:  # few shards travel, and an inner tile does not bring near ranks nearer
        candidates = [choice for choice in candidates if choice.inner is None]
    searches = {}
    for number, direction in enumerate(directions):
        share = _share(report, number, len(directions))
        wanted = quick_effort(problem.ranks, is_uniform=is_uniform) if is_quick else effort(problem.ranks)
        wanted = LARGE if is_many else wanted
        searches[direction] = PassSearch(problem, topology, direction, wanted, memory_limit, share)
        # Against a cache, ranks compute calls of different shapes; and their memory differs a little.
        is_alike = is_many or (problem.seq_q == problem.seq_kv and (not is_limited or problem.ranks > ALL_RANKS))
        priced = problem.ranks if not is_uniform else 1 if is_alike or is_quick else PRICED_RANKS
        searches[direction].run(candidates, priced_ranks=priced, is_uniform=is_uniform)
    trials = _trials(searches) + (_mixed(searches) if is_quick else [])
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
    least = {direction: limits(problem, direction) for direction in directions}
    rates = {"forward": topology.device.forward.tflops, "backward": topology.device.backward.tflops}
    return Tuning(
        trials=_ranked(trials),
        left_out=left_out,
        bound_s=sum(bound.flops / (rates[direction] * 1e12) for direction, bound in least.items()),
        bound_nbytes=sum(bound.received_nbytes for bound in least.values()),
        simulated=simulated,
    )


def tuned_plans(problem: Problem, topology: Topology, trial: Trial) -> dict[Direction, Plan]:
    """The plan of each pass of a trial."""
    return {direction: plan_on(topology, problem, choice, direction) for direction, choice in trial.choices.items()}


def _share(report: Report, number: int, of: int) -> Report:
    return lambda doing, fraction: report(doing, (number + fraction) / of)


def check_memory_limit(memory_limit: object) -> None:
    if isinstance(memory_limit, bool) or not isinstance(memory_limit, int | float) or not memory_limit > 0:
        raise UsageError(f"memory limit {memory_limit!r}: expected a number of bytes above 0")


def _check_directions(directions: Sequence[Direction]) -> None:
    if isinstance(directions, str) or not directions or [d for d in DIRECTIONS if d in directions] != list(directions):
        raise ScheduleError(f"directions {directions!r}: expected ('forward',), ('backward',) or both in this order")


def _trials(searches: dict[Direction, PassSearch]) -> list[Trial]:
    """A trial for every family: the fastest choice of each pass, unless a simpler one is about as fast."""
    trials = []
    for family in FAMILIES:
        by_pass = {direction: search.best(family) for direction, search in searches.items()}
        if all(by_pass.values()):
            trials.append(_trial({direction: _simplest(tried) for direction, tried in by_pass.items()}))
    return trials


def _mixed(searches: dict[Direction, PassSearch]) -> list[Trial]:
    """The fastest choice of each pass, of whatever family."""
    by_pass = {direction: search.best() for direction, search in searches.items()}
    if not all(by_pass.values()):
        return []
    tried = {direction: _simplest(fastest) for direction, fastest in by_pass.items()}
    return [_trial(tried)]


def _simplest(tried: Sequence[Tried]) -> Tried:
    near = [trial for trial in tried if trial.forecast.time_s <= tried[0].forecast.time_s * (1 + SAME_TIME)]
    return min(near, key=lambda trial: complexity(trial.choice))


def _trial(tried: dict[Direction, Tried]) -> Trial:
    """A trial of these choices. If its passes are of different families, it is listed under the more complex family."""
    return Trial(
        family=max((trial.choice.family for trial in tried.values()), key=FAMILIES.index),
        choices={direction: trial.choice for direction, trial in tried.items()},
        forecasts={direction: trial.forecast for direction, trial in tried.items()},
    )


def _one_choice(searches: dict[Direction, PassSearch], trials: Sequence[Trial]) -> list[Trial]:
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
    forward, backward = searches.values()
    tried = {tried.choice: tried for tried in backward.best()}
    for first in forward.best():
        if first.choice in tried:
            trial = _trial(dict(zip(searches, (first, tried[first.choice]), strict=True)))
            by_family[trial.family] = min(by_family.get(trial.family, trial), trial, key=lambda trial: trial.time_s)
    return list(by_family.values())


def _exchanged_once(searches: dict[Direction, PassSearch]) -> list[Trial]:
    """The fastest trials in which both passes exchange heads alike, and backward finds its inputs exchanged."""
    by_pass: list[dict[Exchange, Tried]] = []
    for search in searches.values():
        by_exchange: dict[Exchange, Tried] = {}
        for tried in search.best():
            grid = tried.choice.assignment
            if grid.ulysses_degree > 1 and not tried.choice.keep:
                by_exchange.setdefault((grid.ulysses_degree, grid.waves, grid.cut), tried)
        by_pass.append(by_exchange)
    alike = [
        {d: by_exchange[e] for d, by_exchange in zip(searches, by_pass, strict=True)}
        for e in by_pass[0]
        if e in by_pass[1]
    ]
    alike.sort(key=lambda pair: sum(tried.forecast.time_s for tried in pair.values()))
    trials = []
    for pair in alike[:TRIED_EXCHANGED_ONCE]:
        choices = {d: replace(tried.choice, keep=("own",)) for d, tried in pair.items()}
        kept = {d: Tried(choice, searches[d].simulate(choice)) for d, choice in choices.items()}
        if all(tried.forecast.peak_nbytes <= searches[d].memory_limit for d, tried in kept.items()):
            trials.append(_trial(kept))
    return trials


def _kept(searches: dict[Direction, PassSearch], trials: Sequence[Trial]) -> list[Trial]:
    """Trials with the fastest trials' tiles in which forward keeps its inputs for backward."""
    kept_trials = []
    for trial in sorted(trials, key=lambda trial: trial.time_s)[:3]:
        for shape in dict.fromkeys(c for c in trial.choices.values() if c.assignment.places > 1):
            for keep in KEEPS:
                choice = replace(shape, keep=keep)
                tried = {d: Tried(choice, search.simulate(choice)) for d, search in searches.items()}
                if all(t.forecast.peak_nbytes <= searches[d].memory_limit for d, t in tried.items()):
                    kept_trials.append(_trial(tried))
    return kept_trials


def _priced_again(trials: list[Trial], searches: dict[Direction, PassSearch]) -> list[Trial]:
    """Simulate the trials that are not far behind again, with the calls of more ranks priced. One that then takes more
    memory than is allowed is left out."""
    for search in searches.values():
        search.priced_ranks, search.tried = PRICED_RANKS_AT_LAST, {}
    fastest_s = inf
    again = []
    for trial in sorted(trials, key=lambda trial: trial.time_s):
        if trial.time_s <= FAR_BEHIND * (1 + NEAR_TIE) * fastest_s:
            forecasts = {direction: searches[direction].simulate(c) for direction, c in trial.choices.items()}
            trial = replace(trial, forecasts=forecasts)
            if any(forecast.peak_nbytes > searches[d].memory_limit for d, forecast in forecasts.items()):
                continue
            fastest_s = min(fastest_s, trial.time_s)
        again.append(trial)
    return again


def _ranked(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """The chosen one, then the best of every other family with the reason why it is not chosen, fastest first."""
    best = [_best([t for t in trials if t.family == family]) for family in dict.fromkeys(t.family for t in trials)]
    best.sort(key=lambda trial: trial.time_s)
    near = _near(best, NEAR_TIE)
    chosen = min(near, key=lambda trial: trial.complexity)
    losers = [replace(trial, reason=why_not(trial, chosen, NEAR_TIE)) for trial in best if trial is not chosen]
    return (chosen, *losers)


def _best(trials: Sequence[Trial]) -> Trial:
    """The fastest trial of a family, unless one with a single choice for both passes is as fast."""
    return min(_near(trials, SAME_TIME), key=lambda trial: (len(set(trial.choices.values())), trial.time_s))


def _near(trials: Sequence[Trial], slower: float) -> list[Trial]:
    """The trials within a share of the fastest."""
    fastest_s = min(trial.time_s for trial in trials)
    return [trial for trial in trials if trial.time_s <= fastest_s * (1 + slower)]


def _does_not_fit(searches: dict[Direction, PassSearch], memory_limit: float) -> MemoryLimitError:
    # A method must fit in every pass that was asked for.
    needs = [
        max(min(f.peak_nbytes for c, f in search.tried.items() if c.family == family) for search in searches.values())
        for family in FAMILIES
        if all(any(c.family == family for c in search.tried) for search in searches.values())
    ]
    least = min(needs)
    return MemoryLimitError(
        f"no plan stays below {format_nbytes(memory_limit)} per rank; the smallest needs {format_nbytes(least)}. "
        "Allow more, or spread the sequence over more ranks"
    )


# Why the others lost


def why_not(loser: Trial, chosen: Trial, near_tie: float) -> str:
    """One line that names the largest cost of the loser."""
    lost = loser.time_s - chosen.time_s
    if lost <= near_tie * chosen.time_s:
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
    searches: Mapping[Direction, PassSearch],
    memory_limit: float,
    candidates: Sequence[Choice],
) -> dict[str, str]:
    """The families that have no trial, and why."""
    left_out: dict[str, str] = {}
    for family in FAMILIES:
        if family in usable:
            continue
        needs = [[f.peak_nbytes for c, f in s.tried.items() if c.family == family] for s in searches.values()]
        if all(needs):
            most = max(map(min, needs))
            left_out[family] = f"needs {format_nbytes(most)}, {format_nbytes(memory_limit)} allowed"
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
