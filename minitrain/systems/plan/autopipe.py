"""AutoPipe: cut between attention and MLP by simulation, and halve the first microbatches. No torch.

    units    embedding | attention 1 | MLP 1 | attention 2 | … | head    with forward and backward times
    plan     from the cut with the smallest slowest stage on, move a unit out of the master stage, which
             waits least, over one of its ends, as long as the simulated step gets shorter

    1F1B, p=3     A0 A1 A2 .. .. .. B0 B0         sliced(3, m, 1)    a b A1 A2 .. .. a a b b
                  .. A0 A1 .. B0 B0                                  . a b A1 .. a a b b     microbatch 0
                  .. .. A0 B0 B0 A1                                  . . a b a a b b A1      in halves a and b

Halves are of the rows, so no gradient changes. The last stage's first backward starts at (p+1)·F/2 in place
of p·F, and so much shorter is the step if enough microbatches are sliced. A message becomes two halves.
Liu et al. 2022 (AutoPipe), IEEE Cluster 2022. Differs: backwards in halves too; a simulator, not recurrences.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from minitrain.pipeline.partition import Number, balanced, check_costs
from minitrain.pipeline.schedule import Action, Schedule
from minitrain.pipeline.schedules.one_direction import one_f_one_b
from minitrain.pipeline.simulate import Measured, Simulation, simulate
from minitrain.ranks.checks import require_ints, require_positive, require_positive_ints


class AutoPipePlan(NamedTuple):
    time: Number
    cut: tuple[range, ...]


def plan_autopipe(forward: Sequence[Number], backward: Sequence[Number], p: int, m: int) -> AutoPipePlan:
    """The cut of units into p stages that the search ends at, and its simulated 1F1B step.

    Of equal moves the first: over the front, over the back, and so again with a unit handed on."""
    check_costs("plan_autopipe", forward=forward, backward=backward)
    require_positive_ints(p=p, m=m)
    if len(forward) != len(backward):
        raise ValueError(f"{len(forward)} forward times and {len(backward)} backward; give each unit both")
    cut = tuple(balanced([f + b for f, b in zip(forward, backward)], p))
    best = step(cut, forward, backward, m)
    while True:
        master = min(range(p), key=best.idle)
        tried = [(step(moved, forward, backward, m), moved) for moved in without_one_unit(cut, master)]
        faster = min(tried, key=lambda pair: pair[0].makespan, default=None)
        if faster is None or faster[0].makespan >= best.makespan:
            return AutoPipePlan(best.makespan, cut)
        best, cut = faster


def step(cut: Sequence[range], forward: Sequence[Number], backward: Sequence[Number], m: int) -> Simulation:
    """1F1B over these stages."""
    schedule = one_f_one_b(len(cut), m)
    times = {
        (kind, stage): sum(numbers[units.start : units.stop])
        for kind, numbers in (("F", forward), ("B", backward))
        for stage, units in enumerate(cut)
    }
    return simulate(schedule, Measured({action: times[action[:2]] for action in schedule.place}))


def without_one_unit(cut: Sequence[range], stage: int) -> list[tuple[range, ...]]:
    """The cuts in which a unit of the stage went to a neighbour, who may hand one on to the next."""
    starts, found = [units.start for units in cut] + [cut[-1].stop], []
    for moves in [{stage: 1}, {stage + 1: -1}, {stage: 1, stage - 1: 1}, {stage + 1: -1, stage + 2: -1}]:
        ends = [start + moves.get(i, 0) for i, start in enumerate(starts)]
        moved = tuple(range(a, b) for a, b in zip(ends, ends[1:]))
        if all(0 < i < len(cut) for i in moves) and all(moved):
            found.append(moved)
    return found


def sliced(p: int, m: int, k: int = 1) -> Schedule:
    """1F1B with the first k of m microbatches in halves: units 2i and 2i+1 if i < k, else unit i + k."""
    require_positive_ints(p=p, m=m)
    if not 0 <= k <= m:
        raise ValueError(f"sliced: k={k} of m={m} microbatches in halves; use 0 to {m}")
    whole = one_f_one_b(p, m).ranks
    ranks = tuple(tuple(unit for action in entries for unit in units(action, k)) for entries in whole)
    return Schedule(f"1F1B, p={p}, m={m}, {k} in halves", ranks, p, m + k)


def units(action: Action, k: int) -> list[Action]:
    require_ints(k=k)
    i = action.microbatch
    return [action._replace(microbatch=unit) for unit in ([2 * i, 2 * i + 1] if i < k else [i + k])]


def sliced_times(schedule: Schedule, k: int, F: Number = 1, B: Number = 2) -> Measured:
    """A half takes half of the time."""
    share = {action: Fraction(1, 2) if action.microbatch < 2 * k else 1 for action in schedule.place}
    return Measured({action: (F if action.kind == "F" else B) * part for action, part in share.items()})


def slices_needed(p: int, m: int, F: Number = 1, B: Number = 2) -> int:
    """The fewest halved microbatches that make the whole step (p-1)·F/2 shorter; all m always do."""
    require_positive(F=F, B=B)

    def time(k: int) -> Number:
        schedule = sliced(p, m, k)
        return simulate(schedule, sliced_times(schedule, k, F, B)).makespan

    whole = time(0)
    return next(k for k in range(m + 1) if whole - time(k) >= (p - 1) * F * Fraction(1, 2))
