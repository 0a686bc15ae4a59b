"""Where a tensor is, along one axis of ranks, in OneFlow's three words; how an operator can be cut; and what
it takes to get from one place to another.

    Split(d)    S(d)    a rank has its slice along dim d
    BROADCAST   B       each rank has all of it
    PARTIAL     P       each rank has a term, and the sum over the ranks is the tensor

On a mesh a tensor has one of them for every axis, in the order of the axes: `(Split(0), BROADCAST)`. If two
axes cut one dim, the first is the outer one. The signatures that an operator can have follow from its
equation alone. Cut along a letter, operands and result that have it are split there, operands that have not
are whole, and a result that has not is a sum with one term a rank:

    bd,df->bf     b: S(0), B -> S(0)     f: B, S(1) -> S(1)     d: S(1), S(0) -> P
                  linear in each operand:   P, B -> P           B, P -> P            and whole: B, B -> B

the six that the paper lists for a product of matrices. On a mesh a tensor moves along one axis after another
(`moves`); `sent` says at which price.
Yuan et al. 2021, OneFlow, arXiv:2110.15032, section 3. `sharding.Placement` tells of parameters, cut for good
over known groups; this is about any tensor between two operators, and about no group. No torch.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from minitrain.systems.annotate.graph import LINEAR, Op


class Split(NamedTuple):
    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


BROADCAST, PARTIAL = "B", "P"
Place = Split | str
Spec = tuple[Place, ...]  # of a tensor: one for each axis of the mesh


class Signature(NamedTuple):
    """Of an operator along one axis; `letter` is what is cut."""

    inputs: tuple[Place, ...]
    output: Place
    letter: str | None = None

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {self.output}"


def signatures(op: Op) -> list[Signature]:
    """All that are right, whatever the numbers; first the whole one."""
    *terms, result = op.terms
    right = [Signature((BROADCAST,) * len(terms), BROADCAST)]
    for letter in op.letters:
        inputs = tuple(_at(term, letter, BROADCAST) for term in terms)
        right.append(Signature(inputs, _at(result, letter, PARTIAL), letter))
    if op.function == "product":  # linear in each operand, but not in several at once
        for at in range(len(terms)):
            inputs = tuple(PARTIAL if i == at else BROADCAST for i in range(len(terms)))
            right.append(Signature(inputs, PARTIAL))
    elif op.function in LINEAR:
        right.append(Signature((PARTIAL,) * len(terms), PARTIAL))
    return right


def cut_along(op: Op, letter: str | None) -> Signature:
    return next(one for one in signatures(op) if one.letter == letter)


def _at(term: str, letter: str, otherwise: Place) -> Place:
    return Split(term.index(letter)) if letter in term else otherwise


def local_shape(shape: tuple[int, ...], spec: Spec, axes: dict[str, int], what: str) -> tuple[int, ...]:
    """What one rank has of a tensor; ValueError where a dim does not divide."""
    local = list(shape)
    for place, (axis, ranks) in zip(spec, axes.items()):
        if isinstance(place, Split):
            if local[place.dim] % ranks:
                size = f"{local[place.dim]} along dim {place.dim} of {list(shape)}"
                cure = "choose another size, or leave this dim whole"
                raise ValueError(f"{what}: {size} is not a multiple of the {ranks} ranks of {axis}; {cure}")
            local[place.dim] //= ranks
    return tuple(local)


# ---- from one place to another


class Move(NamedTuple):
    """Of one tensor along one axis."""

    axis: int
    source: Place
    target: Place

    @property
    def collective(self) -> str | None:
        return collective(self.source, self.target)


def collective(source: Place, target: Place) -> str | None:
    """What has to be called; None where nothing is sent."""
    if source == target or source == BROADCAST or target == PARTIAL:
        return None
    if source == PARTIAL:
        return "all_reduce" if target == BROADCAST else "reduce_scatter"
    return "all_gather" if target == BROADCAST else "all_to_all"


def sent(source: Place, target: Place, elements: int | Fraction, ranks: int) -> Fraction:
    """Elements sent by all ranks together, of a tensor of T elements whole: table 2 of the paper.

    T elements, p ranks   -> S(i)                   -> B                    -> P
    S(j)                  all-to-all, for i ≠ j     all-gather              nothing (zeros around it)
                          (p-1)/p · T               (p-1) · T
    B                     nothing (a slice)         nothing                 nothing (one keeps it)
    P                     reduce-scatter            all-reduce              nothing
                          (p-1) · T                 2 (p-1) · T
    """
    factor = {
        None: 0,
        "all_to_all": Fraction(ranks - 1, ranks),
        "all_gather": ranks - 1,
        "reduce_scatter": ranks - 1,
        "all_reduce": 2 * (ranks - 1),
    }
    return factor[collective(source, target)] * Fraction(elements)


def moves(source: Spec, target: Spec) -> list[Move]:
    """One axis after the other, from the outermost. What an inner axis has cut of a dim that an outer one is
    about to change would end in the wrong order: it is gathered first, and cut again when its turn comes."""
    if len(source) != len(target):
        raise ValueError(f"from {source} to {target}: give a place for each axis of the mesh")
    now, path = list(source), []

    def move(axis: int, to: Place) -> None:
        if now[axis] != to:
            path.append(Move(axis, now[axis], to))
            now[axis] = to

    for axis in reversed(range(len(now))):
        outside = [pair for pair in zip(now[:axis], target[:axis]) if pair[0] != pair[1]]
        if isinstance(now[axis], Split) and any(now[axis] in pair for pair in outside):
            move(axis, BROADCAST)
    for axis, to in enumerate(target):
        move(axis, to)
    return path


def sent_along(path: list[Move], source: Spec, elements: int, ranks: tuple[int, ...]) -> list[Fraction]:
    """Elements that each move sends, over all groups of its axis together."""
    now, totals = list(source), []
    for axis, before, after in path:
        others = [place for place in enumerate(now) if place[0] != axis]
        cut = math.prod(ranks[other] for other, place in others if isinstance(place, Split))
        groups = math.prod(ranks) // ranks[axis]
        totals.append(groups * sent(before, after, Fraction(elements, cut), ranks[axis]))
        now[axis] = after
    return totals
