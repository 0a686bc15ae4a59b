"""A graph placed on a mesh, and the program of one rank: operators, and between them what is boxed.

    placed = Placed(graph, {"x": 2, "y": 2}, specs={"w1": (BROADCAST, Split(1)), ..}, chosen={"h": (..), ..})
    placed.program()        [Compute h .., Compute y, Box y: (S(0), P) -> (S(0), B)]

`specs` says where each tensor is, `chosen` the signature of each operator along each axis. What an
operator needs and what it makes follow: operands are boxed from where they are kept to what its signature
asks for, its result from there to where it is kept. Whoever annotates, propagates or searches gives a Placed;
what follows is the same for all of them. A tensor that was boxed for one operator is there for the next: a
weight gathered in forward is not gathered again in backward, and takes memory until the end.

`collectives()` and `sent_elements()` are read from the program; run_placed.py does it on ranks. No torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from minitrain.systems.annotate.graph import Graph, Op
from minitrain.systems.annotate.signature import (
    BROADCAST,
    PARTIAL,
    Move,
    Place,
    Signature,
    Spec,
    Split,
    local_shape,
    moves,
    sent,
    sent_along,
    signatures,
)

Signatures = tuple[Signature, ...]  # of an operator: one for each axis of the mesh


class Box(NamedTuple):
    """One tensor goes from one spec to another."""

    tensor: str
    source: Spec
    target: Spec

    @property
    def moves(self) -> list[Move]:
        return moves(self.source, self.target)


class Compute(NamedTuple):
    """One operator on what this rank has: its operands and its result as the signatures say."""

    op: Op
    inputs: tuple[Spec, ...]
    output: Spec


@dataclass(frozen=True)
class Placed:
    graph: Graph
    axes: Mapping[str, int]  # ranks of each axis, the outermost first
    specs: Mapping[str, Spec]
    chosen: Mapping[str, Signatures]

    def __post_init__(self):
        for name, shape in self.graph.shapes.items():
            local_shape(shape, self.specs[name], self.axes, name)
        for op in self.graph.ops:
            assert all(one in signatures(op) for one in self.chosen[op.name]), op
            for name, spec in zip(op.tensors, (*self.needs(op), self.makes(op))):
                local_shape(self.graph.shapes[name], spec, self.axes, f"{op.name}: {name}")

    def needs(self, op: Op) -> list[Spec]:
        """Where the operands must be."""
        return [tuple(one.inputs[at] for one in self.chosen[op.name]) for at in range(len(op.inputs))]

    def makes(self, op: Op) -> Spec:
        """Where the result is."""
        return tuple(one.output for one in self.chosen[op.name])

    def program(self) -> list[Box | Compute]:
        there = {(name, self.specs[name]) for name in self.graph.inputs}
        steps: list[Box | Compute] = []

        def box(name: str, source: Spec, target: Spec) -> None:
            if (name, target) not in there:
                steps.append(Box(name, source, target))
                there.add((name, target))

        for op in self.graph.ops:
            needs, made, kept = self.needs(op), self.makes(op), self.specs[op.name]
            for name, spec in zip(op.inputs, needs):
                box(name, self.specs[name], spec)
            steps.append(Compute(op, tuple(needs), made))
            there.add((op.name, made))
            box(op.name, made, kept)
        return steps

    def collectives(self) -> Counter[tuple[str, str]]:
        """How often each is called, by (collective, axis)."""
        return Counter(key for key, _ in self._sent())

    def sent_elements(self) -> dict[tuple[str, str], Fraction]:
        """By all ranks together, by (collective, axis)."""
        total: Counter[tuple[str, str]] = Counter()
        for key, elements in self._sent():
            total[key] += elements
        return dict(total)

    def _sent(self):
        names, ranks = list(self.axes), tuple(self.axes.values())
        for step in self.program():
            if isinstance(step, Box):
                elements = math.prod(self.graph.shapes[step.tensor])
                for move, count in zip(step.moves, sent_along(step.moves, step.source, elements, ranks)):
                    if move.collective:
                        yield (move.collective, names[move.axis]), count


def cheapest(graph: Graph, op: Op, places: Sequence[Place | None], ranks: int, choices=None) -> Signature:
    """Along one axis the signature whose operands and result cost least to box, then that which leaves most
    of them as they are, then the first. `places`: where the operands are and the result is to be; None will
    be as the signature has it. A slice is not made a term of a sum: free, it only puts off a cost."""

    def cost(one: Signature) -> tuple:
        boxes = [*zip(op.inputs, places, one.inputs), (op.name, one.output, places[-1])]
        boxes = [(name, at, to) for name, at, to in boxes if None not in (at, to)]
        elements = sum(sent(at, to, math.prod(graph.shapes[name]), ranks) for name, at, to in boxes)
        put_off = any(isinstance(at, Split) and to == PARTIAL for _, at, to in boxes)
        return put_off, elements, sum(at != to for _, at, to in boxes)

    return min(choices or signatures(op), key=cost)


def place(
    graph: Graph,
    axes: Mapping[str, int],
    known: Mapping[tuple[str, str], Place],
    chosen: Mapping[tuple[str, str], Signature],
) -> Placed:
    """From what is known by (tensor, axis) and chosen by (operator, axis). Other tensors are whole, of other
    operators it is the cheapest."""
    specs = {name: tuple(known.get((name, axis), BROADCAST) for axis in axes) for name in graph.shapes}
    full = {}
    for op in graph.ops:
        signatures_ = []
        for at, (axis, ranks) in enumerate(axes.items()):
            here = [specs[name][at] for name in op.tensors]
            signatures_.append(chosen.get((op.name, axis)) or cheapest(graph, op, here, ranks))
        full[op.name] = tuple(signatures_)
    return Placed(graph, axes, specs, full)
