"""AdaPipe: recompute a different share in each stage, and cut the model for the times that result. No torch.

In 1F1B stage s keeps n = min(p - s, m) microbatches, so under one cap for all the first stages recompute most
and the last little or nothing. A unit of a layer (attention, MLP, …) is kept, which costs bytes for every
microbatch in flight, or recomputed: one more forward in the backward, while its bytes live again. Two levels
of search:

    in a stage     a knapsack: the least recomputation so that
                   fixed + n·(boundary + kept units) + largest layer's recomputed units  <=  cap
    over stages    from the last to the first, as in dapple.py: where to cut

A shorter backward never makes a step longer, so this equals trying all subsets in all cuts. The step is
`dapple.latency`, which simulated 1F1B exceeds by at most 4% for like stages.
Sun et al. 2024 (AdaPipe), ASPLOS 2024. Differs: that bound is the step; all unbeaten suffixes are kept.
"""

from itertools import product
from typing import NamedTuple

from minitrain.pipeline.partition import Number, undominated
from minitrain.ranks.checks import require_positive_ints
from minitrain.systems.plan.dapple import Ahead, Stage, in_front

Flags = tuple[bool, ...]  # is each unit of a layer kept?


class Unit(NamedTuple):
    time: Number  # of its forward
    bytes: Number  # kept for backward in one microbatch


class Layer(NamedTuple):
    forward: Number
    backward: Number  # with everything kept
    fixed: Number  # bytes of weights and optimizer state
    units: tuple[Unit, ...]

    def costs(self, kept: Flags, boundary: Number, in_flight: int) -> tuple[Number, Number, Number]:
        """(bytes held all the time, bytes of what is recomputed, its time)."""
        held = boundary + sum(unit.bytes for unit, keep in zip(self.units, kept) if keep)
        again = [unit for unit, keep in zip(self.units, kept) if not keep]
        recomputed = sum(unit.bytes for unit in again), sum(unit.time for unit in again)
        return self.fixed + in_flight * held, *recomputed


class Model(NamedTuple):
    layers: tuple[Layer, ...]
    boundary: Number  # bytes of a layer's input, which is kept whatever is recomputed


class StagePlan(NamedTuple):
    layers: range
    kept: tuple[Flags, ...]  # for each layer
    recomputed: Number  # the time that this costs a microbatch
    bytes: Number


class AdaPipePlan(NamedTuple):
    time: Number
    stages: tuple[StagePlan, ...]


def bytes_of(model: Model, layers: range, kept: tuple[Flags, ...], in_flight: int) -> Number:
    """The most that the stage holds."""
    costs = [model.layers[i].costs(flags, model.boundary, in_flight) for i, flags in zip(layers, kept)]
    return sum(held for held, _, _ in costs) + max(again for _, again, _ in costs)


def knapsack(model: Model, layers: range, in_flight: int, cap: Number) -> StagePlan | None:
    """The units to keep so that the stage fits and recomputes least; None if it cannot fit."""
    require_positive_ints(in_flight=in_flight)
    unbeaten: list = [((0, 0, 0), ())]  # (fixed and kept bytes, largest recomputed layer, recomputation)
    for layer in model.layers[layers.start : layers.stop]:
        found = []
        for kept in product((True, False), repeat=len(layer.units)):
            held, again, time = layer.costs(kept, model.boundary, in_flight)
            found += [
                ((size + held, max(largest, again), spent + time), (*before, kept))
                for (size, largest, spent), before in unbeaten
                if size + held + max(largest, again) <= cap
            ]
        unbeaten = undominated(found)
    if not unbeaten:
        return None
    (size, largest, spent), kept = min(unbeaten, key=lambda found: found[0][2])
    return StagePlan(layers, kept, spent, size + largest)


def stage_of(model: Model, stage: StagePlan) -> Stage:
    layers = model.layers[stage.layers.start : stage.layers.stop]
    backward = sum(layer.backward for layer in layers) + stage.recomputed
    return Stage(sum(layer.forward for layer in layers), backward)


def plan_adapipe(model: Model, p: int, m: int, cap: Number) -> AdaPipePlan:
    """The cut into p stages and the units each keeps, with the shortest step of m microbatches."""
    count = len(model.layers)
    if not 1 <= p <= count or m < 1:
        raise ValueError(f"AdaPipe: p={p}, m={m}; use 1 to {count} stages and 1 microbatch or more")
    suffixes: dict[int, list] = {count: [(Ahead(), ())]}  # layers left -> unbeaten stages behind
    for behind in range(p):
        stage, longer = p - 1 - behind, {}
        for end, unbeaten in suffixes.items():
            for start in range(stage, end) if stage else [0]:
                best = knapsack(model, range(start, end), min(p - stage, m), cap)
                if best is not None:
                    times = stage_of(model, best)
                    found = [(in_front(times, ahead, behind, m), (best, *rest)) for ahead, rest in unbeaten]
                    longer.setdefault(start, []).extend(found)
        suffixes = {start: undominated(found) for start, found in longer.items()}
    if not suffixes.get(0):
        raise ValueError(f"AdaPipe: no cut into {p} stages fits {cap} bytes; use more stages or a larger cap")
    ahead, stages = min(suffixes[0], key=lambda found: found[0].all)
    return AdaPipePlan(ahead.all, stages)
