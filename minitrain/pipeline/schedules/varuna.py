"""Varuna: recomputation just in time, a static schedule by rules, and deviations from it when a message is late.

    varuna(3, 3), F=1 R=1 B=2                             recomputed(gpipe(3, 3))
    F0 F1 F2 R0 .. .. .. B0 B0 R1 B1 B1 R2 B2 B2          F0 F1 F2 R0 .. .. .. .. .. .. B0 B0 R1 B1 B1 R2 B2 B2
    .. F0 F1 F2 R0 B0 B0 R1 B1 B1 R2 B2 B2                .. F0 F1 F2 R0 .. .. .. B0 B0 R1 B1 B1 R2 B2 B2
    .. .. F0 B0 B0 F1 B1 B1 F2 B2 B2                      .. .. F0 F1 F2 R0 B0 B0 R1 B1 B1 R2 B2 B2

With recomputation a forward keeps the stage's input only, and R runs the stage once more before B. GPipe does that on every rank and
in every microbatch. Varuna's rules for a rank that is free, in this order:
    1  a microbatch is recomputed: wait for its gradient and do its B, whatever else could be done, as its activations fill the memory
    2  a gradient is here, or will be here as soon as R is done: R of its microbatch
    3  a forward whose input is here
    4  a gradient is being computed on the next rank: R, and wait
The last rank needs no R: its gradient is there as soon as its forward is, so it does F and B in turn. Rules are played once, against
given times of F, R and B, and give lists as any schedule. In them a rank holds the activations of one microbatch, beside inputs.

`jitter` plays a schedule with a delay for every message of its own. Opportunistic, a rank whose next action lacks its message does
another of its list that is ready: a forward, or an R whose gradient is here (with B behind it). Rule 1 holds: between R and B it waits.
`recomputed` puts R in front of every B of any schedule.

Time: never longer than GPipe with recomputation. For F=R=1, B=2 it is 1 + (m-1) mod 3 shorter, whatever p: the first gradient does not
wait for an R of the last rank, which then has 3 units a microbatch where the others have 4, and every third runs out of forwards. Under
large delays strict lists can be slower than GPipe's, whose forwards run far ahead of all that uses them; with deviations they are
faster on average over seeds.
Memory: `schedule.peak` is 1 on every rank (m for GPipe without R), plus m inputs. Sends what every schedule sends. No torch here.
Raises ValueError in one line for sizes below 1 and for times below 0.
Athlur et al. 2022 (Varuna), arXiv:2111.04007, section 3.2. Differs: their rules are given in prose and played with measured times; the
order above is how they are read here. Deviations are simulated: the interpreter runs lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from minitrain.pipeline.schedule import Action, B, F, R, Schedule, check, parts
from minitrain.pipeline.schedules.one_direction import check_sizes
from minitrain.pipeline.simulate import Costs, Time

Delay = Callable[[Action], Time]


def recomputed(schedule: Schedule) -> Schedule:
    """The same with R in front of each B or I: a forward keeps its input only."""

    def again(entries) -> Iterator[Action]:
        for action in parts(entries):
            if action.kind in "BI":
                yield R(action.stage, action.microbatch)
            yield action

    return check(
        Schedule(
            f"{schedule.name}, recomputed",
            tuple(tuple(again(entries)) for entries in schedule.ranks),
            schedule.stages,
            schedule.microbatches,
            schedule.slices,
            schedule.lengths,
        )
    )


def varuna(p: int, m: int, costs: Costs = Costs(F=1, R=1, B=2)) -> Schedule:
    """The rules played with these times, messages included."""
    check_sizes("varuna", p=p, m=m)
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
                free[rank] = ended[action] = now + costs.of(action)
                for when in (
                    free[rank],
                    free[rank] + costs.send,
                    free[rank] + costs.send - costs.of(R(rank, 0)),
                ):
                    if when > now:
                        heappush(clock, when)
        while clock and clock[0] == now:
            heappop(clock)
    return check(Schedule(f"Varuna, p={p}, m={m}", tuple(map(tuple, ranks)), p, m))


def _by_rules(
    rank: int, p: int, m: int, done: dict[str, int], ended: dict[Action, Time], now: Time, costs: Costs
) -> str:
    """The kind of what the rank does now: its microbatch is the next of that kind. Nothing: it waits."""
    if rank == p - 1:
        here = now if done["F"] > done["B"] else None
    else:
        here = ended.get(B(rank + 1, done["B"]))  # when the gradient will be here; None: nobody knows
        here = None if here is None else here + costs.send
    if done["R"] > done["B"] or rank == p - 1 and here is not None:
        return "B" if here is not None and here <= now else ""
    if here is not None and here <= now + costs.of(R(rank, 0)):
        return "R"
    before = F(rank - 1, done["F"])
    if done["F"] < m and (rank == 0 or before in ended and ended[before] + costs.send <= now):
        return "F"
    return "R" if here is not None else ""


# ---- messages that are late ------------------------------------------------------------------------------------------


def jitter(schedule: Schedule, costs: Costs, delay: Delay, opportunistic: bool) -> Time:
    """The makespan when the message with the result of `action` takes delay(action), drawn once for each."""
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
        gradients = (
            [before for before in needs[B(*action[1:])] if before.kind in "BI"] if action.kind == "R" else []
        )
        return ready(action) and all(here(before, place[action]) for before in gradients)

    def choose(rank: int) -> Action | None:
        head = waits[rank] or left[rank][0]
        if opportunistic and not waits[rank]:
            first = [
                next((action for action in left[rank] if (action.kind == "F") == forward), head)
                for forward in (True, False)
            ]
            head = next((action for action in (head, *first) if timely(action)), head)
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
