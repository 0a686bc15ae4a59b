"""Tessel: search the pattern that one microbatch repeats, for any placement of stages. No torch.

    pattern = repetend(place=[0, 1, 1, 0], costs, limit=4)    a V of 4 stages on 2 ranks
    unroll(pattern, m)                                        a Schedule

Microbatch n does action a at start[a] + n·period. On each rank the actions, taken modulo the period, must not
overlap; nothing else is to be checked, for any number of microbatches. Periods are tried from the work of the
busiest rank on. It finds 1F1B for a line, and among the patterns it looks at are the published Vs. What fills
and drains a rank follows from the times: for a V of whole backwards that takes a forward and a backward more
than the shortest schedule (schedule_search.py).
Lin et al. 2024 (Tessel), arXiv:2311.15269, sections 3 and 4. Differs: a depth-first search, not a solver that
searches warm-up and cool-down too; patterns of one microbatch (one of several could be shorter).
"""

from collections.abc import Sequence
from typing import NamedTuple

from minitrain.checks import counts, positive
from minitrain.pipeline.schedule import Action, Schedule, check
from minitrain.pipeline.simulate import Costs, Time
from minitrain.plan.schedule_search import Kind, Limit, largest_divisor, prepared


class Repetend(NamedTuple):
    """Microbatch n does the action of kind k at starts[k] + n · period."""

    place: tuple[int, ...]
    kinds: tuple[Kind, ...]
    starts: tuple[Time, ...]
    period: Time


def repetend(place: Sequence[int], costs=Costs(), limit: Limit = None, *, split=False, most=500_000):
    """The shortest period, and of its patterns the first: each action as early as those around it allow."""
    kinds, limits = prepared(place, 1, costs, limit, split)
    step, ranks, tried = largest_divisor(kinds), range(len(limits)), 0
    period = max(sum(kind.time for kind in kinds if kind.rank == rank) for rank in ranks)

    def complete(starts: tuple) -> tuple | None:
        """`starts` of the first kinds, continued to all of them."""
        nonlocal tried
        tried += 1
        if tried > most:
            raise ValueError(f"repetend: more than {most} patterns; use fewer stages, or a larger `most`")
        if len(starts) == len(kinds):
            return starts
        before = kinds[len(starts)].before
        ready = 0 if before is None else starts[before] + kinds[before].time
        for late in range(int(period / step)):
            longer = (*starts, ready + late * step)
            no_overlap = fits(kinds, longer, period)
            if no_overlap and all(held(kinds, longer, period, rank) <= limits[rank] for rank in ranks):
                if found := complete(longer):
                    return found
        return None

    while (starts := complete(())) is None:
        period += step
    return Repetend(tuple(place), tuple(kinds), starts, period)


def fits(kinds: list[Kind], starts: tuple, period: Time) -> bool:
    """Does the last action overlap no other of its rank, modulo the period?"""
    new, at = kinds[len(starts) - 1], starts[-1]
    others = [(kind, start) for kind, start in zip(kinds, starts[:-1]) if kind.rank == new.rank]
    return all((at - s) % period >= kind.time and (s - at) % period >= new.time for kind, s in others)


def held(kinds: list[Kind], starts: tuple, period: Time, rank: int) -> int:
    """The most activations in the steady state; fewer while the actions that free them have no times yet."""
    positive(period=period)
    last = kinds[len(starts) - 1]
    now = 0 if last.letter == "W" else starts[-1] + last.time  # no backward to come starts before
    weights_time = {kind.stage: kind.time for kind in kinds if kind.letter == "W"}
    born, freed = {}, {}
    for kind, start in zip(kinds, starts):
        if kind.rank == rank:
            end = start + kind.time
            if kind.letter == "F":
                born[kind.stage], end = start, max(now, end)
            freed[kind.stage] = end + (weights_time[kind.stage] if kind.letter == "I" else 0)
    alive = (sum((at - born[s]) // period - (at - freed[s]) // period for s in born) for at in born.values())
    return max(alive, default=0)


def unroll(pattern: Repetend, m: int) -> Schedule:
    """m microbatches at their times, read off rank by rank."""
    counts(m=m)
    if m < 1:
        raise ValueError(f"unroll: m={m}; use 1 or more microbatches")
    ranks = [[] for _ in range(1 + max(pattern.place))]
    for (letter, stage, rank, *_), start in zip(pattern.kinds, pattern.starts):
        ranks[rank] += [(start + n * pattern.period, Action(letter, stage, n)) for n in range(m)]
    lists = tuple(tuple(action for _, action in sorted(entries)) for entries in ranks)
    return check(Schedule(f"pattern of period {pattern.period}, m={m}", lists, len(pattern.place), m))
