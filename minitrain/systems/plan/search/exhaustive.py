"""Every choice there is, priced one by one: the truth that each search is held to.

    exhaustive(problem).choice           an option for each layer, all devices together, within memory
    every(graph)                         the same for any graph
    least(choices, cost)                 for whatever has a cost
    stages.every_plan(problem)           of plans with stages

|options|^layers choices: 16^4 = 65,536 of four layers on two levels with four words.
"""

from collections.abc import Callable, Iterable
from math import inf

from minitrain.systems.plan.search.problem import Found, Graph, Problem, cheapest


def exhaustive(problem: Problem, unit: str = "seconds") -> Found:
    """The cheapest choice; of equal ones that which comes first in the order of `problem.words`."""
    return every(problem.graph(unit=unit), problem.memory_bytes)


def every(graph: Graph, memory_bytes: float = inf) -> Found:
    fitting = (one for one in graph.every() if one[1] <= memory_bytes)
    cost, _, picks = cheapest(fitting, memory_bytes)
    return Found(graph.choice(picks), cost, graph.size)


def least(choices: Iterable, cost: Callable[..., float]) -> Found:
    priced = [(cost(choice), choice) for choice in choices]
    best, choice = cheapest(priced)
    return Found(choice, best, len(priced))
