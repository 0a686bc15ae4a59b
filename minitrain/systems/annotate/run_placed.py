"""The program of a placed graph on real ranks: each computes with what it has, and collectives box the rest.

    results = run(placed, {"x": local_part(x, spec, groups), ...}, groups)        groups by axis, as in a Mesh

Every operator works on local slices as if they were whole: a product is an einsum over the local part of each
letter, which is why a contracted letter that is cut leaves a term of a sum. All that is sent is in `box`.
Memory: every tensor of the program, in every spec it was boxed to, until the end.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.ranks import collectives
from minitrain.ranks.checks import require_one_of
from minitrain.systems.annotate import plan
from minitrain.systems.annotate.plan import BROADCAST, PARTIAL, Op, Place, Placed, Spec, Split

Groups = Mapping[str, ProcessGroup]


def box(x: Tensor, source: Place, target: Place, group: ProcessGroup) -> Tensor:
    """x, this rank's part by `source`, as its part by `target`."""
    for place in (source, target):
        if not isinstance(place, Split):
            require_one_of((BROADCAST, PARTIAL, "Split(dim)"), place=place)
    ranks, rank = group.size(), group.rank()
    if source == target:
        return x
    if target == PARTIAL:  # what the others add is zero
        if source == BROADCAST:
            return x if rank == 0 else torch.zeros_like(x)
        parts = [x if other == rank else torch.zeros_like(x) for other in range(ranks)]
        return torch.cat(parts, source.dim)
    if source == BROADCAST:
        return x.chunk(ranks, target.dim)[rank].contiguous()
    if source == PARTIAL and target == BROADCAST:
        return collectives.all_reduce(x, group)
    if source == PARTIAL:
        return collectives.reduce_scatter(x, group, target.dim)
    if target == BROADCAST:
        return collectives.all_gather(x, group, source.dim)
    pieces = collectives.all_to_all(x, group, target.dim)  # piece j along the new dim goes to rank j
    return torch.cat(pieces.chunk(ranks, target.dim), source.dim)


def box_along(x: Tensor, source: Spec, target: Spec, groups: Groups) -> Tensor:
    """One axis after the other."""
    for axis, before, after in plan.moves(source, target):
        x = box(x, before, after, list(groups.values())[axis])
    return x


def local_part(x: Tensor, spec: Spec, groups: Groups) -> Tensor:
    """This rank's part of a tensor that all ranks have whole; sends nothing."""
    return box_along(x, (BROADCAST,) * len(spec), spec, groups)


def whole(x: Tensor, spec: Spec, groups: Groups) -> Tensor:
    return box_along(x, spec, (BROADCAST,) * len(spec), groups)


def run(placed: Placed, parts: Mapping[str, Tensor], groups: Groups) -> dict[str, Tensor]:
    """Every tensor of the graph as it is kept on this rank, from this rank's parts of the inputs."""
    ranks = {axis: group.size() for axis, group in groups.items()}
    if list(ranks.items()) != list(placed.axes.items()):
        raise ValueError(f"the graph is placed on {dict(placed.axes)}, the groups are {ranks}; use one mesh")
    inputs = placed.graph.inputs.items()
    local = {name: plan.local_shape(shape, placed.specs[name], ranks, name) for name, shape in inputs}
    given = {name: tuple(part.shape) for name, part in parts.items()}
    if given != local:
        raise ValueError(f"parts of {given}, and placed they are {local}; give local_part(..) of each input")
    there = {(name, placed.specs[name]): parts[name] for name in placed.graph.inputs}
    for step in placed.program():
        if isinstance(step, plan.Box):
            there[step.tensor, step.target] = box_along(there[step.tensor, step.source], *step[1:], groups)
            continue
        op, needs, made = step
        sizes = plan.letter_sizes(op, placed.graph.shapes)
        for cut, one in zip(ranks.values(), placed.chosen[op.name]):
            if one.letter:
                sizes[one.letter] //= cut
        operands = [there[name, spec] for name, spec in zip(op.inputs, needs)]
        there[op.name, made] = compute(op, operands, sizes)
    return {name: there[name, spec] for name, spec in placed.specs.items()}


def compute(op: Op, operands: list[Tensor], sizes: Mapping[str, int]) -> Tensor:
    """The operator on what is here; `sizes` of its letters, here."""
    if op.function != "product":
        return POINTWISE[op.function](*operands)
    *terms, result = op.terms
    kept = "".join(letter for letter in result if letter in "".join(terms))
    y = torch.einsum(f"{','.join(terms)}->{kept}", *operands)
    for dim, letter in enumerate(result):
        y = y if letter in kept else y.unsqueeze(dim)
    return y.expand([sizes[letter] for letter in result]).contiguous()


POINTWISE = {
    "add": lambda *terms: sum(terms[1:], terms[0]),
    "negate": torch.neg,
    "relu": torch.relu,
    "step": lambda x: (x > 0).to(x.dtype),
}


def evaluate(graph: plan.Graph, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor of the graph, on one process."""
    tensors = dict(values)
    for op in graph.ops:
        operands = [tensors[name] for name in op.inputs]
        tensors[op.name] = compute(op, operands, plan.letter_sizes(op, graph.shapes))
    return tensors
