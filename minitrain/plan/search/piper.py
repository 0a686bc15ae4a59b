"""Piper: stages outside, words and recomputation inside a stage, for the least time per sample.

    A(l, d, s)   the slowest stage of layers l.. on d devices in s stages
               = min over ends e and devices h of  max(inner(l..e, h, s), A(e, d-h, s-1))
    inner        the fastest (dp, tp) of a stage: for each layer tp or not, again or not, within memory

A stage with s-1 behind it holds s microbatches, hence the s. The plan is the best of any s. Here layers are a
chain, whose downsets are its beginnings.
Tarnawski, Narayanan, Phanishayee 2021, NeurIPS 2021. Differs: the inner problem is
solved exactly, by fronts of (seconds, bytes); the paper's knapsack is a heuristic.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from math import inf

from minitrain.plan.search.problem import SHARED, Found, Level, Option, Problem
from minitrain.plan.search.stages import Cut, Plan, Stage, all_cuts, message_seconds, sizes_of, stage_graph
from minitrain.plan.search.tensoropt import frontier


def options_of(problem: Problem, levels: Sequence[Level], replicated: int) -> list[Option]:
    """Of a stage whose first `replicated` levels are data-parallel: on the others a tensor-parallel word, or
    all the same."""
    inside = [*(word for word in problem.words if word in SHARED), "all"]
    words = dict.fromkeys(("dp",) * replicated + (word,) * (len(levels) - replicated) for word in inside)
    again = (False, True) if any(layer.keeps for layer in problem.layers) else (False,)
    return [Option(one, a) for one in words for a in again]


def inner(problem: Problem, layers: range, devices: int, behind: int) -> tuple[float, tuple, int]:
    """(seconds, options, sums) of the fastest way to run a stage; infinite if none fits."""
    best, looked_at = (inf, ()), 0
    for replicated in range(len(problem.mesh(devices)) + 1):
        options = lambda levels: options_of(problem, levels, replicated)
        graph = stage_graph(problem, layers, devices, behind, options)
        front, looked = frontier(graph, problem.memory_bytes)
        looked_at += looked
        if front and front[0][0] < best[0]:
            best = front[0][0], graph.choice(front[0][2])
    return best[0] + message_seconds(problem, layers, devices), best[1], looked_at


def piper(problem: Problem) -> Found:
    """`cost`: seconds of the slowest stage. Of equal plans that with fewest stages."""
    layers, sizes, looked_at = len(problem.layers), sizes_of(problem), 0

    @cache
    def stage(start: int, end: int, devices: int, behind: int) -> tuple[float, tuple]:
        nonlocal looked_at
        seconds, options, looked = inner(problem, range(start, end), devices, behind)
        looked_at += looked
        return seconds, options

    @cache
    def slowest(start: int, devices: int, stages: int) -> tuple[float, Plan]:
        if stages == 0:
            return (0.0, ()) if start == layers and devices == 0 else (inf, ())
        best = inf, ()
        for end, here in product(range(start + 1, layers + 1), sizes):
            if here <= devices:
                seconds, options = stage(start, end, here, stages - 1)
                rest, plan = slowest(end, devices - here, stages - 1)
                if max(seconds, rest) < best[0]:
                    best = max(seconds, rest), (Stage(range(start, end), here, options), *plan)
        return best

    most = min(layers, problem.devices)
    time, plan = min(
        (slowest(0, problem.devices, stages) for stages in range(1, most + 1)), key=lambda found: found[0]
    )
    if time == inf:
        raise ValueError(f"no plan fits into {problem.memory_bytes:,} bytes; give more memory or devices")
    return Found(plan, time, looked_at)


def every_piper_plan(problem: Problem) -> Found:
    """The truth: every cut, in each stage every (dp, tp), for each layer every option."""
    best, count = inf, 0
    for cut in all_cuts(problem):
        degrees = [range(len(problem.mesh(devices)) + 1) for _, devices in cut]
        for replicated in product(*degrees):
            found, looked = _slowest_of(problem, cut, replicated)
            best, count = min(best, found), count + looked
    return Found(None, best, count)


def _slowest_of(problem: Problem, cut: Cut, replicated: Sequence[int]) -> tuple[float, int]:
    slowest, count = 0.0, 1
    for number, (layers, devices) in enumerate(cut):
        options: Callable = lambda levels: options_of(problem, levels, replicated[number])
        graph = stage_graph(problem, layers, devices, len(cut) - 1 - number, options)
        every = product(*map(range, map(len, graph.options)))
        fits = [graph.cost(picks) for picks in every if graph.bytes(picks) <= problem.memory_bytes]
        count *= graph.size
        slowest = max(slowest, min(fits, default=inf) + message_seconds(problem, layers, devices))
    return slowest, count
