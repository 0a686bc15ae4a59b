"""AutoDDL: coordinate descent, one layer after the other, until no layer alone can send fewer bytes.

    sweep     for each layer in turn: of its options the one that is best beside what all others do now
    stop      when a sweep changed nothing; then once more from a drawn start: the best of all is kept

A sweep prices L·C choices, and few are needed; what is reached is a local optimum, hence the restarts.
Chen et al. 2023, arXiv:2301.06813. Differs: bytes that a device sends, without latency; words on
levels are its distributions (split, broadcast, partial).
"""

import random

from minitrain.systems.plan.search.problem import Found, Graph, Problem


def autoddl(problem: Problem, starts: int = 20, seed: int = 0) -> Found:
    draw, graph = random.Random(seed), problem.graph(unit="bytes")
    found, looked_at = [], 0
    for start in range(starts):
        picks = [draw.randrange(len(options)) if start else 0 for options in graph.options]
        picks, sweeps = descend(graph, picks)
        found.append((graph.cost(picks), picks))
        looked_at += sweeps * sum(map(len, graph.options))
    cost, picks = min(found)
    return Found(graph.choice(picks), cost, looked_at)


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
