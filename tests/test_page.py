"""The explorer's data says what plans and timelines say, and nothing in it can break out of the page."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from page_scenes import all_kinds, scene, slower

from mesh_attention.errors import UsageError
from mesh_attention.masks import BlockKind
from mesh_attention.plan.counts import rank_costs
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import Attend, Direction, transfers
from mesh_attention.plan.text import format_end, format_step
from mesh_attention.timeline import Span
from mesh_attention_lab.drawing.page import Scene, page, write_page
from mesh_attention_lab.drawing.page.document import page_data
from mesh_attention_lab.drawing.page.passes import program_text

SCENES = all_kinds()
DATA = page_data(SCENES)
PASSES: list[tuple[Scene, Direction, dict[str, Any]]] = [
    (one, direction, data["passes"][direction])
    for one, data in zip(SCENES, DATA["scenes"], strict=True)
    for direction in one.directions
]
TITLE = "Sixteen shards & <b>one</b> </script> {{data}}"


def at(values: Any, index: int) -> Any:
    return values[index] if isinstance(values, list) else values


def pattern(data: dict[str, Any], row: int, col: int) -> str:
    grid = DATA["grids"][data["grid"]]
    letters = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return str(grid["patterns"][letters.index(grid["cells"][row * len(data["rows"]) + col])])


# Data


def test_bytes_and_memory_are_those_of_the_plan() -> None:
    for one, direction, data in PASSES:
        for rank in range(one.ranks):
            costs = rank_costs(one.plans[direction], rank)
            for side, wanted in (("received", costs.received), ("sent", costs.sent)):
                given = {kind: at(values, rank) for kind, values in data["costs"][side].items()}
                assert {kind: n for kind, n in given.items() if n} == {k: b.total for k, b in wanted.items() if b.total}
            assert at(data["costs"]["peak"], rank) == costs.peak_nbytes
            assert at(data["costs"]["flops"], rank) == costs.flops
            assert at(data["costs"]["messages"], rank) == costs.messages


def test_tiles_hold_just_the_blocks_that_each_rank_attends() -> None:
    for one, direction, data in PASSES:
        plan = one.plans[direction]
        for rank in range(one.ranks):
            place = rank // data["ulysses"]
            attended = {
                (row.shard if row.form != "home" else place, col.shard if col.form != "home" else place)
                for step in plan.program(rank).steps
                if isinstance(step, Attend)
                for row in step.rows
                for col in step.cols
            }
            tile = {(row, col) for row in data["rows"][place] for col in data["cols"][place]}
            assert attended == {block for block in tile if pattern(data, *block) != "0"}
            assert data["rows"][place] == [plan.assignment.peer("row", place, k) for k in range(data["tile"][0])]
            assert data["cols"][place] == [plan.assignment.peer("col", place, k) for k in range(data["tile"][1])]


def test_patterns_say_what_the_mask_leaves_of_a_block() -> None:
    for one, direction, data in PASSES:
        matrix = one.plans[direction].matrix
        for row in range(len(data["rows"])):
            for col in range(len(data["rows"])):
                shown = {"0": BlockKind.EMPTY, "1": BlockKind.FULL}.get(pattern(data, row, col), BlockKind.PARTIAL)
                assert shown is matrix.kind(row, col)


def test_zigzag_blocks_are_drawn_segment_by_segment() -> None:
    data = next(data for one, _, data in PASSES if one.method == "ring" and one.ranks == 8)
    assert pattern(data, 2, 2) == "20/12"  # early and late segment, each causal; late sees all of early
    assert (pattern(data, 5, 2), pattern(data, 2, 5)) == ("10/10", "00/11")


def test_every_span_is_there_within_a_tick_and_belongs_to_its_step() -> None:
    for one, direction, data in PASSES:
        timeline, given = one.forecasts[direction], data["forecast"]
        assert given["names"] == []  # every span of a simulation fits a step
        tick_s = given["tick_s"]
        assert tick_s <= timeline.time_s / 1e5
        for rank in sorted({span.rank for span in timeline.spans}):
            steps = one.plans[direction].program(rank).steps
            for lane, numbers in given["spans"][str(rank)].items():
                spans = sorted((s for s in timeline.spans if (s.rank, s.lane) == (rank, lane)), key=lambda s: s[2:4])
                begun = 0
                for number, span in zip(range(0, len(numbers), 3), spans, strict=True):
                    what, start, length = numbers[number : number + 3]
                    begun += start
                    assert abs(begun * tick_s - span.start_s) <= tick_s
                    assert abs((begun + length) * tick_s - span.stop_s) <= 2 * tick_s
                    assert _says_the_same(span, what, steps)


def _says_the_same(span: Span, what: int, steps: Any) -> bool:
    if span.lane in ("compute", "wait"):
        return format_step(steps[what]) == span.name
    return format_end([end for step in steps for end in transfers(step)[span.lane == "recv"]][what]) == span.name


def test_attends_are_matched_in_the_order_of_the_program() -> None:
    for one, direction, data in PASSES:
        for rank, lanes in data["forecast"]["spans"].items():
            steps = one.plans[direction].program(int(rank)).steps
            attends = [index for index, step in enumerate(steps) if isinstance(step, Attend)]
            assert [what for what in lanes["compute"][::3] if what in attends] == attends


def test_spans_without_a_step_keep_their_names() -> None:
    one = scene(4, "mesh", tile=(2, 2), directions=("forward",))
    spans = (
        Span(1, "compute", 0.0, 1.0, "warming up"),
        Span(1, "compute", 1.0, 2.0, "attend", step=2),
        Span(1, "send", 0.0, 1.0, "gossip", 8),
    )
    measured = replace(one.forecasts["forward"], spans=spans)
    data = page_data([replace(one, measured={"forward": measured})])["scenes"][0]["passes"]["forward"]["measured"]
    assert data["names"] == ["warming up", "gossip"]
    assert [numbers[::3] for numbers in data["spans"]["1"].values()] == [[-1, 2], [-2]]


def test_ranks_that_do_the_same_share_one_text() -> None:
    for one, direction, data in PASSES:
        if one.plans[direction].matrix.is_uniform:
            assert len(data["texts"]) == 1, one.method


def test_a_program_that_was_edited_is_written_as_it_is() -> None:
    plan = scene(6, "attention2d", tile=(2, 3)).plans["forward"]
    program = plan.program(1)
    attend = next(step for step in program.steps if isinstance(step, Attend))
    turned = replace(attend, rows=attend.rows[::-1])
    edited = replace(program, steps=tuple(turned if step is attend else step for step in program.steps))
    assert program_text(plan.assignment, edited) == "=" + "\n".join(map(format_step, edited.steps))
    assert not program_text(plan.assignment, program).startswith("=")


# The document


class Reader(HTMLParser):
    """What a browser would make of the page: elements, and the texts of scripts, styles and the heading."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]][-1] += data


def test_markup_in_titles_notes_and_methods_stays_text() -> None:
    odd = "</script><img src=x onerror=alert(1)>\u2028<!--"
    one = replace(scene(2, "ring"), method=odd)
    text = page([one], title=TITLE, notes=["a < b & c </ul>", odd])
    seen = Reader(text)
    assert seen.texts["h1"] == seen.texts["title"] == [TITLE]
    assert len(seen.texts["script"]) == 2
    assert "img" not in seen.texts
    assert json.loads(seen.texts["script"][0])["scenes"][0]["method"] == odd
    assert seen.texts["li"][:2] == ["a < b & c </ul>", odd]
    assert not set("<>&\u2028\u2029").intersection(seen.texts["script"][0])


def test_the_policy_lets_in_this_script_and_this_style_and_nothing_else() -> None:
    seen = Reader(page([scene(2, "ring")], title="t"))
    policy = next(attrs["content"] for tag, attrs in seen.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    for directive, text in (("script-src", seen.texts["script"][1]), ("style-src", seen.texts["style"][0])):
        digest = b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in policy
    assert "unsafe" not in policy


def test_the_page_asks_for_nothing_from_anywhere() -> None:
    text = page([scene(2, "ring")], title="t")
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", text)
    for _, attrs in Reader(text).tags:
        assert "src" not in attrs
        assert attrs.get("href") in (None, "data:,", "#matrix-card")
        assert not any(name.startswith("on") or name == "style" for name in attrs)


def test_equal_scenes_give_equal_bytes_in_any_process() -> None:
    code = (
        "import sys, hashlib; from page_scenes import scene; from mesh_attention_lab.drawing.page import page;"
        "text = page([scene(4, 'mesh', tile=(2, 2)), scene(4, 'ring')], title='t', notes=['n']);"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_sixty_four_ranks_take_little_room() -> None:
    bare = len(page([scene(2, "ring")], title="t"))
    one = scene(64, "mesh", tile=(8, 8), seq=65536, shown=range(0, 64, 8))
    assert len(page([one], title="t")) - bare < 60_000  # thirty such scenes are below two megabytes


def test_a_page_is_written_as_it_is_made(tmp_path: Path) -> None:
    one = scene(2, "ring")
    write_page(tmp_path / "page.html", [one], title="Ünïcode")
    assert (tmp_path / "page.html").read_bytes() == page([one], title="Ünïcode").encode()


# Refusals

FOUR, TWO = scene(4, "mesh", tile=(2, 2)), scene(2, "ring")


def _swapped(plans: Any) -> dict[Direction, Plan]:
    return {"forward": plans["backward"], "backward": plans["forward"]}


BAD_SPAN = replace(FOUR.forecasts["forward"], spans=(Span(0, "recv", 2.0, 1.0, "q1 from 1"),))
FOREIGN = replace(FOUR.forecasts["forward"], spans=(Span(0, "wait", 0.0, 1.0, "recv q1 from 1", step=99),))
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: page([], title="t"), "no scenes given"),
    (lambda: page([TWO], title="t", opening=FOUR), "cannot open on 'mesh' with tile 2x2: expected one of the scenes"),
    (lambda: page([TWO, TWO], title="t"), "two scenes have 2 ranks, method 'ring' and tile 1x2"),
    (lambda: replace(TWO, plans={}), "has plans for nothing; expected forward, backward or both"),
    (lambda: replace(TWO, forecasts={}), "forecasts for nothing; simulate each plan"),
    (lambda: replace(TWO, plans=_swapped(TWO.plans)), "given as forward is a backward plan"),
    (
        lambda: replace(TWO, plans={**TWO.plans, "backward": FOUR.plans["backward"]}),
        "forward and backward plans are for different problems",
    ),
    (lambda: replace(TWO, forecasts=FOUR.forecasts), "expected those of each of the 2 ranks"),
    (
        lambda: Scene(
            method="ring",
            plans={"forward": TWO.plans["forward"]},
            forecasts={"forward": TWO.forecasts["forward"]},
            measured=TWO.forecasts,
        ),
        "was measured for forward and backward and planned for forward",
    ),
    (
        lambda: page([replace(FOUR, forecasts={**FOUR.forecasts, "forward": BAD_SPAN})], title="t"),
        "expected 0 <= start_s <= stop_s",
    ),
    (
        lambda: page([replace(FOUR, forecasts={**FOUR.forecasts, "forward": FOREIGN})], title="t"),
        "expected a timeline of the same plan",
    ),
    (lambda: write_page("/no/such/folder/page.html", [TWO], title="t"), "cannot be written"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_makes_no_page_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        make()


def test_one_pass_and_measurements_of_one_pass_are_enough() -> None:
    one = scene(2, "ring", directions=("forward",))
    both = replace(TWO, measured={"backward": slower(TWO.forecasts["backward"])})
    data = page_data([one])["scenes"][0]["passes"]
    assert list(data) == ["forward"]
    passes = page_data([both])["scenes"][0]["passes"]
    assert passes["forward"]["measured"] is None
    assert passes["backward"]["measured"]["time_s"] == pytest.approx(1.5 * passes["backward"]["forecast"]["time_s"])
