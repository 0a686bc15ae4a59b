"""Intervals of time: (start, end) pairs in order of start."""

from collections.abc import Iterable
from math import inf

Intervals = list[tuple[float, float]]


def length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def join(intervals: Iterable[tuple[float, float]], gap: float = 0.0, keep: float = inf) -> Intervals:
    """Fewer: what overlaps or is at most `gap` apart becomes one, unless both are longer than `keep`."""
    joined: Intervals = []
    for start, end in sorted(intervals):
        if joined and start - joined[-1][1] <= gap and min(end - start, joined[-1][1] - joined[-1][0]) < keep:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def outside(intervals: Iterable[tuple[float, float]], covers: Intervals) -> Intervals:
    """The parts of `intervals` that no cover overlaps; covers do not overlap each other. One pass."""
    free, first = [], 0
    for start, end in sorted(intervals):
        while first < len(covers) and covers[first][1] <= start:
            first += 1
        i = first
        while i < len(covers) and covers[i][0] < end:
            free.append((start, covers[i][0]))
            start = covers[i][1]
            i += 1
        free.append((start, end))
    return [(start, end) for start, end in free if end > start]
