"""Which layers on which device, where devices and links differ: Pipe-Par, FusionAI, HPH, AMP. No torch.

fastest_flow   the slowest stage or message as fast as it can be, for every set of devices and its last one
  Pipe-Par       a stage takes work / speed, a message bytes / the bandwidth of just these two devices
  FusionAI       a graph of operators in order; a device's link carries what comes into its part and what
                 leaves it. 1 / (the slowest device or link) microbatches are done per second
fastest_step   for stages in a given order: of the cuts that no other beats in sum, slowest and last the best
  HPH            devices by speed / bandwidth, the largest first;  step = sum + (m - 1)·slowest stage
  AMP            every (dp, tp, rows of a microbatch), each with its best cut;  step = HPH's + gradients' sum.
                 A stage is as fast as its slowest device, a group as its slowest link

Zhang et al. 2023 (PipePar), Neurocomputing 555; Tang et al. 2023, arXiv:2309.01172 (FusionAI); Duan et al.
2022, IEEE Cluster (HPH); Li et al. 2022, arXiv:2210.07297 (AMP). Differs: fastest_step in the place of HPH's
integer program; a message is a stage of its own; AMP keeps the devices in the order given.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from itertools import product
from math import inf

from minitrain.pipeline.partition import Partition, undominated
from minitrain.ranks import checks
from minitrain.systems.uneven.shares import Device

CROSS = (False, True), (True, False)  # an edge into a run, and out of it


def fastest_flow(layers: int, devices: int, stage: Callable, message: Callable = lambda *at: 0) -> Partition:
    """`stages`: (run, device) of each; a device may stay without. stage(device, run) and message(device,
    device, first layer behind) are times. O(L^2 · 2^n · n^2) for n devices."""
    checks.require_positive_ints(layers=layers)
    checks.require_ints(1, 12, devices=devices)
    states, whole = {(0, frozenset(), None): (-inf, ())}, []
    while states:
        longer = {}
        for ((start, used, last), (high, stages)), device in product(states.items(), range(devices)):
            before = max(high, message(last, device, start)) if stages else high
            for end in range(start + 1, layers + 1) if device not in used else ():
                run, key = range(start, end), (end, used | {device}, device)
                slowest = max(before, stage(device, run))
                if slowest < longer.get(key, (inf,))[0]:
                    longer[key] = slowest, (*stages, (run, device))
        whole += [found for (end, *_), found in longer.items() if end == layers]
        states = {key: found for key, found in longer.items() if key[0] < layers}
    return Partition(*min(whole, key=lambda found: (found[0], len(found[1]))))


def pipepar(work: Sequence, sent: Sequence, speeds: Sequence, bandwidth: Sequence[Sequence]) -> Partition:
    """work[l]; sent[l]: bytes from layer l to the next and back; bandwidth[a][b] of devices."""
    checks.require_nonnegative(work=work, sent=sent)
    checks.require_positive(speeds=speeds)
    checks.require_one_of([len(work)], sent=len(sent))
    seconds = lambda device, run: sum(work[run.start : run.stop]) / speeds[device]
    return fastest_flow(len(work), len(speeds), seconds, lambda a, b, at: sent[at - 1] / bandwidth[a][b])


# of a graph, in order: its output's bytes go to each operator elsewhere that needs it, by number
Operator = namedtuple("Operator", "work bytes needs")


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
    checks.require_positive_ints(layers=layers, stages=stages, m=m)
    checks.require_ints(1, layers, stages=stages)  # each has layers
    best = {0: [((0, 0, 0), ())]}
    for s in range(stages):
        longer: dict[int, list] = {}
        for start, end in product(best, range(1, layers + 1)):
            if start < end and (end == layers) == (s == stages - 1):
                times, once = stage(s, range(start, end))
                longer.setdefault(end, []).extend(
                    ((total + sum(times), max(slowest, *times), max(last, once)), (*runs, range(start, end)))
                    for (total, slowest, last), runs in best[start]
                )
        best = {end: undominated(points) for end, points in longer.items()}
    steps = [(total + (m - 1) * slow + last, runs) for (total, slow, last), runs in best[layers]]
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


# of a layer: seconds of a row at speed 1, forward and backward, and of a microbatch besides; bytes
Part = namedtuple("Part", "row_s fixed_s activation weights")
Layout = namedtuple("Layout", "seconds dp tp rows cut")  # rows of a microbatch


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
