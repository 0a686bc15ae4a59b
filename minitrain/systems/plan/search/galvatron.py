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

from collections.abc import Sequence
from itertools import groupby, product
from math import inf

from minitrain.pipeline.partition import balanced
from minitrain.systems.plan.search.problem import Found, Option, Problem, cheapest
from minitrain.systems.plan.search.stages import (
    Cut,
    Families,
    Stage,
    handed_over,
    pipelined,
    sizes_of,
    stage_seconds,
    with_behind,
    with_recomputation,
)
from minitrain.systems.plan.search.tensoropt import fastest_of_stage


def words_of_tree(words: Sequence[str], levels: int, mixed: bool = False) -> list[tuple[str, ...]]:
    """Every way from the root to a leaf: runs of words over so many levels of two."""
    every = product(words, repeat=levels)
    runs = [(way, [word for word, _ in groupby(way)]) for way in every]
    kept = [(way, run) for way, run in runs if len(set(run)) == len(run)]
    return [way for way, run in kept if mixed or not {"dp", "sdp"} <= set(run)]


def candidates(devices: int, mixed: bool = False) -> list[tuple]:
    """(pipeline degree, words) on a power of two of devices."""
    depth = devices.bit_length() - 1
    if devices != 1 << depth:
        raise ValueError(f"{devices} devices; the tree halves them: use a power of two")
    ways = range(depth + 1)
    return [
        (1 << pp, words) for pp in ways for words in words_of_tree(("dp", "sdp", "tp"), depth - pp, mixed)
    ]


def tree_options(problem: Problem, again: Sequence[bool] = (False,)) -> Families:
    words = lambda levels: words_of_tree(problem.words, len(levels))
    return lambda levels: [[Option(one, a) for one in words(levels) for a in again]]


def bmw_options(problem: Problem) -> Families:
    return tree_options(problem, with_recomputation(problem))


def even_cuts(problem: Problem) -> list[Cut]:
    """As many stages as there are groups of one size, layers spread over them."""
    layers, found = len(problem.layers), []
    for here in reversed(sizes_of(problem)):
        if (stages := problem.devices // here) <= layers:
            found.append(tuple((run, here) for run in balanced([1] * layers, stages)))
    return found


def galvatron(problem: Problem) -> Found:
    """`cost`: seconds of a step. Of equal plans that with fewest stages."""
    return best_of(problem, [within(problem, cut, tree_options(problem)) for cut in even_cuts(problem)])


def galvatron_bmw(problem: Problem) -> Found:
    """Looks at Galvatron's own cuts too, so it is never slower."""
    options, found = bmw_options(problem), []
    for even in even_cuts(problem):
        for start in (even, even_in_memory(problem, even)):
            here = within(problem, start, options)
            found += [here, *lighter(problem, here, options)]
    return best_of(problem, found)


def lighter(problem: Problem, found: Found, families: Families) -> list[Found]:
    """Cuts in which the slowest stage gives its first or its last layer away, and so on from the fastest."""
    times = [stage_seconds(problem, stage) for stage in found.choice]
    runs = handed_over([stage.layers for stage in found.choice], times.index(max(times))) if times else []
    devices = [stage.devices for stage in found.choice]
    tried = [within(problem, tuple(zip(layers, devices)), families) for layers in runs]
    best = min(tried, key=lambda one: one.cost, default=found)
    return tried + (lighter(problem, best, families) if best.cost < found.cost else [])


def best_of(problem: Problem, found: Sequence[Found]) -> Found:
    cost, plan = cheapest([(one.cost, one.choice) for one in found], problem.memory_bytes)
    return Found(plan, cost, sum(one.looked_at for one in found))


def within(problem: Problem, cut: Cut, families: Families) -> Found:
    """The fastest options of a cut's stages; no choice if one stage does not fit."""
    plan, times, looked_at = [], [], 0
    for run, behind in with_behind(cut):
        options, time, looked = fastest_of_stage(problem, run, behind, families)
        looked_at += looked
        if time == inf:
            return Found((), inf, looked_at)
        plan.append(Stage(*run, options))
        times.append(time)
    return Found(tuple(plan), pipelined(times, problem.microbatches), looked_at)


def even_in_memory(problem: Problem, cut: Cut) -> Cut:
    """The same stages, cut where the states of their layers are most even."""
    sizes = [problem.memory(layer, Option(()), ()) for layer in problem.layers]
    return tuple((run, devices) for run, (_, devices) in zip(balanced(sizes, len(cut)), cut))
