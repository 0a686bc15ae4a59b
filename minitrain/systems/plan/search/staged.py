"""Searches for plans with stages: layers and devices of each stage outside, options of its layers inside.

Piper      the least time of the slowest stage: F(l, d, s) with join = max; inside, fronts of (dp, tp)
Alpa       T = sum of t_i + (B-1)·max of t_i: for each t_max there is, the least sum of stages no slower;
           inside, an integer program over one-hot picks s_i of options and e_ij of pairs of them
             min  sum s_i·node_i + sum e_ij·edge_ij    rows and columns of e_ij add up to s_i and s_j,
                                                       the picks' bytes fit into the memory
Galvatron  a decision tree: pipeline degree, then dp, sdp and tp on the levels left, each kind in one run of
           levels, dp never with sdp. Layers are cut evenly; inside, fronts. BMW adds recomputation, and moves
           layers off the slowest stage while that helps
Aceso      the bottleneck (most bytes if too many, else the slowest) gives a layer to a neighbour, swaps
           devices, changes a sharding or recomputation; up to `hops` changes in a row that only help together

Stages get 1, 2, 4, .. devices of a node or whole nodes, and s - 1 behind one mean s microbatches in flight.
Tarnawski et al. 2021 (Piper), NeurIPS; Zheng et al. 2022 (Alpa), arXiv:2201.12023, sections 4.2 and 5.2; Miao
et al. 2022 (Galvatron), arXiv:2211.13878; Wang et al. 2023 (BMW), arXiv:2307.02031; Liu et al. 2024 (Aceso),
EuroSys. Differs: chains; Piper is exact inside; Alpa's layers are given, scipy solves; no overlap; Aceso
ranks nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import groupby, product
from math import inf
from operator import itemgetter

from minitrain.pipeline.partition import balanced
from minitrain.systems.plan.rematerialize import IntegerProgram
from minitrain.systems.plan.search.layerwise import fastest_of_stage
from minitrain.systems.plan.search.problem import (
    SHARED,
    Graph,
    Level,
    Option,
    Problem,
    SearchResult,
    cheapest,
)
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
    tensor-parallel sharding, or do all the same."""
    inside = [*(sharding for sharding in problem.shardings if sharding in SHARED), "all"]

    def families(levels: Sequence[Level]) -> list[list[Option]]:
        found = []
        for dp in range(len(levels) + 1):
            shardings = dict.fromkeys(("dp",) * dp + (sharding,) * (len(levels) - dp) for sharding in inside)
            found.append([Option(one, again) for one in shardings for again in with_recomputation(problem)])
        return found

    return families


def piper(problem: Problem) -> SearchResult:
    """`cost`: seconds of the slowest stage. Of equal plans that with fewest stages."""
    looked_at = 0

    @cache
    def inner(run: Run, behind: int) -> tuple[float, tuple[Option, ...]]:
        nonlocal looked_at
        options, seconds, looked = fastest_of_stage(problem, run, behind, families_of(problem))
        looked_at += looked
        return seconds, options

    time, plan = cheapest(by_stages(problem, inner, max), problem.memory_bytes)
    return SearchResult(plan, time, looked_at)


def every_piper_plan(problem: Problem) -> SearchResult:
    """The truth: every cut, in each stage every (dp, tp), for each layer every option."""
    return every_plan(problem, families_of(problem), time=lambda times, _: max(times))


def intra(graph: Graph, memory_bytes: float = inf) -> tuple[float, tuple[int, ...]] | None:
    """(seconds, the pick of each layer) of the integer program's solution; None if nothing fits."""
    program, layers = IntegerProgram(), range(len(graph.options))
    costs = {("s", i, a): cost for i in layers for a, cost in enumerate(graph.node[i])}
    for i in layers:
        program.add({("s", i, a): 1 for a in range(len(graph.node[i]))}, 1, 1)
    for (i, j), rows in graph.edge.items():
        costs |= {("e", i, j, a, b): cost for a, row in enumerate(rows) for b, cost in enumerate(row)}
        for a, row in enumerate(rows):
            program.add({("s", i, a): -1} | {("e", i, j, a, b): 1 for b in range(len(row))}, 0, 0)
        for b in range(len(rows[0])):
            program.add({("s", j, b): -1} | {("e", i, j, a, b): 1 for a in range(len(rows))}, 0, 0)
    if memory_bytes < inf:
        sizes = {("s", i, a): size for i in layers for a, size in enumerate(graph.memory[i])}
        program.add({name: size / memory_bytes for name, size in sizes.items()}, 0, 1)
    if (chosen := program.solve(costs)) is None:
        return None
    picks = tuple(pick for _, _, pick in sorted(name for name in chosen if name[0] == "s"))
    return graph.cost(picks), picks


def alpa(problem: Problem) -> SearchResult:
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
    return SearchResult(plan, cost, looked_at)


def tree_shardings(shardings: Sequence[str], levels: int, mixed: bool = False) -> list[tuple[str, ...]]:
    """Every path from the root to a leaf: runs of shardings over so many levels of two."""
    paths = []
    for path in product(shardings, repeat=levels):
        runs = [sharding for sharding, _ in groupby(path)]
        if len(set(runs)) == len(runs) and (mixed or not {"dp", "sdp"} <= set(runs)):
            paths.append(path)
    return paths


def tree_options(problem: Problem, again: Sequence[bool] = (False,)) -> Families:
    shardings = lambda levels: tree_shardings(problem.shardings, len(levels))
    return lambda levels: [[Option(one, a) for one in shardings(levels) for a in again]]


def bmw_options(problem: Problem) -> Families:
    return tree_options(problem, with_recomputation(problem))


def even_cuts(problem: Problem) -> list[Cut]:
    """As many stages as there are groups of one size, layers spread over them."""
    layers, found = len(problem.layers), []
    for here in reversed(sizes_of(problem)):
        if (stages := problem.devices // here) <= layers:
            found.append(tuple((run, here) for run in balanced([1] * layers, stages)))
    return found


def galvatron(problem: Problem) -> SearchResult:
    """`cost`: seconds of a step. Of equal plans that with fewest stages."""
    return best_of(problem, [within(problem, cut, tree_options(problem)) for cut in even_cuts(problem)])


def galvatron_bmw(problem: Problem) -> SearchResult:
    """Looks at Galvatron's own cuts too, so it is never slower."""
    options, found = bmw_options(problem), []
    sizes = [problem.memory(layer, Option(()), ()) for layer in problem.layers]
    for even in even_cuts(problem):
        even_bytes = tuple(zip(balanced(sizes, len(even)), (devices for _, devices in even)))
        for start in (even, even_bytes):
            here = within(problem, start, options)
            found += [here, *lighter(problem, here, options)]
    return best_of(problem, found)


def lighter(problem: Problem, start: SearchResult, families: Families) -> list[SearchResult]:
    """Cuts in which the slowest stage gives its first or its last layer away, and so on from the fastest."""
    times = [stage_seconds(problem, stage) for stage in start.choice]
    runs = handed_over([stage.layers for stage in start.choice], times.index(max(times))) if times else []
    devices = [stage.devices for stage in start.choice]
    tried = [within(problem, tuple(zip(layers, devices)), families) for layers in runs]
    best = min(tried, key=lambda one: one.cost, default=start)
    return tried + (lighter(problem, best, families) if best.cost < start.cost else [])


def best_of(problem: Problem, results: Sequence[SearchResult]) -> SearchResult:
    cost, plan = cheapest([(one.cost, one.choice) for one in results], problem.memory_bytes)
    return SearchResult(plan, cost, sum(one.looked_at for one in results))


def within(problem: Problem, cut: Cut, families: Families) -> SearchResult:
    """The fastest options of a cut's stages; no choice if one stage does not fit."""
    plan, times, looked_at = [], [], 0
    for run, behind in with_behind(cut):
        options, time, looked = fastest_of_stage(problem, run, behind, families)
        looked_at += looked
        if time == inf:
            return SearchResult((), inf, looked_at)
        plan.append(Stage(*run, options))
        times.append(time)
    return SearchResult(tuple(plan), pipelined(times, problem.microbatches), looked_at)


Measure = Callable[[Plan], tuple[list[float], list[float]]]  # seconds and bytes of each stage


def aceso(problem: Problem, hops: int = 3, width: int = 20) -> SearchResult:
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
    return SearchResult(plan, scores[0](plan), measure.cache_info().currsize)


def starts(problem: Problem) -> list[Plan]:
    """Of each number of stages the cut with most even work, all layers with the first sharding."""
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


def slowest(problem: Problem, times: Sequence[float], sizes: Sequence[float]) -> list[int]:
    """Stages, the bottleneck first: by bytes if some are over the memory, else by seconds."""
    measured = sizes if max(sizes) > problem.memory_bytes else times
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
    """Its layers keep their innermost shardings as far as there are levels; outside them the first one; a new
    layer is as its neighbour."""
    old, levels, options = stage.layers, len(problem.mesh(devices)), []
    for i in layers:
        shardings, again = stage.options[min(max(i, old.start), old.stop - 1) - old.start]
        kept = shardings[max(0, len(shardings) - levels) :]
        options.append(Option((problem.shardings[0],) * (levels - len(kept)) + kept, again))
    return Stage(layers, devices, tuple(options))


def changes(problem: Problem, stage: Stage, which: Sequence[int]) -> list[tuple[Option, ...]]:
    """These layers with another sharding on one level, or with recomputation turned."""
    found = []
    for level in range(len(stage.options[0].shardings)):
        for sharding in problem.shardings:
            put = lambda o: o._replace(shardings=(*o.shardings[:level], sharding, *o.shardings[level + 1 :]))
            found.append(tuple(put(o) if i in which else o for i, o in enumerate(stage.options)))
    if any(problem.layers[stage.layers[i]].keeps for i in which):
        turned = [o._replace(again=not o.again) if i in which else o for i, o in enumerate(stage.options)]
        found.append(tuple(turned))
    return [options for options in found if options != stage.options]
