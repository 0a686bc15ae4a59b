"""Pipelines over slices of a sequence: TeraPipe (GPipe whose unit is a slice) and Seq1F1B (1F1B whose unit is a slice).

    seq1f1b(2, 2, 2): microbatch 0 is the units 0 1, microbatch 1 the units 2 3; F and B take one each
    rank 0   F0 F1 F2 .. B1 F3 B0 .. B3 B2           forwards in the order of the tokens: later tokens look at earlier keys,
    rank 1   .. F0 F1 B1 F2 B0 F3 B3 B2 ..           backwards from the last slice to the first: gradients come back to those keys

One sequence fills a pipeline: with k slices a microbatch there are m·k units of 1/k of the work. For slices of equal cost, whatever
F and B take, both have the bubble (p-1)/(m·k + p-1), and waiting per work is exactly 1/k of what GPipe and 1F1B have.
TeraPipe holds all m·k units. Seq1F1B's rank s runs p-s-1 units ahead as 1F1B does, and k-1 more, because the first backward is that
of a last slice: it holds min(p-s+k-1, m·k) units, which is (p-s+k-1)/k microbatches where 1F1B holds p-s.

Attention makes later slices dearer: token t meets t+1 keys. `slice_lengths` cuts one sequence so that
sum of the costs + (p-1) · the largest of them, the time of the forwards through p ranks, is least: for each bound on the largest a
dynamic programme finds the least sum, bounds are tried from below until they alone cost too much. Of cuts that are equally good it
gives the one with the longest slices in front; for costs that add up over tokens these never grow (each slice is as long as the bound
allows, and the same bound allows less later on). O(T²) bounds, O(k·T²) each: cut T into grains of 8 tokens, say, as TeraPipe does.

Messages: as many bytes as without slices, k times as many messages. What runs this: sliced_attention.py. No torch here.
Raises ValueError in one line for sizes below 1, for lengths that are not k, and for slices that ranks cannot share.
Li et al. 2021 (TeraPipe), arXiv:2102.07988, sections 3.2 and 3.3; Sun et al. 2024 (Seq1F1B), arXiv:2406.03488, section 3.
Differs: the number of slices is given (TeraPipe's programme finds it too: take the best of several k; with no cost of a slice of its
own it is the largest); TeraPipe's backwards come microbatch by microbatch in the order of the forwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from minitrain.pipeline.schedule import B, F, Schedule
from minitrain.pipeline.schedules.one_direction import alternate, check_sizes

Cost = Callable[[int, int], int | float | Fraction]


def terapipe(p: int, m: int, k: int, lengths: tuple[int, ...] = ()) -> Schedule:
    """All slices of all microbatches forward, then all backward. `lengths`: tokens of each slice, if they are not to be equal."""
    _check("terapipe", p, m, k, lengths)
    return Schedule(
        f"TeraPipe, p={p}, m={m}, k={k}",
        tuple(
            tuple([F(rank, unit) for unit in range(m * k)] + [B(rank, unit) for unit in _backwards(m, k)])
            for rank in range(p)
        ),
        p,
        m * k,
        k,
        lengths,
    )


def seq1f1b(p: int, m: int, k: int, lengths: tuple[int, ...] = ()) -> Schedule:
    """Rank s runs p-s-1 + k-1 slices ahead, then one forward and one backward in turn, then what is left."""
    _check("seq1f1b", p, m, k, lengths)
    return Schedule(
        f"Seq1F1B, p={p}, m={m}, k={k}",
        tuple(
            alternate(
                [F(rank, unit) for unit in range(m * k)],
                [B(rank, unit) for unit in _backwards(m, k)],
                p - rank - 1 + k - 1,
            )
            for rank in range(p)
        ),
        p,
        m * k,
        k,
        lengths,
    )


def on_each_rank(schedule: Schedule, ranks: int) -> Schedule:
    """The same for ranks that share out every slice's tokens: what Runner cuts there are their own, 1/ranks of each slice."""
    if any(length % ranks for length in schedule.lengths):
        raise ValueError(
            f"{schedule.name}: slices of {schedule.lengths} tokens on {ranks} ranks that share them; use multiples of {ranks}"
        )
    return replace(schedule, lengths=tuple(length // ranks for length in schedule.lengths))


def _backwards(m: int, k: int) -> list[int]:
    return [microbatch * k + part for microbatch in range(m) for part in reversed(range(k))]


# ---- slices of unequal length ----------------------------------------------------------------------------------------


def causal_cost(per_token: int | Fraction, per_key: int | Fraction) -> Cost:
    """cost(context, length) of a slice behind `context` tokens: its matrices, and each token meets all keys up to its own."""
    return lambda context, length: (
        per_token * length + per_key * (length * context + length * (length + 1) // 2)
    )


def makespan(lengths: tuple[int, ...], cost: Cost, p: int) -> int | float | Fraction:
    """Time of one sequence's slices through p ranks: all through one, and the dearest once more on each of the others."""
    costs = [cost(sum(lengths[:i]), length) for i, length in enumerate(lengths)]
    return sum(costs) + (p - 1) * max(costs)


def slice_lengths(length: int, k: int, cost: Cost, p: int) -> tuple[int, ...]:
    """k lengths, 1 or more each, that add up to `length`, for which `makespan` is least. cost(context, length) of a slice."""
    check_sizes("slice_lengths", length=length, k=k, p=p)
    if k > length:
        raise ValueError(f"slice_lengths: {k} slices of {length} tokens; use k of at most {length}")
    costs = {
        (start, end): cost(start, end - start)
        for start in range(length)
        for end in range(start + 1, length + 1)
    }
    best, best_time = None, None
    least_sum = _cheapest(length, k, costs, max(costs.values()))[0]
    for bound in sorted(set(costs.values())):
        if best is not None and least_sum + (p - 1) * bound > best_time:  # larger bounds can only cost more
            break
        found = _cheapest(length, k, costs, bound)
        if found is not None:
            time = makespan(found[1], cost, p)
            if best is None or (time, tuple(-n for n in found[1])) < (best_time, tuple(-n for n in best)):
                best, best_time = found[1], time
    return best


def _cheapest(
    length: int, k: int, costs: dict[tuple[int, int], int | float | Fraction], bound: int | float | Fraction
) -> tuple | None:
    """(sum of costs, lengths) of the cheapest k slices that each cost at most `bound`; the longest in front among equals."""
    behind = {length: (0, ())}  # what the tokens from here on cost in 0, 1, .. k slices
    for _ in range(k):
        longer = {}
        for start in range(length):
            for end in sorted(behind, reverse=True):
                if end > start and costs[start, end] <= bound:
                    total = costs[start, end] + behind[end][0]
                    if start not in longer or total < longer[start][0]:
                        longer[start] = (total, (end - start, *behind[end][1]))
        behind = longer
    return behind.get(0)


def _check(what: str, p: int, m: int, k: int, lengths: tuple[int, ...]) -> None:
    check_sizes(what, p=p, m=m, k=k)
    if lengths and (len(lengths) != k or min(lengths) < 1):
        raise ValueError(
            f"{what}: lengths={lengths} for k={k} slices; give k lengths of 1 token or more, or none"
        )
