"""Every choice there is, priced one by one: the truth that each search is held to.

    exhaustive(problem).choice           an option for each layer, all devices together, within memory
    every(graph)                         the same for any graph
    stages.every_plan(problem)           of plans with stages

|options|^layers choices: 16^4 = 65,536 of four layers on two levels with four words.
"""

from itertools import product

from minitrain.plan.search.problem import Found, Graph, Problem


def exhaustive(problem: Problem, unit: str = "seconds") -> Found:
    """The cheapest choice; of equal ones that which comes first in the order of `problem.words`."""
    return every(problem.graph(unit=unit), problem.memory_bytes)


def every(graph: Graph, memory_bytes: float = float("inf")) -> Found:
    best, least = None, float("inf")
    for picks in product(*map(range, map(len, graph.options))):
        if (cost := graph.cost(picks)) < least and graph.bytes(picks) <= memory_bytes:
            best, least = picks, cost
    if best is None:
        raise ValueError(f"no choice fits into {memory_bytes:,} bytes; give more memory")
    return Found(graph.choice(best), least, graph.size)
