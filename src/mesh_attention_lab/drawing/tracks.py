"""The spans of a timeline as tracks: what is drawn in one line, with no two spans at once."""

from __future__ import annotations

from collections.abc import Iterable

from mesh_attention.errors import UsageError
from mesh_attention.timeline import LANES, Lane, Span, Timeline

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
