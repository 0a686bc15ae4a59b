"""Searches for plans with stages: layers and devices of each stage outside, options of its layers inside.

Piper      the least time of the slowest stage: F(l, d, s) with join = max; inside, fronts of (dp, tp)
Alpa       T = sum of t_i + (B-1)·max of t_i: for each t_max there is, the least sum of stages no slower;
           inside, an integer program over one-hot picks s_i of options and e_ij of pairs of them
             min  sum s_i·node_i + sum e_ij·edge_ij    rows and columns of e_ij add up to s_i and s_j,
                                                       the picks' bytes fit into the memory
Galvatron  a decision tree: pipeline degree first, then dp, sdp and tp on the levels left, each kind in
           one run of levels, dp never with sdp: 22 candidates of 34 on 8 GPUs. Layers are cut evenly;
           inside, fronts. BMW adds recomputation, and moves layers off the slowest stage while that helps.
Aceso      from an even plan on: the bottleneck (most bytes if too many, else the slowest) gives a layer to a
           neighbour, swaps devices, changes a word or recomputation; up to `hops` changes in a row that only
           help together. A plan that does not fit scores twice its seconds times a power of bytes / memory.

A stage with s-1 behind it holds s microbatches. Stages get 1, 2, 4, .. devices of a node or whole nodes.
Tarnawski et al. 2021 (Piper), NeurIPS; Zheng et al. 2022 (Alpa), arXiv:2201.12023, sections 4.2 and 5.2; Miao
et al. 2022 (Galvatron), arXiv:2211.13878; Wang et al. 2023 (BMW), arXiv:2307.02031; Liu et al. 2024 (Aceso),
EuroSys. Differs: chains; Piper's inner problem is solved exactly; Alpa's layers are given, not clustered, and
scipy solves; costs are problem.py's, without overlap; Aceso's primitives are not ranked by resource.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import groupby, product
from math import inf
from operator import itemgetter

import numpy

from minitrain.pipeline.partition import balanced
from minitrain.systems.plan.search.layerwise import fastest_of_stage
from minitrain.systems.plan.search.problem import SHARED, Found, Graph, Level, Option, Problem, cheapest
from minitrain.systems.plan.search.stages import (
    Cut,
    Families,
    Plan,
    Run,
    Stage,
    all_cuts,
    by_stages,
    every_plan,
    handed_over,
    message_seconds,
    pipelined,
    sizes_of,
    stage_bytes,
    stage_graphs,
    stage_seconds,
    with_behind,
    with_recomputation,
)


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


def intra(graph: Graph, memory_bytes: float = inf) -> tuple[float, tuple[int, ...]] | None:
    """(seconds, the pick of each layer) of the integer program's solution; None if nothing fits."""
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
    sizes = [problem.memory(layer, Option(()), ()) for layer in problem.layers]
    for even in even_cuts(problem):
        even_bytes = tuple(zip(balanced(sizes, len(even)), (devices for _, devices in even)))
        for start in (even, even_bytes):
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
