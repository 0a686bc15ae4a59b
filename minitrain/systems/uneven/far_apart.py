"""Devices with slow links between them: where stages and replicas go (DT-FM), who averages when (SDPipe).

DT-FM    dp · pp devices, a partition into pp stages of dp replicas. seconds(a, b, S): a message of S bytes
             gradients   the slowest device exchanges G / dp bytes, twice, with all others of its stage
             pipeline    a path through all stages; between two of them replicas are paired so that the
                         slowest link, A bytes each way, is as fast as it can be
         Genetic search: a child has half of its places from one parent, the other devices in the order of
         the other parent; then two devices change places as long as that helps
SDPipe   workers average their models in groups of those that are ready, and go on; a coordinator groups who
         have not met for longest. A slow worker is in few groups, and keeps few others waiting

Yuan et al. 2022, arXiv:2206.01288 (DT-FM); Miao et al. 2023, VLDB 16 (SDPipe). No torch. Differs: pairings
and paths are enumerated, the local search looks at every swap; SDPipe's workers are whole replicas.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations, pairwise, permutations
from random import Random

from minitrain.ranks import checks

Placement = namedtuple("Placement", "seconds gradients_s pipeline_s stages")  # stages in order


def placement(stages: Sequence[tuple], seconds: Callable, gradients: float, activations: float) -> Placement:
    """Of a partition, with the best order of its stages."""
    checks.require_nonnegative(gradients=gradients, activations=activations)

    def exchanged(stage: tuple[int, ...]) -> float:
        return max(sum(2 * seconds(a, b, gradients / len(stage)) for b in stage if a != b) for a in stage)

    def paired(a: tuple[int, ...], b: tuple[int, ...]) -> float:
        links = {(x, y): 2 * seconds(x, y, activations) for x in a for y in b}
        return min(max(links[pair] for pair in zip(a, order)) for order in permutations(b))

    between = {frozenset(pair): paired(*pair) for pair in combinations(stages, 2)}
    length = lambda order: sum(between[frozenset(pair)] for pair in pairwise(order))
    order, slowest = min(permutations(stages), key=length), max(map(exchanged, stages))
    return Placement(slowest + length(order), slowest, length(order), order)


def dt_fm(dp: int, pp: int, seconds: Callable, gradients: float, activations: float, seed=0, children=30):
    """The best Placement looked at, for `gradients` bytes of a stage and `activations` of a microbatch."""
    checks.require_ints(1, 6, dp=dp, pp=pp)  # pairings, paths
    checks.require_ints(0, 10**4, seed=seed, children=children)
    draw, known, devices = Random(seed), {}, range(dp * pp)

    def price(order: Sequence[int]) -> float:
        stages = tuple(sorted(tuple(sorted(order[i : i + dp])) for i in devices[::dp]))
        if stages not in known:
            known[stages] = placement(stages, seconds, gradients, activations)
        return known[stages].seconds

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
    return min(known.values())


def sdpipe(step_s: Sequence[float], until_s: float, size: int = 2) -> tuple[list[int], list[tuple[int, ...]]]:
    """(minibatches that each worker has done by `until_s`, groups in order); `size` of all: all-reduce."""
    checks.require_positive(step_s=step_s, until_s=until_s)
    checks.require_ints(1, len(step_s), size=size)
    checks.require_ints(0, checks.MOST, steps=int(min(until_s / min(step_s), 1e18)))
    agenda, ready, groups, done = [(time, i) for i, time in enumerate(step_s)], [], [], [0] * len(step_s)
    met = dict.fromkeys(combinations(range(len(step_s)), 2), -1)  # the number of their last group
    heapify(agenda)
    while agenda[0][0] <= until_s:
        now, worker = heappop(agenda)
        ready, done[worker] = sorted([*ready, worker]), done[worker] + 1
        while len(ready) >= size and not (agenda and agenda[0][0] == now):  # all that are ready by now
            group = min(combinations(ready, size), key=lambda one: sum(met[p] for p in combinations(one, 2)))
            met |= dict.fromkeys(combinations(group, 2), len(groups))
            groups.append(group)
            ready = [other for other in ready if other not in group]
            for other in group:
                heappush(agenda, (now + step_s[other], other))
    return done, groups
