"""An option for each layer, all devices together: elimination, fronts, level by level, halves, descent.

OptCNN     node elimination  i -> j -> k, nothing else at j, becomes an edge i -> k: the best b per (a, c)
           edge elimination  two edges i -> k become one, their sum: so shrink chains, and branches that part
           and join again; O(L·C³) sums for C options. What does not shrink further is enumerated
TensorOpt  a front where that has a number: all choices that no other beats or equals in seconds and bytes;
           from it the least memory, the fastest choice for a cap
HyPar      the outermost level first: dp or row for each layer, exactly; then the next for each half
Tofu       every tensor is halved, level by level, and every operator along an index of its description,
    y = x·W  "mk,kn->mn"    dx = dy·Wᵀ  "mn,kn->mk"    dW = xᵀ·dy  "mk,mn->kn"
           so it needs half of an input that has the index, all of another; an output without it is a sum of
           terms. Of what it needs a worker stores half, or a quarter where halves are of other indices:
    elements moved by a worker = sum over tensors of (what it needs - what it stores of that)
           A gradient is cut like its tensor, so there is one choice per activation and matrix
AutoDDL    coordinate descent until no layer alone improves, from several drawn starts: a local optimum

Jia et al. 2018 (OptCNN), arXiv:1802.04924; Cai et al. 2020 (TensorOpt), arXiv:2004.10856; Song et al. 2019
(HyPar), arXiv:1901.02067; Wang et al. 2019 (Tofu), arXiv:1807.08887; Chen et al. 2023 (AutoDDL),
arXiv:2301.06813. Differs: fronts are of chains; HyPar's sums are reduce-scattered; AutoDDL without latency.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, product
from math import inf, prod
from typing import NamedTuple

from minitrain.pipeline.partition import undominated
from minitrain.systems.plan.search.problem import Graph, Option, Problem, SearchResult, cheapest, every


def optcnn(problem: Problem) -> SearchResult:
    return eliminate(problem.graph())


def eliminate(graph: Graph) -> SearchResult:
    """The cheapest choice, whatever the memory. Of equal ones any."""
    edges, left, gone, looked_at = dict(graph.edge), list(range(len(graph.options))), [], 0
    while found := next(between_two(edges, left), None):
        i, j, k = found
        into, own, out = edges.pop((i, j)), graph.node[j], edges.pop((j, k))
        sums = [[list(map(sum, zip(row, own, column))) for column in zip(*out)] for row in into]
        best = [[each.index(min(each)) for each in row] for row in sums]
        through = [[min(each) for each in row] for row in sums]
        looked_at += len(into) * len(own) * len(out[0])
        if other := edges.get((i, k)):  # edge elimination
            through = [[a + b for a, b in zip(*rows)] for rows in zip(through, other)]
        edges[i, k] = through
        left.remove(j)
        gone.append((found, best))
    place = {layer: at for at, layer in enumerate(left)}
    options, nodes, free = zip(*((graph.options[i], graph.node[i], [0.0] * len(graph.node[i])) for i in left))
    small = Graph(options, nodes, {(place[i], place[j]): costs for (i, j), costs in edges.items()}, free)
    cost, _, few = cheapest(small.every())
    picks = dict(zip(left, few))
    for (i, j, k), best in reversed(gone):
        picks[j] = best[picks[i]][picks[k]]
    return SearchResult(graph.choice([picks[i] for i in sorted(picks)]), cost, looked_at + small.size)


def between_two(edges: dict, left: list[int]) -> Iterator[tuple[int, int, int]]:
    """(i, j, k): all that touches j is one edge from i and one to k."""
    for j in left:
        before, after = [i for i, to in edges if to == j], [k for by, k in edges if by == j]
        if len(before) == len(after) == 1:
            yield before[0], j, after[0]


Point = tuple[float, float, tuple[int, ...]]  # seconds, bytes, the pick of each layer


def tensoropt(problem: Problem) -> SearchResult:
    """`choice`: the front as (seconds, bytes, options); `cost` the fastest within `memory_bytes`."""
    graph = problem.graph()
    front, looked_at = frontier(graph)
    cost, *_ = cheapest((point for point in front if point[1] <= problem.memory_bytes), problem.memory_bytes)
    return SearchResult([(s, size, graph.choice(picks)) for s, size, picks in front], cost, looked_at)


def frontier(graph: Graph, cap: float = inf) -> tuple[list[Point], int]:
    """The front of a chain within `cap`, the fastest first, and how many sums that took. Of points equal in
    both the one with the first picks."""
    if any(j != i + 1 for i, j in graph.edge):
        raise ValueError(f"edges {sorted(graph.edge)} are no chain; take out the skips")
    unbeaten = lambda points: undominated(sorted(point for point in points if point[0][1] <= cap))
    at = [[((own, size), (a,))] for a, (own, size) in enumerate(zip(graph.node[0], graph.memory[0]))]
    looked_at = len(at)
    for j in range(1, len(graph.options)):
        into, before, at = graph.edge[j - 1, j], list(chain(*at)), []
        for b, (own, size) in enumerate(zip(graph.node[j], graph.memory[j])):
            at.append(unbeaten(((s + into[p[-1]][b] + own, m + size), (*p, b)) for (s, m), p in before))
            looked_at += len(before)
    return [(*costs, picks) for costs, picks in unbeaten(chain(*at))], looked_at


HYPAR_SHARDINGS = ("dp", "row")  # model parallelism: each device has the weights of some inputs


def hypar(problem: Problem, solve: Callable[[Graph], SearchResult] = eliminate) -> SearchResult:
    """`cost`: bytes that a device sends, of all levels. `solve=every` enumerates each level."""
    chosen, looked_at = [()] * len(problem.layers), 0
    for level in range(len(problem.levels)):
        outer = replace(problem, levels=problem.levels[: level + 1])
        options = [[Option((*shardings, sharding)) for sharding in HYPAR_SHARDINGS] for shardings in chosen]
        found = solve(outer.graph(options=options, unit="bytes"))
        chosen, looked_at = [option.shardings for option in found.choice], looked_at + found.looked_at
    return SearchResult(found.choice, problem.cost(found.choice, unit="bytes"), looked_at)


def autoddl(problem: Problem, starts: int = 20, seed: int = 0) -> SearchResult:
    draw, graph = random.Random(seed), problem.graph(unit="bytes")
    found, sweeps = [], 0
    for start in range(starts):
        first = [draw.randrange(len(options)) if start else 0 for options in graph.options]
        picks, more = descend(graph, first)
        found.append((graph.cost(picks), picks))
        sweeps += more
    cost, picks = min(found)
    return SearchResult(graph.choice(picks), cost, sweeps * sum(map(len, graph.options)))


def descend(graph: Graph, picks: list[int]) -> tuple[list[int], int]:
    """(where no layer alone improves, sweeps); of equal options a layer keeps what it has, else the first."""
    picks, sweeps, changed = list(picks), 0, True
    while changed:
        changed, sweeps = False, sweeps + 1
        for layer, options in enumerate(graph.options):
            costs = [graph.cost([*picks[:layer], pick, *picks[layer + 1 :]]) for pick in range(len(options))]
            if min(costs) < costs[picks[layer]]:
                picks[layer], changed = costs.index(min(costs)), True
    return picks, sweeps


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
    price = lambda i: [[elements(i, x, w, y) for w, y in options[i + 1]] for _, x in options[i]]
    edges = {(i, i + 1): price(i) for i in range(len(layers))}
    nothing = [[0.0] * len(some) for some in options]
    return Graph(options, nothing, edges, nothing), best_ways
