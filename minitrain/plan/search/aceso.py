"""Aceso: find the slowest stage, give it what another has too much of, again and again.

    bottleneck    the stage that has most bytes, if that is too many, else the slowest
    primitives    of it: a layer to a neighbour; devices of another stage for its own; for one layer, or all
                  of them, another word on a level, or recomputation on or off
    hops          a primitive that does not help alone may with the next one: up to `hops` in a row

From one even plan for each number of stages. A plan's score is its seconds, twice them times a power of its
bytes over the memory where it does not fit, so that bytes and seconds may be traded on the way. Some hundred
plans are priced where an enumeration prices tens of thousands. In memory that hardly any plan fits it may
end at a plan that takes twice as long as the best.
Liu et al. 2024 (EuroSys), Aceso. Differs: no ranking of primitives by resource; the next
hop starts from the best few.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product

from minitrain.checks import counts
from minitrain.plan.search.problem import Found, Option, Problem
from minitrain.plan.search.stages import Plan, Stage, all_cuts, peak_bytes, pipelined, stage_seconds

Score = Callable[[Plan], float]


def aceso(problem: Problem, hops: int = 3, width: int = 20) -> Found:
    """`choice` fits into memory. Looked at: different plans."""
    counts(1 << 10, hops=hops, width=width)
    time = cache(lambda stage: stage_seconds(problem, stage))

    @cache
    def measure(plan: Plan) -> tuple[float, float]:
        """(seconds of a step, bytes as a share of the memory)"""
        seconds = pipelined([time(stage) for stage in plan], problem.microbatches)
        return seconds, max(peak_bytes(problem, plan)) / problem.memory_bytes

    def score_with(power: int) -> Score:
        def score(plan: Plan) -> float:
            seconds, share = measure(plan)
            return seconds if share <= 1 else 2 * seconds * share**power

        return score

    every = product((2, 4), starts(problem))
    found = [improved(problem, start, score_with(power), time, hops, width) for power, start in every]
    fitting = [plan for plan in found if measure(plan)[1] <= 1]
    if not fitting:
        raise ValueError(f"found no plan in {problem.memory_bytes:,} bytes; give more memory or hops")
    plan = min(fitting, key=lambda plan: measure(plan)[0])
    return Found(plan, measure(plan)[0], measure.cache_info().currsize)


def starts(problem: Problem) -> list[Plan]:
    """Of each number of stages the cut with most even work, all layers with the first word."""
    work = lambda layers, devices: sum(problem.layers[i].flops for i in layers) / devices
    found, every = [], all_cuts(problem)
    for stages in sorted({len(cut) for cut in every}):
        of_them = [cut for cut in every if len(cut) == stages]
        cut = min(of_them, key=lambda cut: max(work(*stage) for stage in cut))
        found.append(tuple(resized(problem, (), layers, devices) for layers, devices in cut))
    return found


def improved(problem: Problem, plan: Plan, score: Score, time, hops: int, width: int) -> Plan:
    """Until no row of primitives helps, neither of the bottleneck nor of the stages behind it in order."""
    while True:
        for place in range(len(plan)):
            tried = [plan]
            for _ in range(hops):
                tried = [
                    new
                    for old in tried
                    for new in primitives(problem, old, slowest(problem, old, time)[place])
                ]
                tried = sorted(dict.fromkeys(tried), key=score)[:width]
                if not tried or score(tried[0]) < score(plan):
                    break
            if tried and score(tried[0]) < score(plan):
                plan = tried[0]
                break
        else:
            return plan


def slowest(problem: Problem, plan: Plan, time) -> list[int]:
    """Stages, the bottleneck first: by bytes if some are over the memory, else by seconds."""
    held, times = peak_bytes(problem, plan), [time(stage) for stage in plan]
    measured = held if max(held) > problem.memory_bytes else times
    return sorted(range(len(plan)), key=lambda i: -measured[i])


def resized(problem: Problem, options: tuple[Option, ...], layers: range, devices: int) -> Stage:
    """A stage whose layers keep their words as far as there are levels, innermost first; new ones are as the
    layer beside them, or have the first word."""
    levels = len(problem.mesh(devices))
    options = options or (Option(()),)
    options = (*options, *[options[-1]] * len(layers))[: len(layers)]
    kept = [option.words[max(0, len(option.words) - levels) :] for option in options]
    padded = [(problem.words[0],) * (levels - len(words)) + words for words in kept]
    return Stage(layers, devices, tuple(Option(words, o.again) for words, o in zip(padded, options)))


def primitives(problem: Problem, plan: Plan, at: int) -> list[Plan]:
    stage, found = plan[at], []
    with_stages = lambda **new: tuple(new.get(f"s{i}", old) for i, old in enumerate(plan))
    for beside in (at - 1, at + 1):
        if 0 <= beside < len(plan) and len(stage.layers) > 1:
            first, other = beside < at, plan[beside]
            run = (
                range(other.layers.start, other.layers.stop + 1)
                if first
                else range(other.layers.start - 1, other.layers.stop)
            )
            own, layers = (
                (stage.options[1:], stage.layers[1:]) if first else (stage.options[:-1], stage.layers[:-1])
            )
            theirs = other.options if first else (other.options[0], *other.options)
            here, there = (
                resized(problem, own, layers, stage.devices),
                resized(problem, theirs, run, other.devices),
            )
            found.append(with_stages(**{f"s{at}": here, f"s{beside}": there}))
    for i, other in enumerate(plan):
        if other.devices > stage.devices:
            here = resized(problem, stage.options, stage.layers, other.devices)
            there = resized(problem, other.options, other.layers, stage.devices)
            found.append(with_stages(**{f"s{at}": here, f"s{i}": there}))
    everyone = range(len(stage.layers))
    for which in [*([i] for i in everyone), everyone]:
        for change in changes(problem, stage, which):
            found.append(with_stages(**{f"s{at}": stage._replace(options=change)}))
    return found


def changes(problem: Problem, stage: Stage, which: Sequence[int]) -> list[tuple[Option, ...]]:
    """These layers with another word on one level, or with recomputation turned."""
    found = []
    for level in range(len(stage.options[0].words)):
        for word in problem.words:
            put = lambda o: o._replace(words=(*o.words[:level], word, *o.words[level + 1 :]))
            found.append(tuple(put(o) if i in which else o for i, o in enumerate(stage.options)))
    if any(problem.layers[stage.layers[i]].keeps for i in which):
        turned = [o._replace(again=not o.again) if i in which else o for i, o in enumerate(stage.options)]
        found.append(tuple(turned))
    return [options for options in found if options != stage.options]
