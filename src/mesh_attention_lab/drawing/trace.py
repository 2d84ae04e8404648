"""A timeline in the JSON trace format of Chrome, for https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

from mesh_attention.errors import UsageError
from mesh_attention.timeline import LANES, Lane, Span, Timeline
from mesh_attention_lab.drawing import writing

Event = dict[str, Any]


def to_perfetto(timeline: Timeline) -> dict[str, Any]:
    """A rank is a process, a lane a thread.

    Viewers lose events of one thread that overlap, so what a lane does at once is on threads such as "send 2".
    """
    names: list[Event] = []
    spans: list[Event] = []
    threads = count(1)
    for pid, (rank, lanes) in enumerate(rank_tracks(timeline).items(), 1):
        names += _named("process", f"rank {rank}", place=pid, pid=pid)
        for lane, tracks in lanes.items():
            for number, track in enumerate(tracks or ((),), 1):  # an idle lane is shown empty
                tid = next(threads)
                names += _named("thread", lane if number == 1 else f"{lane} {number}", place=tid, pid=pid, tid=tid)
                spans += _span_events(track, pid=pid, tid=tid)
    spans.sort(key=lambda event: (event["ts"], event["pid"], event["tid"]))
    return {"traceEvents": names + spans, "displayTimeUnit": "ms"}


def write_trace(path: Path | str, timeline: Timeline) -> None:
    text = json.dumps(to_perfetto(timeline), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    with writing(Path(path)):
        Path(path).write_text(text + "\n", encoding="utf-8")


def joined(passes: Iterable[Timeline]) -> Timeline:
    """Passes after each other: each starts when all ranks have finished the one before. Totals are the first's."""
    first, *later = passes
    spans, start_s = list(first.spans), first.time_s
    for timeline in later:
        spans += [s._replace(start_s=s.start_s + start_s, stop_s=s.stop_s + start_s) for s in timeline.spans]
        start_s += timeline.time_s
    return replace(first, spans=tuple(spans))


def _named(kind: str, name: str, *, place: int, **ids: int) -> tuple[Event, Event]:
    return (
        {"ph": "M", "name": f"{kind}_name", **ids, "args": {"name": name}},
        {"ph": "M", "name": f"{kind}_sort_index", **ids, "args": {"sort_index": place}},
    )


def _span_events(track: Track, *, pid: int, tid: int) -> Iterator[Event]:
    free_ns = 0
    for span in track:
        # Whole nanoseconds, and never before the one before has ended: rounding must not make an overlap.
        start_ns = max(free_ns, round(span.start_s * 1e9))
        free_ns = max(start_ns, round(span.stop_s * 1e9))
        yield {
            "ph": "X",
            "name": span.name,
            "cat": span.lane,
            "pid": pid,
            "tid": tid,
            "ts": start_ns / 1000,
            "dur": (free_ns - start_ns) / 1000,
            "args": _args(span),
        }


def _args(span: Span) -> dict[str, float]:
    seconds = span.stop_s - span.start_s
    args: dict[str, float] = {"bytes": span.nbytes} if span.nbytes else {}
    if span.nbytes and seconds >= TOUCH_S:
        args["GB/s"] = float(f"{span.nbytes / seconds / 1e9:.4g}")
    return args


# Tracks: what is drawn in one line


Track = tuple[Span, ...]
"""Spans of one lane of one rank in order of time, no two of them at once."""
TOUCH_S = 1e-9
"""Spans that overlap by less than this follow each other: the rest is rounding."""


def rank_tracks(timeline: Timeline) -> dict[int, dict[Lane, tuple[Track, ...]]]:
    """Spans by rank and lane, for the ranks that have any; a lane in which nothing happened has no track."""
    if not timeline.spans:
        raise UsageError(
            f"timeline {timeline.name!r} has totals but no spans, so there is nothing to draw; "
            "simulate again with spans_of=, or record the pass"
        )
    by_lane: dict[int, dict[Lane, list[Span]]] = {}
    for span in timeline.spans:
        if span.lane not in LANES or not 0 <= span.start_s <= span.stop_s < inf:
            wanted = f"expected a lane of {', '.join(LANES)}, and 0 <= start_s <= stop_s, in seconds of the pass"
            raise UsageError(f"timeline {timeline.name!r} has {span}: {wanted}")
        by_lane.setdefault(span.rank, {lane: [] for lane in LANES})[span.lane].append(span)
    return {
        rank: {lane: _side_by_side(spans) for lane, spans in lanes.items()} for rank, lanes in sorted(by_lane.items())
    }


def _side_by_side(spans: Iterable[Span]) -> tuple[Track, ...]:
    """The fewest tracks that hold every span; each span goes to the first free one."""
    tracks: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, span.stop_s)):
        free = next((track for track in tracks if track[-1].stop_s <= span.start_s + TOUCH_S), None)
        if free is None:
            tracks.append([span])
        else:
            free.append(span)
    return tuple(tuple(track) for track in tracks)
