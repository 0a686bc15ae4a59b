"""Galvatron: a decision tree says which words a layer may have, dynamic programming which it gets, in memory.

    tree       pipeline degree first; then dp, sdp and tp take turns on the levels that are left. Each kind
               comes in one run of levels, and dp never with sdp: sdp with it is always the better
    inside     a stage's layers: the fastest words within memory, by fronts of (seconds, bytes)

On 8 GPUs, three levels of two, 22 candidates are left of 34 with mixtures of dp and sdp. `galvatron` cuts the
layers evenly. `galvatron_bmw` adds recomputation, and looks for the cut: from the one that is even in memory,
layers move off the slowest stage while that helps (two objectives: bytes and seconds).
Miao et al. 2022, arXiv:2211.13878; Wang et al. 2023 (BMW), arXiv:2307.02031.
Differs: costs are problem.py's, without overlap; memory is not rounded to a grid.
"""

from collections.abc import Callable, Sequence
from itertools import groupby, product

from minitrain.checks import counts
from minitrain.pipeline.partition import balanced
from minitrain.plan.search.problem import Found, Level, Option, Problem
from minitrain.plan.search.stages import (
    Cut,
    Stage,
    message_seconds,
    pipelined,
    sizes_of,
    stage_graph,
    stage_seconds,
)
from minitrain.plan.search.tensoropt import frontier


def words_of_tree(words: Sequence[str], levels: int, mixed: bool = False) -> list[tuple[str, ...]]:
    """Every way from the root to a leaf: runs of words over so many levels of two."""
    every = product(words, repeat=levels)
    runs = [(way, [word for word, _ in groupby(way)]) for way in every]
    kept = [(way, run) for way, run in runs if len(set(run)) == len(run)]
    return [way for way, run in kept if mixed or not {"dp", "sdp"} <= set(run)]


def candidates(devices: int, mixed: bool = False) -> list[tuple]:
    """(pipeline degree, words) on a power of two of devices."""
    counts(1 << 12, devices=devices)
    depth = devices.bit_length() - 1
    if devices != 1 << depth:
        raise ValueError(f"{devices} devices; the tree halves them: use a power of two")
    ways = range(depth + 1)
    return [
        (1 << pp, words) for pp in ways for words in words_of_tree(("dp", "sdp", "tp"), depth - pp, mixed)
    ]


def tree_options(
    problem: Problem, again: Sequence[bool] = (False,)
) -> Callable[[Sequence[Level]], list[Option]]:
    def options(levels: Sequence[Level]) -> list[Option]:
        return [Option(words, a) for words in words_of_tree(problem.words, len(levels)) for a in again]

    return options


def even_cuts(problem: Problem) -> list[Cut]:
    """As many stages as there are groups of one size, layers spread over them."""
    layers, found = len(problem.layers), []
    for here in reversed(sizes_of(problem)):
        if (stages := problem.devices // here) <= layers:
            found.append(tuple((run, here) for run in balanced([1] * layers, stages)))
    return found


def galvatron(problem: Problem) -> Found:
    """`cost`: seconds of a step. Of equal plans that with fewest stages."""
    return best_of(problem, even_cuts(problem), tree_options(problem))


def best_of(problem: Problem, among: Sequence[Cut], options) -> Found:
    tried = [within(problem, cut, options) for cut in among]
    fitting = [found for found in tried if found.choice]
    if not fitting:
        raise ValueError(f"no plan fits into {problem.memory_bytes:,} bytes; give more memory or devices")
    best = min(fitting, key=lambda found: found.cost)
    return Found(best.choice, best.cost, sum(found.looked_at for found in tried))


def within(problem: Problem, cut: Cut, options) -> Found:
    """The fastest options of a cut's stages; no choice if one stage does not fit."""
    plan, times, looked_at = [], [], 0
    for behind, (layers, devices) in reversed(list(enumerate(reversed(cut)))):
        graph = stage_graph(problem, layers, devices, behind, options)
        front, looked = frontier(graph, problem.memory_bytes)
        looked_at += looked
        if not front:
            return Found((), float("inf"), looked_at)
        plan.append(Stage(layers, devices, graph.choice(front[0][2])))
        times.append(front[0][0] + message_seconds(problem, layers, devices))
    return Found(tuple(plan), pipelined(times, problem.microbatches), looked_at)


def bmw_options(problem: Problem) -> Callable[[Sequence[Level]], list[Option]]:
    return tree_options(problem, (False, True) if any(layer.keeps for layer in problem.layers) else (False,))


def galvatron_bmw(problem: Problem) -> Found:
    """Looks at Galvatron's own cuts too, so it is never slower."""
    options, found = bmw_options(problem), []
    for start in even_cuts(problem):
        for cut in (start, even_in_memory(problem, start)):
            here = within(problem, cut, options)
            found.append(here)
            while here.choice and (
                there := [within(problem, one, options) for one in lighter(problem, here)]
            ):
                found += there
                best = min(there, key=lambda one: one.cost)
                if best.cost >= here.cost:
                    break
                here = best
    looked_at = sum(one.looked_at for one in found)
    best = min(found, key=lambda one: one.cost)
    if not best.choice:
        raise ValueError(f"no plan fits into {problem.memory_bytes:,} bytes; give more memory or devices")
    return Found(best.choice, best.cost, looked_at)


def even_in_memory(problem: Problem, cut: Cut) -> Cut:
    """The same stages, cut where the states of their layers are most even."""
    sizes = [problem.memory(layer, Option(()), ()) for layer in problem.layers]
    return tuple((run, devices) for run, (_, devices) in zip(balanced(sizes, len(cut)), cut))


def lighter(problem: Problem, found: Found) -> list[Cut]:
    """Cuts in which the slowest stage gives its first or its last layer away."""
    runs = [(stage.layers, stage.devices) for stage in found.choice]
    times = [stage_seconds(problem, stage) for stage in found.choice]
    slowest, moved = times.index(max(times)), []
    layers = runs[slowest][0]
    for beside in (slowest - 1, slowest + 1):
        if 0 <= beside < len(runs) and len(layers) > 1:
            other = runs[beside][0]
            first = beside < slowest
            here = layers[1:] if first else layers[:-1]
            there = range(other.start, other.stop + 1) if first else range(other.start - 1, other.stop)
            changed = {slowest: here, beside: there}
            moved.append(tuple((changed.get(i, run), devices) for i, (run, devices) in enumerate(runs)))
    return moved
