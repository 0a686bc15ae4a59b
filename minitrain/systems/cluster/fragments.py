"""Tasks that need a part of a GPU, or several, and CPUs: where to put them so that no GPU is stranded.

A node's free GPUs are fragmented for a task that cannot use them: the node lacks CPUs, or each piece is
smaller than the task. F(node) is the mean of that over the tasks that usually come. Fragmentation gradient
descent puts a task where F grows least; best fit where least is left.

    fill(tasks, nodes, fgd(mix))     tasks one after another until they ask for all GPUs there are:
                                     the share of GPUs that nobody has then

Weng et al. 2023, USENIX ATC (FGD), sections 3 and 4. Differs: a mix of a few shapes in place of Alibaba's
trace, so nobody's "up to 49 % fewer" is claimed; with a mix in which CPUs run out first it loses to best fit.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from random import Random
from typing import NamedTuple

from minitrain.ranks.checks import require_ints, require_nonempty

EPSILON = 1e-9


class Shape(NamedTuple):  # of a task, or of a node, whose GPUs are whole
    gpus: float  # at most 1: a part of one; more: whole ones
    cpus: float


Mix = Sequence[tuple[float, Shape]]  # (share of tasks, their shape)
Place = tuple[int, list[float]]  # node, its free GPUs after it


def fragment(free: Sequence[float], cpus: float, mix: Mix) -> float:
    """GPUs of those free on a node that a task of the mix cannot use, on average."""
    total = 0.0
    for share, task in mix:
        piece = min(task.gpus, 1)
        usable = [gpu for gpu in free if gpu >= piece - EPSILON]
        fits = task.cpus <= cpus and len(usable) >= task.gpus
        total += share * (sum(free) - (sum(usable) if fits else 0))
    return total


def places(free: Sequence[float], gpus: float) -> Iterator[list[float]]:
    """Free GPUs of a node afterwards: a part of any GPU that has it, or the first whole ones."""
    if gpus <= 1:
        for i, gpu in enumerate(free):
            if gpu >= gpus - EPSILON:
                yield [*free[:i], gpu - gpus, *free[i + 1 :]]
    elif len(whole := [i for i, gpu in enumerate(free) if gpu >= 1 - EPSILON]) >= gpus:
        yield [0.0 if i in whole[: int(gpus)] else gpu for i, gpu in enumerate(free)]


def fill(tasks: Sequence[Shape], nodes: Sequence[Shape], choose: Callable) -> float:
    """choose(options, free, cpus, task) -> option; a task that fits nowhere goes away."""
    require_nonempty(tasks=tasks, nodes=nodes)
    free, cpus = [[1.0] * int(node.gpus) for node in nodes], [node.cpus for node in nodes]
    total, asked = sum(map(len, free)), 0.0
    for task in tasks:
        if asked >= total:
            break
        asked += task.gpus
        able = [node for node in range(len(nodes)) if cpus[node] >= task.cpus]
        if options := [(node, after) for node in able for after in places(free[node], task.gpus)]:
            node, after = choose(options, free, cpus, task)
            free[node], cpus[node] = after, cpus[node] - task.cpus
    return sum(map(sum, free)) / total


def fgd(mix: Mix) -> Callable:
    require_nonempty(mix=mix)
    value = cache(lambda free, cpus: fragment(free, cpus, mix))
    of = lambda free, cpus: value(tuple(sorted(free)), cpus)

    def choose(options: list[Place], free, cpus, task) -> Place:
        before = {node: of(free[node], cpus[node]) for node, _ in options}
        growth = lambda node, after: round(of(after, cpus[node] - task.cpus) - before[node], 9)
        return min(options, key=lambda option: (growth(*option), option[0]))

    return choose


def best_fit(options: list[Place], free, cpus, task) -> Place:
    """Where least is left, of GPUs and CPUs, as shares of a node's GPUs and of the most free CPUs."""
    most = max(cpus) or 1
    left = lambda node, after: sum(after) / len(after) + (cpus[node] - task.cpus) / most
    return min(options, key=lambda option: (left(*option), option[0]))


def at_random(seed: int) -> Callable:
    require_ints(seed=seed)
    draw = Random(seed)
    return lambda options, free, cpus, task: draw.choice(options)
