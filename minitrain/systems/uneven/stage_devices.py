"""Which layers on which device, where devices and links differ. No torch.

fastest_flow   the slowest stage or message as fast as it can be, for every set of devices and its last one
  Pipe-Par       a stage takes work / speed, a message bytes / the bandwidth of just these two devices
  FusionAI       a graph of operators in order; a device's link carries what comes into its part and what
                 leaves it. 1 / (the slowest device or link) microbatches are done per second
fastest_step   for stages in a given order: of the cuts that no other beats in sum, slowest and last the best
  HPH            devices by speed / bandwidth, the largest first;  step = sum + (m - 1)·slowest stage
  AMP            every (dp, tp, rows of a microbatch), each with its best cut;  step = HPH's + gradients' sum.
                 A stage is as fast as its slowest device, a group as its slowest link
DT-FM          pp stages of dp replicas, each of which sends G / dp bytes to each of its stage, twice; a path
               through all stages, with replicas paired so that the slowest link is fastest; genetic: half
               of a child's places are one parent's, the rest in the other's order; then swaps while they help

Zhang et al. 2023 (PipePar), Neurocomputing 555; Tang et al. 2023, arXiv:2309.01172 (FusionAI); Duan et al.
2022, IEEE Cluster (HPH); Li et al. 2022, arXiv:2210.07297 (AMP); Yuan et al. 2022, arXiv:2206.01288 (DT-FM).
Differs: HPH without integer program; a message is a stage; AMP keeps devices in the order given; DT-FM
enumerates pairings and paths, and looks at every swap.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations, pairwise, permutations, product
from random import Random

from minitrain.pipeline.partition import Partition, undominated
from minitrain.ranks import checks
from minitrain.systems.uneven.shares import Device

CROSS = (False, True), (True, False)  # an edge into a run, and out of it
# Of a graph, in order: its output's bytes go to each operator elsewhere that needs it, by number.
Operator = namedtuple("Operator", "work bytes needs")
# Of a layer: seconds of a row at speed 1, forward and backward, and of a microbatch besides; bytes.
Part = namedtuple("Part", "row_s fixed_s activation weights")
Layout = namedtuple("Layout", "seconds dp tp rows cut")  # rows of a microbatch
Placement = namedtuple("Placement", "seconds gradients_s pipeline_s stages")  # stages in order


def fastest_flow(layers: int, devices: int, stage: Callable, message: Callable = lambda *at: 0) -> Partition:
    """`stages`: (run, device) of each, as few as can be. stage(device, run) and message(device,
    device, first layer behind) are times. O(L^2 · 2^n · n^2) for n devices."""
    checks.require_positive_ints(layers=layers)
    checks.require_ints(1, 12, devices=devices)

    @cache
    def best(start: int, left: frozenset, last: int | None) -> list[tuple]:  # ((slowest, count), stages)
        found = [] if start < layers else [((0, 0), ())]
        for device, end in product(left, range(start + 1, layers + 1)):
            arrives, run = message(last, device, start) if start else 0, range(start, end)
            here = max(arrives, stage(device, run))
            for (high, count), behind in best(end, left - {device}, device):
                found.append(((max(high, here), count + 1), ((run, device), *behind)))
        return undominated(found)

    (slowest, _), stages = best(0, frozenset(range(devices)), None)[0]
    return Partition(slowest, stages)


def pipepar(work: Sequence, sent: Sequence, speeds: Sequence, bandwidth: Sequence[Sequence]) -> Partition:
    """work[l]; sent[l]: bytes from layer l to the next and back; bandwidth[a][b] of devices."""
    checks.require_nonnegative(work=work, sent=sent)
    checks.require_positive(speeds=speeds)
    checks.require_one_of([len(work)], sent=len(sent))
    seconds = lambda device, run: sum(work[run.start : run.stop]) / speeds[device]
    return fastest_flow(len(work), len(speeds), seconds, lambda a, b, at: sent[at - 1] / bandwidth[a][b])


def fusionai(graph: Sequence[Operator], devices: Sequence[Device]) -> Partition:
    """`time`: seconds between two microbatches."""
    checks.require_nonempty(graph=graph, devices=devices)
    edges = [(i, j) for j, operator in enumerate(graph) for i in operator.needs]

    def slowest(device: int, run: range) -> float:  # compute, download, upload
        speed, link = devices[device][:2]
        into, out = (sum(graph[i].bytes for i, j in edges if (i in run, j in run) == ends) for ends in CROSS)
        return max(sum(graph[i].work for i in run) / speed, into / link, out / link)

    return fastest_flow(len(graph), len(devices), slowest)


def fastest_step(layers: int, stages: int, m: int, stage: Callable) -> Partition:
    """stage(s, run) -> (times that are stages of m microbatches, seconds once a step: the longest counts)."""
    checks.require_positive_ints(layers=layers, m=m)
    checks.require_ints(1, layers, stages=stages)  # each has layers

    @cache
    def best(s: int, start: int) -> list[tuple]:  # ((sum, slowest, last), runs) of the stages from s on
        found = [((0, 0, 0), ())] if (s, start) == (stages, layers) else []
        for run in (range(start, end) for end in range(start + 1, layers + 1) if s < stages):
            times, once = stage(s, run)
            for (total, slowest, last), runs in best(s + 1, run.stop):
                costs = total + sum(times), max(slowest, *times), max(last, once)
                found.append((costs, (run, *runs)))
        return undominated(found)

    steps = [(total + (m - 1) * slow + last, runs) for (total, slow, last), runs in best(0, 0)]
    return Partition(*min(steps, key=lambda step: step[0]))


def hph(work: Sequence, sent: Sequence, speeds: Sequence, bandwidths: Sequence, m: int, order=None):
    """(order, Partition): device i sends over its link; `order` of its own in the place of the paper's."""
    checks.require_nonnegative(work=work, sent=sent)
    checks.require_positive(speeds=speeds, bandwidths=bandwidths)
    checks.require_one_of([len(work)], sent=len(sent))
    checks.require_one_of([len(speeds)], bandwidths=len(bandwidths))
    order = order or sorted(range(len(speeds)), key=lambda i: -speeds[i] / bandwidths[i])

    def stage(s: int, run: range) -> tuple:
        message = sent[run.stop - 1] / bandwidths[order[s]] if run.stop < len(work) else 0
        return (sum(work[run.start : run.stop]) / speeds[order[s]], message), 0

    return order, fastest_step(len(work), len(speeds), m, stage)


def ring_s(size: float, devices: Sequence[Device]) -> float:
    """An all-reduce: at the slowest link."""
    n, inside = len(devices), len({device.node for device in devices}) == 1
    return 2 * (n - 1) / n * size / min(device.inside if inside else device.link for device in devices)


def amp_stage(parts: Sequence[Part], block: Sequence[Device], behind, tp: int, rows: int) -> tuple:
    """For fastest_step: replicas of tp devices, one after the other in `block`; `behind`: the next stage."""
    compute = sum(part.fixed_s + rows * part.row_s / tp / min(d.speed for d in block) for part in parts)
    activations, gradients = rows * sum(p.activation for p in parts), sum(p.weights for p in parts) / tp
    within = max(4 * ring_s(activations, block[i : i + tp]) for i in range(0, len(block), tp))
    message = max((ring_s(2 * rows * parts[-1].activation, pair) for pair in zip(block, behind)), default=0)
    return (compute + within, message), max(ring_s(gradients, block[i::tp]) for i in range(tp))


def amp(parts: Sequence[Part], devices: Sequence[Device], batch: int) -> list[Layout]:
    """Every (dp, tp, rows) with its best cut, the fastest first; tp: 4 all-reduces per layer, microbatch."""
    checks.require_nonempty(parts=parts, devices=devices)
    checks.require_positive_ints(batch=batch)
    n, found = len(devices), []
    for dp, tp, rows in product(range(1, n + 1), range(1, n + 1), range(1, batch + 1)):
        if n % (dp * tp) == batch % (dp * rows) == 0 and n // (dp * tp) <= len(parts):
            blocks = [devices[i : i + dp * tp] for i in range(0, n, dp * tp)]
            ends = [*zip(blocks, [*blocks[1:], []])]
            stage = lambda s, run: amp_stage(parts[run.start : run.stop], *ends[s], tp, rows)
            step = fastest_step(len(parts), len(blocks), batch // (dp * rows), stage)
            found.append(Layout(step.time, dp, tp, rows, step.stages))
    return sorted(found)


def placement(stages: Sequence[tuple], seconds: Callable, gradients: float, activations: float) -> Placement:
    """Of a partition, with the best order of its stages."""
    checks.require_nonnegative(gradients=gradients, activations=activations)
    sends = lambda a, s: sum(2 * seconds(a, b, gradients / len(s)) for b in s if a != b)
    message = cache(lambda a, b: 2 * seconds(a, b, activations))
    paired = cache(lambda s, t: min(max(map(message, s, order)) for order in permutations(t)))
    length = lambda order: sum(paired(*sorted(pair)) for pair in pairwise(order))
    order, slowest = min(permutations(stages), key=length), max(sends(a, s) for s in stages for a in s)
    return Placement(slowest + length(order), slowest, length(order), order)


def dt_fm(dp: int, pp: int, seconds: Callable, gradients: float, activations: float, seed=0, children=30):
    """The best Placement looked at, for `gradients` bytes of a stage and `activations` of a microbatch."""
    checks.require_ints(1, 6, dp=dp, pp=pp)  # pairings, paths
    checks.require_ints(0, 10**4, seed=seed, children=children)
    draw, devices = Random(seed), range(dp * pp)
    known = cache(lambda stages: placement(stages, seconds, gradients, activations))
    price = lambda x: known(tuple(sorted(tuple(sorted(x[i : i + dp])) for i in devices[::dp])))

    def improved(order: list[int]) -> list[int]:
        swapped = lambda i, j: [order[{i: j, j: i}.get(at, at)] for at in devices]
        best = min((swapped(*pair) for pair in combinations(devices, 2)), key=price, default=order)
        return improved(best) if price(best) < price(order) else order

    population = [improved(draw.sample(devices, len(devices))) for _ in range(4)]
    for _ in range(children):
        (a, b), places = draw.sample(population, 2), draw.sample(devices, len(devices) // 2)
        rest = iter([device for device in b if device not in {a[i] for i in places}])
        child = improved([a[i] if i in places else next(rest) for i in devices])
        population = sorted([*population, child], key=price)[:4]
    return price(min(population, key=price))
