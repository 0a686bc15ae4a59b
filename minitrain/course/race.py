"""All searches on one instance, each beside every choice of its own space, priced one by one.

Spaces differ: shardings of layers (with memory or without), placements, cuts of tensors, stages. So costs
compare where unit and space are the same; gap (to the best there is) and share (of the space that was looked
at) say how good a search is. Dynamic programming prices partial choices, which may be more than whole ones.
"""

from dataclasses import replace
from itertools import product
from math import inf
from typing import NamedTuple

from minitrain.ranks.tables import aligned
from minitrain.systems.plan.search import layerwise, programs, simulated, staged
from minitrain.systems.plan.search.problem import Level, Problem, SearchResult, every, exhaustive, least
from minitrain.systems.plan.search.staged import Cut, all_cuts, every_plan


class Row(NamedTuple):
    name: str
    unit: str  # of the cost: seconds of a microbatch, a step or a slowest stage; bytes; elements
    cost: float
    best: float  # of every choice in its space
    looked_at: int  # partial and whole choices it priced
    size: int  # of its space

    gap = property(lambda self: self.cost / self.best - 1)
    share = property(lambda self: self.looked_at / self.size)


def race(problem: Problem) -> list[Row]:
    """Of a chain of products on two or more levels of two devices."""
    free, soap = replace(problem, memory_bytes=inf), replace(problem, shardings=("dp", "col", "row"))
    slowest = min(level.bytes_per_s for level in problem.levels)
    flat = replace(problem, levels=(Level(problem.devices, slowest),))  # one axis over all devices
    tree, recomputed = staged.tree_options(problem), staged.with_recomputation(problem)
    again = staged.tree_options(problem, recomputed)
    by_slowest = every_plan(problem, staged.families_of(problem), time=lambda times, _: max(times))
    even, equal = staged.even_cuts(problem), every_run(problem)
    products, two = as_products(flat), programs.pipeline_program(*halves(problem))
    entrants = (  # name, unit, search, every choice of its space
        ("OptCNN", "microbatch", layerwise.optcnn(free), exhaustive(free)),
        ("TensorOpt", "microbatch", layerwise.tensoropt(problem), exhaustive(problem)),
        ("FlexFlow", "simulated", simulated.flexflow(soap), every_simulated(soap)),
        ("HyPar", "bytes", layerwise.hypar(free), layerwise.hypar(free, every)),
        ("AutoDDL", "bytes", layerwise.autoddl(free), exhaustive(free, "bytes")),
        ("Tofu", "elements", layerwise.tofu(problem), layerwise.every_halving(problem)),
        ("RL placement", "simulated", simulated.reinforce(problem), every_placement(problem)),
        ("Automap", "microbatch", simulated.automap(flat), simulated.every_set_of_cuts(flat)),
        ("Unity", "microbatch", programs.optimize(*products), programs.every_graph(*products)),
        ("Piper", "slowest", staged.piper(problem), by_slowest),
        ("Alpa", "step", staged.alpa(problem), every_plan(problem)),
        ("Aceso", "step", staged.aceso(problem), every_plan(problem)),
        ("Galvatron", "step", staged.galvatron(problem), every_plan(problem, tree, even)),
        ("Galvatron-BMW", "step", staged.galvatron_bmw(problem), every_plan(problem, again, equal)),
        ("nnScaler", "simulated", programs.search(*two), programs.search(*two[:3])),
        ("DeepSpeed-Autotuning", "simulated", simulated.autotune(problem), simulated.every_config(problem)),
    )
    return [Row(*told, own.cost, best.cost, own.looked_at, best.looked_at) for *told, own, best in entrants]


def every_simulated(problem: Problem) -> SearchResult:
    choices = product(problem.options(problem.levels), repeat=len(problem.layers))
    return least(choices, lambda choice: max(simulated.simulate(simulated.tasks_of(problem, choice))))


def every_placement(problem: Problem) -> SearchResult:
    choices = product(range(problem.devices), repeat=len(problem.layers))
    return least(choices, lambda choice: simulated.placement_seconds(problem, choice))


def every_run(problem: Problem) -> list[Cut]:
    """Cuts into stages of equal devices."""
    return [cut for cut in all_cuts(problem) if len({devices for _, devices in cut}) == 1]


def as_products(problem: Problem):
    """The chain for Unity: x·W0·W1.., shapes and rates."""
    graph, shapes = ("input", "x"), {"x": (problem.rows, problem.layers[0].takes)}
    for i, layer in enumerate(problem.layers):
        graph, shapes[f"W{i}"] = ("matmul", graph, ("weight", f"W{i}")), (layer.takes, layer.gives)
    return graph, shapes, programs.Rates(problem.devices, problem.flops_per_s, problem.levels[0].bytes_per_s)


def halves(problem: Problem) -> list[float]:
    """Seconds forward of the first and of the last layers, nnScaler's two stages."""
    half, times = len(problem.layers) // 2, [layer.flops * problem.rows for layer in problem.layers]
    return [sum(some) / problem.flops_per_s for some in (times[:half], times[half:])]


def table(rows: list[Row]) -> str:
    head = ("search", "cost", "in", "gap", "looked at", "of", "share")
    cells = lambda r: (r.name, f"{r.cost:.6g}", r.unit, f"{r.gap:.1%}", r.looked_at, r.size, f"{r.share:.2%}")
    return aligned([head, *map(cells, rows)], left=(0, 2))
