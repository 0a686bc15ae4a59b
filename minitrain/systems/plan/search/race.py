"""All searches on one instance, each beside every choice of its own space, priced one by one.

    print(table(race(example())))        cost, gap to the best there is, looked at, share of the space

Spaces differ: a layer's words (with memory or without), placements of whole layers, cuts of tensors, stages.
So costs compare where the unit does and the space is the same; gap and share say how good a search is.
Dynamic programming prices partial choices: where the space is small they may be more than there are whole
ones.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from typing import NamedTuple

from minitrain.ranks.tables import aligned
from minitrain.systems.plan.search import (
    alpa,
    autotuning,
    flexflow,
    galvatron,
    nnscaler,
    piper,
    placement,
    tofu,
    unity,
)
from minitrain.systems.plan.search.aceso import aceso
from minitrain.systems.plan.search.autoddl import autoddl
from minitrain.systems.plan.search.automap import automap, pricer, reachable
from minitrain.systems.plan.search.exhaustive import every, exhaustive, least
from minitrain.systems.plan.search.hypar import hypar
from minitrain.systems.plan.search.optcnn import optcnn
from minitrain.systems.plan.search.problem import Found, Level, Problem
from minitrain.systems.plan.search.stages import Cut, all_cuts, every_plan
from minitrain.systems.plan.search.tensoropt import tensoropt


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
    """(name, unit, search, every choice of its space)"""
    free, soap = replace(problem, memory_bytes=inf), replace(problem, words=("dp", "col", "row"))
    slowest = min(level.bytes_per_s for level in problem.levels)
    flat = replace(problem, levels=(Level(problem.devices, slowest),))  # one axis over all devices
    tree, again = galvatron.tree_options(problem), galvatron.bmw_options(problem)
    even, equal = galvatron.even_cuts(problem), every_run(problem)
    products, two = as_products(flat), two_stages(problem)
    for name, unit, of, search, truth in (
        ("OptCNN", "microbatch", free, optcnn, exhaustive),
        ("TensorOpt", "microbatch", problem, tensoropt, exhaustive),
        ("FlexFlow", "simulated", soap, flexflow.flexflow, every_simulated),
        ("HyPar", "bytes", free, hypar, lambda free: hypar(free, every)),
        ("AutoDDL", "bytes", free, autoddl, lambda free: exhaustive(free, "bytes")),
        ("Tofu", "elements", problem, tofu.tofu, tofu.every_halving),
        ("RL placement", "simulated", problem, placement.reinforce, every_placement),
        ("Automap", "microbatch", flat, automap, lambda flat: least(reachable(flat), pricer(flat))),
        ("Unity", "microbatch", products, lambda of: unity.optimize(*of), lambda of: unity.every_graph(*of)),
        ("Piper", "slowest", problem, piper.piper, piper.every_piper_plan),
        ("Alpa", "step", problem, alpa.alpa, every_plan),
        ("Aceso", "step", problem, aceso, every_plan),
        ("Galvatron", "step", problem, galvatron.galvatron, lambda of: every_plan(of, tree, even)),
        ("Galvatron-BMW", "step", problem, galvatron.galvatron_bmw, lambda of: every_plan(of, again, equal)),
        ("nnScaler", "simulated", two, lambda of: nnscaler.search(*of), lambda of: nnscaler.search(*of[:3])),
        ("DeepSpeed-Autotuning", "simulated", problem, autotuning.autotune, autotuning.every_config),
    ):
        yield name, unit, partial(search, of), partial(truth, of)


def every_simulated(problem: Problem) -> Found:
    choices = product(problem.options(problem.levels), repeat=len(problem.layers))
    return least(choices, lambda choice: flexflow.simulate(flexflow.tasks_of(problem, choice)))


def every_placement(problem: Problem) -> Found:
    choices = product(range(problem.devices), repeat=len(problem.layers))
    return least(choices, lambda choice: placement.step_seconds(problem, choice))


def every_run(problem: Problem) -> list[Cut]:
    """Cuts into stages of equal devices."""
    return [cut for cut in all_cuts(problem) if len({devices for _, devices in cut}) == 1]


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
