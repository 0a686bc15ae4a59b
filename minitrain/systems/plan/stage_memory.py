"""Under a cap of bytes: what each stage recomputes, cuts by measured peaks, where each tensor waits.

AdaPipe  in 1F1B stage s has n = min(p - s, m) microbatches in flight, so the first stages recompute most. In
         a stage a knapsack: the least recomputation so that
             fixed + n·(boundary + kept units) + largest layer's recomputed units  <=  cap
         and over stages, from the last to the first as in stage_cuts.py, where to cut.
mCAP     measure the peaks of a few cuts, predict all, choose the best. By least squares
             peak(s, layers) = base_s + sum over its layers of (fixed_l + n_s · kept_l)
         profiled(5, 3)   0 | 1 | 2 3 4     0 1 | 2 | 3 4     0 1 2 | 3 | 4
MPress   while nobody needs a tensor, from its forward to its backward (`idle`), it may be
             keep 0   recompute: its forward once more   peer, host: what 2·bytes / link exceeds idle
         A plan fits if no rank holds more than the cap, and all together, lent bytes included, no more than
         all.

Sun et al. 2024 (AdaPipe), ASPLOS; Dreuning et al. 2022 (mCAP), Euro-Par; Zhou et al. 2023 (MPress), HPCA.
Differs: AdaPipe's step is `stage_cuts.latency`, and all unbeaten suffixes are kept; mCAP is for 1F1B, so a
layer has two numbers; MPress is an exact search in which each swap has its link to itself, theirs is
profiled.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from operator import add
from typing import NamedTuple

import numpy

from minitrain.pipeline.partition import Number, Partition, divided, least_largest, undominated
from minitrain.pipeline.schedule import Schedule, in_flight, parts
from minitrain.pipeline.simulate import Costs, simulate
from minitrain.ranks.checks import require_ints, require_positive_ints
from minitrain.systems.plan.stage_cuts import Stage, in_front_of_all

Flags = tuple[bool, ...]  # is each unit of a layer kept?


class Unit(NamedTuple):
    time: Number  # of its forward
    bytes: Number  # kept for backward in one microbatch


class Layer(NamedTuple):
    forward: Number
    backward: Number  # with everything kept
    fixed: Number  # bytes of weights and optimizer state
    units: tuple[Unit, ...]

    def costs(self, saved: Flags, boundary: Number, in_flight: int) -> tuple[Number, Number, Number]:
        """(bytes held all the time, bytes of what is recomputed, its time)."""
        held = boundary + sum(unit.bytes for unit, keep in zip(self.units, saved) if keep)
        again = [unit for unit, keep in zip(self.units, saved) if not keep]
        recomputed = sum(unit.bytes for unit in again), sum(unit.time for unit in again)
        return self.fixed + in_flight * held, *recomputed


class Model(NamedTuple):
    layers: tuple[Layer, ...]
    boundary: Number  # bytes of a layer's input, which is kept whatever is recomputed


class StagePlan(NamedTuple):
    layers: range
    saved: tuple[Flags, ...]  # for each layer
    recomputed: Number  # the time that this costs a microbatch
    bytes: Number


def bytes_of(model: Model, layers: range, saved: tuple[Flags, ...], in_flight: int) -> Number:
    """The most that the stage holds."""
    costs = [model.layers[i].costs(flags, model.boundary, in_flight) for i, flags in zip(layers, saved)]
    return sum(held for held, _, _ in costs) + max(again for _, again, _ in costs)


def knapsack(model: Model, layers: range, in_flight: int, cap: Number) -> StagePlan | None:
    """The units to keep so that the stage fits and recomputes least; None if it cannot fit."""
    require_positive_ints(in_flight=in_flight)
    unbeaten: list = [((0, 0, 0), ())]  # (fixed and kept bytes, largest recomputed layer, recomputation)
    for layer in model.layers[layers.start : layers.stop]:
        every = product((True, False), repeat=len(layer.units))
        priced = [(layer.costs(kept, model.boundary, in_flight), kept) for kept in every]
        unbeaten = undominated(
            ((size + held, max(largest, again), spent + time), (*before, kept))
            for (size, largest, spent), before in unbeaten
            for (held, again, time), kept in priced
            if size + held + max(largest, again) <= cap
        )
    if not unbeaten:
        return None
    (size, largest, spent), kept = min(unbeaten, key=lambda found: found[0][2])
    return StagePlan(layers, kept, spent, size + largest)


def stage_of(model: Model, stage: StagePlan) -> Stage:
    layers = model.layers[stage.layers.start : stage.layers.stop]
    backward = sum(layer.backward for layer in layers) + stage.recomputed
    return Stage(sum(layer.forward for layer in layers), backward)


def plan_adapipe(model: Model, p: int, m: int, cap: Number) -> Partition:
    """The cut into p stages and the units each keeps, with the shortest step of m microbatches."""
    count = len(model.layers)
    require_positive_ints(count, p=p)
    require_positive_ints(m=m)

    def choices(end: int, state: tuple[int]) -> Iterator[tuple]:
        (behind,) = state
        stage = p - 1 - behind
        for start in range(stage, end) if stage else [0]:
            best = knapsack(model, range(start, end), min(p - stage, m), cap)
            if best is not None:
                yield start, (behind + 1,), [stage_of(model, best)], best

    found = in_front_of_all(count, (0,), choices, m)
    if not found:
        raise ValueError(f"AdaPipe: no cut into {p} stages fits {cap} bytes; use more stages or a larger cap")
    ahead, stages = min(found, key=lambda found: found[0].all)
    return Partition(ahead.all, stages)


Cut = tuple[range, ...]


def profiled(layers: int, stages: int) -> list[Cut]:
    """The cuts to measure: single layers in the middle, the rest in front and behind."""
    require_ints(2, layers=layers, stages=stages)
    require_ints(2 * stages - 1, layers=layers)
    ends = [[0, *range(first, first + stages - 1), layers] for first in range(1, layers - stages + 2)]
    return [tuple(range(a, b) for a, b in zip(cut, cut[1:])) for cut in ends]


class Peaks(NamedTuple):
    base: tuple[float, ...]  # bytes of each stage
    fixed: tuple[float, ...]  # of each layer
    per_microbatch: tuple[float, ...]  # of each layer and microbatch
    in_flight: tuple[int, ...]  # microbatches that each stage keeps

    def of(self, stage: int, layers: range) -> float:
        count = self.in_flight[stage]
        return self.base[stage] + sum(self.fixed[i] + count * self.per_microbatch[i] for i in layers)


def fit(measured: Mapping[Cut, Sequence[int]], in_flight: Sequence[int]) -> Peaks:
    """The model that is nearest to the measured peaks; of several, the one with the smallest numbers."""
    require_positive_ints(in_flight=in_flight)
    layers, stages = next(iter(measured))[-1].stop, len(in_flight)
    require_ints(stages, stages, stages_of_a_cut=[len(cut) for cut in measured])
    rows, peaks = [], []
    for cut, found in measured.items():
        for stage, run in enumerate(cut):
            base, fixed = numpy.zeros(stages), numpy.zeros(layers)
            base[stage], fixed[run.start : run.stop] = 1, 1
            rows.append(numpy.concatenate([base, fixed, in_flight[stage] * fixed]))
        peaks += found
    solution = numpy.linalg.lstsq(numpy.array(rows), numpy.array(peaks, dtype=float), rcond=None)[0]
    parts = numpy.split(solution, [stages, stages + layers])
    return Peaks(*(tuple(part.tolist()) for part in parts), tuple(in_flight))


def mcap(layers: int, stages: int, in_flight: Sequence[int], measure: Callable) -> tuple[Cut, Peaks]:
    """Measure a few, predict all, choose. `measure(cut)`: the peak of every stage."""
    peaks = fit({cut: measure(cut) for cut in profiled(layers, stages)}, in_flight)
    return least_largest(layers, stages, peaks.of), peaks


PLACES = ("keep", "recompute", "peer", "host")


class Tensor(NamedTuple):
    rank: int
    bytes: Number
    idle: Number  # the time in which nobody needs it
    recompute: Number | None  # None: it cannot be (optimizer state)


class Links(NamedTuple):  # bytes per time
    peer: Number  # to another rank
    host: Number


class MPressPlan(NamedTuple):
    time: Number  # the largest extra time of a rank
    places: tuple[str, ...]  # of each tensor


def extra_time(tensor: Tensor, place: str, links: Links) -> Number | None:
    """What it costs its rank; None if it cannot be done."""
    if place in ("peer", "host"):
        return max(0, divided(2 * tensor.bytes, getattr(links, place)) - tensor.idle)
    return 0 if place == "keep" else tensor.recompute


def plan_mpress(tensors: Sequence[Tensor], fixed: Sequence, cap, links: Links, places=PLACES) -> MPressPlan:
    """The place of each tensor, with the smallest largest extra time of a rank: exact. `fixed[r]`: bytes that
    rank r holds anyway; `cap`: what each may hold. What stays no other beats: per rank in (held + lent bytes,
    extra time), over ranks in (sum of bytes, largest time)."""
    everything = [((0, 0), ())]
    for rank, size in enumerate(fixed):
        own = [((size, 0, 0), ())]  # (held, lent, extra time), [(tensor, place)]
        for i, tensor in enumerate(tensors):
            if tensor.rank == rank:
                n, extras = tensor.bytes, [(place, extra_time(tensor, place, links)) for place in places]
                costs = [(p, (n * (p == "keep"), n * (p == "peer"), s)) for p, s in extras if s is not None]
                both = product(own, costs)
                own = undominated((tuple(map(add, b, more)), (*a, (i, p))) for (b, a), (p, more) in both)
        fitting = undominated(((held + lent, s), chosen) for (held, lent, s), chosen in own if held <= cap)
        both = product(everything, fitting)
        everything = undominated(((t + n, max(s, slow)), a + b) for ((t, slow), a), ((n, s), b) in both)
    everything = [(time, chosen) for (total, time), chosen in everything if total <= cap * len(fixed)]
    if not everything:
        raise ValueError(f"MPress: {cap} bytes per rank are too few; use a larger cap or more than {places}")
    time, chosen = min(everything, key=lambda found: found[0])
    return MPressPlan(time, tuple(place for _, place in sorted(chosen)))


def tensors_at_peak(schedule: Schedule, costs: Costs, layers: Sequence, recompute: Sequence) -> list[Tensor]:
    """What each rank keeps when it first keeps most: per microbatch in flight a tensor of each layer."""
    simulation, tensors = simulate(schedule, costs), []
    for rank, entries in enumerate(schedule.ranks):
        counts, idle = in_flight(schedule, rank), {}
        for action in parts(entries[: counts.index(max(counts)) + 1]):
            if action.kind == "F":
                back = simulation.start(schedule.backward(action.stage, action.microbatch))
                idle[action] = back - simulation.start(action) - costs.of(action)
            elif action.kind in "BW":
                del idle[action._replace(kind="F")]
        for time in idle.values():
            tensors += [Tensor(rank, size, time, again) for size, again in zip(layers, recompute)]
    return tensors
