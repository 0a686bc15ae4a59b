"""Pipelines whose unit is a slice of a sequence: TeraPipe (as GPipe) and Seq1F1B (as 1F1B). No torch.

    seq1f1b(2, 2, 2): microbatch 0 is the units 0 1, microbatch 1 the units 2 3; F and B take one each
    rank 0   F0 F1 F2 .. B1 F3 B0 .. B3 B2       forwards in the order of tokens, which look at earlier keys;
    rank 1   .. F0 F1 B1 F2 B0 F3 B3 B2 ..       backwards from the last: gradients come back to those keys

Bubble, for k slices of equal cost: (p-1)/(m·k + p-1). TeraPipe holds all m·k units; Seq1F1B's rank s holds
min(p-s+k-1, m·k), as the first backward is that of a last slice. Sends the same bytes in k times as many
messages. Later slices cost more, as token t meets t+1 keys: `slice_lengths` minimises the sum of the costs +
(p-1) · the largest of them. For each bound on the largest, in rising order, dynamic programming finds the
least sum: O(T²) bounds, O(k·T²) each, so cut T into grains of 8 tokens, say.
Li et al. 2021 (TeraPipe), arXiv:2102.07988, sections 3.2 and 3.3; Sun et al. 2024 (Seq1F1B),
arXiv:2406.03488, section 3. Differs: the number of slices is given; TeraPipe's backwards come in the order of
the forwards.
"""

from collections.abc import Callable
from dataclasses import replace

from minitrain.pipeline.schedule import B, F, Schedule
from minitrain.pipeline.schedules.one_direction import alternate
from minitrain.pipeline.simulate import Time
from minitrain.ranks.checks import require_positive_ints

Cost = Callable[[int, int], Time]


def terapipe(p: int, m: int, k: int, lengths: tuple[int, ...] = ()) -> Schedule:
    """All slices of all microbatches forward, then backward. `lengths` of the slices, by default equal."""
    _check("terapipe", p, m, k, lengths)
    order = [*((F, unit) for unit in range(m * k)), *((B, unit) for unit in _backwards(m, k))]
    ranks = [[kind(r, unit) for kind, unit in order] for r in range(p)]
    return Schedule(f"TeraPipe, p={p}, m={m}, k={k}", ranks, p, m * k, k, lengths)


def seq1f1b(p: int, m: int, k: int, lengths: tuple[int, ...] = ()) -> Schedule:
    """Rank s runs p-s-1 + k-1 slices ahead, then one forward and one backward in turn, then what is left."""
    _check("seq1f1b", p, m, k, lengths)
    forwards = lambda r: [F(r, unit) for unit in range(m * k)]
    backwards = lambda r: [B(r, unit) for unit in _backwards(m, k)]
    ranks = [alternate(forwards(r), backwards(r), p - r - 1 + k - 1) for r in range(p)]
    return Schedule(f"Seq1F1B, p={p}, m={m}, k={k}", ranks, p, m * k, k, lengths)


def on_each_rank(schedule: Schedule, ranks: int) -> Schedule:
    """The same for ranks that share the tokens of every slice: lengths divided by `ranks`."""
    lengths = schedule.lengths
    if any(length % ranks for length in lengths):
        rule = f"slices of {lengths} tokens on {ranks} ranks that share them; use multiples of {ranks}"
        raise ValueError(f"{schedule.name}: {rule}")
    return replace(schedule, lengths=tuple(length // ranks for length in lengths))


def _backwards(m: int, k: int) -> list[int]:
    return [microbatch * k + part for microbatch in range(m) for part in reversed(range(k))]


def _check(what: str, p: int, m: int, k: int, lengths: tuple[int, ...]) -> None:
    require_positive_ints(p=p, m=m, k=k)
    if lengths and (len(lengths) != k or min(lengths) < 1):
        rule = "give k lengths of 1 token or more, or none"
        raise ValueError(f"{what}: lengths={lengths} for k={k} slices; {rule}")


def causal_cost(per_token: Time, per_key: Time) -> Cost:
    """cost(context, length) of a slice after `context` tokens: a token meets all keys up to its own."""
    return lambda context, n: per_token * n + per_key * (n * context + n * (n + 1) // 2)


def makespan(lengths: tuple[int, ...], cost: Cost, p: int) -> Time:
    """Time of a sequence's slices on p ranks: all of them on one, and the longest once on each other."""
    require_positive_ints(lengths=lengths, p=p)
    costs = [cost(sum(lengths[:i]), length) for i, length in enumerate(lengths)]
    return sum(costs) + (p - 1) * max(costs)


def slice_lengths(length: int, k: int, cost: Cost, p: int) -> tuple[int, ...]:
    """k lengths of at least 1, of sum `length` and least `makespan`; among equals the longest in front."""
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
