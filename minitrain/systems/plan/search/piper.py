"""Piper: stages outside, words and recomputation inside a stage, for the least time per sample.

    A(l, d, s)   the slowest stage of layers l.. on d devices in s stages
               = min over ends e and devices h of  max(inner(l..e, h, s), A(e, d-h, s-1))
    inner        the fastest (dp, tp) of a stage: for each layer tp or not, again or not, within memory

A stage with s-1 behind it holds s microbatches, hence the s. The plan is the best of any s. Here layers are a
chain, whose downsets are its beginnings.
Tarnawski, Narayanan, Phanishayee 2021, NeurIPS 2021. Differs: the inner problem is
solved exactly, by fronts of (seconds, bytes); the paper's knapsack is a heuristic.
"""

from collections.abc import Sequence
from functools import cache

from minitrain.systems.plan.search.problem import SHARED, Found, Level, Option, Problem, cheapest
from minitrain.systems.plan.search.stages import Families, Run, by_stages, every_plan, with_recomputation
from minitrain.systems.plan.search.tensoropt import fastest_of_stage


def families_of(problem: Problem) -> Families:
    """A stage's first levels, none to all of them, are data-parallel; on the others its layers have one
    tensor-parallel word, or do all the same."""
    inside = [*(word for word in problem.words if word in SHARED), "all"]

    def families(levels: Sequence[Level]) -> list[list[Option]]:
        found = []
        for dp in range(len(levels) + 1):
            words = dict.fromkeys(("dp",) * dp + (word,) * (len(levels) - dp) for word in inside)
            found.append([Option(one, again) for one in words for again in with_recomputation(problem)])
        return found

    return families


def piper(problem: Problem) -> Found:
    """`cost`: seconds of the slowest stage. Of equal plans that with fewest stages."""
    looked_at = 0

    @cache
    def inner(run: Run, behind: int) -> tuple[float, tuple[Option, ...]]:
        nonlocal looked_at
        options, seconds, looked = fastest_of_stage(problem, run, behind, families_of(problem))
        looked_at += looked
        return seconds, options

    time, plan = cheapest(by_stages(problem, inner, max), problem.memory_bytes)
    return Found(plan, time, looked_at)


def every_piper_plan(problem: Problem) -> Found:
    """The truth: every cut, in each stage every (dp, tp), for each layer every option."""
    return every_plan(problem, families_of(problem), time=lambda times, _: max(times))
