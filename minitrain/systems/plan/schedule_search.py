"""The shortest schedule there is, found by search, with its proof. No torch.

    shortest(place=[0, 1, 2], m=4, costs, limit=[3, 2, 1])    no list does it in less time with that memory

`place[s]` is the rank of stage s: [0, 1, 2] is a line, [0, 1, 1, 0] a V. `limit` is how many activations of a
stage a rank may hold, one number for all ranks, or one for each. `split=True` has I and W for B.

The search asks for ever longer times T, from a bound that no schedule beats, whether a schedule ends by T. It
goes from one moment at which something ends to the next; there every free rank starts one of its next actions
or waits. Each stage takes the microbatches in order. States grow fast: p=3, m=4 is what it is for.
With `span=True` the longest time from a rank's first action to its last counts, as zero-bubble schedules let
ranks begin and end late (lists alone begin early): `time` is that of ranks that begin as late as they may.
That zero bubble takes 2p-1 microbatches with one stage per rank: Qi et al. 2023, arXiv:2401.10241, section 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from math import gcd, lcm
from typing import NamedTuple

from minitrain.pipeline.schedule import Action, Schedule, check
from minitrain.pipeline.simulate import Costs, Time

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
    stages, p = len(place), 1 + max(place, default=-1)
    if p < 1 or sorted(set(place)) != list(range(p)):
        raise ValueError(f"place={list(place)}: give the rank of each stage, and a stage to every rank")
    if m < 1:
        raise ValueError(f"m={m}; use 1 or more microbatches")
    order = [("F", s) for s in range(stages)] + [("I" if split else "B", s) for s in reversed(range(stages))]
    before = [None, *range(2 * stages - 1)]
    if split:
        order += [("W", s) for s in range(stages)]
        before += [2 * stages - 1 - s for s in range(stages)]
    times = [costs.of(Action(letter, s, 0)) for letter, s in order]
    if costs.send or any(not isinstance(time, (int, Fraction)) or time <= 0 for time in times):
        raise ValueError("search: times are exact: costs are whole numbers or Fractions above 0, and send=0")
    limits = [stages] * p if limit is None else [limit] * p if isinstance(limit, int) else list(limit)
    for rank in range(p):
        own = list(place).count(rank)
        if len(limits) != p or limits[rank] < own:
            raise ValueError(f"limit={limit}: {p} ranks, and rank {rank} has {own} stages; give as many")
    kinds = zip(order, times, before)
    return [Kind(letter, s, place[s], time, needed) for (letter, s), time, needed in kinds], limits


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
        self.way = [0] * len(kinds)  # from the start of an action to the end of all that follows from it
        for k in reversed(range(len(kinds))):
            behind = (self.way[j] for j, kind in enumerate(kinds) if kind.before == k)
            self.way[k] = kinds[k].time + max(behind, default=0)

    def bound(self) -> Time:
        """The busiest rank; and if the clock starts for all at once, the way to it and from it to the end."""
        work = [self.m * sum(self.kinds[k].time for k in own) for own in self.of_rank]
        if self.span:
            return max(work)
        to = [sum(kind.time for kind in self.kinds[: min(own)]) for own in self.of_rank]
        after = [min(self.way[k] - self.kinds[k].time for k in own) for own in self.of_rank]
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
                    least += min(self.way[k] - self.kinds[k].time for k in left)
                    least = max(least, *(self.way[k] for k in left))
                if (job[1] if job else now) + least > deadline:
                    return True
        return False
