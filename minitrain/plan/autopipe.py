"""AutoPipe: cut between attention and MLP where the simulator says it helps, and slice the first microbatches in half. No torch.

    units     embedding | attention 1 | MLP 1 | attention 2 | … | head          each with a forward and a backward time of its own
    plan      start from the cut with the smallest slowest stage; then move a unit out of the master stage, the one that waits least,
              over one of its ends, as long as the simulated step gets shorter

A cut between whole layers leaves the embedding and the head beside as many layers as anybody has; half layers even that out.

    1F1B, p=3            A0 A1 A2 .. .. .. B0 B0           sliced(3, m, 1)       a b A1 A2 .. .. a a b b          the first microbatch
                         .. A0 A1 .. B0 B0                                       . a b A1 .. a a b b              in halves a and b
                         .. .. A0 B0 B0 A1                                       . . a b a a b b A1

`sliced` is 1F1B with the first k microbatches in halves (of the rows: the loss is a sum, so no gradient changes). The last stage's first
backward starts at (p+1)·F/2 in place of p·F: half a forward less for each of the p-1 links of the warm-up, exactly. The whole step
is that much shorter when enough microbatches are sliced that no whole one comes late; `slices_needed` finds how many by simulation.

Sends two messages of half the size for a sliced microbatch. Memory: as 1F1B, two halves for one.
Raises ValueError for fewer units than stages, for k below 0 or above m.
Liu et al. 2022 (AutoPipe), IEEE Cluster 2022. Differs: backwards come in halves too; the
event simulator stands for their recurrences.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from minitrain.pipeline.partition import Number, balanced, check_costs
from minitrain.pipeline.schedule import Action, Schedule
from minitrain.pipeline.schedules.one_direction import check_sizes, one_f_one_b
from minitrain.pipeline.simulate import Measured, Simulation, simulate


class Plan(NamedTuple):
    time: Number
    cut: tuple[range, ...]


def plan(forward: Sequence[Number], backward: Sequence[Number], p: int, m: int) -> Plan:
    """The cut of units into p stages that the search ends at, and its simulated 1F1B step of m microbatches."""
    check_costs("plan", forward=forward, backward=backward)
    if len(forward) != len(backward):
        raise ValueError(
            f"plan: {len(forward)} forward times and {len(backward)} backward times; give each unit both"
        )
    check_sizes("plan", p=p, m=m)
    cut = tuple(balanced([f + b for f, b in zip(forward, backward)], p))
    best = step(cut, forward, backward, m)
    while True:
        master = min(range(p), key=best.idle)
        tried = [(step(moved, forward, backward, m), moved) for moved in without_one_unit(cut, master)]
        faster = min(tried, key=lambda pair: pair[0].makespan, default=None)
        if faster is None or faster[0].makespan >= best.makespan:
            return Plan(best.makespan, cut)
        best, cut = faster


def step(cut: Sequence[range], forward: Sequence[Number], backward: Sequence[Number], m: int) -> Simulation:
    """1F1B over these stages."""
    schedule = one_f_one_b(len(cut), m)
    times = {
        kind: [sum(numbers[layers.start : layers.stop]) for layers in cut]
        for kind, numbers in (("F", forward), ("B", backward))
    }
    return simulate(
        schedule, Measured({action: times[action.kind][action.stage] for action in schedule.place})
    )


def without_one_unit(cut: Sequence[range], stage: int) -> list[tuple[range, ...]]:
    """The cuts in which a unit of the stage has gone to the stage in front or behind, or the neighbours hand one on to theirs."""
    starts, found = [layers.start for layers in cut] + [cut[-1].stop], []
    for moves in [{stage: 1}, {stage + 1: -1}, {stage: 1, stage - 1: 1}, {stage + 1: -1, stage + 2: -1}]:
        moved = [start + moves.get(i, 0) for i, start in enumerate(starts)]
        inner = all(0 < i < len(cut) for i in moves)
        if inner and all(a < b for a, b in zip(moved, moved[1:])):
            found.append(tuple(range(a, b) for a, b in zip(moved, moved[1:])))
    return found


# ---- the slicer ------------------------------------------------------------------------------------------------------


def sliced(p: int, m: int, k: int = 1) -> Schedule:
    """1F1B of m microbatches, the first k in halves: units 2i and 2i+1 are microbatch i < k, unit i + k is microbatch i >= k."""
    check_sizes("sliced", p=p, m=m)
    if not 0 <= k <= m:
        raise ValueError(f"sliced: k={k} of m={m} microbatches in halves; use 0 to {m}")
    return Schedule(
        f"1F1B, p={p}, m={m}, {k} in halves",
        tuple(
            tuple(unit for action in entries for unit in units(action, k))
            for entries in one_f_one_b(p, m).ranks
        ),
        p,
        m + k,
    )


def units(action: Action, k: int) -> list[Action]:
    kind, stage, microbatch = action
    return [
        Action(kind, stage, unit)
        for unit in ([2 * microbatch, 2 * microbatch + 1] if microbatch < k else [microbatch + k])
    ]


def sliced_times(schedule: Schedule, k: int, F: Number = 1, B: Number = 2) -> Measured:
    """A half takes half of the time."""
    return Measured(
        {
            action: (F if action.kind == "F" else B) * (Fraction(1, 2) if action.microbatch < 2 * k else 1)
            for action in schedule.place
        }
    )


def slices_needed(p: int, m: int, F: Number = 1, B: Number = 2) -> int:
    """The fewest microbatches in halves that make the whole step (p-1)·F/2 shorter; all m in halves always do."""

    def time(k: int) -> Number:
        schedule = sliced(p, m, k)
        return simulate(schedule, sliced_times(schedule, k, F, B)).makespan

    whole = time(0)
    return next(k for k in range(m + 1) if whole - time(k) >= (p - 1) * F * Fraction(1, 2))
