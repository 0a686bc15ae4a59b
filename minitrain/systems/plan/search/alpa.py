"""Alpa: an integer program inside each stage, dynamic programming over stages and meshes outside.

    inside    one-hot picks s_i of each layer's options, e_ij of each edge's pairs of them
              min  sum s_i·node_i + sum e_ij·edge_ij    rows and columns of e_ij add up to s_i and s_j,
                                                        the picks' bytes fit into the memory
    outside   T = sum of t_i + (B - 1)·max of t_i: for each t_max that there is, the least sum of stages that
              are not slower:  F(l, d, s) = min over e, h of  t(l..e, h, s) + F(e, d-h, s-1)

Stages get 1, 2, 4, .. devices of a node or whole nodes: such meshes always tile the cluster. t_max goes up
from the least, and ends where (B-1)·t_max alone is more than the best T.
Zheng et al. 2022, arXiv:2201.12023, sections 4.2 and 5.2. Differs: layers are given, not clustered from
operators; scipy's solver.
"""

from functools import cache
from itertools import product
from math import inf
from operator import itemgetter

import numpy

from minitrain.systems.plan.search.problem import Found, Graph, Problem, cheapest
from minitrain.systems.plan.search.stages import Plan, Run, by_stages, message_seconds, sizes_of, stage_graphs


def intra(graph: Graph, memory_bytes: float = inf) -> tuple[float, tuple[int, ...]] | None:
    """(seconds, the pick of each layer) of the integer program's solution; None if nothing fits."""
    if not memory_bytes > 0:
        raise ValueError(f"memory_bytes={memory_bytes}: use a number above 0")
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ModuleNotFoundError:
        cure = "install minitrain with its [course] packages"
        raise ModuleNotFoundError(f"Alpa's program needs scipy: {cure}") from None
    if sum(map(min, graph.memory)) > memory_bytes:
        return None
    costs = [numpy.array(block) for block in (*graph.node, *graph.edge.values())]  # s_0, s_1, .., e_ij, ..

    def row(*parts) -> numpy.ndarray:
        """Coefficients: each part is (block, where in it, which)."""
        made = [numpy.zeros(block.shape) for block in costs]
        for block, where, value in parts:
            made[block][where] = value
        return flat(made)

    flat = lambda blocks: numpy.concatenate([block.ravel() for block in blocks])
    layers = len(graph.options)
    rows, right = [row((layer, slice(None), 1)) for layer in range(layers)], [1] * layers
    for e, (i, j) in enumerate(graph.edge, start=layers):
        from_i, to_j = map(range, costs[e].shape)
        rows += [row((e, a, 1), (i, a, -1)) for a in from_i] + [
            row((e, (..., b), 1), (j, b, -1)) for b in to_j
        ]
        right += [0] * (len(from_i) + len(to_j))
    limits = [LinearConstraint(numpy.array(rows), right, right)]
    if memory_bytes < inf:
        held = row(*((layer, ..., sizes) for layer, sizes in enumerate(graph.memory)))
        limits.append(LinearConstraint(held / memory_bytes, 0, 1))
    scale = max(map(numpy.max, costs)) or 1  # the solver's tolerances are absolute
    solved = milp(flat(costs) / scale, constraints=limits, integrality=1, bounds=Bounds(0, 1))
    if solved.x is None:
        return None
    ends = numpy.cumsum([len(options) for options in graph.options])
    picks = tuple(int(one_hot.argmax()) for one_hot in numpy.split(solved.x, ends)[:layers])
    return graph.cost(picks), picks


def alpa(problem: Problem) -> Found:
    """`cost`: seconds of a step. Looked at: entries of integer programs and of the tables F."""
    looked_at = 0

    @cache
    def unlimited(run: Run) -> tuple[int, ...]:
        nonlocal looked_at
        (graph,) = stage_graphs(problem, run, 0)
        looked_at += sum(map(len, graph.node)) + sum(len(edge) * len(edge[0]) for edge in graph.edge.values())
        return intra(graph)[1]

    @cache
    def stage(run: Run, behind: int) -> tuple[float, tuple]:
        """Solved again only if the fastest does not fit beside so many microbatches."""
        (graph,) = stage_graphs(problem, run, behind)
        picks = unlimited(run)
        solved = graph.cost(picks), picks
        if graph.bytes(picks) > problem.memory_bytes:
            solved = intra(graph, problem.memory_bytes)
        if solved is None:
            return inf, ()
        return solved[0] + message_seconds(problem, *run), graph.choice(solved[1])

    def join(here: float, rest: float) -> float:
        nonlocal looked_at
        looked_at += 1
        return here + rest

    layers, again = len(problem.layers), problem.microbatches - 1
    runs = [range(start, end) for end in range(1, layers + 1) for start in range(end)]
    every = product(product(runs, sizes_of(problem)), range(min(layers, problem.devices)))
    best: tuple[float, Plan] = (inf, ())
    for slowest in sorted({stage(*one)[0] for one in every} - {inf}):
        if again * slowest >= best[0]:
            break
        fast = lambda *one: stage(*one) if stage(*one)[0] <= slowest else (inf, ())
        plans = ((total + again * slowest, plan) for total, plan in by_stages(problem, fast, join))
        best = min((best, *plans), key=itemgetter(0))
    cost, plan = cheapest([best], problem.memory_bytes)
    return Found(plan, cost, looked_at)
