"""A schedule made by a list scheduler: each free rank starts the most urgent action that it can.

    greedy([0, 1, 2, 3], 4, 12, limit=7)         4 ranks, 12 microbatches: no rank waits once it has begun
    greedy([0, 1, 1, 0], 4, 8, limit=4)          a V on two ranks
    greedy(lambda stage, i: stage if i % 2 else 3 - stage, 4, 8)    every stage on two ranks, both directions

`place[stage]`, or `place(stage, microbatch)`, is a rank. Actions whose inputs have arrived (`costs.send`)
start in the order of `priority(action)`. With `split` each backward is I and W. `limit` is what a rank may
hold, in activations of one stage and one microbatch (one number, or one for each rank); it keeps room for all
stages of its oldest unfinished microbatch, so that nobody gets stuck (the banker's rule). Greedy is not
optimal: to wait for something more urgent can pay. Qi et al. 2023 (Zero Bubble), arXiv:2401.10241, section
3.1. Differs: theirs tries several places for the warm-up forwards; here that is the caller's `priority`.
"""

from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from heapq import heappop, heappush
from itertools import pairwise

from minitrain.pipeline.schedule import Action, Schedule, check
from minitrain.pipeline.simulate import Costs, Time, play
from minitrain.ranks.checks import require_positive_ints

Place = Sequence[int] | Callable[[int, int], int]
Home = dict[tuple[int, int], int]  # (stage, microbatch) -> rank
Amount = int | Fraction


def urgency(action: Action) -> tuple[int, int, int]:
    """Backwards, then forwards, then gradients of weights; of a kind older microbatches first."""
    kind, stage, microbatch = action
    return "BIFW".index(kind), microbatch, -stage if kind == "F" else stage


def greedy(
    place: Place, stages, m, costs=Costs(), limit=None, split=True, priority=urgency, sizes=()
) -> Schedule:
    """`sizes[microbatch]` of an activation, by default 1."""
    name = f"greedy, stages={stages}, m={m}" + (f", limit={limit}" if limit is not None else "")
    home = placement(place, stages, m, name)
    p, sizes = max(home.values()) + 1, sizes or (1,) * m
    each = list(limit) if isinstance(limit, Sequence) else [limit] * p
    if len(each) != p:
        raise ValueError(f"{name}: {len(each)} limits for {p} ranks; give one for each, or one for all")
    stages_of = [Counter(i for (_, i), at in home.items() if at == rank) for rank in range(p)]
    memory = [Memory(name, rank, each[rank], sizes, stages_of[rank]) for rank in range(p)]
    needs = dependencies(home, stages, m, p, "FIW" if split else "FB")
    unmet = {action: len(before) for action, before in needs.items()}  # how many actions each one waits for
    users: dict[Action, list[Action]] = defaultdict(list)  # who waits for it
    for action, before in needs.items():
        for other in before:
            users[other].append(action)

    ready: list[list[tuple[object, Action]]] = [[] for _ in range(p)]  # a forward may wait for memory
    coming: list[list[tuple[Time, Action]]] = [[] for _ in range(p)]  # heaps: when an action can start
    arrival: dict[Action, Time] = defaultdict(int)
    for action in sorted(action for action in unmet if not unmet[action]):
        coming[home[action[1:]]].append((0, action))

    def choose(rank: int, now: Time, ended: dict[Action, Time]) -> Action | None:
        while coming[rank] and coming[rank][0][0] <= now:
            action = heappop(coming[rank])[1]
            insort(ready[rank], (priority(action), action))
        if action := memory[rank].first_allowed(ready[rank]):
            for user in users[action]:
                there = home[user[1:]]
                end = now + costs.of(action) + (0 if there == rank else costs.send)
                arrival[user] = max(arrival[user], end)
                unmet[user] -= 1
                if not unmet[user]:
                    heappush(coming[there], (arrival[user], user))
        return action

    ranks, _ = play(p, choose, costs, lambda action: (costs.send,))
    return check(Schedule(name, ranks, stages, m))


class Memory:
    def __init__(self, name: str, rank: int, limit: Amount | None, sizes: Sequence[Amount], stages: Counter):
        self.limit, self.sizes, self.largest, self.stages = limit, sizes, max(sizes), stages
        self.used = self.oldest = 0
        self.forwards, self.backwards = Counter(), Counter()  # of each microbatch
        count = max(stages.values())
        if limit is not None and limit < count * self.largest:
            what = f"rank {rank} may hold {limit} activations, but a microbatch has {count} stages there"
            why = "all must forward before one goes backward: it would wait for ever"
            raise ValueError(f"{name}: {what} and {why}; use limit={count * self.largest} or more")

    def first_allowed(self, ready: list[tuple[object, Action]]) -> Action | None:
        for i, (_, action) in enumerate(ready):
            if action.kind != "F" or self.limit is None or self.fits(action.microbatch):
                del ready[i]
                self.used += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind] * self.sizes[action.microbatch]
                self.forwards[action.microbatch] += action.kind == "F"
                self.backwards[action.microbatch] += action.kind in "BI"
                return action
        return None

    def fits(self, microbatch: int) -> bool:
        """Is there room for one more forward, and after it for the oldest microbatch to get through?"""
        while self.oldest < max(self.stages) and self.backwards[self.oldest] == self.stages[self.oldest]:
            self.oldest += 1
        own = self.forwards[self.oldest] - self.backwards[self.oldest]  # what it has freed stays reserved
        room = 0 if microbatch == self.oldest else max(self.stages.values()) - own
        return self.used + self.sizes[microbatch] + room * self.largest <= self.limit


def dependencies(home: Home, stages: int, m: int, p: int, kinds: str) -> dict[Action, list[Action]]:
    """What each action needs; on each rank microbatches enter the first stage in their order."""
    ranks = [[Action(kind, *at) for at in sorted(home) for kind in kinds if home[at] == r] for r in range(p)]
    needs = Schedule("", ranks, stages, m).needs
    for entries in ranks:
        for before, action in pairwise(action for action in entries if action[:2] == ("F", 0)):
            needs[action].append(before)
    return needs


def placement(place: Place, stages: int, m: int, name: str) -> Home:
    require_positive_ints(stages=stages, m=m)
    if not callable(place) and len(place) != stages:
        raise ValueError(f"{name}: {len(place)} ranks for stages={stages}; name a rank for each stage")
    rank = place if callable(place) else lambda stage, i: place[stage]
    home = {(stage, i): rank(stage, i) for stage in range(stages) for i in range(m)}
    if set(home.values()) != set(range(len(set(home.values())))):
        raise ValueError(f"{name}: ranks {sorted(set(home.values()))}; they count from 0, each has a stage")
    return home
