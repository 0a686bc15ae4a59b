"""DAPPLE's planner: the time of a whole step from a few sums, and the cut, replication and placement that make it smallest. No torch.

    step  =  warm-up  +  steady  +  ending            the pivot Q is the stage that never waits in between
             F_0+…+F_Q   (m-1)(F_Q+B_Q)   B_Q+…+B_0, then the sum of gradients over the replicas

Links count as stages of their own (F an activation, B a gradient): every stage but the last is followed by one. As 1F1B keeps as
many microbatches in flight as stages follow, counting links too lets rank r run ahead by 2(p-r)-1 microbatches, which hides messages.

`paper_latency` is the sum above with the paper's pivot: from the last stage back to the first, s replaces Q where
(m-1)(F_s+B_s) > (m-1)(F_Q+B_Q) + sum of F+B between them. It leaves out that a pivot waits twice: after its K forwards of warm-up for the
first backward, which has been through all stages behind, and at the end for the last one. With `rest` the F+B of these stages

    latency  =  max over Q of  sum over s <= Q of (F_s+B_s)  +  (m-1)(F_Q+B_Q)  +  max(0, rest - (K-1)·F_Q)  +  max(0, rest - (K-1)·B_Q)

(for m <= K the larger of the two waits). Each is the length of a path through the schedule, so a step is never faster. Simulated 1F1B
with stage times up to a factor of 3 apart is at most 4% slower, and equal for 2 stages; the paper's sum is up to a third too short at
m = p, 11% at m = 4p. Differs therefore: `plan` uses `latency`.

`plan` puts stages in front of stages, from the last to the first. For each (layers left, devices left, devices of the stage behind,
number of stages) it keeps all unbeaten (time of the stages' sum, end of the first stage's last backward, end of all): the latency never
falls if one of these rises, so the result is that of trying everything. Stage times are divided by the replicas, which share each
microbatch. Devices are counted per machine; a message or a sum inside one machine uses the fast link. `paper_placements` tries only the
paper's three choices (a fresh machine, one in use, spread over all), for clusters where all are too many.
Raises ValueError for lists of different lengths, no microbatch, no device.
Fan et al. 2021, arXiv:2007.01045, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from minitrain.pipeline.partition import Number, check_costs, divided, undominated

Devices = tuple[int, ...]  # how many of each machine


class Stage(NamedTuple):
    F: Number
    B: Number
    sync: Number = 0  # sum of gradients after the last backward


def paper_latency(stages: Sequence[Stage], m: int) -> Number:
    """Warm-up, steady, ending, with the paper's pivot."""
    steady = [(m - 1) * (stage.F + stage.B) for stage in stages]
    pivot = len(stages) - 1
    for s in range(len(stages) - 2, -1, -1):
        if steady[s] > steady[pivot] + sum(stage.F + stage.B for stage in stages[s + 1 : pivot]):
            pivot = s
    ends = [
        stages[s].sync
        + sum(stage.B for stage in stages[s : pivot + 1])
        - sum(stage.B for stage in stages[pivot + 1 : s + 1])
        for s in range(len(stages))
    ]
    return sum(stage.F for stage in stages[: pivot + 1]) + steady[pivot] + max(ends)


class Ahead(NamedTuple):
    """What a stage in front needs to know of those behind: sum of F+B, end of the first one's last backward, end of everything."""

    rest: Number = 0
    first: Number = 0
    all: Number = 0


def in_front(stage: Stage, behind: Ahead, number: int, m: int) -> Ahead:
    """The same with one more stage in front; `number` stages are behind it. Times from the start of its first forward."""
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


# ---- the planner -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """Per layer: forward and backward of a microbatch on one device, bytes of weights, bytes that it takes from the layer before."""

    forward: Sequence[Number]
    backward: Sequence[Number]
    weights: Sequence[Number]
    activations: Sequence[Number]

    def __post_init__(self) -> None:
        lists = {name: getattr(self, name) for name in ("forward", "backward", "weights", "activations")}
        check_costs("Model", **lists)
        if not self.forward or len({len(numbers) for numbers in lists.values()}) > 1:
            raise ValueError(
                f"Model: lists of {[len(numbers) for numbers in lists.values()]} layers; give each layer all four numbers"
            )


@dataclass(frozen=True)
class Cluster:
    """`machines[i]` devices in machine i; bytes per time inside a machine and between two."""

    machines: Devices
    inside: Number
    between: Number

    def __post_init__(self) -> None:
        if not self.machines or min(self.machines) < 1 or self.inside <= 0 or self.between <= 0:
            raise ValueError(
                f"Cluster: machines {self.machines}, bandwidths {self.inside} and {self.between}; all must be above 0"
            )

    def bandwidth(self, *groups: Devices) -> Number:
        """Of the slowest link among these devices."""
        return self.inside if sum(any(counts) for counts in zip(*groups)) == 1 else self.between


class Planned(NamedTuple):
    time: Number
    stages: tuple[tuple[range, Devices], ...]


def compute_stage(model: Model, layers: range, devices: Devices, cluster: Cluster) -> Stage:
    """Layers on replicas, which split each microbatch and sum their gradients in a ring."""
    n = sum(devices)
    forward, backward, weights = (
        sum(numbers[layers.start : layers.stop]) for numbers in (model.forward, model.backward, model.weights)
    )
    return Stage(
        divided(forward, n),
        divided(backward, n),
        divided(2 * (n - 1) * weights, n * cluster.bandwidth(devices)),
    )


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
    """For each number of devices: fresh machines first, machines in use first, or spread over all as evenly as it goes."""
    for n in range(1, sum(free) + 1):
        found = set()
        for order in ((lambda i: free[i] < machines[i]), (lambda i: free[i] == machines[i])):
            left, devices = n, [0] * len(free)
            for i in sorted(range(len(free)), key=order):
                devices[i] = min(free[i], left)
                left -= devices[i]
            found.add(tuple(devices))
        devices = [0] * len(free)
        for _ in range(n):
            i = max(
                (i for i in range(len(free)) if devices[i] < free[i]), key=lambda i: (-devices[i], free[i])
            )
            devices[i] += 1
        yield from sorted(found | {tuple(devices)})


def plan(
    model: Model,
    cluster: Cluster,
    m: int,
    placements: Callable[[Devices, Devices], Iterator[Devices]] = all_placements,
) -> Planned:
    """The cut, replication and placement with the smallest `latency`, on all devices or fewer."""
    if m < 1:
        raise ValueError(f"plan: {m} microbatches; use 1 or more")

    layers_left = len(model.forward)
    frontier: dict[tuple, list] = {
        (layers_left, cluster.machines, (), 0): [(Ahead(), ())]
    }  # (layers, devices left, those behind, number)
    whole: list[tuple[tuple, object]] = []
    for end in range(layers_left, 0, -1):
        for key in [key for key in frontier if key[0] == end]:
            _, free, behind, number = key
            unbeaten = undominated(frontier.pop(key))
            for start, devices in product(range(end), list(placements(free, cluster.machines))):
                left = tuple(a - b for a, b in zip(free, devices))
                if start and not any(left):
                    continue
                stage, layers = compute_stage(model, range(start, end), devices, cluster), range(start, end)
                found = []
                for ahead, stages in unbeaten:
                    if behind:
                        ahead = in_front(link_stage(model, end, devices, behind, cluster), ahead, number, m)
                    found.append(
                        (in_front(stage, ahead, number + bool(behind), m), ((layers, devices), *stages))
                    )
                if start:
                    frontier.setdefault((start, left, devices, number + bool(behind) + 1), []).extend(found)
                else:
                    whole += [((ahead.all, len(stages)), stages) for ahead, stages in found]
    (time, _), stages = min(whole, key=lambda found: found[0])
    return Planned(time, stages)
