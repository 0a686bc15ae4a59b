"""Schedules that need less memory: BPipe lends activations, Varuna recomputes them just in time. No torch.

    bpipe(4, 8): limit 3   rank 0 holds 4 in 1F1B, rank 3 one: rank 0 evicts (E) to rank 3, loads (L) before B
    rank 0   F0 F1 E1 F2 F3 E3 B0 F4 L1 B1 F5 E5 B2 F6 L3 B3 E6 F7 B4 L5 B5 L6 B6 B7
    rank 3   H1 F0 B0 F1 B1 F2 B2 H3 G1 F3 B3 ..                     H: hosts it, G: gives it back

    varuna(3, 3), F=1 R=1 B=2                           recomputed(gpipe(3, 3))
    F0 F1 F2 R0 .. .. .. B0 B0 R1 B1 B1 R2 B2 B2        F0 F1 F2 R0 .. .. .. .. .. .. B0 B0 R1 B1 B1 R2 B2 B2
    .. F0 F1 F2 R0 B0 B0 R1 B1 B1 R2 B2 B2              .. F0 F1 F2 R0 .. .. .. B0 B0 R1 B1 B1 R2 B2 B2
    .. .. F0 B0 B0 F1 B1 B1 F2 B2 B2                    .. .. F0 F1 F2 R0 B0 B0 R1 B1 B1 R2 B2 B2

Kim et al. 2023 (BPipe), ICML, PMLR 202, section 3, whose bound is for even p; bpipe_eviction.py runs it.
Athlur et al. 2022 (Varuna), arXiv:2111.04007, section 3.2, whose rules are in prose: the order is our
reading. Differs: deviations are simulated only (`jitter`), the interpreter runs lists.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import inf

from minitrain.pipeline.schedule import Action, B, Entry, F, R, Schedule, check, parts
from minitrain.pipeline.schedules.one_direction import one_f_one_b
from minitrain.pipeline.simulate import Costs, Time, play, simulate
from minitrain.ranks.checks import require_positive_ints


def bpipe(p: int, m: int) -> Schedule:
    """1F1B in which no rank holds more than ceil((p+2)/2) microbatches.
    Rank x of 1F1B holds p-x and its partner p-1-x holds x+1: with one on its way, as many on each. A move
    runs beside one entry that computes, and meanwhile counts at both ends: E stands an entry ahead of the
    forward that needs the room, L arrives beside the entry before its backward. No more is evicted than must
    be, the newest first. While a move takes no longer than a forward, the makespan is that of 1F1B. Sends
    what a forward keeps at each eviction, and the same back."""
    require_positive_ints(p=p, m=m)
    plain, limit = one_f_one_b(p, m), (p + 3) // 2
    spans = simulate(plain, Costs(F=1, B=2)).spans
    ranks: list[list[Entry]] = [list(entries) for entries in plain.ranks]
    for rank in range(p // 2):
        partner = p - 1 - rank
        ranks[rank] = _with_moves(plain.ranks[rank], limit)
        start = {span.entry: span.start for span in spans[rank]}
        guests: list[tuple[int, int, Action]] = []  # (before which entry of the partner, order, what)
        moves = [(at, action) for at, action in enumerate(ranks[rank]) if action.kind in "EL"]
        for at, action in moves:  # arrives one forward after the next entry begins, or leaves one before
            then = next(start[other] for other in ranks[rank][at:] if other in start)
            behind = lambda span: span.start >= then + 1 if action.kind == "E" else span.end > then - 1
            before = next((i for i, span in enumerate(spans[partner]) if behind(span)), 2 * m)
            guests.append((before, at, Action("H" if action.kind == "E" else "G", *action[1:])))
        for before, _, action in sorted(guests, reverse=True):
            ranks[partner].insert(before, action)
    return check(Schedule(f"BPipe, p={p}, m={m}", ranks, p, m))


def _with_moves(entries: tuple[Action, ...], limit: int) -> list[Entry]:
    """E where the limit demands it and L before the backward of what was evicted. What left right before an
    entry, and what arrives for the next one, counts while it computes."""
    moves: list[list[Entry]] = [[] for _ in entries]
    here, away = [], set()
    could_leave: list[int] = []  # here since before the last entry began
    for at, (kind, stage, unit) in enumerate(entries):
        following = [other.microbatch for other in entries[at + 1 : at + 2] if other.kind == "B"]
        coming = [other for other in following if other in away]
        while len(here) + len(coming) + (kind == "F") > limit:
            newest = max(other for other in could_leave if other in here and (kind == "F" or other != unit))
            here.remove(newest)
            away.add(newest)
            moves[at - 1].insert(0, Action("E", stage, newest))
        could_leave = [other for other in here if other != unit]
        if kind == "F":
            here.append(unit)
        else:
            here.remove(unit)
        for other in coming:
            away.remove(other)
            here.append(other)
            moves[at + 1].append(Action("L", stage, other))
    return [entry for before, action in zip(moves, entries) for entry in (*before, action)]


def recomputed(schedule: Schedule) -> Schedule:
    """The same with R before each B or I: a forward keeps only its input. Pairs are taken apart."""
    again = lambda action: [R(*action[1:]), action] if action.kind in "BI" else [action]
    ranks = [[step for action in parts(entries) for step in again(action)] for entries in schedule.ranks]
    return check(replace(schedule, name=f"{schedule.name}, recomputed", ranks=ranks))


def varuna(p: int, m: int, costs: Costs = Costs(F=1, R=1, B=2)) -> Schedule:
    """A forward keeps the stage's input only, R runs the stage once more before B, and a free rank does the
    first of these that applies, with these times:
        1  after R it waits for the gradient and does B, as the recomputed activations fill the memory
        2  R, if a gradient is here or will be as soon as R is done
        3  F, if its input is here
        4  R, if a gradient is being computed on the next rank (the last rank needs no R)
    Time: never longer than GPipe with recomputation; for F=R=1, B=2 it is 1 + (m-1) mod 3 shorter.
    Memory: `schedule.peak` is 1 on every rank (m for GPipe without R), plus m inputs."""
    require_positive_ints(p=p, m=m)
    again, done = costs.of(R(0, 0)), [Counter() for _ in range(p)]

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
        return "F" if fed else "R" if here < inf else ""

    def choose(rank: int, now: Time, ended: dict[Action, Time]) -> Action | None:
        if kind := by_rules(rank, now, ended):
            done[rank][kind] += 1
            return Action(kind, rank, done[rank][kind] - 1)
        return None

    ranks, _ = play(p, choose, costs, lambda action: (costs.send, costs.send - again))
    return check(Schedule(f"Varuna, p={p}, m={m}", ranks, p, m))


def jitter(schedule: Schedule, costs: Costs, delay: Callable, opportunistic: bool) -> Time:
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
