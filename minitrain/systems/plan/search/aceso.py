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

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product

from minitrain.systems.plan.search.problem import Found, Option, Problem
from minitrain.systems.plan.search.stages import (
    Plan,
    Stage,
    all_cuts,
    handed_over,
    pipelined,
    stage_bytes,
    stage_seconds,
    with_behind,
)

Measure = Callable[[Plan], tuple[list[float], list[float]]]  # seconds and bytes of each stage


def aceso(problem: Problem, hops: int = 3, width: int = 20) -> Found:
    """`choice` fits into memory. Looked at: different plans."""
    seconds_of = cache(lambda stage: stage_seconds(problem, stage))
    bytes_of = cache(lambda stage, behind: stage_bytes(problem, stage, behind))

    @cache
    def measure(plan: Plan) -> tuple[list[float], list[float]]:
        return [seconds_of(stage) for stage in plan], [bytes_of(*one) for one in with_behind(plan)]

    def score(power: int, plan: Plan) -> float:
        times, held = measure(plan)
        step, share = pipelined(times, problem.microbatches), max(held) / problem.memory_bytes
        return step if share <= 1 else 2 * step * share**power

    scores = [partial(score, power) for power in (2, 4)]
    found = [improved(problem, *one, measure, hops, width) for one in product(starts(problem), scores)]
    fitting = [plan for plan in found if max(measure(plan)[1]) <= problem.memory_bytes]
    if not fitting:
        raise ValueError(f"found no plan in {problem.memory_bytes:,} bytes; give more memory or hops")
    plan = min(fitting, key=scores[0])
    return Found(plan, scores[0](plan), measure.cache_info().currsize)


def starts(problem: Problem) -> list[Plan]:
    """Of each number of stages the cut with most even work, all layers with the first word."""
    work = lambda layers, devices: sum(problem.layers[i].flops for i in layers) / devices
    first = lambda devices: problem.options(problem.mesh(devices))[0]
    most_even: dict[int, tuple] = {}
    for cut in all_cuts(problem):
        most = max(work(*run) for run in cut)
        plan = tuple(Stage(layers, devices, (first(devices),) * len(layers)) for layers, devices in cut)
        most_even[len(cut)] = min(most_even.get(len(cut), (most, plan)), (most, plan), key=lambda one: one[0])
    return [most_even[stages][1] for stages in sorted(most_even)]


def improved(
    problem: Problem, plan: Plan, score: Callable[[Plan], float], measure: Measure, hops: int, width: int
) -> Plan:
    """Until no row of primitives helps, neither of the bottleneck nor of the stages behind it in order."""
    while True:
        for place in range(len(plan)):
            tried = [plan]
            for _ in range(hops):
                wide = (
                    new
                    for old in tried
                    for new in primitives(problem, old, slowest(problem, *measure(old))[place])
                )
                tried = sorted(dict.fromkeys(wide), key=score)[:width]
                if not tried or score(tried[0]) < score(plan):
                    break
            if tried and score(tried[0]) < score(plan):
                plan = tried[0]
                break
        else:
            return plan


def slowest(problem: Problem, times: Sequence[float], held: Sequence[float]) -> list[int]:
    """Stages, the bottleneck first: by bytes if some are over the memory, else by seconds."""
    measured = held if max(held) > problem.memory_bytes else times
    return sorted(range(len(measured)), key=lambda i: -measured[i])


def primitives(problem: Problem, plan: Plan, at: int) -> Iterator[Plan]:
    runs, devices = [stage.layers for stage in plan], [stage.devices for stage in plan]
    resize = lambda runs, devices: tuple(resized(problem, *one) for one in zip(plan, runs, devices))
    for handed in handed_over(runs, at):
        yield resize(handed, devices)
    for i, more in enumerate(devices):
        if more > devices[at]:
            swapped = {at: more, i: devices[at]}
            yield resize(runs, [swapped.get(j, own) for j, own in enumerate(devices)])
    stage, layers = plan[at], range(len(runs[at]))
    for which in [*([i] for i in layers), layers]:
        for changed in changes(problem, stage, which):
            yield (*plan[:at], stage._replace(options=changed), *plan[at + 1 :])


def resized(problem: Problem, stage: Stage, layers: range, devices: int) -> Stage:
    """Its layers keep their words as far as there are levels, innermost first, beside the first word; a layer
    that is new is as the one beside it."""
    old, levels, options = stage.layers, len(problem.mesh(devices)), []
    for i in layers:
        words, again = stage.options[min(max(i, old.start), old.stop - 1) - old.start]
        kept = words[max(0, len(words) - levels) :]
        options.append(Option((problem.words[0],) * (levels - len(kept)) + kept, again))
    return Stage(layers, devices, tuple(options))


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
