"""TensorOpt: not the fastest choice but all that are worth having, seconds against bytes of memory.

    front        the choices that no other beats or equals in both: seconds fall as bytes grow
    elimination  of layer j between i and k: for every (a, c) the front of all (b, what came before)

As in OptCNN, with a front where that has a number, so the front of the whole graph comes out. From it one
reads the least memory, the fastest choice for a cap, and what a gigabyte more would buy.
Cai et al. 2020, arXiv:2004.10856. Differs: chains only, which LDP, its faster
algorithm, handles from one end to the other.
"""

from collections.abc import Iterable
from math import inf

from minitrain.systems.plan.search.problem import Found, Graph, Problem
from minitrain.systems.plan.search.stages import Families, Run, message_seconds, stage_graphs

Point = tuple[float, float, tuple[int, ...]]  # seconds, bytes, the pick of each layer


def tensoropt(problem: Problem) -> Found:
    """`choice`: the front as (seconds, bytes, options); `cost` the fastest within `memory_bytes`."""
    graph = problem.graph()
    front, looked_at = frontier(graph)
    cost = fastest(front, problem.memory_bytes)[0]
    return Found([(s, size, graph.choice(picks)) for s, size, picks in front], cost, looked_at)


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


def fastest(front: list[Point], memory_bytes: float) -> Point:
    """Read off a front: of those that fit into so many bytes."""
    if fitting := [point for point in front if point[1] <= memory_bytes]:
        return fitting[0]
    raise ValueError(f"no choice fits into {memory_bytes:,.0f} bytes; the least is {front[-1][1]:,.0f}")


def fastest_of_stage(problem: Problem, run: Run, behind: int, families: Families | None) -> Found:
    """Its options within memory; `cost` has the message, and is infinite if nothing fits."""
    best, looked_at = Found((), inf, 0), 0
    for graph in stage_graphs(problem, run, behind, families):
        front, looked = frontier(graph, problem.memory_bytes)
        looked_at += looked
        if front and front[0][0] < best.cost:
            best = Found(graph.choice(front[0][2]), front[0][0], 0)
    return Found(best.choice, best.cost + message_seconds(problem, *run), looked_at)


def every_point(graph: Graph) -> list[Point]:
    """The front found the long way."""
    return unbeaten(graph.every())
