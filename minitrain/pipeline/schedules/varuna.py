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

from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush

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
    ranks: list[list[Action]] = [[] for _ in range(p)]
    done = [{kind: 0 for kind in "FRB"} for _ in range(p)]
    free: list[Time] = [0] * p
    ended: dict[Action, Time] = {}  # known as soon as an action starts
    clock: list[Time] = [0]
    while clock:
        now = heappop(clock)
        for rank in reversed(range(p)):  # the next rank first: its gradient, begun now, is seen
            if free[rank] > now:
                continue
            kind = _by_rules(rank, p, m, done[rank], ended, now, costs)
            if kind:
                action = Action(kind, rank, done[rank][kind])
                ranks[rank].append(action)
                done[rank][kind] += 1
                free[rank] = end = ended[action] = now + costs.of(action)
                for when in (end, end + costs.send, end + costs.send - costs.of(R(rank, 0))):
                    if when > now:
                        heappush(clock, when)
        while clock and clock[0] == now:
            heappop(clock)
    return check(Schedule(f"Varuna, p={p}, m={m}", ranks, p, m))


def _by_rules(rank: int, p: int, m: int, done: dict, ended: dict, now: Time, costs: Costs) -> str:
    """The kind of action that the rank starts now, with its next microbatch of that kind; "" to wait."""
    if rank == p - 1:
        here = now if done["F"] > done["B"] else None
    else:
        here = ended.get(B(rank + 1, done["B"]))  # when the gradient arrives; None: not known yet
        here = None if here is None else here + costs.send
    if done["R"] > done["B"] or rank == p - 1 and here is not None:
        return "B" if here is not None and here <= now else ""
    if here is not None and here <= now + costs.of(R(rank, 0)):
        return "R"
    before = F(rank - 1, done["F"])
    if done["F"] < m and (rank == 0 or before in ended and ended[before] + costs.send <= now):
        return "F"
    return "R" if here is not None else ""


def jitter(schedule: Schedule, costs: Costs, delay: Delay, opportunistic: bool) -> Time:
    """The makespan when the message with the result of `action` takes delay(action), drawn once for each.

    Opportunistic, a rank whose next action lacks its message does another that is ready: a forward, or an R
    whose gradient is here (and B after it)."""
    place, needs = schedule.place, schedule.needs
    late = {action: delay(action) for action in sorted(place)}  # in an order that does not depend on the play
    left = [list(parts(entries)) for entries in schedule.ranks]
    waits: list[Action | None] = [None] * len(left)  # the backward whose activations are there again
    free: list[Time] = [0] * len(left)
    ended: dict[Action, Time] = {}
    clock: list[Time] = [0]

    def here(before: Action, rank: int) -> bool:
        return before in ended and ended[before] + (late[before] if place[before] != rank else 0) <= now

    def ready(action: Action) -> bool:
        return all(here(before, place[action]) for before in needs[action])

    def timely(action: Action) -> bool:
        gradients = [b for b in needs[B(*action[1:])] if b.kind in "BI"] if action.kind == "R" else []
        return ready(action) and all(here(before, place[action]) for before in gradients)

    def choose(rank: int) -> Action | None:
        head = waits[rank] or left[rank][0]
        if opportunistic and not waits[rank]:
            forward = next((action for action in left[rank] if action.kind == "F"), head)
            other = next((action for action in left[rank] if action.kind != "F"), head)
            head = next((action for action in (head, forward, other) if timely(action)), head)
        return head if ready(head) else None

    while clock:
        now = heappop(clock)
        for rank in range(len(left)):
            if free[rank] <= now and left[rank] and (action := choose(rank)):
                left[rank].remove(action)
                waits[rank] = B(*action[1:]) if action.kind == "R" else None
                free[rank] = ended[action] = now + costs.of(action)
                heappush(clock, free[rank])
                heappush(clock, free[rank] + late[action])
    return max(free)
