"""The spans of a timeline, checked and sorted: by rank, by lane, and side by side where a lane had several at once."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

from mesh_attention.errors import UsageError
from mesh_attention.timeline import LANES, Lane, Span, Timeline

TOUCH_S = 1e-9
"""Spans that overlap by less than this follow each other: the rest is rounding."""

Track = tuple[Span, ...]
"""Spans of one lane of one rank in order of time, no two of them at once."""


def rank_tracks(timeline: Timeline) -> dict[int, dict[Lane, tuple[Track, ...]]]:
    """Of the ranks that have spans; all lanes are there, one in which nothing happened has no track."""
    if not timeline.spans:
        raise UsageError(
            f"timeline {timeline.name!r} has totals but no spans, so there is nothing to draw; "
            "make it anew and ask for the spans of some ranks"
        )
    by_lane: dict[int, dict[Lane, list[Span]]] = {}
    for span in timeline.spans:
        _check(span, timeline.name)
        by_lane.setdefault(span.rank, {lane: [] for lane in LANES})[span.lane].append(span)
    return {
        rank: {lane: side_by_side(spans) for lane, spans in lanes.items()} for rank, lanes in sorted(by_lane.items())
    }


def side_by_side(spans: Iterable[Span]) -> tuple[Track, ...]:
    """As few tracks as hold every span once; a span is on the first that is free."""
    tracks: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, span.stop_s)):
        free = next((track for track in tracks if track[-1].stop_s <= span.start_s + TOUCH_S), None)
        if free is None:
            tracks.append([span])
        else:
            free.append(span)
    return tuple(tuple(track) for track in tracks)


def _check(span: Span, name: str) -> None:
    if span.lane not in LANES:
        raise UsageError(f"timeline {name!r} has {span}: expected a lane of {', '.join(LANES)}")
    if not (0 <= span.start_s <= span.stop_s and isfinite(span.stop_s)):
        raise UsageError(f"timeline {name!r} has {span}: expected 0 <= start_s <= stop_s, in seconds of the pass")
