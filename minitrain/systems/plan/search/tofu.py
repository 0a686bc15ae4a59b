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

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from math import prod
from typing import NamedTuple

from minitrain.systems.plan.search.layerwise import eliminate
from minitrain.systems.plan.search.problem import Graph, Problem, SearchResult, every

OPERATORS = {"forward": "mk,kn->mn", "dx": "mn,kn->mk", "dW": "mk,mn->kn"}
ACTIVATION, MATRIX = "rc", "kn"  # rows or columns (features); inputs or outputs
Cuts = tuple[str, ...]  # a letter for each step, the first outermost


class Halved(NamedTuple):  # how each is cut, step by step
    activations: tuple[Cuts, ...]  # L + 1
    matrices: tuple[Cuts, ...]  # L
    operators: dict[tuple[int, str], Cuts]  # of (layer, operator): indices


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


def tofu(problem: Problem) -> SearchResult:
    """`cost`: elements moved by all workers in forward and backward. Looked at: ways to cut an operator."""
    layers, cost, looked_at = sizes_of(problem), 0.0, 0
    halved = uncut(layers)
    for _ in problem.levels:
        graph, best_ways = graph_of(layers, halved)
        cuts, cost, _ = eliminate(graph)
        (_, *matrices), activations = zip(*cuts)
        each = enumerate(zip(activations, matrices, activations[1:]))
        ways = {(i, name): way for i, one in each for name, (_, way) in best_ways(i, *one).items()}
        halved = Halved(activations, tuple(matrices), ways)
        looked_at += best_ways.cache_info().currsize * len(OPERATORS) * len("mkn")
    return SearchResult(halved, cost * problem.devices, looked_at)


def every_halving(problem: Problem) -> SearchResult:
    """The least elements over all cuts of all tensors and operators, in all steps at once."""
    layers = sizes_of(problem)
    cuts, cost, size = every(graph_of(layers, uncut(layers), len(problem.levels))[0])
    return SearchResult(cuts, cost * problem.devices, size)


def uncut(layers: Sequence[dict[str, int]]) -> Halved:
    operators = {(i, name): () for i in range(len(layers)) for name in OPERATORS}
    return Halved(((),) * (len(layers) + 1), ((),) * len(layers), operators)


def graph_of(layers: Sequence[dict[str, int]], halved: Halved, steps: int = 1) -> tuple[Graph, Callable]:
    """A chain of so many more steps: the first activation's cuts, then each matrix's with those of the
    activation it makes; edges cost the elements that a worker moves. And for (layer, x, W, y) the best way
    to cut each operator: {name: (elements, indices)}."""
    then = lambda cuts, letters: [(*cuts, *more) for more in product(letters, repeat=steps)]

    @cache
    def best_ways(i: int, x: Cuts, w: Cuts, y: Cuts) -> dict[str, tuple[float, Cuts]]:
        stored, found = stored_as(x, w, y), {}
        for name, operator in OPERATORS.items():
            ways = then(halved.operators[i, name], "mkn")
            priced = [(moved(operator, way, stored, layers[i]), way) for way in ways]
            found[name] = min(priced, key=lambda one: one[0])
        return found

    elements = lambda *place: sum(least for least, _ in best_ways(*place).values())
    activations = [then(cuts, ACTIVATION) for cuts in halved.activations]
    matrices = [[()], *(then(cuts, MATRIX) for cuts in halved.matrices)]  # none makes the first activation
    options = [list(product(*cuts)) for cuts in zip(matrices, activations)]
    edges = {
        (i, i + 1): [[elements(i, x, w, y) for w, y in options[i + 1]] for _, x in options[i]]
        for i in range(len(layers))
    }
    nothing = [[0.0] * len(some) for some in options]
    return Graph(options, nothing, edges, nothing), best_ways
