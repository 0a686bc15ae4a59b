"""Varuna: recomputation just in time, a static schedule by rules, deviations when a message is late.

    varuna(3, 3), F=1 R=1 B=2                           recomputed(gpipe(3, 3))
    F0 F1 F2 R0 .. .. .. B0 B0 R1 B1 B1 R2 B2 B2        F0 F1 F2 R0 .. .. .. .. .. .. B0 B0 R1 B1 B1 R2 B2 B2
    .. F0 F1 F2 R0 B0 B0 R1 B1 B1 R2 B2 B2              .. F0 F1 F2 R0 .. .. .. B0 B0 R1 B1 B1 R2 B2 B2
    .. .. F0 B0 B0 F1 B1 B1 F2 B2 B2                    .. .. F0 F1 F2 R0 B0 B0 R1 B1 B1 R2 B2 B2

A forward keeps the stage's input only, and R runs the stage once more before B. A free rank does the first
of these that applies:
    1  after R it waits for the gradient and does B, as the recomputed activations fill the memory
    2  R, if a gradient is here or will be as soon as R is done
    3  F, if its input is here
    4  R, if a gradient is being computed on the next rank (the last rank needs no R)
Time: never longer than GPipe with recomputation; for F=R=1, B=2 it is 1 + (m-1) mod 3 shorter, whatever p.
Memory: `schedule.peak` is 1 on every rank (m for GPipe without R), plus m inputs.
Athlur et al. 2022 (Varuna), arXiv:2111.04007, section 3.2, whose rules are in prose: the order is our
reading. Differs: deviations are simulated only (`jitter`), the interpreter runs lists.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from math import inf

from minitrain.pipeline.schedule import Action, B, F, R, Schedule, check, parts
from minitrain.pipeline.simulate import Costs, Time
from minitrain.ranks.checks import require_positive_ints

Delay = Callable[[Action], Time]


def recomputed(schedule: Schedule) -> Schedule:
    """The same with R before each B or I: a forward keeps only its input. Pairs are taken apart."""
    again = lambda action: [R(*action[1:]), action] if action.kind in "BI" else [action]
    ranks = [[step for action in parts(entries) for step in again(action)] for entries in schedule.ranks]
    return check(replace(schedule, name=f"{schedule.name}, recomputed", ranks=ranks))


def varuna(p: int, m: int, costs: Costs = Costs(F=1, R=1, B=2)) -> Schedule:
    """The list that the rules give with these times, messages included."""
    require_positive_ints(p=p, m=m)
    again = costs.of(R(0, 0))
    done = [Counter() for _ in range(p)]

    def by_rules(rank: int, now: Time, ended: dict[Action, Time]) -> str:
        f, r, b = (done[rank][kind] for kind in "FRB")
        arrival = lambda action: ended[action] + costs.send if action in ended else inf
        fed = f < m and (rank == 0 or arrival(F(rank - 1, f)) <= now)
        here = arrival(B(rank + 1, b))  # when the gradient arrives
        if rank == p - 1:
            return "B" if f > b else "F" * fed
        if r > b:
            return "B" if here <= now else ""
        if here <= now + again:
            return "R"
        if fed:
            return "F"
        return "R" if here < inf else ""

    def choose(rank: int, now: Time, ended: dict[Action, Time]) -> Action | None:
        if kind := by_rules(rank, now, ended):
            done[rank][kind] += 1
            return Action(kind, rank, done[rank][kind] - 1)
        return None

    ranks, _ = play(p, choose, costs, lambda action: (costs.send, costs.send - again))
    return check(Schedule(f"Varuna, p={p}, m={m}", ranks, p, m))


def play(p: int, choose: Callable, costs: Costs, later: Callable) -> tuple[list[list[Action]], Time]:
    """(lists, makespan): a free rank starts what choose(rank, now, ended) gives, None to wait.

    All are asked when an action ends, and each of `later(action)` after that, the last rank first: what it
    begins is seen at once, as `ended[action]` is known from the start."""
    ranks, free, ended, clock = [[] for _ in range(p)], [0] * p, {}, [0]
    while clock:
        now = heappop(clock)
        for rank in reversed(range(p)):
            if free[rank] <= now and (action := choose(rank, now, ended)):
                ranks[rank].append(action)
                free[rank] = ended[action] = now + costs.of(action)
                for after in (0, *later(action)):
                    heappush(clock, max(now, free[rank] + after))
    return ranks, max(free)


def jitter(schedule: Schedule, costs: Costs, delay: Delay, opportunistic: bool) -> Time:
    """The makespan when the message with the result of `action` takes delay(action), drawn once for each.

    Opportunistic, a rank whose next action lacks its message does another that is ready: a forward, or an R
    whose gradient is here (and B after it)."""
    place, needs = schedule.place, schedule.needs
    late = {action: delay(action) for action in sorted(place)}  # in an order that does not depend on the play
    left = [list(parts(entries)) for entries in schedule.ranks]
    waits: list[Action | None] = [None] * len(left)  # the backward whose activations are there again

    def choose(rank: int, now: Time, ended: dict[Action, Time]) -> Action | None:
        here = lambda b: b in ended and ended[b] + (late[b] if place[b] != rank else 0) <= now
        ready = lambda action: all(map(here, needs[action]))

        def timely(action: Action) -> bool:
            gradients = [b for b in needs[B(*action[1:])] if b.kind in "BI"] if action.kind == "R" else []
            return ready(action) and all(map(here, gradients))

        if not left[rank]:
            return None
        head = waits[rank] or left[rank][0]
        if opportunistic and not waits[rank]:
            forward = next((action for action in left[rank] if action.kind == "F"), head)
            other = next((action for action in left[rank] if action.kind != "F"), head)
            head = next((action for action in (head, forward, other) if timely(action)), head)
        if not ready(head):
            return None
        left[rank].remove(head)
        waits[rank] = B(*head[1:]) if head.kind == "R" else None
        return head

    return play(len(left), choose, costs, lambda action: (late[action],))[1]
