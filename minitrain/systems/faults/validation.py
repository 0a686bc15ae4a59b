"""Machines are tested before a job meets their faults; and which job gets those that are left. No torch."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from math import prod, sqrt
from typing import NamedTuple

from minitrain.ranks.checks import require_fractions, require_ints, require_nonnegative, require_positive


class Latent(NamedTuple):
    """Faults that are there before they strike, in hours of work: one in `mtbf`, which strikes `latency`
    later on average and then costs `crash`; a test costs `test` and finds it."""

    mtbf: float
    latency: float
    crash: float
    test: float

    def period(self) -> float:
        """Of least cost as Young has it, test/T + crash·T/(2·mtbf·latency): only where T is far below the
        latency, as else most faults strike before a test finds them."""
        return sqrt(2 * self.test * self.mtbf * self.latency / self.crash)


def goodput(faults: Latent, period: float, hours: float = 2e5) -> float:
    """The useful share of the time that simulated `hours` of work take with a test after each `period` of
    them: low with tests all the time and with none. Raises ValueError for more than a million faults."""
    require_positive(period=period, hours=hours, faults=tuple(faults))
    require_ints(0, 10**6, faults=int(min(hours / faults.mtbf, 1e9)))
    draw, work, crashes = random.Random(0), 0.0, 0
    while work < hours:
        arises = work + draw.expovariate(1 / faults.mtbf)
        strikes, found = arises + draw.expovariate(1 / faults.latency), (arises // period + 1) * period
        crashes += strikes < found
        work = min(strikes, found)
    return work / (work + work / period * faults.test + crashes * faults.crash)


def select(tests: Sequence[tuple[float, float]], incident: float) -> tuple[int, ...]:
    """SuperBench's selector: of tests (cost, share of faults found) those of least cost + missed share ·
    incident, if each finds by itself: one or two in or out, while that pays. Xiong et al. 2024 (SuperBench),
    arXiv:2402.06194. Differs: shares are given; theirs come from a model of when nodes fail."""
    require_positive(incident=incident)
    require_fractions(shares=[share for _, share in tests])
    total = lambda s: sum(tests[i][0] for i in s) + incident * prod(1 - tests[i][1] for i in s)
    chosen, changes = frozenset(), [{*c} for n in (1, 2) for c in combinations(range(len(tests)), n)]
    while changes and total(best := min((chosen ^ change for change in changes), key=total)) < total(chosen):
        chosen = best
    return tuple(sorted(chosen))


def similarity(a: Sequence[float], b: Sequence[float]) -> float:
    """1 - the area between the distribution functions of two samples, as a share of the largest value."""
    require_nonnegative(a=tuple(a), b=tuple(b))
    points = sorted({0.0, *a, *b})
    below = lambda sample, x: sum(value <= x for value in sample) / len(sample)
    areas = (abs(below(a, x) - below(b, x)) * (after - x) for x, after in zip(points, points[1:]))
    return 1 - sum(areas) / (points[-1] or 1)


def defective(samples: Mapping[str, Sequence[float]], threshold: float = 0.95) -> list[str]:
    """SuperBench's criterion: nodes whose sample is too far from the one that is most like all others."""
    middle = max(samples.values(), key=lambda one: sum(similarity(one, other) for other in samples.values()))
    return [node for node, sample in samples.items() if similarity(sample, middle) < threshold]


def preflight(free: list[int], wanted: int, passes: Callable[[int], bool]) -> tuple[list[int], list[int]]:
    """TPUv4: (cubes of a job, cubes drained), both taken out of `free`. Each cube is tested before the job
    starts, the next one stands in for one that fails, as optical switches join any; no cubes: it waits.
    Zu et al. 2024, NSDI. Differs: a test finds every fault."""
    require_ints(1, wanted=wanted)
    chosen, drained = [], []
    for cube in free:
        if len(chosen) < wanted:
            (chosen if passes(cube) else drained).append(cube)
    chosen = chosen if len(chosen) == wanted else []
    free[:] = [cube for cube in free if cube not in (*chosen, *drained)]
    return chosen, drained


def remap_actions(samples: Sequence[tuple[int, int]]) -> list[tuple[int, str]]:
    """What to do with a GPU, at which sample of DCGM's (row remap pending, remaps failed), once per rise: a
    pending one needs a "reset", which Vela makes between jobs; after a failed one "replace" the GPU."""
    rises = enumerate(zip([(0, 0), *samples], samples))
    found = [(at, new[0] > old[0], new[1] > old[1]) for at, (old, new) in rises]
    return [(at, "replace" if failed else "reset") for at, pending, failed in found if pending or failed]


def shares(worth: Sequence[Sequence[float]], now: Sequence[int], change: Sequence[float], workers: int):
    """Unicron's plan: workers of each task, of most worth[task][k], its weighted FLOP/s with k, less
    change[task] if k is not what it has `now`; dynamic programming over tasks. He et al. 2023 (Unicron),
    arXiv:2401.00134. Differs: the cost of a change is given; theirs is work lost until the next one."""
    require_ints(0, workers=workers)
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())] * (workers + 1)  # with at most so many
    for values, had, cost in zip(worth, now, change, strict=True):
        gain = [value - cost * (k != had) for k, value in enumerate(values)]
        with_k = lambda k, left: (left[0] + gain[k], (*left[1], k))
        best = [max(map(with_k, range(len(gain)), best[most::-1])) for most in range(workers + 1)]
    return best[-1][1]
