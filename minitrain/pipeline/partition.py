"""Where to cut a model into stages: evenly, by the slowest stage, or with replicas (PipeDream). No torch.

    even(6, 4)                       ->  [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]   of 8 layers
    balanced([1, 3, 3, 3, 3, 5], 3)  ->  [range(0, 3), range(3, 5), range(5, 6)]                costs 7 6 5
    pipedream([4, 8, 4], 4)          ->  slowest stage 4 with layers 0..2 on 4 workers          data parallel

A pipeline in its steady state is as fast as its slowest stage. A(j, m) is the slowest stage's time for the
first j layers on m workers, T(i, j, r) that of layers i..j-1 on r workers:

    A(j, m)    = min(T(0, j, m), min over i < j, r < m of max(A(i, m-r), 2·acts_i/bandwidth, T(i, j, r)))
    T(i, j, r) = max(sum of times, 2(r-1)·(sum of weights) / bandwidth) / r

Exact for whole numbers and Fractions. O(stages·L²) and O(L²·workers²) steps; stage_cuts.py plans for the time
of a step. Narayanan et al. 2019 (PipeDream), arXiv:1806.03377, section 3.1. Differs: one level of links.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate
from math import inf
from operator import le
from typing import NamedTuple

from minitrain.pipeline.simulate import Time as Number
from minitrain.pipeline.simulate import divided
from minitrain.ranks.checks import require_nonnegative, require_positive_ints


def even(num_blocks: int, stages: int) -> list[range]:
    """Runs of layers, one per stage: blocks as evenly as they divide, the embedding first, the head last.
    Blocks left over go to the stages after the first, which has the most microbatches in flight."""
    layers = num_blocks + 2
    if not 1 <= stages <= layers:
        raise ValueError(f"{stages} stages of a model of {layers} layers; use 1 to {layers} stages")
    if stages > num_blocks:  # embedding and head are stages of their own
        sizes = [1] * (stages - 1) + [layers + 1 - stages]
    else:
        share, rest = divmod(num_blocks, stages)
        sizes = [share + (1 <= number <= rest) for number in range(stages)]
        sizes[0] += 1
        sizes[-1] += 1
    return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes))]


def balanced(costs: Sequence[Number], stages: int) -> list[range]:
    """Runs of layers whose largest sum of costs is as small as it can be.
    Of equal ones that with the shortest last stage, and what is in front is cut by the same rule."""
    require_nonnegative(costs=costs)
    if not 1 <= stages <= len(costs):
        raise ValueError(f"balanced: {stages} stages of {len(costs)} layers; use 1 to {len(costs)} stages")
    before = [0, *accumulate(costs)]
    return list(least_largest(len(costs), stages, lambda _, run: before[run.stop] - before[run.start]))


def least_largest(layers: int, stages: int, size: Callable[[int, range], Number]) -> tuple[range, ...]:
    """The runs of layers whose largest `size(stage, run)` is least; of equal ones, as in `balanced`."""
    best = {0: (-inf, ())}  # layers in the stages so far -> (largest size, runs)
    for stage in range(stages):
        longer = {}
        for end in range(stage + 1, layers - stages + stage + 2):
            runs = [(before, range(start, end)) for start, before in reversed(best.items()) if start < end]
            found = [(max(high, size(stage, run)), (*cut, run)) for (high, cut), run in runs]
            longer[end] = min(found, key=lambda pair: pair[0])
        best = longer
    return best[layers][1]


class Partition(NamedTuple):
    """`stages`: (layers, workers) of each, or what a planner says of it; `time`: a microbatch, or a step."""

    time: Number
    stages: tuple


def pipedream(times, workers, weights=None, activations=None, bandwidth=inf) -> Partition:
    """The partition whose slowest stage is fastest, on all `workers`; of equal ones, with fewest stages.
    times[l] forward and backward of layer l for a microbatch; weights[l] its bytes; activations[i] the bytes
    that layer i takes from layer i-1; bandwidth in bytes per time."""
    weights, activations = weights or [0] * len(times), activations or [0] * len(times)
    require_nonnegative(times=times, weights=weights, activations=activations)
    if not len(times) == len(weights) == len(activations):
        given = f"{len(weights)} weights, {len(activations)} activations"
        raise ValueError(f"pipedream: {given} of {len(times)} layers; give one per layer")
    require_positive_ints(workers=workers)
    if not bandwidth > 0:
        raise ValueError(f"pipedream: bandwidth={bandwidth}; use one above 0")
    time, size = [0, *accumulate(times)], [0, *accumulate(weights)]

    @cache
    def best(end: int, workers: int) -> list[tuple]:
        """((time, stages), partition) of the first layers, unbeaten in both."""
        whole = stage_time(time[end], size[end], workers, bandwidth)
        found = [((whole, 1), ((range(end), workers),))]
        for cut in range(1, end):
            message = divided(2 * activations[cut], bandwidth)
            for replicas in range(1, workers):
                here = stage_time(time[end] - time[cut], size[end] - size[cut], replicas, bandwidth)
                for (slowest, count), stages in best(cut, workers - replicas):
                    costs = max(slowest, message, here), count + 1
                    found.append((costs, (*stages, (range(cut, end), replicas))))
        return undominated(found)

    (slowest, _), stages = best(len(times), workers)[0]
    return Partition(slowest, stages)


def stage_time(time: Number, weight_bytes: Number, replicas: int, bandwidth: Number) -> Number:
    """T of a stage: its replicas take turns, and meanwhile sum their gradients over a ring."""
    return divided(max(time, divided(2 * (replicas - 1) * weight_bytes, bandwidth)), replicas)


def undominated(points: Iterable[tuple[tuple, object]]) -> list[tuple[tuple, object]]:
    """Of (costs, plan) those that no other beats or equals in every cost: for searches with several costs."""
    kept: list[tuple[tuple, object]] = []
    for costs, plan in sorted(points, key=lambda point: point[0]):
        if not any(all(map(le, other, costs)) for other, _ in kept):
            kept.append((costs, plan))
    return kept
