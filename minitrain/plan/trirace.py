"""TriRace: where weights may be old, communication gets out of the way. Two small simulations, no torch.

**One-way messages.** Between two stages activations go up and gradients down. Sent and received as one call (Megatron-LM's
send_forward_recv_backward), a rank waits in it until both have come, though the next thing it does may need neither:

    together  F3 [up 3 | down 1] B1 [down 1 | up 4] F4 ..          a period of F + B + 2c for messages that take c
    one-way   F3 B1 F4 ..  and each message leaves as soon as it is made; a rank waits for what it uses, and for nothing else

`period(p, F, B, c, paired, ahead)` plays 1F1B on links that carry one message at a time in each direction and says how long the steady
state takes for a microbatch. Together it is F + B + 2c (p > 2; with two ranks each has one neighbour, and it is F + B + c). One-way, with
1F1B's p-r-1 forwards ahead, it is F + B + 2c(p-1)/p: a microbatch goes down the ranks and back while p others pass. With twice as many
ahead, which an asynchronous pipeline may afford, it is F + B, as if messages took no time. Together that is no way out: the calls of
neighbours no longer bring what the other's next call takes, so that ranks work one after the other, p·(F + B) and more.

**Late updates.** The sum of gradients over data-parallel ranks takes a while too. An asynchronous update need not wait for it: the
gradient of step t is used when it has come, at most `bound` steps later. `delayed(steps, compute, reduce, bound)` counts: with 0 a step
takes compute + reduce, with 1 or more max(compute, reduce), and no update is ever more than `bound` steps late.

Raises ValueError in one line for times below 0, for no ranks or steps, and for a bound below 0.
Guo et al. (TriRace), as the survey of Duan et al. 2024, arXiv:2407.20018, section 7.2.3, describes it: delayed updates, split messages.
Differs: a model of its two ideas with equal stages; its order by critical path is here the order in which messages are made.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from minitrain.pipeline.schedule import Action, B, F, Schedule, check
from minitrain.pipeline.schedules.one_direction import alternate
from minitrain.pipeline.simulate import Time


class Call(NamedTuple):
    """What a rank does next: `work`, or a call that ends when all its messages have gone and come. A message is the action it is from."""

    work: Action | None = None
    sends: tuple[Action, ...] = ()
    receives: tuple[Action, ...] = ()


def racing(p: int, m: int, ahead: int) -> Schedule:
    """1F1B with `ahead`·(p-r-1) forwards ahead on rank r; 1 is the usual."""
    return check(
        Schedule(
            f"1F1B, p={p}, m={m}, {ahead} times ahead",
            tuple(
                alternate([F(r, i) for i in range(m)], [B(r, i) for i in range(m)], ahead * (p - r - 1))
                for r in range(p)
            ),
            p,
            m,
        )
    )


def together(schedule: Schedule, rank: int) -> list[Call]:
    """Calls as Megatron-LM makes them: what goes to a neighbour and what is to come from it next are one call."""
    entries, last, calls = schedule.ranks[rank], schedule.stages - 1, []

    def arrives(action: Action) -> tuple[Action, ...]:
        if action.kind == "F":
            return (F(rank - 1, action.microbatch),) if rank else ()
        return (B(rank + 1, action.microbatch),) if rank < last else ()

    calls.append(Call(receives=arrives(entries[0])))
    for here, after in zip(entries, (*entries[1:], None)):
        leaves = (here,) if (rank < last if here.kind == "F" else rank > 0) else ()
        needed = arrives(after) if after else ()
        calls.append(Call(work=here))
        if after and here.kind != after.kind:
            calls.append(Call(sends=leaves, receives=needed))  # both with the same neighbour
        else:
            calls += [Call(sends=leaves), Call(receives=needed)]
    return [call for call in calls if call != Call()]


def ends(
    schedule: Schedule, forward: Time, backward: Time, message: Time, paired: bool
) -> list[dict[Action, Time]]:
    """When each rank has done each action."""
    ready: dict[Action, Time] = {}  # message -> when the sender has it and waits, or when it has left
    wanted: dict[Action, Time] = {}  # message -> when the receiver waits for it
    come: dict[Action, Time] = {}
    free: dict[tuple[int, str], Time] = {}  # link (source, direction) -> end of its last message
    done: list[dict[Action, Time]] = [{} for _ in schedule.ranks]
    now: list[Time] = [0] * len(schedule.ranks)
    position = [0] * len(schedule.ranks)
    calls = [
        together(schedule, rank) if paired else [Call(work=action) for action in entries]
        for rank, entries in enumerate(schedule.ranks)
    ]

    def carry(what: Action, start: Time) -> None:
        link = what.stage, what.kind
        come[what] = free[link] = max(start, free.get(link, 0)) + message

    def meet(call: Call, rank: int) -> bool:
        """The call ends when both sides of each message have come to it, and the messages have passed."""
        for what in call.sends:
            ready.setdefault(what, now[rank])
        for what in call.receives:
            wanted.setdefault(what, now[rank])
        for what in (*call.sends, *call.receives):
            if what in ready and what in wanted and what not in come:
                carry(what, max(ready[what], wanted[what]))
        if all(what in come for what in (*call.sends, *call.receives)):
            now[rank] = max([now[rank], *(come[what] for what in (*call.sends, *call.receives))])
            return True
        return False

    def work(action: Action, rank: int) -> bool:
        needed = [before for before in schedule.needs[action] if before.stage != rank]
        if not paired and not all(before in come for before in needed):
            return False
        start = now[rank] if paired else max([now[rank], *(come[before] for before in needed)])
        now[rank] = done[rank][action] = start + (forward if action.kind == "F" else backward)
        if not paired:
            carry(action, now[rank])
        return True

    moved = True
    while moved:
        moved = False
        for rank, todo in enumerate(calls):
            while position[rank] < len(todo):
                call = todo[position[rank]]
                if not (work(call.work, rank) if call.work else meet(call, rank)):
                    break
                position[rank] += 1
                moved = True
    stuck = [rank for rank, todo in enumerate(calls) if position[rank] < len(todo)]
    if stuck:
        raise ValueError(
            f"{schedule.name}: ranks {stuck} wait in calls for one another; send and receive one-way"
        )
    return done


def period(p: int, forward: Time, backward: Time, message: Time, paired: bool, ahead: int = 1) -> Time:
    """Time from a microbatch to the next in the steady state, exact if the times are."""
    check_numbers(
        p=(p, 1), forward=(forward, 0), backward=(backward, 0), message=(message, 0), ahead=(ahead, 1)
    )
    m = 12 * p * ahead
    done = ends(racing(p, m, ahead), forward, backward, message, paired)[0]
    first, last = m // 3, m // 3 + 2 * p * ahead  # whole rounds: a round may be uneven inside
    return Fraction(done[B(0, last)] - done[B(0, first)]) / (last - first)


class Delayed(NamedTuple):
    period: Time
    latest: int  # steps between the gradient that came last and the update that used it


def delayed(steps: int, compute: Time, reduce: Time, bound: int) -> Delayed:
    """Steps of `compute`; their gradients are summed one after the other; step t waits until all but the last `bound` have come."""
    check_numbers(steps=(steps, 1), compute=(compute, 0), reduce=(reduce, 0), bound=(bound, 0))
    now, summed, applied, latest, begun = 0, [], 0, 0, []
    for t in range(steps):
        if t - applied > bound:
            now = max(now, summed[t - bound - 1])
        while applied < t and summed[applied] <= now:  # what has come by now is used at once
            latest = max(latest, t - 1 - applied)
            applied += 1
        assert t - applied <= bound
        begun.append(now)
        now += compute
        summed.append(max(now, summed[-1] if summed else 0) + reduce)
    half = steps // 2
    return Delayed(Fraction(begun[-1] - begun[half]) / max(steps - 1 - half, 1), latest)


def check_numbers(**numbers: tuple[Time, int]) -> None:
    for name, (number, least) in numbers.items():
        if not number >= least:
            raise ValueError(f"{name}={number}; use {least} or more")
