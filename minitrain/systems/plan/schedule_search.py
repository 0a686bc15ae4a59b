"""Schedules found by search: the shortest there is, with its proof; a pattern that every microbatch repeats.

    shortest(place=[0, 1, 2], m=4, costs, limit=[3, 2, 1])    no list does it in less time with that memory
    pattern = repetend(place=[0, 1, 1, 0], costs, limit=4)    a V of 4 stages on 2 ranks
    unroll(pattern, m)                                        a Schedule that follows the pattern's times
    completed(pattern, m)                                     the shortest that repeats it between other ends

`place[s]` is the rank of stage s. `limit` is how many activations of a stage a rank may hold, one number for
all ranks, or one for each. `split=True` has I and W for B.
`shortest` asks for ever longer times, from a bound that no schedule beats, whether a schedule ends by then.
States grow fast: p=3, m=4 is what it is for.
In a pattern microbatch n does action a at start[a] + n·period. On each rank the actions, taken modulo the
period, must not overlap. `completed` searches in every order what comes before the first whole window and
behind the last; of partial orders that did the same those stay that no other beats on all ranks.

Qi et al. 2023, arXiv:2401.10241, section 2: zero bubble with one stage per rank needs 2p-1 microbatches. Lin
et al. 2024 (Tessel), arXiv:2311.15269, sections 3 and 4. Differs: depth-first and dominance in place of a
solver; patterns of one microbatch (one of several could be shorter).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, product
from math import gcd, lcm
from typing import NamedTuple

from minitrain.pipeline.partition import undominated
from minitrain.pipeline.schedule import Action, Schedule, check, peak
from minitrain.pipeline.simulate import Costs, Time
from minitrain.ranks.checks import require_ints, require_positive_ints

Limit = int | Sequence[int] | None


class Kind(NamedTuple):
    """All actions of one letter on one stage: the k-th needs the k-th of `before`."""

    letter: str
    stage: int
    rank: int
    time: Time
    before: int | None


def prepared(place: Sequence[int], m: int, costs: Costs, limit: Limit, split: bool) -> tuple[list, list]:
    """The kinds of actions in a microbatch's order (F up, B or I down, then all W), and every rank's limit.

    By default that is the number of stages; at least it is the number of the rank's own."""
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
    limits = per_rank(stages if limit is None else limit, p)
    if any(limits[rank] < list(place).count(rank) for rank in range(p)):
        raise ValueError(f"limit={limit}: a rank holds at least an activation of each of its stages {place}")
    kinds = zip(order, times, before)
    return [Kind(letter, s, place[s], time, needed) for (letter, s), time, needed in kinds], limits


def per_rank(limit: int | Sequence[int], ranks: int) -> list[int]:
    limits = [limit] * ranks if isinstance(limit, int) else list(limit)
    if len(limits) != ranks:
        raise ValueError(f"limit={limit}: give one number, or one for each of {ranks} ranks")
    return limits


def largest_divisor(kinds: list[Kind]) -> Fraction:
    """The largest number that all times are multiples of."""
    grid = lcm(*(Fraction(kind.time).denominator for kind in kinds))
    return Fraction(gcd(*(int(kind.time * grid) for kind in kinds)), grid)


class Shortest(NamedTuple):
    schedule: Schedule
    time: Time
    states: int  # how many were looked at, over all times that were tried


def shortest(place, m, costs=Costs(), limit=None, *, split=False, span=False, most=2_000_000) -> Shortest:
    """The schedule of the smallest makespan, or span; refuses a search of more than `most` states."""
    kinds, limits = prepared(place, m, costs, limit, split)
    search = Search(kinds, m, limits, span, most)
    time = search.bound()
    while (found := search.within(time)) is None:
        time += largest_divisor(kinds)
    lists = [[] for _ in limits]
    for rank, k, microbatch in found:
        lists[rank].append(Action(kinds[k].letter, kinds[k].stage, microbatch))
    name = f"shortest{' span' if span else ''} for place {list(place)}, m={m}, limit {limits}"
    return Shortest(check(Schedule(name, tuple(map(tuple, lists)), len(place), m)), time, search.states)


@dataclass
class Search:
    kinds: list[Kind]
    m: int
    limits: list[int]
    span: bool
    most: int
    states: int = 0

    def __post_init__(self):
        kinds, self.p = self.kinds, len(self.limits)
        self.of_rank = [[k for k, kind in enumerate(kinds) if kind.rank == rank] for rank in range(self.p)]
        self.frees = "W" if any(kind.letter == "W" for kind in kinds) else "B"
        self.tail = [0] * len(kinds)  # from the start of an action to the end of all that follows from it
        for k in reversed(range(len(kinds))):
            behind = (self.tail[j] for j, kind in enumerate(kinds) if kind.before == k)
            self.tail[k] = kinds[k].time + max(behind, default=0)

    def bound(self) -> Time:
        """The busiest rank; and if the clock starts for all at once, the way to it and from it to the end."""
        work = [self.m * sum(self.kinds[k].time for k in own) for own in self.of_rank]
        if self.span:
            return max(work)
        to = [sum(kind.time for kind in self.kinds[: min(own)]) for own in self.of_rank]
        after = [min(self.tail[k] - self.kinds[k].time for k in own) for own in self.of_rank]
        return max(map(sum, zip(to, work, after)))

    def within(self, time: Time) -> list[tuple[int, int, int]] | None:
        """(rank, kind, microbatch) by their starts, of a schedule that ends by `time`, if there is one."""
        self.time, self.failed = time, set()
        deadlines = (None if self.span else time,) * self.p
        return self.go_on(0, (0,) * len(self.kinds), (None,) * self.p, deadlines)

    def go_on(self, now: Time, started: tuple, running: tuple, deadlines: tuple) -> list | None:
        """The same from this moment on.

        `started[kind]` counts microbatches, `running[rank]` is (kind, end), `deadlines[rank]` when the rank
        must be done (None: it has not begun)."""
        if all(count == self.m for count in started):
            return []
        jobs_left = tuple(job and (job[0], job[1] - now) for job in running)
        state = started, jobs_left, tuple(end and end - now for end in deadlines)
        if state in self.failed or self.too_late(now, started, running, deadlines):
            return None
        self.states += 1
        if self.states > self.most:
            case = f"more than {self.most} states for {self.p} ranks, {self.m} microbatches"
            raise ValueError(f"shortest: {case}; use fewer, or a larger `most`")
        done = list(started)
        for k, _ in filter(None, running):
            done[k] -= 1
        options = []  # of every rank: gradients first; None: it waits
        for own, job in zip(self.of_rank, running):
            ready = [k for k in reversed(own) if not job and self.may_start(k, done, started)]
            options.append([*ready, None])
        for choice in product(*options):
            begun = [(rank, k, started[k]) for rank, k in enumerate(choice) if k is not None]
            if not begun and not any(running):
                continue  # all wait, for nothing
            counts, jobs, ends = list(started), list(running), list(deadlines)
            for rank, k, _ in begun:
                counts[k] += 1
                jobs[rank] = k, now + self.kinds[k].time
                ends[rank] = now + self.time if ends[rank] is None else ends[rank]
            then = min(job[1] for job in jobs if job)
            still = tuple(job if job and job[1] > then else None for job in jobs)
            rest = self.go_on(then, tuple(counts), still, tuple(ends))
            if rest is not None:
                return begun + rest
        self.failed.add(state)
        return None

    def may_start(self, k: int, done: list, started: tuple) -> bool:
        kind, count = self.kinds[k], started[k]
        if count == self.m or kind.before is not None and done[kind.before] <= count:
            return False
        letters = [(self.kinds[j].letter, started[j]) for j in self.of_rank[kind.rank]]
        held = sum(number * ((letter == "F") - (letter == self.frees)) for letter, number in letters)
        return kind.letter != "F" or held < self.limits[kind.rank]

    def too_late(self, now: Time, started: tuple, running: tuple, deadlines: tuple) -> bool:
        """Has a rank more work than time left, or one of its microbatches a longer way to go?"""
        for own, job, deadline in zip(self.of_rank, running, deadlines):
            left = [k for k in own if started[k] < self.m]
            if left and deadline is not None:  # what runs was looked at when it began
                least = sum((self.m - started[k]) * self.kinds[k].time for k in left)
                if not self.span:
                    least += min(self.tail[k] - self.kinds[k].time for k in left)
                    least = max(least, *(self.tail[k] for k in left))
                if (job[1] if job else now) + least > deadline:
                    return True
        return False


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
            if no_overlap and all(
                most_activations(kinds, longer, period, rank) <= limits[rank] for rank in ranks
            ):
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
    """The smallest makespan of all that repeat whole windows of the pattern, each rank within its limit.

    The limit is by default what a rank holds in `unroll`. Refuses to look at more than `most` partial orders.
    """
    ranks = range(1 + max(pattern.place))
    holds = [peak(unroll(pattern, m), rank) for rank in ranks]
    limits = per_rank(holds if limit is None else limit, len(ranks))
    found = []
    for cut in sorted({start % pattern.period for start in pattern.starts}):
        laps = [(start - cut) // pattern.period for start in pattern.starts]
        late = [lap - min(laps) for lap in laps]  # in window j kind k is at microbatch j - late[k]
        window = sorted(range(len(late)), key=lambda k: (pattern.starts[k] - cut) % pattern.period)
        whole = range(max(late), m)
        before = [whole.start - lag if whole else m for lag in late]
        ends = Ends(pattern.kinds, limits, most)
        partial = ends.search([Partial((0,) * len(ranks), ((),) * len(late), ())], [0] * len(late), before)
        counts = list(before)
        for _ in whole:
            for k in window:
                partial = [ends.step(one, k) for one in partial] if ends.room(k, counts) else []
                counts[k] += 1
            partial = unbeaten(partial)
        found += ends.search(partial, counts, [m] * len(late))
    if not found:
        told = f"completed: limit={limit}, and ranks that repeat the pattern hold {holds}"
        raise ValueError(f"{told}; search a pattern for that limit")
    best = min(found, key=lambda one: max(one.free))
    lists, counts = [[] for _ in ranks], [0] * len(pattern.kinds)
    for k in best.done:
        kind = pattern.kinds[k]
        lists[kind.rank].append(Action(kind.letter, kind.stage, counts[k]))
        counts[k] += 1
    name = f"pattern of period {pattern.period}, completed for m={m}"
    return check(Schedule(name, tuple(map(tuple, lists)), len(pattern.place), m))


class Partial(NamedTuple):
    """A schedule that is begun: when each rank is free, when what each kind needs came, what was done."""

    free: tuple[Time, ...]
    waiting: tuple[tuple[Time, ...], ...]
    done: tuple[int, ...]


def unbeaten(some: list[Partial]) -> list[Partial]:
    """Those than which no other is as early on all ranks and in all that is waiting."""
    return [one for _, one in undominated(((*one.free, *chain(*one.waiting)), one) for one in some)]


class Ends(NamedTuple):
    """Both ends of a schedule are searched alike, from some counts of each kind to others."""

    kinds: Sequence[Kind]
    limits: Sequence[int]
    most: int

    def search(self, partial: list[Partial], counts: list[int], goal: list[int]) -> list[Partial]:
        """All that no other beats, of every order of the actions between."""
        front, tried = {tuple(counts): partial}, 0
        for _ in range(sum(goal) - sum(counts)):
            after = {}
            for at, some in front.items():
                for k, kind in enumerate(self.kinds):
                    ready = kind.before is None or at[k] < at[kind.before]
                    if ready and at[k] < goal[k] and self.room(k, at):
                        more = (*at[:k], at[k] + 1, *at[k + 1 :])
                        after.setdefault(more, []).extend(self.step(one, k) for one in some)
            front = {at: unbeaten(some) for at, some in after.items()}
            tried += sum(map(len, front.values()))
            if tried > self.most:
                case = f"completed: more than {self.most} partial orders"
                raise ValueError(f"{case}; use fewer stages, or a larger `most`")
        return front.get(tuple(goal), [])

    def room(self, k: int, counts: Sequence[int]) -> bool:
        """May the next action of kind k start on its rank? A forward needs a place for what it keeps."""
        rank = self.kinds[k].rank
        own = [(kind.letter, count) for kind, count in zip(self.kinds, counts) if kind.rank == rank]
        frees = "W" if any(letter == "W" for letter, _ in own) else "B"
        held = sum(count * ((letter == "F") - (letter == frees)) for letter, count in own)
        return self.kinds[k].letter != "F" or held < self.limits[rank]

    def step(self, one: Partial, k: int) -> Partial:
        kind = self.kinds[k]
        free, waiting = list(one.free), list(one.waiting)
        start = free[kind.rank]
        if kind.before is not None:
            start, waiting[k] = max(start, waiting[k][0]), waiting[k][1:]
        free[kind.rank] = start + kind.time
        for j, other in enumerate(self.kinds):
            if other.before == k:
                waiting[j] = (*waiting[j], free[kind.rank])
        return Partial(tuple(free), tuple(waiting), (*one.done, k))
