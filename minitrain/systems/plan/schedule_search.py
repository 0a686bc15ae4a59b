"""Schedules found by search: the shortest there is, with its proof; a pattern that every microbatch repeats.

`place[s]` is the rank of stage s, [0, 1, 1, 0] a V. `limit` is how many activations of a stage a rank may
hold, one number for all ranks, or one for each. `split=True` has I and W for B. `shortest` tries every order;
of partial ones that did the same those stay that no other beats on all ranks. In a pattern microbatch n does
action a at start[a] + n·period. On each rank the actions, taken modulo the period, must not overlap.

Qi et al. 2023, arXiv:2401.10241, section 2: zero bubble with one stage per rank needs 2p-1 microbatches. Lin
et al. 2024 (Tessel), arXiv:2311.15269, sections 3 and 4. Differs: dominance in place of a solver; patterns of
one microbatch (one of several could be shorter).
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import chain, product
from math import gcd, inf, lcm
from operator import le
from typing import NamedTuple

from minitrain.pipeline.partition import undominated
from minitrain.pipeline.schedule import Action, Schedule, check, peak
from minitrain.pipeline.simulate import Costs, Time
from minitrain.ranks.checks import require_ints, require_positive_ints

Limit = int | Sequence[int] | None


class Kind(NamedTuple):  # all actions of one letter on one stage: the k-th needs the k-th of `before`
    letter: str
    stage: int
    rank: int
    time: Time
    before: int | None


def prepared(place: Sequence[int], m: int, costs: Costs, limit: Limit, split: bool) -> tuple[list, list]:
    """The kinds of actions in a microbatch's order (F up, B or I down, then all W), and each rank's limit, by
    default the number of stages, at least that of the rank's own."""
    require_ints(place=place)
    require_positive_ints(m=m)
    stages, p = len(place), 1 + max(place)
    if len(set(place)) != p:
        raise ValueError(f"place={list(place)}: give the rank of each stage, and a stage to every rank")
    order = [("F", s) for s in range(stages)] + [("I" if split else "B", s) for s in reversed(range(stages))]
    before = [None, *range(2 * stages - 1)]
    if split:
        order += [("W", s) for s in range(stages)]
        before += [2 * stages - 1 - s for s in range(stages)]
    times = [costs.of(Action(letter, s, 0)) for letter, s in order]
    if costs.send or any(not isinstance(time, (int, Fraction)) or time <= 0 for time in times):
        raise ValueError("search: times are exact: costs are whole numbers or Fractions above 0, and send=0")
    limit = stages if limit is None else limit
    limits = [limit] * p if isinstance(limit, int) else list(limit)
    if len(limits) != p or any(limits[rank] < list(place).count(rank) for rank in range(p)):
        raise ValueError(f"limit={limit}: one number, or one per rank, each at least its stages in {place}")
    kinds = zip(order, times, before)
    return [Kind(letter, s, place[s], time, needed) for (letter, s), time, needed in kinds], limits


def largest_divisor(kinds: list[Kind]) -> Fraction:
    """The largest number that all times are multiples of."""
    grid = lcm(*(Fraction(kind.time).denominator for kind in kinds))
    return Fraction(gcd(*(int(kind.time * grid) for kind in kinds)), grid)


Shortest = NamedTuple("Shortest", [("schedule", Schedule), ("time", Time)])


def shortest(place, m, costs=Costs(), limit=None, *, split=False, span=False, most=500_000) -> Shortest:
    """The schedule of the smallest makespan, or longest span of a rank from its first action on. Asks for
    ever longer times, from the work of the busiest rank, whether one ends by then."""
    kinds, limits = prepared(place, m, costs, limit, split)
    ranks, step = range(len(limits)), largest_divisor(kinds)
    time = m * max(sum(kind.time for kind in kinds if kind.rank == rank) for rank in ranks)
    while True:
        late = range(int(time / step)) if span else [0]  # a rank may begin later than it could
        begins = product(*([0] if rank == place[0] else [step * i for i in late] for rank in ranks))
        begun = [Partial(begin, begin, ((),) * len(kinds), ()) for begin in begins]
        if found := between(begun, (0,) * len(kinds), (m,) * len(kinds), kinds, limits, most, time):
            break
        time += step
    name = f"shortest{' span' if span else ''} for place {list(place)}, m={m}, limit {limits}"
    return Shortest(scheduled(kinds, found[0], len(limits), name), time)


class Partial(NamedTuple):  # a schedule that is begun
    begun: tuple[Time, ...]  # when, by rank
    free: tuple[Time, ...]  # each rank
    waiting: tuple[tuple[Time, ...], ...]  # when what each kind needs came
    done: tuple[int, ...]  # kinds


def between(partial: list[Partial], counts, goal, kinds, limits, most: int, time=inf) -> list[Partial]:
    """From some counts of each kind to others: of every order of the actions between those in which no rank
    works longer than `time`, and that no other beats."""
    front, tried = {tuple(counts): partial}, 0
    for _ in range(sum(goal) - sum(counts)):
        after: dict[tuple, list[Partial]] = {}
        for at, some in front.items():
            for k, kind in enumerate(kinds):
                ready = kind.before is None or at[k] < at[kind.before]
                if ready and at[k] < goal[k] and has_room(kinds, limits, k, at):
                    more = (*at[:k], at[k] + 1, *at[k + 1 :])
                    after.setdefault(more, []).extend(followed(kinds, one, k) for one in some)
        front = {}
        for at, some in after.items():
            left = [0] * len(limits)
            for kind, count, wanted in zip(kinds, at, goal):
                left[kind.rank] += (wanted - count) * kind.time
            ends = lambda one: map(lambda free, more, begun: free + more - begun, one.free, left, one.begun)
            front[at] = unbeaten([one for one in some if max(ends(one)) <= time])
        tried += sum(map(len, front.values()))
        if tried > most:
            raise ValueError(f"more than {most} partial orders; use fewer stages or a larger `most`")
    return front.get(tuple(goal), [])


def unbeaten(some: list[Partial]) -> list[Partial]:
    """Those than which no other is as early on all ranks and in all that is waiting, and began as late."""
    each = (((*one.free, *chain(*one.waiting), *(-time for time in one.begun)), one) for one in some)
    return [one for _, one in undominated(each)]


def has_room(kinds: Sequence[Kind], limits: Sequence[int], k: int, counts: Sequence[int]) -> bool:
    """May the next action of kind k start on its rank? A forward needs a place for what it keeps."""
    frees = "W" if kinds[-1].letter == "W" else "B"
    own = [(kind.letter, count) for kind, count in zip(kinds, counts) if kind.rank == kinds[k].rank]
    held = sum(count * ((letter == "F") - (letter == frees)) for letter, count in own)
    return kinds[k].letter != "F" or held < limits[kinds[k].rank]


def followed(kinds: Sequence[Kind], one: Partial, k: int) -> Partial:
    """By one more action of kind k."""
    kind, free, waiting = kinds[k], list(one.free), list(one.waiting)
    if kind.before is not None:
        free[kind.rank], waiting[k] = max(free[kind.rank], waiting[k][0]), waiting[k][1:]
    free[kind.rank] += kind.time
    for j, other in enumerate(kinds):
        if other.before == k:
            waiting[j] = (*waiting[j], free[kind.rank])
        if other.rank == kind.rank:  # what came earlier waits for the rank, too
            waiting[j] = tuple(max(came, free[kind.rank]) for came in waiting[j])
    return Partial(one.begun, tuple(free), tuple(waiting), (*one.done, k))


def scheduled(kinds: Sequence[Kind], one: Partial, ranks: int, name: str) -> Schedule:
    """What was done, as lists."""
    lists, counts = [[] for _ in range(ranks)], [0] * len(kinds)
    for k in one.done:
        lists[kinds[k].rank].append(Action(kinds[k].letter, kinds[k].stage, counts[k]))
        counts[k] += 1
    return check(Schedule(name, tuple(map(tuple, lists)), 1 + max(kind.stage for kind in kinds), counts[0]))


class Repetend(NamedTuple):
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
            held = (most_activations(kinds, longer, period, rank) for rank in ranks)
            if fits(kinds, longer, period) and all(map(le, held, limits)) and (found := complete(longer)):
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


def most_activations(kinds: list[Kind], starts: tuple, period: Time, rank: int) -> int:
    """The most activations in the steady state; fewer while the actions that free them have no times yet."""
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
    require_positive_ints(m=m)
    ranks = [[] for _ in range(1 + max(pattern.place))]
    for (letter, stage, rank, *_), start in zip(pattern.kinds, pattern.starts):
        ranks[rank] += [(start + n * pattern.period, Action(letter, stage, n)) for n in range(m)]
    lists = tuple(tuple(action for _, action in sorted(entries)) for entries in ranks)
    return check(Schedule(f"pattern of period {pattern.period}, m={m}", lists, len(pattern.place), m))


def completed(pattern: Repetend, m: int, limit: Limit = None, *, most=100_000) -> Schedule:
    """The smallest makespan of all that repeat whole windows of the pattern, each rank within its limit, by
    default what it holds in `unroll`."""
    kinds, start = pattern.kinds, (0,) * (1 + max(pattern.place))
    holds = [peak(unroll(pattern, m), rank) for rank in range(len(start))]
    limits, found = [limit] * len(start) if isinstance(limit, int) else list(limit or holds), []
    for cut in sorted({start % pattern.period for start in pattern.starts}):
        laps = [(start - cut) // pattern.period for start in pattern.starts]
        late = [lap - min(laps) for lap in laps]  # in window j kind k is at microbatch j - late[k]
        window = sorted(range(len(late)), key=lambda k: (pattern.starts[k] - cut) % pattern.period)
        whole = range(max(late), m)
        counts = [whole.start - lag if whole else m for lag in late]
        begun = [Partial(start, start, ((),) * len(kinds), ())]
        partial = between(begun, [0] * len(late), counts, kinds, limits, most)
        for k in window * len(whole):
            room = has_room(kinds, limits, k, counts)
            partial = [followed(kinds, one, k) for one in partial if room]
            counts[k] += 1
        found += between(unbeaten(partial), counts, [m] * len(late), kinds, limits, most)
    if not found:
        raise ValueError(f"completed: limit={limit}, the pattern holds {holds}; search one for that limit")
    name = f"pattern of period {pattern.period}, completed for m={m}"
    return scheduled(kinds, min(found, key=lambda one: max(one.free)), len(start), name)
