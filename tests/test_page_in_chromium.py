"""The explorer as a person meets it: in a browser, wide and narrow, light and dark, with pointer and keys."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from page_scenes import all_kinds, scene

from mesh_attention.plan.format import format_step
from mesh_attention.plan.steps import Attend
from mesh_attention_lab.drawing.page import Scene, write_page

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
TITLE = "Six & eight <ranks>"
START = {"pass": "forward", "rank": 0, "step": 0}
FADES = {"more-above", "more-below"}
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 400, "height": 800}
TEXTS = (
    *("h1", "h2", "h3", "#problem", "legend", ".chip input:checked + span", ".chip input:not(:checked) + span"),
    *("#steps li.past code", "#steps li[aria-selected=true] code", ".verb-recv b", ".verb-send b", ".verb-compute b"),
    *(".index", ".readout", ".legend li", "dt", "dd", ".words p", "#timeline-words", ".bar-name", ".bar-value small"),
    *(".bar-row[aria-pressed=true] .bar-value", "#notes li", "footer p", "#where", ".lane-name", "#timeline .small"),
    *(".shard", ".shard.mine", ".source-name", "#growth text.mine"),
)
NUMBERS = [(".tile .number", f".tone-{tone} path:not(.under)") for tone in range(7)]


class View:
    """A tab with the page in it, and all it complained about or asked for."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": WIDE, "reduced_motion": "reduce", **options})
        self.context.add_init_script(path=Path(__file__).with_name("page_look.js"))
        self.tab = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.tab.on("console", lambda message: self.said.append(message.text))
        self.tab.on("pageerror", lambda error: self.said.append(str(error)))
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.address = address

    def go(self, **choice: object) -> View:
        """Through the address: the first time as a link would, then as one who edits it."""
        values = "#" + "&".join(f"{name}={value}" for name, value in choice.items())
        if self.tab.url == "about:blank":
            self.tab.goto(self.address + values)
            self.tab.wait_for_selector("#choice-words p")  # the page unpacks its data before it draws
        else:
            self.run(
                "(hash) => new Promise((seen) => { addEventListener('hashchange', seen); location.hash = hash; })",
                values,
            )
        return self

    def run(self, script: str, argument: Any = None) -> Any:
        return self.tab.evaluate(script, argument)

    def look(self, question: str, argument: Any = None) -> Any:
        """The answer of a function of page_look.js."""
        return self.run(f"(given) => look.{question}(given)", argument)

    def texts(self, selector: str) -> list[str]:
        return list(self.look("texts", selector))

    def html(self, *ids: str) -> list[str]:
        return [self.run("(id) => document.getElementById(id).innerHTML", id_) for id_ in ids]

    def chosen(self) -> dict[str, str]:
        return dict(self.run("() => Object.fromEntries(new URLSearchParams(location.hash.slice(1)))"))


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    sixteen = scene(16, "mesh", tile=(4, 4), blocks_per_call=4, seq=4096, shown=(0, 5))
    gathering = scene(16, "attention2d", tile=(2, 8), seq=4096, shown=(0, 5))
    return [*all_kinds(), sixteen, gathering, scene(4, "mesh", tile=(2, 2))]


@pytest.fixture(scope="module")
def address(scenes: list[Scene], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_page(path, scenes, title=TITLE, notes=["Forecasts are for h100."])
    return path.as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_view(browser: Any, address: str) -> Iterator[Callable[..., View]]:
    opened: list[View] = []

    def open_it(at: str = address, **options: Any) -> View:
        opened.append(View(browser, at, **options))
        return opened[-1]

    yield open_it
    for view in opened:
        view.context.close()
        assert view.said == []
        others = {url for url in view.asked if not url.startswith(view.address)}
        assert others <= {"data:,", "about:blank"}


@pytest.fixture
def view(open_view: Callable[..., View]) -> View:
    return open_view()


def choice_of(one: Scene, **more: object) -> dict[str, object]:
    return {"ranks": one.ranks, "method": one.method, "tile": one.tile, **more}


# At first sight


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_two_sentences_in_the_first_view_say_what_a_shard_and_a_block_are(
    open_view: Callable[..., View], size: dict[str, int]
) -> None:
    view = open_view(viewport=size).go()
    words = re.sub(r"\s+", " ", view.texts(".intro")[0]).strip()
    shard, block = re.findall(r"[^.]+\.", words)[:2]
    assert shard.startswith("A shard is the tokens that one rank")
    assert block.startswith(" A block is one query shard against one key/value shard")
    assert view.run("() => document.querySelector('.intro').getBoundingClientRect().bottom < innerHeight / 2")


def test_exposed_is_one_time_and_one_colour(view: View, scenes: list[Scene]) -> None:
    """Of a rank that is not the busiest: what it waits is another time."""
    one = next(s for s in scenes if s.method == "attention2d")
    timeline = one.forecasts["backward"]
    assert min(rank.compute_s for rank in timeline.ranks) < timeline.compute_s
    slowest = min(timeline.ranks, key=lambda rank: rank.compute_s).rank
    view.go(**choice_of(one, **{"pass": "backward", "rank": slowest}))
    (exposed,) = re.findall(r"of which ([\d.]+ .s) is exposed;", view.texts("#timeline-words")[0])
    unit = {"µs": 1e6, "ms": 1e3}[exposed.split()[1]]
    assert float(exposed.split()[0]) == pytest.approx(timeline.exposed_s * unit, rel=0.01)
    assert view.texts(".bars:nth-child(2) [aria-pressed=true] small")[0] == f"{exposed} exposed"
    share = "([whole, busy]) => 1 - busy.width.baseVal.value / whole.width.baseVal.value"
    rects = "[...document.querySelectorAll('.pass-row.chosen rect.forecast')]"
    assert view.run(f"() => ({share})({rects})") == pytest.approx(timeline.exposed_s / timeline.time_s, abs=0.01)
    colours = view.look("exposedAndWait")
    assert len(set(colours[:3])) == len(set(colours[3:])) == 1
    assert colours[0] != colours[3]
    legends = [text for text in view.texts(".legend li") if "exposed" in text]
    assert legends == ["exposed: the busiest rank does not compute"] * 2


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_all_ranks_fill_their_space(open_view: Callable[..., View], scenes: list[Scene], size: dict[str, int]) -> None:
    view = open_view(viewport=size)
    for one in {s.ranks: s for s in scenes}.values():
        view.go(**choice_of(one))
        across, below = view.look("filled")
        assert across > 0.9, one.ranks
        assert below < 60, one.ranks


def test_long_steps_fold_and_unfold(view: View, scenes: list[Scene]) -> None:
    one = next(s for s in scenes if s.ranks == 16 and s.method == "attention2d")
    view.go(**choice_of(one, rank=5, step=0))
    folded = view.look("heightsOfSteps")
    assert max(folded) < 120
    assert "all of 7 sends and 7 receives" in view.texts(".fold")
    longest = view.texts("#steps li").index(next(text for text in view.texts("#steps li") if "7 receives" in text))
    button = view.tab.locator("#steps li").nth(longest).locator(".fold")
    button.click()
    assert view.look("heightsOfSteps")[longest] > 150
    assert view.chosen()["step"] == "0"  # unfolding is not choosing
    button.click()
    assert view.look("heightsOfSteps") == folded
    view.go(**choice_of(one, rank=5, step=longest))
    view.tab.locator("#steps").focus()
    view.tab.keyboard.press("Enter")
    assert view.look("heightsOfSteps")[longest] > 150
    assert len(view.texts("#now-words p")[0]) < 400


def test_the_program_fades_where_it_goes_on(view: View) -> None:
    view.go(ranks=16, method="mesh", rank=5)
    for step, wanted in (("0", ["more-below"]), ("20", ["more-above", "more-below"]), ("9999", ["more-above"])):
        view.tab.locator("#slider").fill(str(min(int(step), len(view.texts("#steps li")))))
        assert sorted(set(view.run("() => [...document.getElementById('steps').classList]")) & FADES) == wanted


# What is shown is what the plan says


def test_steps_are_the_program_letter_for_letter(view: View, scenes: list[Scene]) -> None:
    """Of every pass of every scene one rank: the first, one in the middle and the last, in turn."""
    passes = [(one, direction) for one in scenes for direction in one.directions]
    for number, (one, direction) in enumerate(passes):
        rank = (0, one.ranks // 2, one.ranks - 1)[number % 3]
        view.go(**choice_of(one, **{"pass": direction, "rank": rank}))
        wanted = [format_step(step) for step in one.plans[direction].program(rank).steps]
        assert view.texts("#steps code") == wanted, (one.method, direction, rank)


def test_blocks_are_done_as_the_program_attends_them(view: View, scenes: list[Scene]) -> None:
    one = next(s for s in scenes if s.method == "ulysses+mesh")
    steps = one.plans["backward"].program(5).steps
    view.go(**choice_of(one, **{"pass": "backward", "rank": 5}))
    done: set[tuple[int, int]] = set()
    for step in steps:
        blocks = {(q.shard, kv.shard) for q in step.rows for kv in step.cols} if isinstance(step, Attend) else set()
        assert {tuple(block) for block in view.look("blocks", "now")} == blocks
        assert {tuple(block) for block in view.look("blocks", "done")} == done
        done |= blocks
        view.tab.keyboard.press("ArrowRight")
    assert {tuple(block) for block in view.look("blocks", "done")} == done
    assert view.texts(".block:not(.done):not(.empty)") == []


def test_shards_are_on_their_way_until_the_forecast_says_they_are_here(view: View, scenes: list[Scene]) -> None:
    one = next(s for s in scenes if s.ranks == 8 and s.method == "ring")
    view.go(**choice_of(one, **{"pass": "forward", "rank": 3}))
    steps = one.plans["forward"].program(3).steps
    spans = [s for s in one.forecasts["forward"].spans if s.rank == 3]
    begins = sorted(s.start_s for s in spans if s.lane == "compute")
    arrives = {s.name.split(" ")[0]: s.stop_s for s in spans if s.lane == "recv"}
    attend = [index for index, step in enumerate(steps) if isinstance(step, Attend)][1]
    view.go(**choice_of(one, **{"pass": "forward", "rank": 3, "step": attend}))
    listed = dict(zip(view.texts(".stock dt"), view.texts(".stock dd"), strict=True))
    asked = {format_step(step).split(" ")[1] for step in steps[:attend] if format_step(step).startswith("recv")}
    coming = {name for name in asked if arrives[name] > begins[2] + 1e-9}
    assert set(listed["on its way"].split(", ")) - {"nothing"} == coming
    assert asked - coming <= set(listed["holds"].split(", "))
    assert listed["done"] == "1 of 8 blocks"


def test_bytes_in_words_are_the_plan_s(view: View, scenes: list[Scene]) -> None:
    view.go(ranks=8, method="mesh", tile="2x4")
    words = " ".join(view.texts("#compare-words"))
    assert re.search(r"A rank receives [\d.,]+ [KM]iB; with ring [\d.,]+ [KM]iB: [\d.]+ times (less|more)", words), (
        words
    )


def test_bars_are_as_long_as_the_times_they_stand_for(view: View, scenes: list[Scene]) -> None:
    view.go(ranks=6, method="mesh", tile="2x3", **{"pass": "backward"})
    beside = {f"{s.method} {s.tile}": s for s in scenes if s.ranks == 6}
    for group, passes in ((2, ("backward",)), (3, ("forward", "backward"))):
        rows = {name: widths for name, *widths in view.look("bars", group)}
        scale = f".bars:nth-child({group}) .bar-row svg"
        assert len(set(view.run(f"() => [...document.querySelectorAll('{scale}')].map((e) => e.clientWidth)"))) == 1
        assert set(rows) <= set(beside)
        longest = 100 / max(
            sum(beside[name].measured[p].time_s for p in passes) for name in rows if beside[name].measured
        )
        for name, (busy, exposed, measured) in rows.items():
            one = beside[name]
            times = [one.forecasts[p] for p in passes]
            assert exposed == pytest.approx(longest * sum(t.exposed_s for t in times), abs=0.02)
            assert busy + exposed == pytest.approx(longest * sum(t.time_s for t in times), abs=0.02)
            known = sum(one.measured[p].time_s for p in passes) if one.measured else 0
            assert measured == pytest.approx(longest * known, abs=0.02)


def test_forecast_and_measured_are_named_and_never_mixed_up(view: View) -> None:
    view.go(ranks=6, method="mesh", tile="2x3", rank=1)
    names = view.texts(".source-name")
    assert names == ["Forecast: rank 1, forward", "Measured: rank 1, forward"]
    view.go(ranks=8, method="mesh", tile="2x4", rank=1)
    assert view.texts(".source-name") == ["Forecast: rank 1, forward"]
    assert "nothing measured" in view.texts("#timeline-words")[0]
    assert "measured" not in " ".join(view.texts("#timeline svg text")).lower()


def test_a_rank_without_spans_says_which_have_some(view: View) -> None:
    view.go(ranks=16, method="mesh", rank=7, step=3)
    words = "it has those of 2 ranks of 16, spread from the first to the last: choose 0, 5."
    assert words in view.texts("#timeline-words")[0]
    assert len(view.texts("#steps li")) > 30
    view.go(ranks=16, method="mesh", rank=5, step=3)
    assert view.run("() => document.querySelectorAll('.span').length") > 30


# Every control changes the picture


def test_every_control_changes_the_picture(view: View) -> None:
    view.go(ranks=6, method="mesh", tile="2x3", rank=1)
    drawn = ("matrix", "steps", "timeline", "choice-words", "compare")
    seen = [view.html(*drawn)]
    for name, value in (("ranks", "8"), ("method", "ring"), ("pass", "backward"), ("ranks", "6")):
        view.tab.locator(f"input[name={name}][value='{value}']").check(force=True)
        seen.append(view.html(*drawn))
    view.tab.locator("#rank").select_option("4")
    seen.append(view.html(*drawn))
    for before, after in pairwise(seen):
        assert all(a != b for a, b in zip(before[:4], after[:4], strict=True))
    assert view.chosen() == {
        "ranks": "6",
        "method": "ring",
        "tile": "1x6",
        "pass": "backward",
        "rank": "4",
        "step": "0",
    }


def test_tiles_on_offer_are_those_that_exist(view: View, scenes: list[Scene]) -> None:
    view.go(ranks=6, method="mesh", tile="2x3")
    assert view.texts("#tile-chips .chip") == ["2x3", "3x2"]
    before = view.html("matrix", "steps")
    view.tab.locator("input[name=tile][value='3x2']").check(force=True)
    assert all(a != b for a, b in zip(before, view.html("matrix", "steps"), strict=True))
    view.tab.locator("input[name=ranks][value='3']").check(force=True)
    assert (view.texts("#method-chips .chip"), view.texts("#tile-chips .chip")) == (["pass-q"], ["3x1"])
    assert view.texts("#ranks-chips .chip") == sorted({str(s.ranks) for s in scenes}, key=int)


def test_stepping_moves_matrix_list_cursor_and_words_together(view: View) -> None:
    view.go(ranks=6, method="mesh", tile="2x3", rank=1)
    steps = len(view.texts("#steps li"))
    parts = ("matrix", "steps", "timeline", "now-words")
    before = view.html(*parts)
    view.tab.locator("#slider").fill(str(steps // 2))
    assert all(a != b for a, b in zip(before, view.html(*parts), strict=True))
    current = view.run("() => document.querySelector('#steps [aria-selected=true]').dataset.step")
    assert current == view.chosen()["step"] == str(steps // 2)
    view.tab.locator("#next").click()
    view.tab.locator("#next").click()
    view.tab.locator("#prev").click()
    assert view.chosen()["step"] == str(steps // 2 + 1)


def test_the_current_step_is_in_sight_and_the_page_stays_where_it_is(view: View) -> None:
    view.go(ranks=16, method="mesh", rank=5)
    steps = len(view.texts("#steps li"))
    for step in (steps - 2, steps // 2, 0):
        view.tab.locator("#slider").fill(str(step))
        assert view.look("currentStepIsInSight")
        assert view.run("() => scrollY") == 0


def test_playing_goes_on_by_itself_and_stops(view: View) -> None:
    view.go(ranks=3, method="pass-q", rank=1)
    view.tab.locator("#play").click()
    view.tab.wait_for_function("() => Number(new URLSearchParams(location.hash.slice(1)).get('step')) >= 2")
    assert view.tab.locator("#play").get_attribute("aria-label") == "Pause"
    view.tab.locator("#play").click()
    assert view.tab.locator("#play").get_attribute("aria-label") == "Play"


def test_pointing_at_a_block_says_who_computes_it_and_a_click_chooses_the_rank(view: View) -> None:
    view.go(ranks=6, method="mesh", tile="2x3", rank=1)
    block = view.look("middleOf", ".tile[data-place='4'] .number")
    view.tab.mouse.move(*block)
    assert "computed by rank 4" in view.texts("#block-words")[0]
    view.tab.mouse.click(*block)
    assert view.chosen()["rank"] == "4"
    assert view.texts("#steps-title") == ["The program of rank 4"]


def test_spans_bars_and_rows_can_be_clicked(view: View) -> None:
    view.go(ranks=6, method="mesh", tile="2x3", rank=1)
    view.tab.locator("#timeline .lanes.measured .span.compute").nth(3).click()
    assert view.chosen()["step"] != "0"
    assert re.search(r": .+ to .+, ", view.texts("#span-words")[0])
    view.tab.locator(".bar-row", has_text="ring").first.click()
    assert view.chosen()["method"] == "ring"
    view.tab.locator("#overview .rank-row").nth(5).click(force=True)
    assert view.chosen()["rank"] == "5"


# Keys, links, themes, sizes


def test_keys_alone_are_enough(view: View) -> None:
    view.go(ranks=6, method="mesh", tile="2x3", rank=1)
    view.tab.keyboard.press("End")
    assert view.texts("#where")[0].startswith("end / ")
    view.tab.keyboard.press("ArrowLeft")
    view.tab.keyboard.press("Home")
    assert view.chosen()["step"] == "0"
    view.tab.locator("#matrix").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):  # the first shows where one is
        view.tab.keyboard.press(f"Shift+{key}")
    assert view.texts("#block-words")[0].startswith("Block q2 × kv2")
    view.tab.keyboard.press("Enter")
    assert view.chosen()["rank"] == "2"
    view.tab.locator("input[name=method]:checked").focus()
    view.tab.keyboard.press("ArrowDown")
    assert view.chosen()["method"] == "attention2d"
    assert view.chosen()["step"] == "0"
    assert view.run("() => document.activeElement.value") == "attention2d"
    assert view.run("() => getComputedStyle(document.activeElement.nextSibling).outlineStyle") == "solid"


def test_left_and_right_step_wherever_the_focus_is(view: View) -> None:
    choice = {"ranks": 6, "method": "mesh", "tile": "2x3", "pass": "forward", "rank": 1, "step": 5}
    view.go(**choice)
    places = ["body", *view.look("focusable")]
    assert {"#matrix", "#steps", "#rank", "#slider", "#next", "#theme", "input[name=method]:checked"} <= set(places)
    for place in places:
        view.run("(place) => { document.activeElement.blur(); document.querySelector(place).focus(); }", place)
        at = view.run("() => [scrollX, scrollY]")
        for key, step in (("ArrowRight", 6), ("ArrowRight", 7), ("ArrowLeft", 6), ("ArrowLeft", 5)):
            view.tab.keyboard.press(key)
            assert view.chosen() == {name: str(value) for name, value in {**choice, "step": step}.items()}, place
        assert view.run("() => [scrollX, scrollY]") == at, place
    view.tab.locator("#slider").fill(str(len(view.texts("#steps li")) - 1))
    view.tab.locator("#next").focus()
    view.tab.keyboard.press("Enter")
    view.tab.keyboard.press("Enter")  # nothing is left to step to
    assert view.run("() => document.activeElement.id") == "next"
    view.tab.keyboard.press("ArrowLeft")
    assert view.chosen()["step"] == str(len(view.texts("#steps li")) - 1)


def test_controls_keep_their_other_keys(view: View) -> None:
    view.go(ranks=6, method="mesh", tile="2x3", rank=1, step=5)
    view.tab.locator("#rank").focus()
    view.tab.keyboard.press("ArrowDown")
    assert (view.chosen()["rank"], view.chosen()["step"]) == ("2", "5")
    view.tab.locator("#steps").focus()
    view.tab.keyboard.press("ArrowDown")
    assert view.chosen()["step"] == "6"
    view.tab.locator("input[name=pass]:checked").focus()
    view.tab.keyboard.press(" ")
    assert view.tab.locator("#play").get_attribute("aria-label") == "Play"
    view.tab.locator("#matrix").focus()
    view.tab.keyboard.press(" ")
    assert view.tab.locator("#play").get_attribute("aria-label") == "Pause"
    assert "wherever the focus is" in view.texts(".keys")[0]


def test_a_link_brings_the_same_view_back(view: View) -> None:
    choice = {"ranks": 8, "method": "ulysses+mesh", "tile": "2·2x2", "pass": "backward", "rank": 5, "step": 7}
    view.go(**choice)
    assert view.chosen() == {name: str(value) for name, value in choice.items()}
    drawn = view.html("matrix", "steps", "timeline")
    link = view.run("() => location.href")
    view.tab.goto("about:blank")
    view.tab.goto(link)
    assert view.html("matrix", "steps", "timeline") == drawn
    view.go(ranks=8, method="nonsense", rank=99, step=-4)
    assert view.chosen()["rank"] == "7"
    assert view.chosen()["step"] == "0"


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_nothing_is_cut_off_or_too_small(
    open_view: Callable[..., View], scenes: list[Scene], size: dict[str, int]
) -> None:
    view = open_view(viewport=size, has_touch=size is NARROW)
    for one in scenes:
        view.go(**choice_of(one, **{"pass": one.directions[-1], "rank": one.ranks - 1, "step": 3}))
        assert view.run("() => document.documentElement.scrollWidth <= innerWidth"), one.method
        for question in ("clipped", "outside", "overlapping", "cut", "struck", "crossed"):
            assert view.look(question) == [], (question, one.method)
    assert view.look("small") == []
    assert view.look("nameless") == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_can_be_read_in_both_themes(open_view: Callable[..., View], theme: str) -> None:
    view = open_view(color_scheme=theme)
    for is_switched in (False, True):
        found: dict[str, float | None] = {}
        view.go(ranks=6, method="mesh", tile="2x3", rank=1, step=9)
        if is_switched:
            view.tab.locator("#theme").click()
        found |= dict(
            view.look("contrast", [*((name, None) for name in TEXTS), (".span-name.compute", ".span.compute")])
        )
        view.go(ranks=8, method="ring", rank=5)  # its rows have all tones but that of rank 5
        found |= dict(view.look("contrast", NUMBERS))
        assert {name for name, ratio in found.items() if ratio is None} == set()
        assert {name: ratio for name, ratio in found.items() if ratio is not None and ratio < 4.5} == {}
        for method in ("mesh", "attention2d"):  # the second has steps that fold
            view.go(ranks=16, method=method, rank=5, step=9)
            worst, text = view.look("worstContrast")
            assert worst >= 4.5, text
    is_dark = view.run("() => document.documentElement.dataset.theme") == "dark"
    assert is_dark == (theme == "light")


def test_print_leaves_out_what_cannot_be_pressed(view: View) -> None:
    view.go(ranks=6, method="mesh", tile="2x3")
    view.tab.emulate_media(media="print")
    assert not view.look("isShown", ".player")
    assert not view.look("isShown", "#controls")
    assert view.look("isShown", "#matrix svg")
