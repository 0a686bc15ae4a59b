"""Tessel: search the pattern that one microbatch repeats, for any placement of stages. No torch.

    pattern = repetend(place=[0, 1, 1, 0], costs, limit=4)    a V of 4 stages on 2 ranks
    unroll(pattern, m)                                        a Schedule that follows the pattern's times
    completed(pattern, m)                                     the shortest that repeats it between other ends

    rank 0    F F F | F F B B | F F B B | .. | B B B          a warm-up, whole windows, a cool-down

Microbatch n does action a at start[a] + n·period. On each rank the actions, taken modulo the period, must not
overlap; nothing else is to be checked, for any number of microbatches. Periods are tried from the work of the
busiest rank on. It finds 1F1B for a line, and among the patterns it looks at are the published Vs.

The window may be cut anywhere in the period; all that is left before the first whole one and behind the last
is searched, in every order, and costs the same for any m: of partial orders that did the same actions only
those stay that no other beats on all ranks. Filling by the pattern's times costs a V of whole backwards a
forward and a backward more than that.
Lin et al. 2024 (Tessel), arXiv:2311.15269, sections 3 and 4. Differs: depth-first and dominance in place of a
solver; patterns of one microbatch (one of several could be shorter).
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from minitrain.pipeline.schedule import Action, Schedule, check, peak
from minitrain.pipeline.simulate import Costs, Time
from minitrain.ranks.checks import require_positive_ints
from minitrain.systems.plan.schedule_search import Kind, Limit, largest_divisor, prepared


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
    if m < 1:
        raise ValueError(f"unroll: m={m}; use 1 or more microbatches")
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
    limits = holds if limit is None else [limit] * len(ranks) if isinstance(limit, int) else list(limit)
    if len(limits) != len(ranks):
        raise ValueError(f"completed: {len(limits)} limits for {len(ranks)} ranks; give one for each")
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


def unbeaten(some: list[Partial]) -> list[Partial]:
    """Those than which no other is as early on all ranks and in all that has arrived."""
    kept = []
    timed = [((*one.free, *chain(*one.waiting)), one) for one in some]
    for times, one in sorted(timed, key=lambda pair: pair[0]):
        if not any(all(a <= b for a, b in zip(other, times)) for other, _ in kept):
            kept.append((times, one))
    return [one for _, one in kept]
