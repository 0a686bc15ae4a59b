"""AdaPipe: recompute a different share in each stage, and cut the model for the times that result. No torch.

    1F1B with 3 stages      stage 0 keeps 3 microbatches, stage 1 keeps 2, stage 2 keeps 1           one cap of memory for all
    so under a cap          recomputes most               less               little or nothing       (and has the fewest layers)

A layer is made of units (attention, MLP, a norm, …). A unit is kept, which costs bytes for every microbatch in flight, or recomputed,
which costs its forward once more in the backward. Two levels of dynamic programming:

    in a stage      the units to keep: a knapsack. Longest recomputation saved with
                    fixed + n·(boundary + kept units) + largest layer's recomputed units  <=  cap,     n = min(p - s, m)
    over stages     from the last to the first: cut in front of layer l for stage s, with the shortest backward of each stage; what
                    is kept of the stages behind are all unbeaten (sum of times, end of first stage's backward), as in dapple.py

A shorter backward never makes a step longer, so the best of a stage by itself is the best for the whole: the two levels together equal
trying all subsets in all cuts. The step is `dapple.latency`, which simulated 1F1B exceeds by at most 4% for like stages.

Knapsacks here keep all unbeaten (bytes, time): exact for any numbers. Sends nothing more than 1F1B. Memory as above: the recomputed units
of a layer live again during its backward.
Raises ValueError where no cut fits the cap even if everything is recomputed.
Sun et al. 2024 (AdaPipe), ASPLOS 2024. Differs: the step is dapple.py's bound, and all unbeaten suffixes are kept in place of one best.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from minitrain.pipeline.partition import Number, undominated
from minitrain.plan.dapple import Ahead, Stage, in_front


class Unit(NamedTuple):
    """What may be recomputed: its forward time, and the bytes it keeps for backward in one microbatch."""

    time: Number
    bytes: Number


class Layer(NamedTuple):
    """Forward and backward times with everything kept, bytes of weights and optimizer state, and its units."""

    forward: Number
    backward: Number
    fixed: Number
    units: tuple[Unit, ...]


class Model(NamedTuple):
    """`boundary`: bytes of a layer's input; a stage keeps one a layer, whatever it recomputes."""

    layers: tuple[Layer, ...]
    boundary: Number


class StagePlan(NamedTuple):
    """`kept[i][u]`: is unit u of the i-th layer kept? `recomputed` is the time that this costs a microbatch."""

    layers: range
    kept: tuple[tuple[bool, ...], ...]
    recomputed: Number
    bytes: Number


class Plan(NamedTuple):
    time: Number
    stages: tuple[StagePlan, ...]


def bytes_of(model: Model, layers: range, kept: tuple[tuple[bool, ...], ...], in_flight: int) -> Number:
    """The most that the stage holds."""
    fixed, per_microbatch, again = 0, 0, 0
    for number, flags in zip(layers, kept):
        layer = model.layers[number]
        fixed += layer.fixed
        per_microbatch += model.boundary + sum(unit.bytes for unit, keep in zip(layer.units, flags) if keep)
        again = max(again, sum(unit.bytes for unit, keep in zip(layer.units, flags) if not keep))
    return fixed + in_flight * per_microbatch + again


def knapsack(model: Model, layers: range, in_flight: int, cap: Number) -> StagePlan | None:
    """The units to keep so that the stage fits and recomputes least; None if it cannot fit.

    A state is (fixed and kept bytes, largest recomputed layer, recomputation); a layer goes in with each choice of its units.
    """
    unbeaten: list = [((0, 0, 0), ())]
    for number in layers:
        layer, found = model.layers[number], []
        for kept in choices(layer):
            alone = Model((layer,), model.boundary)
            again = sum(unit.bytes for unit, keep in zip(layer.units, kept) if not keep)
            held = bytes_of(alone, range(1), (kept,), in_flight) - again
            time = sum(unit.time for unit, keep in zip(layer.units, kept) if not keep)
            found += [
                ((size + held, max(largest, again), spent + time), (*plan, kept))
                for (size, largest, spent), plan in unbeaten
                if size + held + max(largest, again) <= cap
            ]
        unbeaten = undominated(found)
    if not unbeaten:
        return None
    (size, largest, spent), kept = min(unbeaten, key=lambda found: found[0][2])
    return StagePlan(layers, kept, spent, size + largest)


@cache
def choices(layer: Layer) -> list[tuple[bool, ...]]:
    """Which units of a layer to keep: all subsets."""
    found = [()]
    for _ in layer.units:
        found = [(*flags, keep) for flags in found for keep in (True, False)]
    return found


def plan(model: Model, p: int, m: int, cap: Number) -> Plan:
    """The cut into p stages and the units each keeps, with the shortest step of m microbatches."""
    count = len(model.layers)
    if not 1 <= p <= count or m < 1:
        raise ValueError(
            f"AdaPipe: {p} stages of {count} layers, {m} microbatches; use 1 to {count} stages and 1 microbatch or more"
        )
    suffixes: dict[int, list] = {count: [(Ahead(), ())]}  # layers left -> unbeaten stages behind
    for behind in range(p):
        stage, longer = p - 1 - behind, {}
        for end, unbeaten in suffixes.items():
            for start in range(stage, end) if stage else [0]:
                best = knapsack(model, range(start, end), min(p - stage, m), cap)
                if best is not None:
                    times = stage_of(model, best)
                    longer.setdefault(start, []).extend(
                        (in_front(times, ahead, behind, m), (best, *stages)) for ahead, stages in unbeaten
                    )
        suffixes = {start: undominated(found) for start, found in longer.items()}
    if not suffixes.get(0):
        raise ValueError(
            f"AdaPipe: no cut into {p} stages fits {cap} bytes even if all is recomputed; use more stages or a larger cap"
        )
    ahead, stages = min(suffixes[0], key=lambda found: found[0].all)
    return Plan(ahead.all, stages)


def stage_of(model: Model, stage: StagePlan) -> Stage:
    layers = [model.layers[number] for number in stage.layers]
    return Stage(
        sum(layer.forward for layer in layers), sum(layer.backward for layer in layers) + stage.recomputed
    )
