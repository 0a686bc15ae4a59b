"""Searches for plans with stages: layers and devices of each stage outside, options of its layers inside.

    T = sum of t_i + (B - 1) · max of t_i    B microbatches, t_i forward and backward of one in stage i
    F(l, d, s) = min over ends e and devices h of join(t(l..e, h, s-1 behind), F(e, d-h, s-1)): `by_stages`

Piper      the least time of the slowest stage: F with join = max; inside, fronts of (dp, tp)
Alpa       T: for each t_max the least sum of stages no slower; inside, one-hot picks s_i and e_ij of pairs
             min  sum s_i·node_i + sum e_ij·edge_ij    rows and columns of e_ij add up to s_i and s_j
           `clusters` of operators come first: about as many FLOPs, as few bytes between them as can be
Galvatron  a decision tree: pipeline degree, then dp, sdp and tp on the levels left, each kind in one run of
           levels, dp never with sdp; cuts are even. BMW recomputes, and moves layers off the slowest stage
Aceso      the bottleneck (most bytes if too many, else the slowest) gives a layer to a neighbour, swaps
           devices, changes a sharding or recomputation; up to `hops` changes in a row that only help together

T is exact for GPipe with backwards as many times their forwards (proved against pipeline/simulate.py); 1F1B
takes up to a fifth less. Stage i of S holds min(B, S - i) microbatches; messages are 1/d at each device.
Tarnawski et al. 2021 (Piper), NeurIPS; Zheng et al. 2022 (Alpa), arXiv:2201.12023, sections 4.2 to 5.2; Miao
et al. 2022 (Galvatron), arXiv:2211.13878; Wang et al. 2023 (BMW), arXiv:2307.02031; Liu et al. 2024 (Aceso),
EuroSys. Differs: chains; Piper is exact inside; no overlap; Aceso ranks nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, partial
from itertools import combinations, groupby, pairwise, product
from math import inf, prod
from operator import itemgetter
from typing import NamedTuple

from minitrain.pipeline.partition import balanced
from minitrain.ranks.checks import require_nonnegative, require_positive, require_positive_ints
from minitrain.systems.plan.integer_program import IntegerProgram
from minitrain.systems.plan.search.layerwise import frontier
from minitrain.systems.plan.search.problem import (
    SHARED,
    Graph,
    Layer,
    Option,
    Problem,
    SearchResult,
    cheapest,
)

Run = tuple[range, int]  # layers and devices of a stage
Cut = tuple[Run, ...]
Families = Callable[[Sequence], list[list[Option]]]  # of levels; a stage's layers take options from one


class Stage(NamedTuple):
    layers: range
    devices: int
    options: tuple[Option, ...]


Plan = tuple[Stage, ...]


def pipelined(times: Sequence[float], microbatches: int) -> float:
    return sum(times) + (microbatches - 1) * max(times)


def seconds(problem: Problem, plan: Plan) -> float:
    """Of a step, computed from the layers up: what every search is held to."""
    return pipelined([stage_seconds(problem, stage) for stage in plan], problem.microbatches)


@lru_cache(1 << 16)
def stage_seconds(problem: Problem, stage: Stage) -> float:
    layers, devices, options = stage
    return problem.cost(options, layers, devices) + message_seconds(problem, layers, devices)


def message_seconds(problem: Problem, layers: range, devices: int) -> float:
    if layers[0] == 0:
        return 0.0
    size = problem.layers[layers[0]].takes * problem.rows * problem.element_bytes
    return 2 * size / devices / problem.levels[0].bytes_per_s


def peak_bytes(problem: Problem, plan: Plan) -> list[float]:
    """Of a device of every stage."""
    return [stage_bytes(problem, stage, behind) for stage, behind in with_behind(plan)]


@lru_cache(1 << 16)
def stage_bytes(problem: Problem, stage: Stage, behind: int) -> float:
    levels, held = problem.mesh(stage.devices), in_flight(problem, behind)
    layers = problem.layers[stage.layers.start : stage.layers.stop]
    return sum(problem.memory(*one, levels, held) for one in zip(layers, stage.options))


def in_flight(problem: Problem, behind: int) -> int:
    return min(problem.microbatches, behind + 1)


def with_behind(stages: Sequence) -> list[tuple]:
    """Each with the number of stages after it."""
    return list(zip(stages, reversed(range(len(stages)))))


def sizes_of(problem: Problem) -> list[int]:
    """Groups of devices that fill levels, of one or more nodes or of a part of one."""
    sizes, inside = {1}, 1
    for level in reversed(problem.levels):
        sizes |= {inside * part for part in range(1, level.devices + 1)}
        inside *= level.devices
    return sorted(size for size in sizes if problem.devices % size == 0)


def all_cuts(problem: Problem, start: int = 0, devices: int | None = None) -> list[Cut]:
    """Every way to give all layers, in runs, and all devices, in groups that fill levels, to stages."""
    devices, layers = problem.devices if devices is None else devices, len(problem.layers)
    found: list[Cut] = [()] if start == layers and devices == 0 else []
    for end, here in product(range(start + 1, layers + 1), sizes_of(problem)):
        if here <= devices:
            rest = all_cuts(problem, end, devices - here)
            found += [((range(start, end), here), *cut) for cut in rest]
    return found


def handed_over(runs: Sequence[range], at: int) -> Iterator[list[range]]:
    """The stage `at` gives its first layer to the one before it, or its last to the one behind."""
    for boundary, moved in ((at, 1), (at + 1, -1)):
        if 0 < boundary < len(runs) and len(runs[at]) > 1:
            ends = [runs[0].start, *(run.stop for run in runs)]
            ends[boundary] += moved
            yield [range(a, b) for a, b in pairwise(ends)]


def with_recomputation(problem: Problem) -> tuple[bool, ...]:
    """Of an option, whether inner results may be computed again: nothing to choose where no layer has any."""
    return (False, True) if any(layer.keeps for layer in problem.layers) else (False,)


def stage_graphs(problem: Problem, run: Run, behind: int, families: Families | None = None) -> list[Graph]:
    """One of each family, with `behind` stages after it."""
    if problem.skips:
        raise ValueError(f"stages of layers with skips {problem.skips}; give a chain")
    layers, devices = run
    levels, held = problem.mesh(devices), in_flight(problem, behind)
    every = [problem.options(levels)] if families is None else families(levels)
    return [problem.graph(layers, devices, [options] * len(layers), in_flight=held) for options in every]


def every_plan(
    problem: Problem, families: Families | None = None, among=None, time=pipelined
) -> SearchResult:
    """The fastest of all plans, or of cuts `among` them, of equal ones the first. `time` grows with each
    stage's, so a stage is priced with all its choices once, wherever it stands. Looked at: plans."""

    @cache
    def fastest(run: Run, behind: int) -> tuple[float, Stage | None, int]:
        graphs, best = stage_graphs(problem, run, behind, families), (inf, None)
        for graph in graphs:
            for cost, size, picks in graph.every():
                if size <= problem.memory_bytes and cost < best[0]:
                    best = cost, Stage(*run, graph.choice(picks))
        return best[0] + message_seconds(problem, *run), best[1], sum(graph.size for graph in graphs)

    found, space = [], 0
    for cut in all_cuts(problem) if among is None else among:
        times, plan, sizes = zip(*(fastest(*one) for one in with_behind(cut)))
        space += prod(sizes)
        if all(plan):
            found.append((time(times, problem.microbatches), plan))
    best, plan = cheapest(found, problem.memory_bytes)
    return SearchResult(plan, best, space)


def by_stages(problem: Problem, stage: Callable, join: Callable) -> Iterator[tuple[float, Plan]]:
    """(F, its plan) for 1, 2, .. stages. `stage(run, behind)`: (seconds, options); `join`: with the rest."""
    layers, sizes = len(problem.layers), sizes_of(problem)

    @cache
    def least(start: int, devices: int, stages: int) -> tuple[float, Plan]:
        if stages == 0:
            return (0.0, ()) if start == layers and devices == 0 else (inf, ())
        best = inf, ()
        for end, here in product(range(start + 1, layers + 1), sizes):
            run = range(start, end), here
            if here <= devices and (first := stage(run, stages - 1))[0] < inf:
                rest, plan = least(end, devices - here, stages - 1)
                if (total := join(first[0], rest)) < best[0]:
                    best = total, (Stage(*run, first[1]), *plan)
        return best

    for stages in range(1, min(layers, problem.devices) + 1):
        yield least(0, problem.devices, stages)


def fastest_of_stage(problem: Problem, run: Run, behind: int, families: Families | None) -> SearchResult:
    """Its options within memory; `cost` has the message, and is infinite if nothing fits."""
    best, looked_at = SearchResult((), inf, 0), 0
    for graph in stage_graphs(problem, run, behind, families):
        front, looked = frontier(graph, problem.memory_bytes)
        looked_at += looked
        if front and front[0][0] < best.cost:
            best = SearchResult(graph.choice(front[0][2]), front[0][0], 0)
    return SearchResult(best.choice, best.cost + message_seconds(problem, *run), looked_at)


def families_of(problem: Problem) -> Families:
    """A stage's first levels, none to all of them, are data-parallel; on the others its layers have one
    tensor-parallel sharding, or do all the same."""
    inside = [*(sharding for sharding in problem.shardings if sharding in SHARED), "all"]

    def family(dp: int, tp: int) -> list[Option]:
        shardings = dict.fromkeys(("dp",) * dp + (sharding,) * tp for sharding in inside)
        return [Option(one, again) for one in shardings for again in with_recomputation(problem)]

    return lambda levels: [family(dp, len(levels) - dp) for dp in range(len(levels) + 1)]


def piper(problem: Problem) -> SearchResult:
    """`cost`: seconds of the slowest stage. Of equal plans that with fewest stages."""
    looked_at = []

    @cache
    def inner(run: Run, behind: int) -> tuple[float, tuple[Option, ...]]:
        found = fastest_of_stage(problem, run, behind, families_of(problem))
        looked_at.append(found.looked_at)
        return found.cost, found.choice

    time, plan = cheapest(by_stages(problem, inner, max), problem.memory_bytes)
    return SearchResult(plan, time, sum(looked_at))


def intra(graph: Graph, memory_bytes: float = inf) -> tuple[float, tuple[int, ...]] | None:
    """(seconds, the pick of each layer) of the integer program's solution; None if nothing fits."""
    if memory_bytes < inf:
        require_positive(memory_bytes=memory_bytes)
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


def clusters(layers: Sequence[Layer], groups: int, slack: float = 0.5) -> list[range]:
    """Runs of layers, each of at most (1 + slack) times the mean FLOPs, of which the widest input behind the
    first is as narrow as can be; of such those with the least sum of squared FLOPs."""
    require_positive_ints(len(layers), groups=groups)
    require_nonnegative(slack=slack)
    most = (1 + slack) * sum(layer.flops for layer in layers) / groups

    @cache
    def evenest(end: int, left: int, widest: int) -> tuple[float, tuple[range, ...]]:
        found = [(inf if end or left else 0.0, ())]
        for start in range(end) if left else ():
            work = sum(layer.flops for layer in layers[start:end])
            if work <= most and (start == 0 or layers[start].takes <= widest):
                squares, runs = evenest(start, left - 1, widest)
                found.append((squares + work**2, (*runs, range(start, end))))
        return min(found, key=itemgetter(0))

    for widest in sorted({layer.takes for layer in layers}):
        squares, runs = evenest(len(layers), groups, widest)
        if squares < inf:
            return list(runs)
    raise ValueError(f"no {groups} groups of these layers are even within {slack=}; give more slack")


def alpa(problem: Problem, into: Sequence[range] | None = None) -> SearchResult:
    """`cost`: seconds of a step. Looked at: entries of integer programs and of the tables F. Stages are made
    of whole clusters, `into`, by default of layers."""
    looked_at, layers = 0, len(problem.layers)
    ends = {0, *(run.stop for run in into)} if into else {*range(layers + 1)}

    @cache
    def unlimited(run: Run) -> tuple[float, tuple[int, ...]]:
        nonlocal looked_at
        (graph,) = stage_graphs(problem, run, 0)
        looked_at += sum(map(len, graph.node)) + sum(len(edge) * len(edge[0]) for edge in graph.edge.values())
        return intra(graph)

    @cache
    def stage(run: Run, behind: int) -> tuple[float, tuple]:
        """Solved again only if the fastest does not fit beside so many microbatches."""
        if not {run[0].start, run[0].stop} <= ends:
            return inf, ()
        (graph,) = stage_graphs(problem, run, behind)
        solved = unlimited(run)
        if graph.bytes(solved[1]) > problem.memory_bytes:
            solved = intra(graph, problem.memory_bytes)
        if solved is None:
            return inf, ()
        return solved[0] + message_seconds(problem, *run), graph.choice(solved[1])

    def join(here: float, rest: float) -> float:
        nonlocal looked_at
        looked_at += 1
        return here + rest

    again, runs = problem.microbatches - 1, (range(*both) for both in combinations(sorted(ends), 2))
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


def tree_shardings(shardings: Sequence[str], levels: int) -> list[tuple[str, ...]]:
    """Every path from the root to a leaf: each kind in one run of levels of two, dp never with sdp."""
    paths = product(shardings, repeat=levels)
    in_runs = (path for path in paths if len(list(groupby(path))) == len({*path}))
    return [path for path in in_runs if not {"dp", "sdp"} <= {*path}]


def tree_options(problem: Problem, again: Sequence[bool] = (False,)) -> Families:
    """`again`: Galvatron never recomputes, BMW chooses it for each layer (`with_recomputation`)."""
    kinds = problem.shardings
    return lambda levels: [[Option(one, a) for one in tree_shardings(kinds, len(levels)) for a in again]]


def even_cuts(problem: Problem) -> list[Cut]:
    """As many stages as there are groups of one size, layers spread over them."""
    groups = ((problem.devices // here, here) for here in reversed(sizes_of(problem)))
    even = [1] * len(problem.layers)
    return [tuple((run, here) for run in balanced(even, n)) for n, here in groups if n <= len(even)]


def galvatron(problem: Problem) -> SearchResult:
    """`cost`: seconds of a step. Of equal plans that with fewest stages."""
    return best_of(problem, [within(problem, cut, tree_options(problem)) for cut in even_cuts(problem)])


def galvatron_bmw(problem: Problem) -> SearchResult:
    """Looks at Galvatron's own cuts too, so it is never slower."""
    options, found = tree_options(problem, with_recomputation(problem)), []
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


def aceso(problem: Problem, hops: int = 3, width: int = 20) -> SearchResult:
    """`choice` fits into memory. Looked at: different plans."""

    @cache
    def measure(plan: Plan) -> tuple[list[float], list[float]]:
        return [stage_seconds(problem, stage) for stage in plan], peak_bytes(problem, plan)

    def score(power: int, plan: Plan) -> float:
        times, held = measure(plan)
        step, share = pipelined(times, problem.microbatches), max(held) / problem.memory_bytes
        return step if share <= 1 else 2 * step * share**power

    scores = [partial(score, power) for power in (2, 4)]
    found = [improved(problem, *one, measure, hops, width) for one in product(starts(problem), scores)]
    fitting = [(scores[0](plan), plan) for plan in found if max(measure(plan)[1]) <= problem.memory_bytes]
    if not fitting:
        raise ValueError(f"found no plan in {problem.memory_bytes:,} bytes; give more memory or hops")
    cost, plan = cheapest(fitting)
    return SearchResult(plan, cost, measure.cache_info().currsize)


def starts(problem: Problem) -> list[Plan]:
    """Of each number of stages the cut with most even work, all layers with the first sharding."""
    work = lambda layers, devices: sum(problem.layers[i].flops for i in layers) / devices
    most = lambda cut: max(work(*run) for run in cut)
    first = lambda devices: problem.options(problem.mesh(devices))[0]
    even = sorted(all_cuts(problem), key=lambda cut: (len(cut), most(cut)))
    begun = [next(cuts) for _, cuts in groupby(even, key=len)]
    return [tuple(Stage(*run, (first(run[1]),) * len(run[0])) for run in cut) for cut in begun]


def improved(problem: Problem, plan: Plan, score: Callable, measure: Callable, hops: int, width: int) -> Plan:
    """Until no row of primitives helps, neither of the bottleneck nor of the stages behind it in order."""
    for place in range(len(plan)):
        tried = [plan]
        for _ in range(hops):
            at = ((old, slowest(problem, *measure(old))[place]) for old in tried)
            wide = (new for one in at for new in primitives(problem, *one))
            tried = sorted(dict.fromkeys(wide), key=score)[:width] or [plan]
            if score(tried[0]) < score(plan):
                return improved(problem, tried[0], score, measure, hops, width)
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
    layers = range(len(runs[at]))
    for which in [*([i] for i in layers), layers]:
        for changed in changes(problem, plan[at], which):
            yield (*plan[:at], plan[at]._replace(options=changed), *plan[at + 1 :])


def resized(problem: Problem, stage: Stage, layers: range, devices: int) -> Stage:
    """Layers keep their innermost shardings, outside is the first one; a new layer is as its neighbour."""
    old, levels, options = stage.layers, len(problem.mesh(devices)), []
    for i in layers:
        shardings, again = stage.options[min(max(i, old.start), old.stop - 1) - old.start]
        kept = shardings[max(0, len(shardings) - levels) :]
        options.append(Option((problem.shardings[0],) * (levels - len(kept)) + kept, again))
    return Stage(layers, devices, tuple(options))


def changes(problem: Problem, stage: Stage, which: Sequence[int]) -> list[tuple[Option, ...]]:
    """These layers with another sharding on one level, or with recomputation turned."""
    each = lambda change: tuple(change(o) if i in which else o for i, o in enumerate(stage.options))
    found = []
    for level, sharding in product(range(len(stage.options[0].shardings)), problem.shardings):
        with_it = lambda old: (*old[:level], sharding, *old[level + 1 :])
        found.append(each(lambda o: o._replace(shardings=with_it(o.shardings))))
    if any(problem.layers[stage.layers[i]].keeps for i in which):
        found.append(each(lambda o: o._replace(again=not o.again)))
    return [options for options in found if options != stage.options]
