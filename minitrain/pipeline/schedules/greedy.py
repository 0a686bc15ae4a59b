"""A schedule made by a list scheduler: time goes by, and each free rank does the most urgent thing that it can do now.

    greedy([0, 1, 2, 3], 4, 12, limit=7)                      4 ranks, 12 microbatches: no rank waits once it has begun
    greedy([0, 1, 1, 0], 4, 8, limit=4)                       a V on two ranks
    greedy(lambda stage, i: stage if i % 2 else 3 - stage, 4, 8)          every stage on two ranks, microbatches in both directions

An action can be done when all that it needs is done (and has travelled, `costs.send`), and a forward only where memory allows. Of these
the one with the smallest `priority(action)` starts; a rank never waits while it can do something. By default backwards come first, then
forwards, then gradients of weights, which so fill what would be bubbles; of a kind, older microbatches first.

`limit` is what a rank may hold, in activations of one stage and one microbatch (one number, or one for each rank): F takes one, B gives
it back, of an I the share `kept` stays until its W, as in `schedule.peak`. It is never exceeded, and nobody gets stuck: a rank keeps
room for all stages of its oldest unfinished microbatch, so that one microbatch can always go on (the banker's rule). With one stage a
rank this forbids nothing. The smallest limit that works is the number of stages that a microbatch has on a rank.

Sends one message a boundary between ranks and a microbatch each way, as any schedule. Memory: at most `limit`.
Raises ValueError in one line for a placement that leaves a rank out, for m or stages below 1, for a limit that cannot work.
Qi et al. 2023 (Zero Bubble), arXiv:2401.10241, section 3.1, makes such lists by a heuristic too. Differs: theirs tries several ways to
place the warm-up forwards and keeps the best; here that is the caller's `priority`. Greedy is not best: not to start something, as
something more urgent is about to arrive, can pay.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from heapq import heappop, heappush

from minitrain.pipeline.schedule import Action, B, F, I, Schedule, W, check
from minitrain.pipeline.schedules.one_direction import check_sizes
from minitrain.pipeline.simulate import Costs, Time

Place = Sequence[int] | Callable[[int, int], int]
Amount = int | Fraction


def urgency(action: Action) -> tuple[int, int, int]:
    """Backwards, then forwards, then gradients of weights; of a kind older microbatches, and of one microbatch what is further on."""
    kind, stage, microbatch = action
    return "BIFW".index(kind), microbatch, -stage if kind == "F" else stage


def greedy(
    place: Place,
    stages: int,
    m: int,
    costs: Costs = Costs(),
    limit: Amount | Sequence[Amount] | None = None,
    split: bool = True,
    priority: Callable[[Action], object] = urgency,
    kept: Amount = 1,
    name: str | None = None,
) -> Schedule:
    """`place[stage]`, or `place(stage, microbatch)`, is a rank. With `split` each backward is I and W."""
    name = name or f"greedy, stages={stages}, m={m}" + (f", limit={limit}" if limit is not None else "")
    home = placement(place, stages, m, name)
    p = max(home.values()) + 1
    memory = [Memory(held, kept) for held in limits(limit, home, p, name)]
    for (_, microbatch), rank in home.items():
        memory[rank].stages[microbatch] += 1
    unmet, users = dependencies(home, stages, split)

    ranks: list[list[Action]] = [[] for _ in range(p)]
    ready: list[list[tuple[object, Action]]] = [
        [] for _ in range(p)
    ]  # by priority; a forward may have to wait for memory
    free: list[Time] = [0] * p
    arrival: dict[Action, Time] = defaultdict(int)
    events = [
        (0, action) for action in unmet if not unmet[action]
    ]  # (time, action that can start from then on)
    alarms: list[Time] = [0]  # times at which something changes
    events.sort()
    while alarms:
        now = heappop(alarms)
        while events and events[0][0] <= now:
            action = heappop(events)[1]
            insort(ready[home[action[1:]]], (priority(action), action))
        for rank in range(p):
            if free[rank] > now or (action := memory[rank].first_allowed(ready[rank])) is None:
                continue
            ranks[rank].append(action)
            free[rank] = end = now + costs.of(action)
            heappush(alarms, end)
            for user in users[action]:
                arrival[user] = max(arrival[user], end + (0 if home[user[1:]] == rank else costs.send))
                unmet[user] -= 1
                if not unmet[user]:
                    heappush(events, (arrival[user], user))
                    heappush(alarms, arrival[user])
    return check(Schedule(name, tuple(map(tuple, ranks)), stages, m))


class Memory:
    """What one rank holds, and which of the things that it could do it may do."""

    def __init__(self, limit: Amount | None, kept: Amount):
        self.limit, self.kept, self.held = limit, kept, 0
        self.stages: Counter[int] = Counter()  # stages of each microbatch on this rank
        self.forwards: Counter[int] = Counter()
        self.backwards: Counter[int] = Counter()
        self.oldest = 0

    def first_allowed(self, ready: list[tuple[object, Action]]) -> Action | None:
        """Takes the most urgent action that memory allows off the list."""
        for i, (_, action) in enumerate(ready):
            if action.kind != "F" or self.limit is None or self.fits(action.microbatch):
                del ready[i]
                self.account(action)
                return action
        return None

    def fits(self, microbatch: int) -> bool:
        """One more forward, and then still room for the oldest microbatch to come through; what it has given back stays its own."""
        while self.oldest < max(self.stages) and self.backwards[self.oldest] == self.stages[self.oldest]:
            self.oldest += 1
        room = (
            0
            if microbatch == self.oldest
            else max(self.stages.values()) - self.forwards[self.oldest] + self.backwards[self.oldest]
        )
        return self.held + 1 + room <= self.limit

    def account(self, action: Action) -> None:
        self.held += {"F": 1, "B": -1, "I": self.kept - 1, "W": -self.kept}[action.kind]
        self.forwards[action.microbatch] += action.kind == "F"
        self.backwards[action.microbatch] += action.kind in "BI"


def dependencies(
    home: dict[tuple[int, int], int], stages: int, split: bool
) -> tuple[dict[Action, int], dict[Action, list[Action]]]:
    """How many actions each one waits for, and who waits for it. On each rank microbatches enter the first stage in their order."""
    back = I if split else B
    unmet: dict[Action, int] = {}
    users: dict[Action, list[Action]] = defaultdict(list)

    def after(action: Action, *before: Action) -> None:
        unmet[action] = len(before)
        for other in before:
            users[other].append(action)

    entered: dict[int, list[Action]] = defaultdict(list)  # the newest forward of stage 0 on each rank
    for (stage, i), rank in sorted(home.items()):
        after(F(stage, i), *([F(stage - 1, i)] if stage else entered[rank]))
        if stage == 0:
            entered[rank] = [F(stage, i)]
        after(back(stage, i), F(stage, i), *([back(stage + 1, i)] if stage + 1 < stages else []))
        if split:
            after(W(stage, i), I(stage, i))
    return unmet, users


# ---- what is refused -------------------------------------------------------------------------------------------------


def placement(place: Place, stages: int, m: int, name: str) -> dict[tuple[int, int], int]:
    check_sizes(name, stages=stages, m=m)
    if not callable(place) and len(place) != stages:
        raise ValueError(f"{name}: {len(place)} ranks for stages={stages}; name a rank for each stage")
    home = {
        (stage, i): place(stage, i) if callable(place) else place[stage]
        for stage in range(stages)
        for i in range(m)
    }
    found = set(home.values())
    if found != set(range(len(found))):
        raise ValueError(
            f"{name}: stages stand on the ranks {sorted(found)}; ranks count from 0, and each needs a stage"
        )
    return home


def limits(
    limit: Amount | Sequence[Amount] | None, home: dict[tuple[int, int], int], p: int, name: str
) -> list[Amount | None]:
    """One for each rank, each enough for one microbatch to come through."""
    each = list(limit) if isinstance(limit, Sequence) else [limit] * p
    if len(each) != p:
        raise ValueError(
            f"{name}: {len(each)} limits for {p} ranks; give one for each, or one number for all"
        )
    stages = Counter((rank, i) for (_, i), rank in home.items())
    for rank, given in enumerate(each):
        least = max(count for (at, _), count in stages.items() if at == rank)
        if given is not None and given < least:
            raise ValueError(
                f"{name}: rank {rank} may hold {given} activations, but a microbatch has {least} stages there and all must "
                f"forward before one goes backward: it would wait for ever; use limit={least} or more"
            )
    return each
