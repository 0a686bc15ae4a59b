"""What the tests of pipelines share: schedules in other forms, every schedule there is, what an error says."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest

from minitrain.pipeline.schedule import B, F, I, Pair, Schedule, W, peak
from minitrain.pipeline.schedules.bidirectional import chimera, dualpipe, dualpipe_v, hanayo
from minitrain.pipeline.schedules.less_memory import bpipe, recomputed, varuna
from minitrain.pipeline.schedules.one_direction import (
    breadth_first,
    gpipe,
    interleaved,
    one_f_one_b,
    seq1f1b,
    terapipe,
)
from minitrain.pipeline.schedules.zero_bubble import v_half, v_min, zb_h1, zb_h2, zb_interleaved, zb_v

GRID = [(1, 1), (1, 5), (2, 1), (2, 4), (3, 2), (3, 7), (4, 8), (5, 64), (8, 3), (8, 16), (16, 16)]


def said_by(call: Callable) -> str:
    """The words of the one line with which a call refuses."""
    with pytest.raises((ValueError, RuntimeError)) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def refuse(refused: dict[str, Callable]) -> None:
    for words, call in refused.items():
        assert words in said_by(call)


def peaks(schedule: Schedule) -> list[int]:
    return [peak(schedule, rank) for rank in range(len(schedule.ranks))]


def split(schedule: Schedule, late: int = 1) -> Schedule:
    """Each B as I, and its W when `late` more backwards have been (0: right behind it)."""

    def rank(entries):
        waiting = []
        for action in entries:
            if action.kind != "B":
                yield action
                continue
            yield I(*action[1:])
            waiting.append(W(*action[1:]))
            if len(waiting) > late:
                yield waiting.pop(0)
        yield from waiting

    return replace(schedule, name=f"{schedule.name}, split", ranks=map(rank, schedule.ranks))


def paired(schedule: Schedule) -> Schedule:
    """Neighbours B and F of different microbatches as one entry, where that leaves nobody stuck."""

    def rank(entries):
        entries = list(entries)
        while entries:
            first = entries.pop(0)
            together = first.kind == "B" and entries and entries[0].kind == "F"
            yield Pair(entries.pop(0), first) if together else first

    return replace(schedule, name=f"{schedule.name}, paired", ranks=map(rank, schedule.ranks))


def folded(p: int, m: int) -> Schedule:
    """A V: rank r has the stages r and 2p-1-r; all forwards, then all backwards."""
    late = [(r, 2 * p - 1 - r) for r in range(p)]
    every = lambda kind, stages: [kind(s, i) for s in stages for i in range(m)]
    return Schedule(f"V, p={p}, m={m}", [every(F, own) + every(B, own[::-1]) for own in late], 2 * p, m)


@cache
def everything() -> Sequence[Schedule]:
    made = []
    for p, m in GRID:
        made += [gpipe(p, m), one_f_one_b(p, m), split(one_f_one_b(p, m)), recomputed(one_f_one_b(p, m))]
    for p, m, v in [(2, 4, 3), (4, 8, 2), (4, 12, 4), (8, 16, 2)]:
        made += [interleaved(p, m, v), breadth_first(p, m, v)]
    for p, m in [(2, 4), (4, 8), (6, 13)]:
        made += [make(p, m) for make in (zb_h1, zb_h2, zb_v, v_half, v_min, dualpipe_v, bpipe, varuna)]
    for p in (2, 4, 6):
        made += [chimera(p, 2 * p), dualpipe(p, 2 * p)]
    made += [folded(p, m) for p, m in [(1, 2), (2, 3), (4, 8)]]
    made += [hanayo(4, 8, 2), zb_interleaved(4, 8, 2), terapipe(4, 2, 3), terapipe(2, 2, 3), seq1f1b(4, 4, 2)]
    made += [split(one_f_one_b(16, 64)), split(interleaved(4, 8, 2)), split(folded(4, 4))]
    return [*made, recomputed(gpipe(3, 4)), paired(one_f_one_b(1, 6)), paired(interleaved(2, 8, 2))]
