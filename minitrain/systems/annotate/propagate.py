"""GSPMD: annotate a few tensors, and the placements of all others follow operator by operator.

    propagate(graph, {"data": 2, "model": 2}, {"x": {"data": Split(0)}, "w1": {"model": Split(1)}})

        h = x · w1      b from x, f from w1      -> h (S(0), S(1))
        y = a · w2      f from a                 -> w2 (.., S(0)), and y is a sum over `model`: one all-reduce

An operator is cut along the letter along which one of its tensors is, and its other tensors that have this
letter and no placement yet get it, operands and result alike, in both directions until nothing changes.
Operators that leave dims as they are come first: they cost nothing where all their tensors agree. What is
annotated stays; an axis that an annotation does not name is open. Where two letters compete for an axis, the
one that costs less to box is taken. What nothing reaches is whole.

Xu et al. 2021, GSPMD, arXiv:2105.04663, sections 3 (annotations and how they are completed) and 4 (the
partitioner). Differs: dims that do not divide are refused, not padded; no operator looks at its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping

from minitrain.systems.annotate.graph import Graph, Op
from minitrain.systems.annotate.plan import Placed, cheapest, place
from minitrain.systems.annotate.signature import PARTIAL, Place, Signature, Split, cut_along


class Propagation:
    """What is known of (tensor, axis) and chosen for (operator, axis) so far; it only grows."""

    def __init__(self, graph: Graph, axes: Mapping[str, int]):
        self.graph, self.axes = graph, dict(axes)
        self.known: dict[tuple[str, str], Place] = {}
        self.chosen: dict[tuple[str, str], Signature] = {}

    def annotate(self, name: str, axis: str, to: Place) -> None:
        if name not in self.graph.shapes:
            raise ValueError(f"no tensor {name!r} to annotate; there are {', '.join(self.graph.shapes)}")
        if axis not in self.axes:
            raise ValueError(f"{name}: no axis {axis!r}; the mesh has {', '.join(self.axes)}")
        if isinstance(to, Split) and not 0 <= to.dim < len(self.graph.shapes[name]):
            raise ValueError(f"{name} {list(self.graph.shapes[name])} has no dim {to.dim} to cut over {axis}")
        if to == PARTIAL and name in self.graph.inputs:
            raise ValueError(f"{name} is an input, and no sum over {axis}; split it or leave it whole")
        self.known[name, axis] = to

    def spread(self, axis: str) -> None:
        """Until nothing changes; after each step operators that leave dims as they are have precedence."""
        in_order = sorted(self.graph.ops, key=lambda op: op.function == "product")
        while step := next(filter(None, (self._suggested(op, axis) for op in in_order)), None):
            op, one = step
            self.chosen[op.name, axis] = one
            for name, to in zip(op.tensors, (*one.inputs, one.output)):
                if isinstance(to, Split):
                    self.known.setdefault((name, axis), to)

    def _suggested(self, op: Op, axis: str) -> tuple[Op, Signature] | None:
        """The operator and how to cut it, if one of its tensors says so and nobody has said it before."""
        if (op.name, axis) in self.chosen:
            return None
        places = [self.known.get((name, axis)) for name in op.tensors]
        letters = [term[to.dim] for term, to in zip(op.terms, places) if isinstance(to, Split)]
        if not letters:
            return None
        choices = [cut_along(op, letter) for letter in dict.fromkeys(letters)]
        return op, cheapest(self.graph, op, places, self.axes[axis], choices)

    def placed(self) -> Placed:
        return place(self.graph, self.axes, self.known, self.chosen)


def propagate(
    graph: Graph, axes: Mapping[str, int], annotations: Mapping[str, Mapping[str, Place]]
) -> Placed:
    """From annotations by tensor and axis."""
    state = Propagation(graph, axes)
    for name, places in annotations.items():
        for axis, to in places.items():
            state.annotate(name, axis, to)
    for axis in axes:
        state.spread(axis)
    return state.placed()
