"""PartIR: a schedule of tactics, one after the other; each cuts a few tensors over one axis and spreads.

    schedule = [Tactic("BP", "batch", {"x": 0}),                       x S(0) over batch
                Tactic("MP", "model", {"w1": 1}),                      columns of w1, hence rows of w2
                Tactic("Z3", "batch", {"w1": 0, "w2": 1})]             ZeRO-3: parameters over batch as well

    for step in apply(graph, {"batch": 2, "model": 2}, schedule):
        print(step.tactic.name, step.placed.collectives())

Earlier tactics have precedence: where Z3 finds an operator that BP has cut over `batch` already, w1 is
gathered in front of it and the operator stays as it is. So the order decides what GSPMD leaves to costs, and
what each tactic adds can be read: on a training step of an MLP BP has an all-reduce for each gradient, MP
adds one for y, Z3 turns those of gradients into reduce-scatters and adds a gather for each parameter.

Alabed et al. 2024, PartIR, arXiv:2401.11202. Differs: a graph is placed and then lowered, where there each
tactic rewrites loops of an intermediate language. What competes within one tactic goes to the cheaper.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from minitrain.systems.annotate.graph import Graph
from minitrain.systems.annotate.plan import Placed
from minitrain.systems.annotate.propagate import Propagation
from minitrain.systems.annotate.signature import Split


class Tactic(NamedTuple):
    """`cuts`: of some tensors the dim that is cut over `axis`."""

    name: str
    axis: str
    cuts: Mapping[str, int]


class Step(NamedTuple):
    tactic: Tactic
    placed: Placed


def apply(graph: Graph, axes: Mapping[str, int], schedule: Iterable[Tactic]) -> Iterator[Step]:
    """The placed graph after each tactic."""
    state = Propagation(graph, axes)
    for tactic in schedule:
        for name, dim in tactic.cuts.items():
            if (name, tactic.axis) in state.known:
                found = f"is {state.known[name, tactic.axis]} over {tactic.axis} by an earlier one"
                raise ValueError(f"tactic {tactic.name}: {name} {found}; name another tensor or axis")
            state.annotate(name, tactic.axis, Split(dim))
        state.spread(tactic.axis)
        yield Step(tactic, state.placed())
