"""Schedules found, not designed: the shortest one there is, with its proof, and Tessel's pattern that repeats. No torch.

    shortest(place=[0, 1, 2], m=4, costs, limit=[3, 2, 1])        no list does it in less time with that memory
    repetend(place=[0, 1, 1, 0], costs, limit=4)                  a pattern of one microbatch that repeats; unroll(pattern, m) is a Schedule

`place[s]` is the rank of stage s: [0, 1, 2] is the usual line, [0, 1, 1, 0] a V. `limit` is how many activations of a stage a rank may
hold, one number for all ranks or one each. `split=True` has I and W for B.

**shortest** asks for ever longer times T, from a bound that no schedule can beat, whether a schedule ends by T; the first yes is the
optimum, for all shorter times were searched to the end. A search goes from one moment at which something ends to the next; there
every free rank starts one of its next actions or waits. Microbatches are alike, so each stage takes them in order. A branch is cut
when a rank has more work left than time, or a microbatch a longer way home, and when its state was met before.
With `span=True` what counts is the longest time from a rank's first action to its last: zero-bubble schedules let ranks begin late and
end late (`time` is that of ranks that begin as late as they may; lists alone begin early). States grow fast: p=3, m=4 is what it is for.

**repetend** (Tessel) looks at the steady state only. Microbatch n does action a at start[a] + n·period. On each rank the actions, taken
modulo the period, must not overlap; then nothing else is to be checked, for any number of microbatches. The period can not be less
than the work of the busiest rank; periods are tried from there. It finds 1F1B for a line. `unroll` puts m microbatches at their times,
and the order in which they stand on a rank is the schedule: what fills and drains it comes out by itself, and runs as early as it can.

Raises ValueError in one line for places that leave out a rank, m below 1, a limit below what one microbatch needs, costs of 0 or of
messages, and for a search of more than `most` states.
Lin et al. 2024 (Tessel), arXiv:2311.15269, sections 3 and 4. Differs: a depth-first search, theirs asks a solver and searches warm-up and
cool-down too; patterns of one microbatch (where a tight limit makes ranks wait, one of several could be shorter).
That zero bubble takes the memory of 2p-1 microbatches: Qi et al. 2023, arXiv:2401.10241, section 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import NamedTuple

from minitrain.pipeline.schedule import Action, Schedule, check
from minitrain.pipeline.simulate import Costs, Time


class Kind(NamedTuple):
    """All actions of one letter on one stage: the k-th needs the k-th of `before`."""

    letter: str
    stage: int
    rank: int
    time: Time
    before: int | None


class Shortest(NamedTuple):
    schedule: Schedule
    time: Time
    states: int  # how many were looked at, over all times that were tried


def kinds_of(place: Sequence[int], costs: Costs, split: bool) -> list[Kind]:
    """In the order a microbatch goes: F up, B or I down, and then all W."""
    stages = len(place)
    up = [Kind("F", s, place[s], costs.of(Action("F", s, 0)), s - 1 if s else None) for s in range(stages)]
    letter = "I" if split else "B"
    down = [
        Kind(letter, s, place[s], costs.of(Action(letter, s, 0)), stages + i - 1)
        for i, s in enumerate(reversed(range(stages)))
    ]
    late = (
        [Kind("W", s, place[s], costs.of(Action("W", s, 0)), 2 * stages - 1 - s) for s in range(stages)]
        if split
        else []
    )
    return up + down + late


# ---- the shortest schedule -----------------------------------------------------------------------------------------------


def shortest(
    place: Sequence[int],
    m: int,
    costs: Costs = Costs(),
    limit: int | Sequence[int] | None = None,
    *,
    split: bool = False,
    span: bool = False,
    most: int = 2_000_000,
) -> Shortest:
    kinds, limits = prepared(place, m, costs, limit, split)
    search = Search(kinds, len(limits), m, limits, span, most)
    grid = lcm(*(Fraction(kind.time).denominator for kind in kinds))
    step = Fraction(gcd(*(int(kind.time * grid) for kind in kinds)), grid)
    time = search.bound()
    while (lists := search.within(time)) is None:
        time += step
    what = f"shortest{' span' if span else ''} for place {list(place)}, m={m}, limit {limits}"
    ranks = [
        tuple(Action(kinds[k].letter, kinds[k].stage, i) for rank, k, i in lists if rank == here)
        for here in range(len(limits))
    ]
    return Shortest(check(Schedule(what, tuple(ranks), len(place), m)), time, search.states)


class Search:
    def __init__(self, kinds: list[Kind], p: int, m: int, limits: list[int], span: bool, most: int):
        self.kinds, self.p, self.m, self.limits, self.span, self.most, self.states = (
            kinds,
            p,
            m,
            limits,
            span,
            most,
            0,
        )
        self.of_rank = [[k for k, kind in enumerate(kinds) if kind.rank == rank] for rank in range(p)]
        self.frees = "W" if any(kind.letter == "W" for kind in kinds) else "B"
        self.way = [0] * len(kinds)  # from the start of an action to the end of all that follows from it
        for k in reversed(range(len(kinds))):
            self.way[k] = kinds[k].time + max(
                (self.way[j] for j, kind in enumerate(kinds) if kind.before == k), default=0
            )

    def bound(self) -> Time:
        """The busiest rank; and if the clock starts for all at once, the way to it and from it to the end."""
        work = [self.m * sum(self.kinds[k].time for k in own) for own in self.of_rank]
        if self.span:
            return max(work)
        to = [sum(self.kinds[j].time for j in range(min(own))) for own in self.of_rank]
        after = [min(self.way[k] - self.kinds[k].time for k in own) for own in self.of_rank]
        return max(map(sum, zip(to, work, after)))

    def within(self, time: Time) -> list[tuple[int, int, int]] | None:
        """(rank, kind, microbatch) in the order of their starts, of a schedule that ends by `time`; None if there is none."""
        self.failed: set = set()
        deadline = (None,) * self.p if self.span else (time,) * self.p
        return self.go(0, (0,) * len(self.kinds), (None,) * self.p, deadline, time)

    def go(self, now: Time, started: tuple, running: tuple, deadline: tuple, time: Time) -> list | None:
        """From this moment on: `running[rank]` is (kind, end), `deadline[rank]` when it must be done (None: it has not begun)."""
        if all(count == self.m for count in started):
            return []
        state = (
            started,
            tuple(job and (job[0], job[1] - now) for job in running),
            tuple(end and end - now for end in deadline),
        )
        if state in self.failed or self.hopeless(now, started, running, deadline):
            return None
        self.states += 1
        if self.states > self.most:
            raise ValueError(
                f"shortest: more than {self.most} states for {self.p} ranks and {self.m} microbatches; use fewer, or a larger `most`"
            )
        done = list(started)
        for job in filter(None, running):
            done[job[0]] -= 1
        for choice in self.choices(done, started, running, 0):
            if not any(choice) and not any(running):
                continue  # all wait, for nothing
            counts, jobs, ends, begun = list(started), list(running), list(deadline), []
            for rank, k in enumerate(choice):
                if k is not None:
                    begun.append((rank, k - 1, counts[k - 1]))
                    counts[k - 1] += 1
                    jobs[rank] = (k - 1, now + self.kinds[k - 1].time)
                    ends[rank] = now + time if ends[rank] is None else ends[rank]
            then = min(job[1] for job in jobs if job)
            rest = self.go(
                then,
                tuple(counts),
                tuple(job if job and job[1] > then else None for job in jobs),
                tuple(ends),
                time,
            )
            if rest is not None:
                return begun + rest
        self.failed.add(state)
        return None

    def choices(self, done: list, started: tuple, running: tuple, rank: int) -> Iterator[tuple]:
        """For every free rank kind + 1 of what it starts, or None: it waits. Gradients first."""
        if rank == self.p:
            yield ()
            return
        options = (
            []
            if running[rank]
            else [k + 1 for k in reversed(self.of_rank[rank]) if self.may_start(k, done, started)]
        )
        for option in (*options, None):
            for others in self.choices(done, started, running, rank + 1):
                yield option, *others

    def may_start(self, k: int, done: list, started: tuple) -> bool:
        kind, count = self.kinds[k], started[k]
        if count == self.m or kind.before is not None and done[kind.before] <= count:
            return False
        held = sum(
            started[j] * ((self.kinds[j].letter == "F") - (self.kinds[j].letter == self.frees))
            for j in self.of_rank[kind.rank]
        )
        return kind.letter != "F" or held < self.limits[kind.rank]

    def hopeless(self, now: Time, started: tuple, running: tuple, deadline: tuple) -> bool:
        for rank, own in enumerate(self.of_rank):
            left = [k for k in own if started[k] < self.m]
            if not left or deadline[rank] is None:
                continue  # what runs was looked at when it began
            ready = running[rank][1] if running[rank] else now
            after = 0 if self.span else min((self.way[k] - self.kinds[k].time for k in left), default=0)
            if ready + sum((self.m - started[k]) * self.kinds[k].time for k in left) + after > deadline[rank]:
                return True
            if not self.span and any(ready + self.way[k] > deadline[rank] for k in left):
                return True
        return False


# ---- the pattern that repeats --------------------------------------------------------------------------------------------


class Repetend(NamedTuple):
    """Microbatch n does the action of kind k at starts[k] + n · period."""

    place: tuple[int, ...]
    kinds: tuple[Kind, ...]
    starts: tuple[Time, ...]
    period: Time


def repetend(
    place: Sequence[int],
    costs: Costs = Costs(),
    limit: int | Sequence[int] | None = None,
    *,
    split: bool = False,
    most: int = 500_000,
) -> Repetend:
    """The shortest period, and of its patterns the first: each action as early as what comes before and after it allows."""
    kinds, limits = prepared(place, 1, costs, limit, split)
    grid = lcm(*(Fraction(kind.time).denominator for kind in kinds))
    step = Fraction(gcd(*(int(kind.time * grid) for kind in kinds)), grid)
    period = max(sum(kind.time for kind in kinds if kind.rank == rank) for rank in range(len(limits)))
    tried = 0

    def put(starts: tuple) -> tuple | None:
        """`starts` of the first kinds, continued to all of them."""
        nonlocal tried
        tried += 1
        if tried > most:
            raise ValueError(
                f"repetend: more than {most} patterns for {len(place)} stages; use fewer, or a larger `most`"
            )
        if len(starts) == len(kinds):
            return starts
        kind = kinds[len(starts)]
        ready = 0 if kind.before is None else starts[kind.before] + kinds[kind.before].time
        for late in range(int(period / step)):
            longer = (*starts, ready + late * step)
            if fits(kinds, longer, period) and all(
                holds(kinds, longer, period, rank) <= most_held for rank, most_held in enumerate(limits)
            ):
                if found := put(longer):
                    return found
        return None

    while (starts := put(())) is None:
        period += step
    return Repetend(tuple(place), tuple(kinds), starts, period)


def fits(kinds: list[Kind], starts: tuple, period: Time) -> bool:
    """Does the last action overlap another of its rank, modulo the period?"""
    new, at = kinds[len(starts) - 1], starts[-1]
    return all(
        (at - other) % period >= kind.time and (other - at) % period >= new.time
        for kind, other in zip(kinds, starts[:-1])
        if kind.rank == new.rank
    )


def holds(kinds: list[Kind], starts: tuple, period: Time, rank: int) -> int:
    """The most activations in the steady state, or fewer than that while the actions that free them have no times yet."""
    last = kinds[len(starts) - 1]
    now = 0 if last.letter == "W" else starts[-1] + last.time  # no backward to come starts before
    late = {kind.stage: kind.time for kind in kinds if kind.letter == "W"}
    lives: dict[int, tuple[Time, Time]] = {}
    for kind, start in zip(kinds, starts):
        if kind.rank == rank:
            end = start + kind.time
            match kind.letter:
                case "F":
                    lives[kind.stage] = start, max(now, end)
                case "I":
                    lives[kind.stage] = lives[kind.stage][0], end + late[kind.stage]
                case _:
                    lives[kind.stage] = lives[kind.stage][0], end
    return max(
        (
            sum((at - born) // period - (at - end) // period for born, end in lives.values())
            for at, _ in lives.values()
        ),
        default=0,
    )


def unroll(pattern: Repetend, m: int) -> Schedule:
    """m microbatches at their times, read off rank by rank."""
    if m < 1:
        raise ValueError(f"unroll: m={m}; use 1 or more microbatches")
    ranks = [[] for _ in range(1 + max(pattern.place))]
    for kind, start in zip(pattern.kinds, pattern.starts):
        ranks[kind.rank] += [
            (start + n * pattern.period, Action(kind.letter, kind.stage, n)) for n in range(m)
        ]
    return check(
        Schedule(
            f"pattern of period {pattern.period}, m={m}",
            tuple(tuple(action for _, action in sorted(entries)) for entries in ranks),
            len(pattern.place),
            m,
        )
    )


def prepared(
    place: Sequence[int], m: int, costs: Costs, limit: int | Sequence[int] | None, split: bool
) -> tuple[list[Kind], list[int]]:
    """The kinds of actions, and the limit of every rank: by default as many as there are stages, at least all of the rank's own."""
    p = 1 + max(place, default=-1)
    if p < 1 or sorted(set(place)) != list(range(p)):
        raise ValueError(
            f"place={list(place)}: give the rank of each stage, so that every rank from 0 on has one"
        )
    if m < 1:
        raise ValueError(f"m={m}; use 1 or more microbatches")
    kinds = kinds_of(place, costs, split)
    if costs.send or any(not isinstance(kind.time, (int, Fraction)) or kind.time <= 0 for kind in kinds):
        raise ValueError(
            "search: costs are whole numbers or Fractions above 0, and send=0; times are compared exactly"
        )
    limits = [len(place)] * p if limit is None else [limit] * p if isinstance(limit, int) else list(limit)
    for rank in range(p):
        own = sum(at == rank for at in place)
        if len(limits) != p or limits[rank] < own:
            raise ValueError(
                f"limit={limit}: {p} ranks, and rank {rank} has {own} stages, all of which a microbatch needs; give each rank as many"
            )
    return kinds, limits
