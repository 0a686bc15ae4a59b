"""DAPPLE's planner: the time of a step from a few sums, and the fastest cut and replicas. No torch.

    step  =  warm-up  +  steady  +  ending        the pivot Q is the stage that never waits in between
             F_0+…+F_Q   (m-1)(F_Q+B_Q)   B_Q+…+B_0, then the sum of gradients over the replicas

Links count as stages of their own, one behind every stage but the last; so 1F1B lets rank r run ahead by
2(p-r)-1 microbatches, which hides messages. `paper_latency` is this sum. It leaves out that a pivot waits
twice: after its K forwards of warm-up, and for the last backward. With `rest` the F+B of the stages behind it

    latency  =  max over Q of  sum over s <= Q of (F_s+B_s)  +  (m-1)(F_Q+B_Q)  +  w(F_Q)  +  w(B_Q)
                w(t) = max(0, rest - (K-1)·t); for m <= K the larger of the two waits alone

No step is faster. Simulated 1F1B with stage times up to a factor of 3 apart is at most 4% slower; the
paper's sum is up to a third too short at m = p.
Fan et al. 2021, arXiv:2007.01045, section 4. Differs: `plan_dapple` minimises `latency`, over all placements.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from minitrain.pipeline.partition import Number, check_costs, divided, undominated
from minitrain.ranks.checks import require_positive_ints

Devices = tuple[int, ...]  # how many of each machine


class Stage(NamedTuple):
    F: Number
    B: Number
    sync: Number = 0  # sum of gradients after the last backward


def paper_latency(stages: Sequence[Stage], m: int) -> Number:
    """Warm-up, steady, ending, with the paper's pivot: found from the last stage back to the first."""
    require_positive_ints(m=m)
    F, B, sync = zip(*((stage.F, stage.B, stage.sync) for stage in stages))
    steady = [(m - 1) * (f + b) for f, b in zip(F, B)]
    pivot = len(stages) - 1
    for s in reversed(range(pivot)):
        if steady[s] > steady[pivot] + sum(F[s + 1 : pivot]) + sum(B[s + 1 : pivot]):
            pivot = s
    ends = [sync[s] + sum(B[s : pivot + 1]) - sum(B[pivot + 1 : s + 1]) for s in range(len(stages))]
    return sum(F[: pivot + 1]) + steady[pivot] + max(ends)


class Ahead(NamedTuple):
    """What a stage needs to know of those behind it, from the start of their first forward on."""

    rest: Number = 0  # sum of F+B
    first: Number = 0  # end of the first one's last backward
    all: Number = 0  # end of everything


def in_front(stage: Stage, behind: Ahead, number: int, m: int) -> Ahead:
    """The same with one more stage in front; `number` stages are behind it."""
    own, k = m * (stage.F + stage.B), min(number + 1, m)
    waits = max(0, behind.rest - (k - 1) * stage.F), max(0, behind.rest - (k - 1) * stage.B)
    first = max(own + (sum(waits) if m > k else max(waits)), stage.F + behind.first + stage.B)
    return Ahead(behind.rest + stage.F + stage.B, first, max(stage.F + behind.all, first + stage.sync))


def latency(stages: Sequence[Stage], m: int) -> Number:
    """The time of a 1F1B step of m microbatches, from below."""
    behind = Ahead()
    for number, stage in enumerate(reversed(stages)):
        behind = in_front(stage, behind, number, m)
    return behind.all


@dataclass(frozen=True)
class Model:
    """Per layer: forward and backward of a microbatch on one device, bytes of weights and of its input."""

    forward: Sequence[Number]
    backward: Sequence[Number]
    weights: Sequence[Number]
    activations: Sequence[Number]

    def __post_init__(self) -> None:
        check_costs("Model", **vars(self))
        layers = [len(numbers) for numbers in vars(self).values()]
        if not self.forward or len(set(layers)) > 1:
            raise ValueError(f"Model: lists of {layers} layers; give each layer all four numbers")


@dataclass(frozen=True)
class Cluster:
    """`machines[i]` devices in machine i; bytes per time inside a machine and between two."""

    machines: Devices
    inside: Number
    between: Number

    def __post_init__(self) -> None:
        if not self.machines or min(*self.machines, self.inside, self.between) <= 0:
            raise ValueError(f"{self}: devices of a machine and bandwidths must be above 0")

    def bandwidth(self, *groups: Devices) -> Number:
        """Of the slowest link among these devices."""
        return self.inside if sum(any(counts) for counts in zip(*groups)) == 1 else self.between


class DapplePlan(NamedTuple):
    time: Number
    stages: tuple[tuple[range, Devices], ...]


def compute_stage(model: Model, layers: range, devices: Devices, cluster: Cluster) -> Stage:
    """Layers on replicas, which split each microbatch and sum their gradients in a ring."""
    n, lists = sum(devices), (model.forward, model.backward, model.weights)
    forward, backward, weights = (sum(numbers[layers.start : layers.stop]) for numbers in lists)
    sync = divided(2 * (n - 1) * weights, n * cluster.bandwidth(devices))
    return Stage(divided(forward, n), divided(backward, n), sync)


def link_stage(model: Model, layer: int, source: Devices, to: Devices, cluster: Cluster) -> Stage:
    """The message into `layer`, both ways, as a stage."""
    time = divided(model.activations[layer], cluster.bandwidth(source, to))
    return Stage(time, time)


def stages_of(planned: Sequence[tuple[range, Devices]], model: Model, cluster: Cluster) -> list[Stage]:
    """Stages and links in turn, as `latency` and a 1F1B schedule of 2p-1 stages take them."""
    stages = []
    for i, (layers, devices) in enumerate(planned):
        if i:
            stages.append(link_stage(model, layers.start, planned[i - 1][1], devices, cluster))
        stages.append(compute_stage(model, layers, devices, cluster))
    return stages


def all_placements(free: Devices, machines: Devices) -> Iterator[Devices]:
    """Every number of devices from every machine, at least one in all."""
    return (devices for devices in product(*(range(count + 1) for count in free)) if any(devices))


def paper_placements(free: Devices, machines: Devices) -> Iterator[Devices]:
    """For each number of devices: fresh machines first, machines in use first, or spread evenly."""
    if len(free) != len(machines):
        raise ValueError(
            f"free devices of {len(free)} machines, of {len(machines)} in all: give one for each"
        )
    for n in range(1, sum(free) + 1):
        found = set()
        for used_first in (False, True):
            left, devices = n, [0] * len(free)
            for i in sorted(range(len(free)), key=lambda i: (free[i] < machines[i]) != used_first):
                devices[i] = min(free[i], left)
                left -= devices[i]
            found.add(tuple(devices))
        spread = [0] * len(free)
        for _ in range(n):
            open_machines = [i for i in range(len(free)) if spread[i] < free[i]]
            spread[max(open_machines, key=lambda i: (-spread[i], free[i]))] += 1
        yield from sorted(found | {tuple(spread)})


def plan_dapple(model: Model, cluster: Cluster, m: int, placements: Callable = all_placements) -> DapplePlan:
    """The cut, replication and placement with the smallest `latency`, on all devices or fewer; of equal ones,
    with fewest stages.

    Stages go in front of stages, keeping all that no other beats in every number of `Ahead`: the latency
    never falls if one rises, so this equals trying everything. `paper_placements` tries fewer, for clusters
    where all are too many."""
    if m < 1:
        raise ValueError(f"plan_dapple: {m} microbatches; use 1 or more")
    # (layers left, devices left, devices of the stage behind, stages and links behind) -> (Ahead, stages)
    frontier = {(len(model.forward), cluster.machines, (), 0): [(Ahead(), ())]}
    whole = []
    for end in range(len(model.forward), 0, -1):
        for key in [key for key in frontier if key[0] == end]:
            _, free, behind, number = key
            unbeaten = undominated(frontier.pop(key))
            for start, devices in product(range(end), list(placements(free, cluster.machines))):
                left = tuple(a - b for a, b in zip(free, devices))
                if start and not any(left):
                    continue
                added = [link_stage(model, end, devices, behind, cluster)] if behind else []
                added.append(compute_stage(model, range(start, end), devices, cluster))
                found = []
                for ahead, stages in unbeaten:
                    for stages_behind, stage in enumerate(added, number):
                        ahead = in_front(stage, ahead, stages_behind, m)
                    found.append((ahead, ((range(start, end), devices), *stages)))
                if start:
                    frontier.setdefault((start, left, devices, number + len(added)), []).extend(found)
                else:
                    whole += found
    ahead, stages = min(whole, key=lambda found: (found[0].all, len(found[1])))
    return DapplePlan(ahead.all, stages)
