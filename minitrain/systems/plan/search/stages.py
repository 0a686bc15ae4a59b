"""Plans with stages: runs of layers on their own devices, and how long a step of such a pipeline takes.

    T = sum of t_i + (B - 1) · max of t_i        B microbatches, t_i forward and backward of one in stage i

Exact for GPipe where all backwards are as many times their forwards, messages included in t_i (proved against
pipeline/simulate.py); 1F1B with uneven stages takes up to a fifth less. Stage i of S holds min(B, S - i)
microbatches, as in 1F1B. Its input arrives over the outermost links, 1/d at each of its d devices, and a
gradient leaves likewise. Zheng et al. 2022 (Alpa), arXiv:2201.12023, section 5.1.

    F(l, d, s)   of layers l.. on d devices in s stages, the least
               = min over ends e and devices h of  join(t(l..e, h, s-1 behind), F(e, d-h, s-1))

is the dynamic program of Piper (join is max) and of Alpa (a sum of stages that are fast enough).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import product
from math import inf, prod
from typing import NamedTuple

from minitrain.systems.plan.search.problem import Graph, Level, Option, Problem, SearchResult, cheapest

Run = tuple[range, int]  # layers and devices of a stage
Cut = tuple[Run, ...]
Families = Callable[[Sequence[Level]], list[list[Option]]]  # a stage's layers take their options from one


class Stage(NamedTuple):
    layers: range
    devices: int
    options: tuple[Option, ...]

    def __str__(self) -> str:
        return f"{self.layers[0]}-{self.layers[-1]} on {self.devices}: {' '.join(map(str, self.options))}"


Plan = tuple[Stage, ...]


def pipelined(times: Sequence[float], microbatches: int) -> float:
    return sum(times) + (microbatches - 1) * max(times)


def seconds(problem: Problem, plan: Plan) -> float:
    """Of a step, computed from the layers up: what every search is held to."""
    return pipelined([stage_seconds(problem, stage) for stage in plan], problem.microbatches)


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


def stage_bytes(problem: Problem, stage: Stage, behind: int) -> float:
    levels, held = problem.mesh(stage.devices), in_flight(problem, behind)
    each = zip(stage.layers, stage.options)
    return sum(problem.memory(problem.layers[i], option, levels, held) for i, option in each)


def in_flight(problem: Problem, behind: int) -> int:
    return min(problem.microbatches, behind + 1)


def with_behind(stages: Sequence) -> list[tuple]:
    """Each with the number of stages after it."""
    return list(zip(stages, reversed(range(len(stages)))))


def cuts(layers: int, devices: int, sizes: Sequence[int], start: int = 0) -> Iterator[Cut]:
    """Every way to give all layers, in runs, and all devices, in groups of these sizes, to stages."""
    if start == layers and devices == 0:
        yield ()
    for end, here in product(range(start + 1, layers + 1), sizes):
        if here <= devices:
            for rest in cuts(layers, devices - here, sizes, end):
                yield ((range(start, end), here), *rest)


def sizes_of(problem: Problem) -> list[int]:
    """Groups of devices that fill levels, of one or more nodes or of a part of one."""
    sizes, inside = {1}, 1
    for level in reversed(problem.levels):
        sizes |= {inside * part for part in range(1, level.devices + 1)}
        inside *= level.devices
    return sorted(size for size in sizes if problem.devices % size == 0)


def all_cuts(problem: Problem) -> list[Cut]:
    return list(cuts(len(problem.layers), problem.devices, sizes_of(problem)))


def handed_over(runs: Sequence[range], at: int) -> Iterator[list[range]]:
    """The stage `at` gives its first layer to the one before it, or its last to the one behind."""
    starts = [runs[0].start, *(run.stop for run in runs)]
    for boundary, moved in ((at, 1), (at + 1, -1)):
        if 0 < boundary < len(runs) and len(runs[at]) > 1:
            ends = [start + moved * (i == boundary) for i, start in enumerate(starts)]
            yield [range(a, b) for a, b in zip(ends, ends[1:])]


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
    problem: Problem,
    families: Families | None = None,
    among: Iterable[Cut] | None = None,
    time: Callable[[Sequence[float], int], float] = pipelined,
) -> SearchResult:
    """The fastest of all plans, of equal ones the first. `time` grows with each stage's, so a stage is priced
    with all its choices once, wherever it stands. Looked at: plans, fitting or not."""

    @cache
    def fastest(run: Run, behind: int) -> tuple[float, Stage | None, int]:
        graphs, message = stage_graphs(problem, run, behind, families), message_seconds(problem, *run)
        priced = (
            (cost + message, Stage(*run, graph.choice(picks)))
            for graph in graphs
            for cost, size, picks in graph.every()
            if size <= problem.memory_bytes
        )
        best = min(priced, key=lambda found: found[0], default=(inf, None))
        return *best, sum(graph.size for graph in graphs)

    found, space = [], 0
    for cut in all_cuts(problem) if among is None else among:
        times, plan, sizes = zip(*(fastest(*one) for one in with_behind(cut)))
        space += prod(sizes)
        if all(plan):
            found.append((time(times, problem.microbatches), plan))
    best, plan = cheapest(found, problem.memory_bytes)
    return SearchResult(plan, best, space)


def by_stages(problem: Problem, stage: Callable, join: Callable) -> Iterator[tuple[float, Plan]]:
    """(F, its plan) for 1, 2, .. stages. `stage(run, behind)` is (seconds, options), `join` adds the seconds
    of a stage to those of the rest."""
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
