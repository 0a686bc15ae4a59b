"""BPipe: the first ranks of 1F1B, which hold the most, lend what their forwards kept to the last ranks, which hold the least.

    p=4: limit 3        rank 0 holds 4 in 1F1B, rank 3 one: rank 0 evicts (E) to its partner and loads (L) back before B
    rank 0   F0 F1 E1 F2 F3 E3 B0 F4 L1 B1 F5 E5 B2 F6 L3 B3 E6 F7 B4 L5 B5 L6 B6 B7
    rank 3   H1 F0 B0 F1 B1 F2 B2 H3 G1 F3 B3 ..                     H: has it as a guest, G: gives it back

In 1F1B rank x holds p-x microbatches and its partner p-1-x holds x+1, together p+1 whatever x; one more is on its way. Shared evenly
that is ceil((p+2)/2) on each: 5 instead of 8 for p=8. The pair is chosen so that it can sit in one node (ranks of a pipeline are
assigned to nodes in pairs), where links are fast.

A move runs beside one entry that computes: E stands an entry ahead of the forward that needs the room, L comes in while the entry before
its backward is computed. On the way both ends have it. So what is evicted is the newest (its backward is the furthest away) that was
there when the entry before began, and only what must be: about every second microbatch. `bpipe` makes 1F1B's lists with these actions
between; they take no time of a rank, and as long as a move takes no longer than a forward, the makespan is that of 1F1B to the unit.

`Balanced` (lending.py) runs such lists on real ranks. No torch here.

Sends what a forward keeps at each eviction, and the same back. Memory: no rank ever holds more than the largest `schedule.peak`, with what is
leaving and what is coming: not one more, as the lists keep that room.
Raises ValueError in one line for sizes below 1; lower.py for lists whose moves wait in a circle.
Kim et al. 2023 (BPipe), ICML, PMLR 202, section 3. Differs: their bound is for even p; for odd p the last rank has room to spare.
"""

from __future__ import annotations

from minitrain.pipeline.schedule import Action, Entry, Schedule, check
from minitrain.pipeline.schedules.one_direction import check_sizes, one_f_one_b
from minitrain.pipeline.simulate import Costs, simulate


def bpipe(p: int, m: int) -> Schedule:
    """1F1B in which no rank holds more than ceil((p+2)/2) microbatches."""
    check_sizes("bpipe", p=p, m=m)
    plain, limit = one_f_one_b(p, m), (p + 3) // 2
    spans = simulate(plain, Costs(F=1, B=2)).spans
    ranks: list[list[Entry]] = [list(entries) for entries in plain.ranks]
    for rank in range(p // 2):
        partner = p - 1 - rank
        ranks[rank] = _with_moves(list(plain.ranks[rank]), limit)
        start = {span.entry: span.start for span in spans[rank]}
        guests: list[tuple[int, int, Action]] = []  # (in front of which entry of the partner, order, what)
        for at, action in enumerate(ranks[rank]):
            user = next((other for other in ranks[rank][at:] if other.kind in "FB"), None)
            if action.kind == "E":  # it is there one forward later
                before = [i for i, span in enumerate(spans[partner]) if span.start >= start[user] + 1]
                guests.append((min(before, default=2 * m), at, Action("H", *action[1:])))
            if action.kind == "L":  # it leaves one forward earlier
                before = [i for i, span in enumerate(spans[partner]) if span.end > start[user] - 1]
                guests.append((min(before, default=2 * m), at, Action("G", *action[1:])))
        for before, _, action in sorted(guests, reverse=True):
            ranks[partner].insert(before, action)
    return check(Schedule(f"BPipe, p={p}, m={m}", tuple(map(tuple, ranks)), p, m))


def _with_moves(entries: list[Action], limit: int) -> list[Entry]:
    """The list of a rank with E where the limit demands it and L in front of the backward of what was evicted.

    Counted is what is here while an entry is computed: a microbatch that leaves in front of it, one that comes for the next.
    """
    moves: list[list[Entry]] = [[] for _ in entries]
    here, away = [], set()
    could_leave: list[int] = []  # here when the entry before began, and still
    for at, action in enumerate(entries):
        then = entries[at + 1] if at + 1 < len(entries) else None
        coming = (
            [then.microbatch] if then is not None and then.kind == "B" and then.microbatch in away else []
        )
        while len(here) + len(coming) + (action.kind == "F") > limit:
            newest = max(
                unit
                for unit in could_leave
                if unit in here and (action.kind == "F" or unit != action.microbatch)
            )
            here.remove(newest)
            away.add(newest)
            moves[at - 1].insert(0, Action("E", action.stage, newest))
        could_leave = [unit for unit in here if unit != action.microbatch]
        if action.kind == "F":
            here.append(action.microbatch)
        else:
            here.remove(action.microbatch)
        for unit in coming:
            away.remove(unit)
            here.append(unit)
            moves[at + 1].append(Action("L", action.stage, unit))
    return [entry for before, action in zip(moves, entries) for entry in (*before, action)]
