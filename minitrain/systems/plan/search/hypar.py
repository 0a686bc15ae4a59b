"""HyPar: level by level, data or model parallelism for each layer, so that least bytes are sent.

    outermost level   dynamic programming over the layers: dp or row for each           2^L choices
    next level        the same for what each half has to do, given the words so far     2^L choices, and so on

Exact on each level, as an enumeration of its 2^L choices would be; level after level is a heuristic.
Convolutions (few weights, many activations) become data-parallel, wide products model-parallel.
Song et al. 2019, arXiv:1901.02067. Differs: sums that the next layer wants cut are
reduce-scattered.
"""

from collections.abc import Callable
from dataclasses import replace

from minitrain.systems.plan.search.optcnn import eliminate
from minitrain.systems.plan.search.problem import Found, Graph, Option, Problem

WORDS = ("dp", "row")  # model parallelism: each device has the weights of some inputs


def hypar(problem: Problem, solve: Callable[[Graph], Found] = eliminate) -> Found:
    """`cost`: bytes that a device sends, of all levels. `solve=every` enumerates each level."""
    chosen, looked_at = [()] * len(problem.layers), 0
    for level in range(len(problem.levels)):
        found = solve(level_graph(problem, chosen, level))
        chosen, looked_at = [option.words for option in found.choice], looked_at + found.looked_at
    return Found(found.choice, problem.cost(found.choice, unit="bytes"), looked_at)


def level_graph(problem: Problem, chosen: list[tuple[str, ...]], level: int) -> Graph:
    """Two words for each layer on this level, behind those chosen on the ones outside of it."""
    outer = replace(problem, levels=problem.levels[: level + 1])
    return outer.graph(options=[[Option((*words, word)) for word in WORDS] for words in chosen], unit="bytes")
