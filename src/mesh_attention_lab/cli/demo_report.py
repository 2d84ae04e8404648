"""The folder that `mesh-attention demo` writes: a page and a trace of what ran, next to its forecast."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from mesh_attention.clusters import PRESETS
from mesh_attention.errors import TopologyError
from mesh_attention.machine.fit import Measurement, fit_topology
from mesh_attention.masks import causal
from mesh_attention.plan.steps import DIRECTIONS
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.units import format_time
from mesh_attention_lab.cli.demo_worker import Measured, Seen
from mesh_attention_lab.cli.files import Report, make_folder
from mesh_attention_lab.cli.tables import cluster_words, mask_words, size_words
from mesh_attention_lab.drawing.page import Scene
from mesh_attention_lab.scenes import rival_scenes, scene_of, write_explorer

PAGE = "report.html"
LOOK_AT = (
    "Choose a method there: the matrix shows who computes what, the timeline what each rank did when, as forecast and "
    "as measured."
)
FORECAST_CLUSTER, FORECAST_RANKS = "h100", (16, 64)
FORECAST_TOKENS = 131072


def write_report(
    folder: Path, problem: Problem, methods: Iterable[str], seen: Seen, *, best: str, report: Report
) -> Path:
    """Write the page, which is returned, and a trace next to it. `seen` are the results of rank 0, with recordings. The
    page opens on the `best` method."""
    make_folder("--report", folder)
    assert seen.calibration is not None  # passes were recorded
    here, is_fitted = machine_at_hand(seen.calibration, ranks=problem.ranks)
    measured = [_measured_scene(*one, here, report) for one in zip(methods, seen.methods, strict=True)]
    opening = next(scene for scene in measured if scene.method == best)
    page = folder / PAGE
    write_explorer(
        page,
        [*measured, *forecast_scenes(report)],
        traced=measured,
        title="Attention spread over ranks: who computes what, and when",
        notes=_notes(problem, here, is_fitted=is_fitted),
        opening=opening,
        lead=f"Shown first: {best} {opening.tile}, which the demo recommends: a rank receives the fewest bytes.",
    )
    return page


def machine_at_hand(calibration: Measurement, *, ranks: int) -> tuple[Topology, bool]:
    """The calibrated machine, or the `laptop` preset if its times are inconsistent, as on a busy machine."""
    try:
        here = fit_topology(calibration, name="here", ranks=ranks, ranks_per_node=ranks, unmeasured=None)
    except TopologyError:
        return PRESETS["laptop"].topology.with_ranks(ranks), False
    return here, True


def _measured_scene(method: str, measured: Measured, here: Topology, report: Report) -> Scene:
    plans = {plan.direction: plan for plan, _ in measured.passes}
    timelines = {plan.direction: timeline for plan, timeline in measured.passes}
    return scene_of(plans, here, report=report, measured=timelines, method=method)


def forecast_problem(ranks: int) -> Problem:
    return Problem.self_attention(seq=FORECAST_TOKENS, heads=32, kv_heads=8, head_dim=128, ranks=ranks, mask=causal())


def forecast_scenes(report: Report) -> list[Scene]:
    found: list[Scene] = []
    for ranks in FORECAST_RANKS:
        topology = PRESETS[FORECAST_CLUSTER].topology.with_ranks(ranks)
        problem = forecast_problem(ranks)
        found += rival_scenes(problem, topology, layout=None, directions=DIRECTIONS, report=report, tiles=1)
    return found


def _notes(problem: Problem, here: Topology, *, is_fitted: bool) -> list[str]:
    rates = f"{1e3 * here.device.forward.tflops:.3g} and {1e3 * here.device.backward.tflops:.3g} GFLOP/s per rank"
    source = (
        "as calibrated by the same processes right after they ran"
        if is_fitted
        else "by the laptop preset, because the measured times are inconsistent; run it again when the machine is idle"
    )
    larger = forecast_problem(FORECAST_RANKS[-1])
    return [
        f"Scenes of {problem.ranks} ranks were measured: {size_words(problem)}, {mask_words(problem)}, in "
        f"{problem.ranks} processes on {os.cpu_count()} cores, with Gloo on the loopback interface. Each pass was "
        "recorded once, after the timed runs.",
        f"Their forecasts are for this machine {source}: {rates} forward and backward with all ranks at work, "
        f"{here.inside.gb_per_s:.3g} GB/s and {format_time(here.inside.latency_us * 1e-6)} per message. Ranks that "
        "share cores take turns, which a forecast does not include.",
        f"Scenes of {' and '.join(map(str, FORECAST_RANKS))} ranks are forecasts: {size_words(larger)}, "
        f"{mask_words(larger)}, on {cluster_words(PRESETS[FORECAST_CLUSTER].topology.with_ranks(larger.ranks))}.",
    ]
