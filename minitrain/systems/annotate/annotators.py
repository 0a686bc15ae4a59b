"""Four systems that place a graph, each from other words. What follows is the same for all: see plan.py.

laid_out(graph, {"row": 2, "col": 2}, {"b": "row", "f": "col"})                         Mesh-TensorFlow
propagate(graph, axes, {"x": {"data": Split(0)}, "w1": {"model": Split(1)}})            GSPMD
choose(graph, {"x": 2}, {"u": (Split(1),), "v": (Split(0),)})                           OneFlow
apply(graph, axes, [Tactic("BP", "batch", {"x": 0}), Tactic("MP", "model", {"w1": 1})])  PartIR
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from minitrain.ranks.checks import require_one_of
from minitrain.systems.annotate import plan
from minitrain.systems.annotate.plan import BROADCAST, PARTIAL, Graph, Op, Place, Placed, Split


def laid_out(graph: Graph, axes: Mapping[str, int], layout: Mapping[str, str]) -> Placed:
    """Dims have names, the same everywhere, and a layout maps some to mesh axes: a tensor is cut along each
    of its dims that it maps; an operator that sums over such a dim leaves terms, added at once.

    A layout is legal if no tensor has two dims on one axis; without reshapes, it costs all-reduces alone.
    Shazeer et al. 2018, arXiv:1811.02084, section 3. Differs: a name is a letter.
    """
    names: dict[str, str] = {}
    for op in graph.ops:
        for name, term in zip(op.tensors, op.terms):
            if names.setdefault(name, term) != term:
                raise ValueError(f"{name} has the dims {names[name]!r}, in {op.name} {term!r}; give one name")
    known, chosen = {}, {}
    for axis in axes:
        for name, term in names.items():
            cut = [letter for letter in term if layout.get(letter) == axis]
            if len(cut) > 1:
                raise ValueError(f"illegal layout: {name} has {' and '.join(cut)} on {axis}; move one")
            known |= {(name, axis): Split(term.index(letter)) for letter in cut}
        for op in graph.ops:
            letters = [letter for letter in op.letters if layout.get(letter) == axis]
            if len(letters) > 1:  # in different operands, and in no result: two sums at once
                raise ValueError(f"illegal layout: {op.name} sums over {' and '.join(letters)} on {axis}")
            chosen[op.name, axis] = plan.cut_along(op, letters[0] if letters else None)
    return plan.place(graph, axes, known, chosen)


class Propagation:
    """What is known of (tensor, axis) and chosen for (operator, axis) so far; it only grows."""

    def __init__(self, graph: Graph, axes: Mapping[str, int]):
        self.graph, self.axes = graph, dict(axes)
        self.known: dict[tuple[str, str], Place] = {}
        self.chosen: dict[tuple[str, str], plan.Signature] = {}

    def annotate(self, name: str, axis: str, to: Place) -> None:
        require_one_of(self.graph.shapes, tensor=name)
        require_one_of(self.axes, axis=axis)
        if isinstance(to, Split) and not 0 <= to.dim < len(self.graph.shapes[name]):
            raise ValueError(f"{name} {list(self.graph.shapes[name])} has no dim {to.dim} to cut over {axis}")
        if to == PARTIAL and name in self.graph.inputs:
            raise ValueError(f"{name} is an input, and no sum over {axis}; split it or leave it whole")
        self.known[name, axis] = to

    def complete(self, axis: str) -> None:
        """Until nothing changes; after each step operators that leave dims as they are have precedence."""
        in_order = sorted(self.graph.ops, key=lambda op: op.function == "product")
        while any(self._cut(op, axis) for op in in_order):
            pass

    def _cut(self, op: Op, axis: str) -> bool:
        places = [self.known.get((name, axis)) for name in op.tensors]
        letters = [term[to.dim] for term, to in zip(op.terms, places) if isinstance(to, Split)]
        if not letters or (op.name, axis) in self.chosen:
            return False
        choices = [plan.cut_along(op, letter) for letter in dict.fromkeys(letters)]
        one = self.chosen[op.name, axis] = plan.cheapest(self.graph, op, places, self.axes[axis], choices)
        for name, to in zip(op.tensors, (*one.inputs, one.output)):
            if isinstance(to, Split):
                self.known.setdefault((name, axis), to)
        return True

    def placed(self) -> Placed:
        return plan.place(self.graph, self.axes, self.known, self.chosen)


def propagate(graph: Graph, axes: Mapping[str, int], annotations: Mapping[str, Mapping]) -> Placed:
    """From annotations of a few tensors, by tensor and axis, all others follow.

    An operator is cut along the letter along which one of its tensors is; its other tensors that have this
    letter and no placement yet get it, both ways, until nothing changes. Operators that leave dims as is come
    first: they cost nothing where their tensors agree. What is annotated stays; an axis that it does not name
    is open. Of two letters that compete for an axis the one that costs less to box wins. What nothing reaches
    is whole. Xu et al. 2021, arXiv:2105.04663, sections 3 and 4. Differs: uneven dims are refused.
    """
    state = Propagation(graph, axes)
    for name, places in annotations.items():
        for axis, to in places.items():
            state.annotate(name, axis, to)
    for axis in axes:
        state.complete(axis)
    return state.placed()


def choose(graph: Graph, axes: Mapping[str, int], given: Mapping[str, plan.Spec]) -> Placed:
    """Operator by operator, of all signatures the one that costs least to box. `given`: of inputs (others
    are whole), and of results that must stay so.

    A result stays as it comes out, also as terms of a sum: in (u · v) · w the product with w is linear, so
    the terms are added once, at the end, and only if somebody asks for more than P. Yuan et al. 2021,
    arXiv:2110.15032, section 3. Differs: what the computation itself costs is not weighed.
    """
    specs = {name: given.get(name, (BROADCAST,) * len(axes)) for name in graph.inputs}
    chosen = {}
    for op in graph.ops:
        known = [*(specs[name] for name in op.inputs), given.get(op.name, (None,) * len(axes))]
        each = zip(zip(*known), axes.values())
        chosen[op.name] = tuple(plan.cheapest(graph, op, places, ranks) for places, ranks in each)
        specs[op.name] = given.get(op.name, tuple(one.output for one in chosen[op.name]))
    return Placed(graph, axes, specs, chosen)


class Tactic(NamedTuple):
    """`cuts`: of some tensors the dim that is cut over `axis`."""

    name: str
    axis: str
    cuts: Mapping[str, int]


def apply(graph: Graph, axes: Mapping[str, int], schedule: Iterable[Tactic]) -> Iterator[Placed]:
    """The placed graph after each tactic, which cuts a few tensors over one axis and completes the rest.

    Earlier ones have precedence: where ZeRO-3 finds an operator that BP has cut over `batch` already, w1 is
    gathered in front of it and the operator stays as it is. So the order decides what GSPMD leaves to costs.
    Alabed et al. 2024, arXiv:2401.11202. Differs: a graph is placed and then lowered, where there each tactic
    rewrites loops of an intermediate language.
    """
    state = Propagation(graph, axes)
    for tactic in schedule:
        for name, dim in tactic.cuts.items():
            if (name, tactic.axis) in state.known:
                raise ValueError(f"tactic {tactic.name}: {name} is placed on {tactic.axis}; name another")
            state.annotate(name, tactic.axis, Split(dim))
        state.complete(tactic.axis)
        yield state.placed()
