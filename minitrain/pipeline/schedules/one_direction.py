"""Whole backwards and stages in one direction: GPipe, 1F1B, interleaved, breadth-first; in slices. No torch.

    GPipe, p=3 m=4                                   1F1B, p=3 m=4
    F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3              F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3  (B as long as F)
    .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..              .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..              .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

Bubble share: (p-1)/(m+p-1). Memory: GPipe holds all m microbatches; rank r of 1F1B holds p - r.
Interleaving gives a rank v stages of 1/v of the size: the overhead is (p-1)/(v·m), for v times the messages.
Depth-first (interleaved 1F1B) holds at most p·(1 + (p-1)/(p·v)) microbatches' worth, on rank 0. Breadth-first
holds all m, but gathers sharded weights twice per step, not 2m times (`runtime.WholeStages`).
Huang et al. 2019 (GPipe), arXiv:1811.06965, section 2; Narayanan et al. 2021, arXiv:2104.04473, sections
2.2.1 and 2.2.2; Fan et al. 2021 (DAPPLE: 1F1B as early backward), arXiv:2007.01045, section 3; Lamy-Poirier
2023 (breadth-first), arXiv:2211.05953; slices: Li et al. 2021 (TeraPipe), arXiv:2102.07988, sections 3.2 and
3.3; Sun et al. 2024 (Seq1F1B), arXiv:2406.03488, section 3. Differs: the number of slices is given; GPipe's
backwards, and TeraPipe's, come in the order of the forwards.
"""

from collections.abc import Callable
from dataclasses import replace

from minitrain.pipeline.schedule import Action, B, F, Schedule
from minitrain.pipeline.simulate import Time
from minitrain.ranks.checks import require_positive_ints


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards."""
    require_positive_ints(p=p, m=m)
    ranks = [[kind(r, i) for kind in (F, B) for i in range(m)] for r in range(p)]
    return Schedule(f"GPipe, p={p}, m={m}", ranks, p, m)


def one_f_one_b(p: int, m: int, extra: int = 0) -> Schedule:
    """Rank r runs p-r-1 forwards ahead, then a forward and a backward in turn, then the other backwards.
    `extra` more forwards ahead give messages time to travel; fewer (below 0) make every backward wait."""
    require_positive_ints(p=p, m=m)
    order = [(0, i) for i in range(m)]
    ranks = [alternate(*on_rank(r, p, 1, order, B), max(0, p - r - 1 + extra)) for r in range(p)]
    return Schedule(f"1F1B{f' {extra:+}' if extra else ''}, p={p}, m={m}", ranks, p, m)


def interleaved(p: int, m: int, v: int, room: int = 2) -> Schedule:
    """Interleaved 1F1B: rank r has the stages r, r+p, .. and goes through them depth-first. It is `room`
    forwards further ahead than the next one: 2 leave time for messages, 1 is enough if they take none."""
    order = depth_first("interleaved", p, m, v)
    ahead = [room * (p - r - 1) + (v - 1) * p for r in range(p)]
    ranks = [alternate(*on_rank(r, p, v, order, B), ahead[r]) for r in range(p)]
    return Schedule(f"interleaved 1F1B, p={p}, m={m}, v={v}", ranks, p * v, m)


def breadth_first(p: int, m: int, v: int) -> Schedule:
    """The stages of `interleaved`, each run for all microbatches before the next."""
    require_positive_ints(p=p, m=m, v=v)
    order = [(F, c) for c in range(v)] + [(B, c) for c in reversed(range(v))]
    ranks = [[kind(c * p + r, i) for kind, c in order for i in range(m)] for r in range(p)]
    return Schedule(f"breadth-first, p={p}, m={m}, v={v}", ranks, p * v, m)


def on_rank(r: int, p: int, v: int, order: list[tuple[int, int]], backward: Callable) -> tuple[list, list]:
    """(Forwards, backwards) of rank r, which has v stages, every p-th; `order` of (stage, microbatch)."""
    forwards = [F(c * p + r, i) for c, i in order]
    return forwards, [backward((v - 1 - c) * p + r, i) for c, i in order]


def alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> tuple[Action, ...]:
    """`ahead` forwards, then one of each in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    turns = [action for pair in zip(forwards[ahead:], backwards) for action in pair]
    return tuple(forwards[:ahead] + turns + backwards[len(forwards) - ahead :])


def depth_first(what: str, p: int, m: int, v: int) -> list[tuple[int, int]]:
    """(which of its v stages, microbatch) of each forward: p microbatches go through all, then the next p."""
    require_positive_ints(p=p, m=m, v=v)
    if m % p:
        raise ValueError(f"{what}: m={m} microbatches are not a multiple of p={p} ranks; use {m + -m % p}")
    return [(k // p % v, k // (p * v) * p + k % p) for k in range(m * v)]


def check_even(what: str, why: str, name: str, size: int, of: str) -> None:
    if size % 2:
        raise ValueError(f"{what}: {name}={size} {of}; {why}, use an even number")


Cost = Callable[[int, int], Time]


def terapipe(p: int, m: int, k: int, lengths: tuple[int, ...] = ()) -> Schedule:
    """All slices of all microbatches forward, then backward. `lengths` of the slices, by default equal.
    Unit m·k + j is slice j of microbatch m: forwards in the order of tokens, which look at earlier keys,
    backwards from the last. Bubble: (p-1)/(m·k + p-1). Holds all m·k units; k times as many messages."""
    return _sliced("TeraPipe", p, m, k, lengths, lambda r: m * k)


def seq1f1b(p: int, m: int, k: int, lengths: tuple[int, ...] = ()) -> Schedule:
    """Rank s runs p-s-1 + k-1 slices ahead, then one forward and one backward in turn, then what is left.

        rank 0 of 2, m=2, k=2   F0 F1 F2 .. B1 F3 B0 .. B3 B2
        rank 1                  .. F0 F1 B1 F2 B0 F3 B3 B2 ..

    Rank s holds min(p-s+k-1, m·k) units, as the first backward is that of a last slice."""
    return _sliced("Seq1F1B", p, m, k, lengths, lambda r: p - r - 1 + k - 1)


def _sliced(name: str, p: int, m: int, k: int, lengths: tuple[int, ...], ahead: Callable) -> Schedule:
    require_positive_ints(p=p, m=m, k=k)
    if lengths and (len(lengths) != k or min(lengths) < 1):
        rule = "give k lengths of 1 token or more, or none"
        raise ValueError(f"{name}: lengths={lengths} for k={k} slices; {rule}")
    back = [microbatch * k + part for microbatch in range(m) for part in reversed(range(k))]
    lists = lambda r: ([F(r, unit) for unit in range(m * k)], [B(r, unit) for unit in back])
    ranks = [alternate(*lists(r), ahead(r)) for r in range(p)]
    return Schedule(f"{name}, p={p}, m={m}, k={k}", ranks, p, m * k, k, lengths)


def on_each_rank(schedule: Schedule, ranks: int) -> Schedule:
    """The same for ranks that share the tokens of every slice: lengths divided by `ranks`."""
    lengths = schedule.lengths
    if any(length % ranks for length in lengths):
        rule = f"slices of {lengths} tokens on {ranks} ranks that share them; use multiples of {ranks}"
        raise ValueError(f"{schedule.name}: {rule}")
    return replace(schedule, lengths=tuple(length // ranks for length in lengths))


def causal_cost(per_token: Time, per_key: Time) -> Cost:
    """cost(context, length) of a slice after `context` tokens: a token meets all keys up to its own."""
    return lambda context, n: per_token * n + per_key * (n * context + n * (n + 1) // 2)


def makespan(lengths: tuple[int, ...], cost: Cost, p: int) -> Time:
    require_positive_ints(lengths=lengths, p=p)
    costs = [cost(sum(lengths[:i]), length) for i, length in enumerate(lengths)]
    return sum(costs) + (p - 1) * max(costs)


def slice_lengths(length: int, k: int, cost: Cost, p: int) -> tuple[int, ...]:
    """k lengths of at least 1, of sum `length` and least `makespan`; among equals the longest in front.
    Later slices cost more, as token t meets t+1 keys. For each bound on the largest cost, in rising order,
    dynamic programming finds the least sum: O(T²) bounds, O(k·T²) each: cut T into grains of 8 tokens."""
    require_positive_ints(length=length, k=k, p=p)
    if k > length:
        raise ValueError(f"slice_lengths: {k} slices of {length} tokens; use k of at most {length}")
    costs = {(start, end): cost(start, end - start) for end in range(1, length + 1) for start in range(end)}
    least_sum = _cheapest(length, k, costs, max(costs.values()))[0]
    best: tuple | None = None  # (time, - each length)
    for bound in sorted(set(costs.values())):
        if best is not None and least_sum + (p - 1) * bound > best[0]:  # larger bounds can only cost more
            break
        if found := _cheapest(length, k, costs, bound):
            key = makespan(found[1], cost, p), tuple(-n for n in found[1])
            best = min(best or key, key)
    return tuple(-n for n in best[1])


def _cheapest(length: int, k: int, costs: dict[tuple[int, int], Time], bound: Time) -> tuple | None:
    """(sum of costs, lengths) of the cheapest k slices of at most `bound` each, the longest in front."""
    behind = {length: (0, ())}  # what the tokens from here on cost in 0, 1, .. k slices
    for _ in range(k):
        longer = {}
        for start in range(length):
            ends = [end for end in sorted(behind, reverse=True) if end > start and costs[start, end] <= bound]
            if ends:
                total = lambda end: costs[start, end] + behind[end][0]
                end = min(ends, key=total)
                longer[start] = total(end), (end - start, *behind[end][1])
        behind = longer
    return behind.get(0)
