"""Choosing among plans of communication: a tuner, a walk, a level at a time, all of them. No torch.

    tuned         the best of a grid from few trials: a Gaussian process, expected improvement (ByteScheduler)
    annealed      an order of operations and a motif for each, by Monte Carlo steps (Syndicate)
    centauri_s    an all-reduce as one primitive or two, flat or by groups, in chunks, behind its product
    placements    all matrices that put axes of ranks on levels of the network (P^2)

Peng et al. 2019 (ByteScheduler), SOSP; Mao et al. 2023 (Syndicate), NSDI; Chen et al. 2024
(Centauri), ASPLOS; Xie et al. 2022 (P^2), MLSys. Differs: few operations on links that each carry
one thing at a time; P^2's reductions are rings, level by level.
"""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import product
from math import erf, exp, pi, prod, sqrt
from random import Random

import numpy

from minitrain.pipeline.simulate import divided
from minitrain.ranks.checks import require_ints, require_nonnegative, require_one_of, require_positive
from minitrain.systems.simulate.links import Number, Task, play


def tuned(grid: Sequence[Sequence[float]], cost: Callable[..., Number], trials: int, seed: int = 0):
    """(point, cost) of the best of `trials`: 6 by chance, then where the improvement to expect is largest."""
    require_ints(6, len(grid), trials=trials)
    x = numpy.array(grid, float)
    x = (x - x.min(0)) / numpy.maximum(x.max(0) - x.min(0), 1e-12)
    seen = Random(seed).sample(range(len(grid)), 6)
    near = numpy.exp(-8 * ((x[:, None] - x) ** 2).sum(-1))  # lengths of a quarter of the grid
    while True:
        found = numpy.array([float(cost(*grid[i])) for i in seen])
        if len(seen) == trials:
            return grid[seen[found.argmin()]], found.min()
        scale = found.std() + 1e-9
        weights = near[:, seen] @ numpy.linalg.inv(near[numpy.ix_(seen, seen)] + 1e-6 * numpy.eye(len(seen)))
        mean = weights @ (found - found.mean()) / scale
        spread = numpy.sqrt(numpy.maximum(1e-12, 1 - (weights * near[:, seen]).sum(1)))
        z = ((found.min() - found.mean()) / scale - mean) / spread
        below = numpy.array([(1 + erf(one / sqrt(2))) / 2 for one in z])
        gain = spread * (z * below + numpy.exp(-z * z / 2) / sqrt(2 * pi))
        gain[seen] = -1
        seen.append(int(gain.argmax()))


Motif = Sequence[tuple[str, Number]]  # parts of an operation, one after the other: (link, seconds)


def motifs_s(order: Sequence[str], motifs: Mapping[str, Motif]) -> Number:
    """Operations that are ready at once; a free link takes the part of the first in `order` that is ready."""
    parts = [(name, i, *part) for name in order for i, part in enumerate(motifs[name])]
    tasks = [Task(f"{name} {i}", *part, after=(f"{name} {i - 1}",) * (i > 0)) for name, i, *part in parts]
    return play(tasks, by=lambda task: order.index(task.name.rsplit(" ", 1)[0])).end_s


def annealed(operations: Mapping[str, Mapping[str, Motif]], steps: int, seed: int = 0):
    """(seconds, order, {operation: motif}). A step swaps two operations or draws a motif; a worse plan is
    taken with probability exp(-difference / temperature), which falls to 0."""
    require_ints(1, 1 << 16, steps=steps)
    cost = lambda order, names: motifs_s(order, {key: operations[key][name] for key, name in names.items()})
    draw, order = Random(seed), list(operations)
    names = {key: next(iter(motifs)) for key, motifs in operations.items()}
    here = best = cost(order, names), order, names
    for number in range(steps):
        order, names, key = list(here[1]), dict(here[2]), draw.choice(here[1])
        if draw.random() < 0.5:
            i, j = order.index(key), draw.randrange(len(order))
            order[i], order[j] = order[j], order[i]
        else:
            names[key] = draw.choice(list(operations[key]))
        there = cost(order, names), order, names
        warmth = 0.3 * float(best[0]) * (1 - number / steps) + 1e-12
        if draw.random() < exp(min(0.0, float(here[0] - there[0]) / warmth)):
            here, best = there, min(best, there, key=lambda plan: plan[0])
    return best


def centauri_s(
    primitives: str, group: str, chunks: int, work: Number, size: Number, after: Number,
    per_node: int, inside: tuple[Number, Number], across: tuple[Number, Number],
) -> Number:  # fmt: skip
    """When a product, the all-reduce of its output of `size` in chunks, and `after` seconds that need the sum
    are done; with "RS+AG" they need the reduced shards alone. `group` "flat", or "nodes": a reduce-scatter of
    `per_node` ranks, an all-reduce of the shards across, an all-gather. Links: (alpha, seconds per byte)."""
    require_one_of(("AR", "RS+AG"), primitives=primitives)
    require_one_of(("flat", "nodes"), group=group)
    require_ints(1, 256, chunks=chunks, per_node=per_node)
    require_nonnegative(work=work, size=size, after=after, inside=inside, across=across)
    if group == "nodes":
        part = Fraction(per_node - 1, per_node)
        phases = [("in", inside, part), ("across", across, Fraction(2, per_node)), ("out", inside, part)]
    else:
        phases = [("across", across, 1)] * 2 if primitives == "RS+AG" else [("across", across, 2)]
    tasks = []
    for i in range(chunks):
        tasks.append(Task(f"{i}", "device", divided(work, chunks)))
        for j, (link, (alpha, per_byte), share) in enumerate(phases):
            seconds = alpha + per_byte * share * divided(size, chunks)
            tasks.append(Task(f"{i}.{j}", link, seconds, after=(f"{i}.{j - 1}" if j else f"{i}",)))
    needed = len(phases) - 1 - (primitives == "RS+AG" and len(phases) > 1)
    return play([*tasks, Task("after", "device", after, after=(f"{chunks - 1}.{needed}",))]).end_s


def placements(levels: Sequence[int], axes: Sequence[int]) -> list[tuple[tuple[int, ...], ...]]:
    """All matrices [axis][level] of factors whose rows multiply to the axes, and columns to the levels."""
    require_ints(1, 1 << 12, levels=list(levels), axes=list(axes))
    shares = [[f for f in range(1, level + 1) if level % f == 0] for level in levels]
    rows = [row for row in product(*shares) if prod(row) == axes[0]]
    rooms = ([level // f for level, f in zip(levels, row)] for row in rows)  # what is left for other axes
    if len(axes) == 1:
        return [(row,) for row, room in zip(rows, rooms) if set(room) == {1}]
    return [(row, *rest) for row, room in zip(rows, rooms) for rest in placements(room, axes[1:])]


def placement_s(matrix: Sequence[Sequence[int]], bytes_per_s: Sequence, sizes: Sequence) -> Number:
    """Seconds of an all-reduce of `sizes` on each axis: rings of shards, innermost level first."""
    require_positive(bytes_per_s=list(bytes_per_s))
    require_nonnegative(sizes=list(sizes))
    seconds: Number = 0
    for row, size in zip(matrix, sizes):
        for factor, rate in zip(reversed(row), reversed(bytes_per_s)):
            seconds += divided(2 * (factor - 1) * size, factor * rate)
            size = divided(size, factor)
    return seconds
