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

from minitrain.plan.search.problem import Found, Graph, Problem
from minitrain.plan.search.stages import Plan, Stage, message_seconds, sizes_of, stage_graph


def intra(graph: Graph, memory_bytes: float = inf) -> tuple[float, tuple[int, ...]] | None:
    """(seconds, the pick of each layer) of the integer program's solution; None if nothing fits."""
    if not memory_bytes > 0:
        raise ValueError(f"memory_bytes={memory_bytes}: use a number above 0")
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import lil_array
    except ModuleNotFoundError:
        cure = "install minitrain with its [course] packages"
        raise ModuleNotFoundError(f"Alpa's program needs scipy: {cure}") from None
    first, costs = [], []  # where a layer's picks begin; the objective
    for node in graph.node:
        first.append(len(costs))
        costs += node
    rows, right, pairs = [], [], {}
    for layer, options in enumerate(graph.options):
        rows.append({first[layer] + a: 1 for a in range(len(options))})
        right.append(1)
    for (i, j), edge in graph.edge.items():
        pairs[i, j] = len(costs)
        at = {
            (a, b): len(costs) + a * len(edge[0]) + b
            for a, b in product(range(len(edge)), range(len(edge[0])))
        }
        costs += [cost for row in edge for cost in row]
        rows += [{first[i] + a: -1, **{at[a, b]: 1 for b in range(len(edge[0]))}} for a in range(len(edge))]
        rows += [{first[j] + b: -1, **{at[a, b]: 1 for a in range(len(edge))}} for b in range(len(edge[0]))]
        right += [0] * (len(edge) + len(edge[0]))
    if memory_bytes < inf:
        held = [size / memory_bytes for sizes in graph.memory for size in sizes]
        rows.append(dict(enumerate(held)))
    matrix = lil_array((len(rows), len(costs)))
    for number, row in enumerate(rows):
        for column, value in row.items():
            matrix[number, column] = value
    bounded = len(rows) > len(right)
    limits = LinearConstraint(matrix.tocsr(), right + [0] * bounded, right + [1] * bounded)
    scale = max(costs) or 1  # the solver's tolerances are absolute
    solved = milp([cost / scale for cost in costs], constraints=limits, integrality=1, bounds=Bounds(0, 1))
    if solved.x is None:
        return None
    picks = tuple(
        max(range(len(options)), key=lambda a: solved.x[first[layer] + a])
        for layer, options in enumerate(graph.options)
    )
    return graph.cost(picks), picks


def alpa(problem: Problem) -> Found:
    """`cost`: seconds of a step. Looked at: entries of integer programs and of the tables F."""
    layers, sizes, looked_at = len(problem.layers), sizes_of(problem), 0

    @cache
    def unlimited(start: int, end: int, devices: int) -> tuple[int, ...]:
        nonlocal looked_at
        graph = stage_graph(problem, range(start, end), devices, 0, problem.options)
        looked_at += sum(map(len, graph.node)) + sum(len(edge) * len(edge[0]) for edge in graph.edge.values())
        return intra(graph)[1]

    @cache
    def stage(start: int, end: int, devices: int, behind: int) -> tuple[float, tuple]:
        """Solved again only if the fastest does not fit beside so many microbatches."""
        graph = stage_graph(problem, range(start, end), devices, behind, problem.options)
        picks = unlimited(start, end, devices)
        solved = graph.cost(picks), picks
        if graph.bytes(picks) > problem.memory_bytes:
            solved = intra(graph, problem.memory_bytes)
        if solved is None:
            return inf, ()
        return solved[0] + message_seconds(problem, range(start, end), devices), graph.choice(solved[1])

    most = min(layers, problem.devices)
    runs = [(start, end) for end in range(1, layers + 1) for start in range(end)]
    times = {stage(*run, here, behind)[0] for run, here, behind in product(runs, sizes, range(most))} - {inf}
    best: tuple[float, Plan] = (inf, ())
    for slowest in sorted(times):
        if (problem.microbatches - 1) * slowest >= best[0]:
            break

        @cache
        def least(start: int, devices: int, stages: int) -> tuple[float, Plan]:
            nonlocal looked_at
            if stages == 0:
                return (0.0, ()) if start == layers and devices == 0 else (inf, ())
            found = inf, ()
            for end, here in product(range(start + 1, layers + 1), sizes):
                if here <= devices and (ahead := stage(start, end, here, stages - 1))[0] <= slowest:
                    rest, plan = least(end, devices - here, stages - 1)
                    looked_at += 1
                    if ahead[0] + rest < found[0]:
                        found = ahead[0] + rest, (Stage(range(start, end), here, ahead[1]), *plan)
            return found

        for stages in range(1, most + 1):
            total, plan = least(0, problem.devices, stages)
            if total + (problem.microbatches - 1) * slowest < best[0]:
                best = total + (problem.microbatches - 1) * slowest, plan
    if best[0] == inf:
        raise ValueError(f"no plan fits into {problem.memory_bytes:,} bytes; give more memory or devices")
    return Found(best[1], best[0], looked_at)
