"""The published figures beside ours: volumes are met, times as far as is stated, and what the remarks say holds."""

from __future__ import annotations

import json
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
import what_do_the_papers_claim as script

from mesh_attention.plan.steps import DIRECTIONS
from mesh_attention.topology import Topology
from papers import fit as fitting
from papers.figures import FIGURES, MESH_TIMES, QUANTITIES
from papers.fit import (
    PASSES,
    Fit,
    best_of,
    fitted,
    refined,
    residuals,
    scaled_fits,
    with_latency,
    with_rates,
)
from papers.reproduce import Reproduction, Row, reproduce
from papers.scaling import WEAK_SEQ, Run, Scaling, run_experiments, scaling_problem

RESULTS = Path(script.__file__).parent / "results"
EXPLAINED = 0.1
"""How far off a time may be that is said to be explained."""


@pytest.fixture(scope="module")
def reproduction() -> Reproduction:
    return reproduce()


@pytest.fixture(scope="module")
def preset(reproduction: Reproduction) -> Fit:
    return Fit(cluster=fitted(), passes=PASSES, residuals=residuals(reproduction.scaling))


def scaling_on(cluster: Topology) -> Scaling:
    return Scaling.of(run_experiments(cluster), PASSES)


def relative(row: Row) -> float:
    """The deviation as a share: of what was published, or of the time."""
    return row.deviation / row.figure.published if row.figure.unit == "%" else row.deviation


# Volumes; tests/golden/python/papers.txt has more of them


def test_every_volume_is_within_one_percent(reproduction: Reproduction) -> None:
    volumes = [row for row in reproduction.rows if row.figure.is_volume]
    assert len(volumes) >= 25
    for row in volumes:
        assert abs(row.deviation) <= (1.0 if row.figure.unit == "%" else 0.01), row


def test_volumes_that_follow_from_formulas_are_met_exactly(reproduction: Reproduction) -> None:
    for row in reproduction.rows:
        if row.figure.unit in ("N·d", "units", "tiles"):
            assert row.ours == pytest.approx(row.figure.published, rel=1e-9), row.figure.what


# Times


def test_times_that_are_explained_stay_within_a_tenth_and_the_others_do_not(reproduction: Reproduction) -> None:
    times = [row for row in reproduction.rows if not row.figure.is_volume]
    assert len(times) == len(MESH_TIMES) + 3
    for row in times:
        if row.figure.unit == "GPUs":
            assert row.figure.is_explained == (row.ours == row.figure.published), row
            assert row.deviation < EXPLAINED, row
        else:
            assert row.figure.is_explained == (abs(relative(row)) <= EXPLAINED), row
        assert row.figure.is_explained or row.figure.note, row


def test_weak_scaling_keeps_the_operations_of_a_gpu() -> None:
    first, last = (scaling_problem(Run("ring", n, seq)).flops("forward") / n for n, seq in WEAK_SEQ.items())
    assert last == pytest.approx(first, rel=1e-3)


# The fit


def test_the_preset_is_as_good_as_it_says(preset: Fit) -> None:
    assert preset.rms == pytest.approx(0.09, abs=0.01)
    assert preset.residuals.keys() == set(QUANTITIES)
    assert preset.residuals["ring growth"] == pytest.approx(log(1 - 0.22), abs=0.02)
    others = [abs(residual) for quantity, residual in preset.residuals.items() if quantity != "ring growth"]
    assert max(others) == pytest.approx(0.07, abs=0.01)


def test_a_search_from_elsewhere_comes_back_to_the_preset(preset: Fit) -> None:
    (start,) = scaled_fits(with_rates(fitted(), tflops=185, inside=3.4, between=2.23), (PASSES,))
    found = refined(start, (1.2,))
    assert start.rms > 1.3 * preset.rms
    assert 0.95 * preset.rms < found.rms < 1.1 * preset.rms  # and nothing is much better
    assert found.cluster.inside.gb_per_s == pytest.approx(fitted().inside.gb_per_s, rel=0.1)


def test_hypotheses_are_sorted_and_the_best_are_searched_finely(preset: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "NICS": (8, 4),
        "DUPLEX": (False,),
        "COARSE_TFLOPS": (116.0,),
        "COARSE_INSIDE": (1.73,),
    }.items():
        monkeypatch.setattr(fitting, name, value)
    searched: list[Fit] = []

    def search(start: Fit, _factors: object) -> Fit:
        searched.append(start)
        return start

    monkeypatch.setattr(fitting, "refined", search)
    fits = fitting.fit()
    assert [fit.rms for fit in fits] == sorted(fit.rms for fit in fits)
    assert [(fit.cluster.nics_per_node, len(fit.passes)) for fit in fits[:2]] == [(4, 2), (4, 1)]
    assert len(fits) == 4
    assert fits[0] in searched
    assert all(fit.rms <= 1.3 * fits[0].rms for fit in searched)
    assert fits[0].rms == pytest.approx(preset.rms, rel=0.02)


def test_other_hypotheses_fit_worse(preset: Fit) -> None:
    """Forward alone on the same nodes; both passes with a NIC a GPU, or with full-duplex links."""
    forward = DIRECTIONS[:1]
    (alone,) = scaled_fits(with_rates(fitted(), tflops=50, inside=0.91, between=0.79), (forward,))
    assert alone.rms > 1.05 * preset.rms
    rivals = {(8, False): 2.9, (4, True): 2.5}
    for (nics, full_duplex), inside in rivals.items():
        cluster = replace(fitted(), nics_per_node=nics, full_duplex=full_duplex)
        for found in best_of(cluster, [(180.0, inside)], (PASSES, forward)):
            assert found.rms > 1.15 * preset.rms, (nics, full_duplex)


# What the remarks say


def test_slow_kernels_make_64_best_for_ring_and_leave_mesh_too_little_waiting() -> None:
    cluster = fitted()
    scaling = scaling_on(with_rates(cluster, tflops=40, inside=2.75, between=2.23))
    values = scaling.values()
    assert values["ring best"] == 64
    assert values["wait share"] == pytest.approx(69, abs=1.5)
    assert values["average speedup"] == pytest.approx(2.3, abs=0.1)


def test_milliseconds_a_message_explain_rings_growth_and_spoil_the_rest() -> None:
    scaling = scaling_on(with_latency(fitted(), 15_000))
    assert scaling.growth("ring") == pytest.approx(3.6, abs=0.05)
    assert (scaling.best("ring"), scaling.best("mesh")) == (32, 32)
    assert scaling.excess("ring", 64) == pytest.approx(0.1, abs=0.03)
    assert scaling.excess("mesh", 128) == pytest.approx(0.1, abs=0.03)


# The script


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, reproduction: Reproduction) -> Reproduction:
    """The script with what the fixture worked out, so that only printing takes time."""
    monkeypatch.setattr(script, "reproduce", lambda on_progress: reproduction)
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return reproduction


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[list[str], dict[str, Any]]:
    """The lines for people after the first, which says what ran where, and the JSON line."""
    assert script.main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    first, *lines, last = out.splitlines()
    answer = json.loads(last)
    assert answer["commit"] in first
    return lines, answer


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("width", [80, 120])
def test_the_table_has_every_figure_and_fits(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines, _ = printed(capsys)
    assert all(len(line.rstrip()) <= width for line in lines)
    words = " ".join(" ".join(lines).split())
    assert "…" not in words
    for figure in FIGURES:
        assert " ".join(figure.what.split()[:3]) in words  # before the first line break at any width
        assert figure.note in words
    assert "Not explained. Ring's volume grows 2.91 times" in words
    assert "rms of the log ratios 0.0" in words


def test_json_has_every_figure(quick: Reproduction, capsys: pytest.CaptureFixture[str]) -> None:
    _, answer = printed(capsys)
    assert [entry["figure"] for entry in answer["figures"]] == [figure.what for figure in FIGURES]
    for entry, row in zip(answer["figures"], quick.rows, strict=True):
        assert (entry["published"], entry["ours"]) == (row.figure.published, row.ours)
        assert entry["deviation"] == row.deviation
        assert entry["deviation_in"] == {"%": "points", "GPUs": "time"}.get(entry["unit"], "published")
        assert entry["how"]
    assert answer["cluster"]["name"] == "paper"
    assert answer["times_s"]["ring"]["64"] == quick.scaling.strong("ring")[64].time_s
    assert "fits" not in answer


@pytest.mark.usefixtures("quick")
def test_refit_shows_every_hypothesis(
    preset: Fit, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(preset, passes=DIRECTIONS[:1])
    monkeypatch.setattr(script, "fit", lambda on_progress: (preset, other))
    lines, answer = printed(capsys, "--refit")
    again = " ".join(lines[lines.index("fitted again") :])
    assert "both" in again
    assert "forward" in again
    assert [entry["rms"] for entry in answer["fits"]] == [preset.rms, other.rms]


def test_the_stored_result_is_ours(reproduction: Reproduction) -> None:
    *_, last = (RESULTS / "what_do_the_papers_claim.txt").read_text().splitlines()
    stored = {entry["figure"]: entry["ours"] for entry in json.loads(last)["figures"]}
    assert stored == pytest.approx({row.figure.what: row.ours for row in reproduction.rows}, rel=1e-9)
