"""Mesh-TensorFlow: dims have names, the same in the whole computation, and a layout maps some to mesh axes.

    laid_out(graph, {"row": 2, "col": 2}, {"b": "row", "f": "col"})

A tensor is cut along each of its dims that the layout maps; an operator that sums over such a dim leaves
terms of a sum, which are added at once. So data parallelism is a layout of one rule (b), tensor parallelism
another (f), and both together are the two rules above. A layout is legal if no tensor has two dims on one
axis. In return nothing is ever gathered or exchanged: all that a layout can cost are all-reduces.

Shazeer et al. 2018, Mesh-TensorFlow, arXiv:1811.02084, section 3. Differs: a name is a letter.
"""

from __future__ import annotations

from collections.abc import Mapping

from minitrain.systems.annotate.graph import Graph
from minitrain.systems.annotate.plan import Placed, place
from minitrain.systems.annotate.signature import Split, cut_along


def dim_names(graph: Graph) -> dict[str, str]:
    """The letters of every tensor; ValueError where two operators call them differently."""
    found: dict[str, str] = {}
    for op in graph.ops:
        for name, term in zip(op.tensors, op.terms):
            if found.setdefault(name, term) != term:
                said = f"{name} has the dims {found[name]!r}, and in {op.name} {term!r}"
                raise ValueError(f"{said}; a layout is by name, so give a dim one name everywhere")
    return found


def laid_out(graph: Graph, axes: Mapping[str, int], layout: Mapping[str, str]) -> Placed:
    """`layout`: the mesh axis of a dim, for those that are to be cut."""
    names = dim_names(graph)
    for letter, axis in layout.items():
        if axis not in axes:
            raise ValueError(f"layout {letter} -> {axis}: the mesh has {', '.join(axes)}")
        if not any(letter in term for term in names.values()):
            raise ValueError(f"layout {letter} -> {axis}: no tensor has a dim {letter!r}")
    for name, term in names.items():
        for axis in axes:
            if len(both := [letter for letter in term if layout.get(letter) == axis]) > 1:
                said = f"{name} ({term}) would be cut along {' and '.join(both)} over {axis}"
                raise ValueError(f"illegal layout: {said}; map one of them to another axis, or to none")
    known = {
        (name, layout[letter]): Split(term.index(letter))
        for name, term in names.items()
        for letter in term
        if letter in layout
    }
    chosen = {}
    for op in graph.ops:
        for axis in axes:
            letters = [letter for letter in op.letters if layout.get(letter) == axis]
            if len(letters) > 1:  # in different operands, and in no result: two sums at once
                raise ValueError(f"illegal layout: {op.name} sums over {' and '.join(letters)} on {axis}")
            chosen[op.name, axis] = cut_along(op, letters[0] if letters else None)
    return place(graph, axes, known, chosen)
