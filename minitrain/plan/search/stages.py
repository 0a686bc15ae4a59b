"""Plans with stages: runs of layers on their own devices, and how long a step of such a pipeline takes.

    T = sum of t_i + (B - 1) · max of t_i        B microbatches, t_i forward and backward of one in stage i

Exact for GPipe where all backwards are as many times their forwards, messages included in t_i (proved against
pipeline/simulate.py); 1F1B with uneven stages takes up to a fifth less. Stage i of S holds min(B, S - i)
microbatches, as in 1F1B. Its input arrives over the outermost links, 1/d at each of its d devices, and a
gradient leaves likewise. Zheng et al. 2022 (Alpa), arXiv:2201.12023, section 5.1.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from math import inf, prod
from typing import NamedTuple

from minitrain.checks import whole
from minitrain.plan.search.problem import Found, Graph, Level, Option, Problem

Cut = tuple[tuple[range, int], ...]  # layers and devices of every stage


class Stage(NamedTuple):
    layers: range
    devices: int
    options: tuple[Option, ...]

    def __str__(self) -> str:
        return f"{self.layers[0]}-{self.layers[-1]} on {self.devices}: {' '.join(map(str, self.options))}"


Plan = tuple[Stage, ...]
OptionsOf = Callable[[Sequence[Level]], list[Option]]


def pipelined(times: Sequence[float], microbatches: int) -> float:
    return sum(times) + (microbatches - 1) * max(times)


def message_seconds(problem: Problem, layers: range, devices: int) -> float:
    if layers[0] == 0:
        return 0.0
    size = problem.layers[layers[0]].takes * problem.rows * problem.element_bytes
    return 2 * size / devices / problem.levels[0].bytes_per_s


def in_flight(problem: Problem, behind: int) -> int:
    return min(problem.microbatches, behind + 1)


def stage_graph(problem: Problem, layers: range, devices: int, behind: int, options: OptionsOf) -> Graph:
    """With `behind` stages after it."""
    if problem.skips:
        raise ValueError(f"stages of layers with skips {problem.skips}; give a chain")
    levels = problem.mesh(devices)
    held = in_flight(problem, behind)
    return problem.graph(layers, devices, options=options(levels), in_flight=held)


def seconds(problem: Problem, plan: Plan) -> float:
    """Of a step, computed from the layers up: what every search is held to."""
    return pipelined([stage_seconds(problem, stage) for stage in plan], problem.microbatches)


def stage_seconds(problem: Problem, stage: Stage) -> float:
    layers, devices, options = stage
    graph = problem.graph(layers, devices, options=sorted(set(options)))
    picks = [graph.options[0].index(option) for option in options]
    return graph.cost(picks) + message_seconds(problem, layers, devices)


def peak_bytes(problem: Problem, plan: Plan) -> list[float]:
    """Of a device of every stage."""
    found = []
    for behind, (layers, devices, options) in enumerate(reversed(plan)):
        levels, held = problem.mesh(devices), in_flight(problem, behind)
        each = zip(layers, options)
        found.append(sum(problem.memory(problem.layers[i], option, levels, held) for i, option in each))
    return found[::-1]


def cuts(layers: int, devices: int, sizes: Sequence[int], start: int = 0) -> Iterator[Cut]:
    """Every way to give all layers, in runs, and all devices, in groups of these sizes, to stages."""
    whole(layers=layers)
    if start == layers and devices == 0:
        yield ()
    for end, here in product(range(start + 1, layers + 1), sizes):
        if here <= devices:
            for rest in cuts(layers, devices - here, sizes, end):
                yield ((range(start, end), here), *rest)


def sizes_of(problem: Problem) -> list[int]:
    """Groups of devices that fill levels, of one or more nodes or of a part of one."""
    found = []
    for devices in range(1, problem.devices + 1):
        try:
            problem.mesh(devices)
        except ValueError:
            continue
        if problem.devices % devices == 0:
            found.append(devices)
    return found


def all_cuts(problem: Problem) -> list[Cut]:
    return list(cuts(len(problem.layers), problem.devices, sizes_of(problem)))


def stage_choices(problem: Problem, layers, devices, behind, options: OptionsOf) -> Iterator[tuple]:
    """(seconds, options) of everything that fits."""
    graph = stage_graph(problem, layers, devices, behind, options)
    message = message_seconds(problem, layers, devices)
    for picks in product(*map(range, map(len, graph.options))):
        if graph.bytes(picks) <= problem.memory_bytes:
            yield graph.cost(picks) + message, graph.choice(picks)


def space(problem: Problem, options: OptionsOf | None = None, among: Iterable[Cut] | None = None) -> int:
    """How many plans there are, fitting or not."""
    of = lambda devices: len((options or problem.options)(problem.mesh(devices)))
    every = all_cuts(problem) if among is None else among
    return sum(prod(of(devices) ** len(layers) for layers, devices in cut) for cut in every)


def plans(problem: Problem, options: OptionsOf | None = None, among: Iterable[Cut] | None = None):
    """Every (seconds, plan) that fits into memory, in the order of `among`, by default all cuts."""
    for cut in all_cuts(problem) if among is None else among:
        each = []
        for behind, (layers, devices) in enumerate(reversed(cut)):
            choices = stage_choices(problem, layers, devices, behind, options or problem.options)
            each.insert(0, [(time, Stage(layers, devices, picked)) for time, picked in choices])
        for stages in product(*each):
            times, plan = zip(*stages)
            yield pipelined(times, problem.microbatches), plan


def every_plan(problem: Problem, options: OptionsOf | None = None, among=None) -> Found:
    """The fastest of all plans, of equal ones the first."""
    among = all_cuts(problem) if among is None else among
    time, plan = min(plans(problem, options, among), key=lambda found: found[0], default=(inf, ()))
    if not plan:
        raise ValueError(f"no plan fits into {problem.memory_bytes:,} bytes; give more memory or devices")
    return Found(plan, time, space(problem, options, among))
