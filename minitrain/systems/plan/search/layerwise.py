"""An option for each layer, all devices together: elimination, fronts, level by level, coordinate descent.

OptCNN     node elimination  i -> j -> k, nothing else at j, becomes an edge i -> k: the best b per (a, c)
           edge elimination  two edges i -> k become one, their sum
           A chain shrinks to two layers, so does every graph of branches that part and join again; O(L·C³)
           sums for C options. What does not shrink further is enumerated.
TensorOpt  the same with a front where that has a number: all choices that no other beats or equals in seconds
           and bytes. From it one reads the least memory, the fastest choice for a cap, what a gigabyte buys.
HyPar      the outermost level first: dp or row for each layer, exactly; the next level for what each half has
           to do, and so on. Level after level is a heuristic.
AutoDDL    coordinate descent: for each layer in turn the best option given all others, until a sweep changes
           nothing; from several drawn starts, for what is reached is a local optimum.

Jia et al. 2018 (OptCNN), arXiv:1802.04924; Cai et al. 2020 (TensorOpt), arXiv:2004.10856; Song et al. 2019
(HyPar), arXiv:1901.02067; Chen et al. 2023 (AutoDDL), arXiv:2301.06813. Differs: options are shardings on
levels; fronts are of chains only; HyPar's sums that the next layer wants cut are reduce-scattered; AutoDDL
counts bytes without latency.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import inf

from minitrain.systems.plan.search.problem import Graph, Option, Problem, SearchResult, cheapest


def optcnn(problem: Problem, unit: str = "seconds") -> SearchResult:
    return eliminate(problem.graph(unit=unit))


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
    """The front of a chain within `cap`, the fastest first, and how many sums that took."""
    if any(j != i + 1 for i, j in graph.edge):
        raise ValueError(f"edges {sorted(graph.edge)} are no chain; take out the skips")
    at = [[(own, size, (a,))] for a, (own, size) in enumerate(zip(graph.node[0], graph.memory[0]))]
    looked_at = len(at)
    for j in range(1, len(graph.options)):
        into, grown = graph.edge[j - 1, j], []
        for b, (own, size) in enumerate(zip(graph.node[j], graph.memory[j])):
            points = [(s + into[p[-1]][b] + own, m + size, (*p, b)) for front in at for s, m, p in front]
            looked_at += len(points)
            grown.append(unbeaten(point for point in points if point[1] <= cap))
        at = grown
    return unbeaten(point for front in at for point in front if point[1] <= cap), looked_at


def unbeaten(points: Iterable[Point]) -> list[Point]:
    """The fastest first; of points equal in both the one with the first picks."""
    kept: list[Point] = []
    for point in sorted(points):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


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
