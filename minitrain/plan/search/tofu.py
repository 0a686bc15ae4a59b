"""Tofu: every tensor is halved, step after step, and every operator along one index of its description.

    y = x·W      "mk,kn->mn"        dx = dy·Wᵀ   "mn,kn->mk"        dW = xᵀ·dy   "mk,mn->kn"

From such descriptions alone follows what a worker must fetch. Cut along an index, an operator needs half of
an input that has the index, all of another; an output without it is a sum of two terms. Of what it needs a
worker has a part: the half it stores, or a quarter where the two halves are of different indices. Hence

    elements moved by a worker = sum over tensors of (what it needs - what it stores of that)

Coarsened: a gradient is cut like its tensor, so a step has one choice per activation and matrix, and dynamic
programming from the first layer to the last. k steps for 2^k workers, each with the former ones fixed.
Wang, Huang, Li 2019, arXiv:1807.08887. Differs: the language is that of einsum.
"""

from collections.abc import Sequence
from functools import cache
from itertools import product
from math import prod
from typing import NamedTuple

from minitrain.plan.search.problem import Found, Problem

OPERATORS = {"forward": "mk,kn->mn", "dx": "mn,kn->mk", "dW": "mk,mn->kn"}
ACTIVATION, MATRIX = "rc", "kn"  # rows or columns (features); inputs or outputs
Cuts = tuple[str, ...]  # a letter for each step, the first outermost


class Halved(NamedTuple):
    """How each is cut, step by step: L + 1 activations, L matrices, and {(layer, operator): indices}."""

    activations: tuple[Cuts, ...]
    matrices: tuple[Cuts, ...]
    operators: dict[tuple[int, str], Cuts]


def moved(description: str, along: Cuts, stored: dict[str, Cuts], sizes: dict[str, int]) -> float:
    """Elements that a worker fetches for an operator, or sends of what it made, which others store."""
    total = 0.0
    for letters in description.replace("->", ",").split(","):
        need = own = prod(sizes[letter] for letter in letters)
        for index, cut in zip(along, stored[letters]):
            need *= 0.5 if index in letters else 1
            own *= 0.25 if index in letters and index != cut else 0.5
        total += need - own
    return total


def stored_as(before: Cuts, matrix: Cuts, after: Cuts) -> dict[str, Cuts]:
    letters = lambda cuts, column: tuple("m" if cut == "r" else column for cut in cuts)
    return {"mk": letters(before, "k"), "kn": matrix, "mn": letters(after, "n")}


def sizes_of(problem: Problem) -> list[dict[str, int]]:
    if any(layer.keeps or layer.takes * layer.gives != layer.weights for layer in problem.layers):
        raise ValueError(f"layers {[layer.name for layer in problem.layers]}: tofu cuts products only")
    if any(level.devices != 2 for level in problem.levels):
        raise ValueError(f"levels of {[level.devices for level in problem.levels]}; tofu needs 2 on each")
    return [dict(m=problem.rows, k=layer.takes, n=layer.gives) for layer in problem.layers]


def tofu(problem: Problem) -> Found:
    """`cost`: elements moved by all workers in forward and backward. Of equal cuts the first."""
    layers, looked_at = sizes_of(problem), 0
    halved = Halved(
        ((),) * (len(layers) + 1),
        ((),) * len(layers),
        {(i, op): () for i in range(len(layers)) for op in OPERATORS},
    )
    for _ in problem.levels:
        halved, elements, looked = step(halved, layers)
        looked_at += looked
    return Found(halved, elements * problem.devices, looked_at)


def step(halved: Halved, layers: Sequence[dict[str, int]]) -> tuple[Halved, float, int]:
    """One more halving of everything, by dynamic programming, and the elements that a worker then moves."""
    looked_at, best = 0, {cut: (0.0, ((*halved.activations[0], cut),), (), {}) for cut in ACTIVATION}
    for i, sizes in enumerate(layers):
        grown = {}
        for cut, (before, matrix, after) in (
            (c, (b, m, c)) for b, m, c in product(ACTIVATION, MATRIX, ACTIVATION)
        ):
            x, y, w = (
                (*halved.activations[i], before),
                (*halved.activations[i + 1], after),
                (*halved.matrices[i], matrix),
            )
            stored, own, along = stored_as(x, w, y), 0.0, {}
            for name, description in OPERATORS.items():
                ways = [(*halved.operators[i, name], index) for index in "mkn"]
                costs = [moved(description, way, stored, sizes) for way in ways]
                own, along[i, name] = own + min(costs), ways[costs.index(min(costs))]
                looked_at += 3
            cost, activations, matrices, operators = best[before]
            found = (cost + own, (*activations, y), (*matrices, w), operators | along)
            grown[cut] = min(grown.get(cut, found), found, key=lambda one: one[0])
        best = grown
    cost, *parts = min(best.values(), key=lambda one: one[0])
    return Halved(*parts), cost, looked_at


def every_halving(problem: Problem) -> Found:
    """The least elements over all cuts of all tensors and operators, in all steps at once."""
    layers, steps = sizes_of(problem), len(problem.levels)

    @cache
    def own(i: int, x: Cuts, w: Cuts, y: Cuts) -> float:
        stored, ways = stored_as(x, w, y), list(product("mkn", repeat=steps))
        return sum(min(moved(op, way, stored, layers[i]) for way in ways) for op in OPERATORS.values())

    activations, matrices = (list(product(letters, repeat=steps)) for letters in (ACTIVATION, MATRIX))
    best, count = None, 0
    for xs in product(activations, repeat=len(layers) + 1):
        for ws in product(matrices, repeat=len(layers)):
            cost = sum(own(i, xs[i], w, xs[i + 1]) for i, w in enumerate(ws))
            best, count = min(best or (cost, xs, ws), (cost, xs, ws)), count + 1
    return Found(best[1:], best[0] * problem.devices, count)
