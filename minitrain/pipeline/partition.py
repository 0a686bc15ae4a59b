"""Where to cut a model into stages: evenly, by the slowest stage, and with some stages replicated (PipeDream's planner). No torch.

    even(6, 4)                       ->  [range(0, 3), range(3, 5), range(5, 6), range(6, 8)]     layer 0 is the embedding, layer 7 the head
    balanced([1, 3, 3, 3, 3, 5], 3)  ->  [range(0, 3), range(3, 5), range(5, 6)]                  7 6 5: no cut has a largest stage below 7
    pipedream([4, 8, 4], 4)          ->  slowest stage 4 with layers 0..2 on 4 workers            data parallelism, as nothing is sent

A pipeline in its steady state is as fast as its slowest stage. `balanced` makes that as small as it gets on one worker a stage.
`pipedream` may give a stage several workers, which then share its microbatches and sum its gradients. A(j, m) is the slowest
stage's time for the first j layers on m workers, T(i, j, r) the time of layers i..j-1 as one stage on r workers:

    A(j, m)    = min over i < j, r < m of  max(A(i, m-r), 2·activations_i / bandwidth, T(i, j, r))        or one stage: T(0, j, m)
    T(i, j, r) = max(sum of times, 2(r-1)·(sum of weights) / bandwidth) / r

Messages and sums run while others compute, so that the slowest of the three counts and they are not added. All times exact if they
are whole numbers or Fractions. O(stages·L²) and O(L²·workers²) steps.
Raises ValueError for fewer layers than stages, for times below 0, for lists of the wrong length.
Narayanan et al. 2019 (PipeDream), arXiv:1806.03377, section 3.1. Differs: one level of machines; theirs repeats the recursion inside
each level of a hierarchy of links. dapple.py plans for the time of a whole step, which has a beginning and an end too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cache
from itertools import accumulate
from typing import NamedTuple

Number = int | float | Fraction


def even(num_blocks: int, stages: int) -> list[range]:
    """Runs of layers, one a stage: blocks as evenly as they divide, the embedding with the first, the head with the last.

    What does not divide goes to the stages behind the first, as that one has the most microbatches in flight.
    """
    if not 1 <= stages <= num_blocks + 2:
        raise ValueError(
            f"{stages} stages of a model of {num_blocks + 2} layers; use 1 to {num_blocks + 2} stages"
        )
    if stages > num_blocks:  # ends of their own
        sizes = [1] * (stages - 1) + [num_blocks + 3 - stages]
        return _runs(sizes)
    share, rest = divmod(num_blocks, stages)
    sizes = [share + (1 <= number <= rest if rest < stages else 0) for number in range(stages)]
    sizes[0] += 1
    sizes[-1] += 1
    return _runs(sizes)


def _runs(sizes: list[int]) -> list[range]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [range(end - size, end) for size, end in zip(sizes, ends)]


def balanced(costs: Sequence[Number], stages: int) -> list[range]:
    """Runs of layers whose largest sum of costs is as small as it can be; of equal ones, the cuts that come last."""
    check_costs("balanced", costs=costs)
    if not 1 <= stages <= len(costs):
        raise ValueError(f"balanced: {stages} stages of {len(costs)} layers; use 1 to {len(costs)} stages")
    before = [0, *accumulate(costs)]
    best = {
        (end, 1): (before[end], 0) for end in range(1, len(costs) + 1)
    }  # (layers, stages) -> (largest, last cut)
    for count in range(2, stages + 1):
        for end in range(count, len(costs) + 1):
            best[end, count] = min(
                (
                    (max(best[cut, count - 1][0], before[end] - before[cut]), cut)
                    for cut in range(count - 1, end)
                ),
                key=lambda found: (found[0], -found[1]),
            )
    cuts, end = [], len(costs)
    for count in range(stages, 0, -1):
        cut = best[end, count][1]
        cuts.append(range(cut, end))
        end = cut
    return cuts[::-1]


class Plan(NamedTuple):
    """`stages`: (layers, workers) of each; `time`: a microbatch in steady state."""

    time: Number
    stages: tuple[tuple[range, int], ...]


def pipedream(
    times: Sequence[Number],
    workers: int,
    weights: Sequence[Number] | None = None,
    activations: Sequence[Number] | None = None,
    bandwidth: Number | None = None,
) -> Plan:
    """The plan whose slowest stage is fastest, on all `workers`.

    times[l] forward and backward of layer l for a microbatch; weights[l] its bytes; activations[i] the bytes that layer i (from 1) takes
    from layer i-1; bandwidth in bytes per time, None for links that cost nothing.
    """
    check_costs("pipedream", times=times, weights=weights or (), activations=activations or ())
    for name, given in (("weights", weights), ("activations", activations)):
        if given is not None and len(given) != len(times):
            raise ValueError(
                f"pipedream: {len(given)} {name} of {len(times)} layers; give one number a layer"
            )
    if workers < 1 or (bandwidth is not None and bandwidth <= 0):
        raise ValueError(
            f"pipedream: {workers} workers, bandwidth {bandwidth}; use 1 worker or more, and a bandwidth above 0 or None"
        )
    time, size = [0, *accumulate(times)], [0, *accumulate(weights or [0] * len(times))]

    @cache
    def best(end: int, workers: int) -> Plan:
        plans = [Plan(stage_time(time[end], size[end], workers, bandwidth), ((range(end), workers),))]
        for cut in range(1, end):
            message = sending(2 * activations[cut], bandwidth) if activations else 0
            for replicas in range(1, workers):
                head, here = (
                    best(cut, workers - replicas),
                    stage_time(time[end] - time[cut], size[end] - size[cut], replicas, bandwidth),
                )
                plans.append(Plan(max(head.time, message, here), (*head.stages, (range(cut, end), replicas))))
        return min(plans, key=lambda plan: (plan.time, len(plan.stages)))

    return best(len(times), workers)


def stage_time(time: Number, weight_bytes: Number, replicas: int, bandwidth: Number | None) -> Number:
    """T of a stage: its replicas take turns, and sum their gradients over a ring meanwhile."""
    return divided(max(time, sending(2 * (replicas - 1) * weight_bytes, bandwidth)), replicas)


def sending(size: Number, bandwidth: Number | None) -> Number:
    return 0 if bandwidth is None else divided(size, bandwidth)


def divided(a: Number, b: Number) -> Number:
    """a / b, exact where both are."""
    return a / b if isinstance(a, float) or isinstance(b, float) else Fraction(a, b)


def undominated(points: Iterable[tuple[tuple, object]]) -> list[tuple[tuple, object]]:
    """Of (costs, plan) those that no other beats or equals in every cost. Searches keep these where one number does not say it all."""
    kept: list[tuple[tuple, object]] = []
    for costs, plan in sorted(points, key=lambda point: point[0]):
        if not any(all(a <= b for a, b in zip(other, costs)) for other, _ in kept):
            kept.append((costs, plan))
    return kept


def check_costs(what: str, **lists: Sequence[Number]) -> None:
    for name, numbers in lists.items():
        for layer, number in enumerate(numbers):
            if not number >= 0:
                raise ValueError(f"{what}: {name}[{layer}] = {number}; use 0 or more")
