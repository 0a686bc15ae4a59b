"""OneFlow: inputs have signatures of S, B and P, and each operator takes the one that is cheapest to reach.

    choose(graph, {"x": 2}, {"u": (Split(1),), "v": (Split(0),)})

Operator by operator, along each axis, of all signatures that its equation allows (signature.py) that one is
taken which costs least to box, by the sums of table 2 (boxing.py). A result stays as it comes out,
also as terms of a sum: in (u · v) · w the product with w is linear too, so that the terms are added once, at
the end, and only if somebody asks for more than P. That is what the letter P is for.

Yuan et al. 2021, OneFlow, arXiv:2110.15032, section 3. Differs: what the computation itself costs is not
weighed, so of two signatures that send as much the one that changes fewest operands is taken.
"""

from __future__ import annotations

from collections.abc import Mapping

from minitrain.systems.annotate.graph import Graph
from minitrain.systems.annotate.plan import Placed, cheapest
from minitrain.systems.annotate.signature import BROADCAST, Spec


def choose(graph: Graph, axes: Mapping[str, int], given: Mapping[str, Spec]) -> Placed:
    """`given`: of inputs (others are whole), and of results that must be kept so."""
    for name, spec in given.items():
        if name not in graph.shapes:
            raise ValueError(f"no tensor {name!r} to give a signature; there are {', '.join(graph.shapes)}")
        if len(spec) != len(axes):
            said = f"{name}: {len(spec)} letters for a mesh of {len(axes)} axes"
            raise ValueError(f"{said}; give one for each of {', '.join(axes)}")
    specs = {name: given.get(name, (BROADCAST,) * len(axes)) for name in graph.inputs}
    chosen = {}
    for op in graph.ops:
        known = [*(specs[name] for name in op.inputs), given.get(op.name, (None,) * len(axes))]
        each = zip(zip(*known), axes.values())
        chosen[op.name] = tuple(cheapest(graph, op, places, ranks) for places, ranks in each)
        specs[op.name] = given.get(op.name, tuple(one.output for one in chosen[op.name]))
    return Placed(graph, axes, specs, chosen)
