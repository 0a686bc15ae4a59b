"""BPipe: the first ranks of 1F1B, which hold the most, lend what forwards kept to the last, which hold least.

    p=4: limit 3        rank 0 holds 4 in 1F1B, rank 3 one: rank 0 evicts (E) to rank 3, loads (L) before B
    rank 0   F0 F1 E1 F2 F3 E3 B0 F4 L1 B1 F5 E5 B2 F6 L3 B3 E6 F7 B4 L5 B5 L6 B6 B7
    rank 3   H1 F0 B0 F1 B1 F2 B2 H3 G1 F3 B3 ..                     H: hosts it, G: gives it back

Rank x of 1F1B holds p-x microbatches and its partner p-1-x holds x+1; with one on its way, shared evenly,
that is ceil((p+2)/2) on each. A move runs beside one entry that computes, and meanwhile counts at both ends:
E stands an entry ahead of the forward that needs the room, L arrives beside the entry before its backward.
No more is evicted than must be, the newest first: about every second microbatch. While a move takes no longer
than a forward, the makespan is that of 1F1B. Sends what a forward keeps at each eviction, and the same back.
Memory: moves under way included, at most the largest `schedule.peak`. bpipe_eviction.py runs it.
Kim et al. 2023 (BPipe), ICML, PMLR 202, section 3, whose bound is for even p.
"""

from minitrain.pipeline.schedule import Action, Entry, Schedule, check
from minitrain.pipeline.schedules.one_direction import one_f_one_b
from minitrain.pipeline.simulate import Costs, simulate
from minitrain.ranks.checks import require_positive_ints


def bpipe(p: int, m: int) -> Schedule:
    """1F1B in which no rank holds more than ceil((p+2)/2) microbatches."""
    require_positive_ints(p=p, m=m)
    plain, limit = one_f_one_b(p, m), (p + 3) // 2
    spans = simulate(plain, Costs(F=1, B=2)).spans
    ranks: list[list[Entry]] = [list(entries) for entries in plain.ranks]
    for rank in range(p // 2):
        partner = p - 1 - rank
        ranks[rank] = _with_moves(plain.ranks[rank], limit)
        start = {span.entry: span.start for span in spans[rank]}
        guests: list[tuple[int, int, Action]] = []  # (before which entry of the partner, order, what)
        for at, action in enumerate(ranks[rank]):
            if (
                action.kind in "EL"
            ):  # it arrives one forward after the next entry begins, or leaves one before
                then = next(start[other] for other in ranks[rank][at:] if other in start)
                behind = lambda span: span.start >= then + 1 if action.kind == "E" else span.end > then - 1
                before = next((i for i, span in enumerate(spans[partner]) if behind(span)), 2 * m)
                guests.append((before, at, Action("H" if action.kind == "E" else "G", *action[1:])))
        for before, _, action in sorted(guests, reverse=True):
            ranks[partner].insert(before, action)
    return check(Schedule(f"BPipe, p={p}, m={m}", ranks, p, m))


def _with_moves(entries: tuple[Action, ...], limit: int) -> list[Entry]:
    """A rank's list with E where the limit demands it and L before the backward of what was evicted.

    What left right before an entry, and what arrives for the next one, counts while it computes."""
    moves: list[list[Entry]] = [[] for _ in entries]
    here, away = [], set()
    could_leave: list[int] = []  # here since before the last entry began
    for at, (kind, stage, unit) in enumerate(entries):
        coming = [other.microbatch for other in entries[at + 1 : at + 2] if other.kind == "B"]
        coming = [other for other in coming if other in away]
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
