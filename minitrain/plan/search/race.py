"""All searches on one instance, each beside every choice of its own space, priced one by one.

    print(table(race(example())))        cost, gap to the best there is, looked at, share of the space

Spaces differ: a layer's words (with memory or without), placements of whole layers, cuts of tensors, stages.
So costs compare where the unit does and the space is the same; gap and share say how good a search is.
Dynamic programming prices partial choices: where the space is small they may be more than there are whole
ones.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from minitrain.plan.search import (
    aceso,
    alpa,
    automap,
    autotuning,
    flexflow,
    galvatron,
    hypar,
    nnscaler,
    piper,
    placement,
    stages,
    tofu,
    unity,
)
from minitrain.plan.search.autoddl import autoddl
from minitrain.plan.search.exhaustive import every, exhaustive
from minitrain.plan.search.optcnn import optcnn
from minitrain.plan.search.problem import Found, Level, Problem
from minitrain.plan.search.tensoropt import tensoropt
from minitrain.tables import aligned


class Row(NamedTuple):
    name: str
    unit: str  # of the cost: seconds of a microbatch, a step or a slowest stage; bytes; elements
    cost: float
    best: float  # of every choice in its space
    looked_at: int  # partial and whole choices it priced
    size: int  # of its space

    @property
    def gap(self) -> float:
        return self.cost / self.best - 1

    @property
    def share(self) -> float:
        return self.looked_at / self.size


def race(problem: Problem) -> list[Row]:
    """Of a chain of products on two or more levels of two devices."""
    rows = []
    for name, unit, search, truth in entrants(problem):
        found, best = search(), truth()
        rows.append(Row(name, unit, found.cost, best.cost, found.looked_at, best.looked_at))
    return rows


def entrants(problem: Problem) -> Iterator[tuple[str, str, Callable[[], Found], Callable[[], Found]]]:
    free, soap = replace(problem, memory_bytes=float("inf")), replace(problem, words=("dp", "col", "row"))
    slowest = min(level.bytes_per_s for level in problem.levels)
    flat = replace(problem, levels=(Level(problem.devices, slowest),))  # one axis over all devices
    tree, even = galvatron.tree_options(problem), galvatron.even_cuts(problem)
    again, products, two = galvatron.bmw_options(problem), as_products(flat), two_stages(problem)
    all_plans = lambda *space: lambda: stages.every_plan(problem, *space)
    yield "OptCNN", "microbatch", lambda: optcnn(free), lambda: exhaustive(free)
    yield "TensorOpt", "microbatch", lambda: tensoropt(problem), lambda: exhaustive(problem)
    yield "FlexFlow", "simulated", lambda: flexflow.flexflow(soap), lambda: every_simulated(soap)
    yield "HyPar", "bytes", lambda: hypar.hypar(free), lambda: hypar.hypar(free, every)
    yield "AutoDDL", "bytes", lambda: autoddl(free), lambda: exhaustive(free, "bytes")
    yield "Tofu", "elements", lambda: tofu.tofu(problem), lambda: tofu.every_halving(problem)
    yield "RL placement", "simulated", lambda: placement.reinforce(problem), lambda: every_placement(problem)
    yield "Automap", "microbatch", lambda: automap.automap(flat), lambda: every_cut(flat)
    yield "Unity", "microbatch", lambda: unity.optimize(*products), lambda: unity.every_graph(*products)
    yield "Piper", "slowest", lambda: piper.piper(problem), lambda: piper.every_piper_plan(problem)
    yield "Alpa", "step", lambda: alpa.alpa(problem), all_plans()
    yield "Aceso", "step", lambda: aceso.aceso(problem), all_plans()
    yield "Galvatron", "step", lambda: galvatron.galvatron(problem), all_plans(tree, even)
    yield (
        "Galvatron-BMW",
        "step",
        lambda: galvatron.galvatron_bmw(problem),
        all_plans(again, every_run(problem)),
    )
    yield "nnScaler", "simulated", lambda: nnscaler.search(*two), lambda: nnscaler.search(*two[:3])
    tuned = lambda: autotuning.autotune(problem)
    yield "DeepSpeed-Autotuning", "simulated", tuned, lambda: autotuning.every_config(problem)


def every_simulated(problem: Problem) -> Found:
    choices = list(product(problem.options(problem.levels), repeat=len(problem.layers)))
    time = lambda choice: flexflow.simulate(flexflow.tasks_of(problem, choice))
    return cheapest(choices, time)


def every_placement(problem: Problem) -> Found:
    choices = list(product(range(problem.devices), repeat=len(problem.layers)))
    return cheapest(choices, lambda choice: placement.step_seconds(problem, choice))


def every_cut(problem: Problem) -> Found:
    return cheapest(list(automap.reachable(problem)), automap.pricer(problem))


def cheapest(choices: list, cost: Callable) -> Found:
    costs = list(map(cost, choices))
    return Found(choices[costs.index(min(costs))], min(costs), len(costs))


def every_run(problem: Problem) -> list[stages.Cut]:
    """Cuts into stages of equal devices."""
    return [cut for cut in stages.all_cuts(problem) if len({devices for _, devices in cut}) == 1]


def as_products(problem: Problem):
    """The chain for Unity: x·W0·W1.., shapes and rates."""
    graph, shapes = ("input", "x"), {"x": (problem.rows, problem.layers[0].takes)}
    for i, layer in enumerate(problem.layers):
        graph, shapes[f"W{i}"] = ("matmul", graph, ("weight", f"W{i}")), (layer.takes, layer.gives)
    rates = unity.Rates(problem.devices, problem.flops_per_s, problem.levels[0].bytes_per_s)
    return graph, shapes, rates


def two_stages(problem: Problem):
    """nnScaler's program, two devices and what fits, then the constraints: the layers in two halves, forward
    and backward of two microbatches. A device has room for the weights of one half."""
    half, times = len(problem.layers) // 2, [layer.flops * problem.rows for layer in problem.layers]
    return nnscaler.pipeline_program(
        *(sum(some) / problem.flops_per_s for some in (times[:half], times[half:]))
    )


def table(rows: list[Row]) -> str:
    head = ("search", "cost", "in", "gap", "looked at", "of", "share")
    cells = [
        (row.name, f"{row.cost:.6g}", row.unit, f"{row.gap:.1%}", row.looked_at, row.size, f"{row.share:.2%}")
        for row in rows
    ]
    return aligned([head, *cells], left=(0, 2))
