"""Where a tensor is, along one axis of ranks, in OneFlow's three words; and how an operator can be cut.

    Split(d)    S(d)    a rank has its slice along dim d
    BROADCAST   B       each rank has all of it
    PARTIAL     P       each rank has a term, and the sum over the ranks is the tensor

On a mesh a tensor has one of them for every axis, in the order of the axes: `(Split(0), BROADCAST)`. If two
axes cut one dim, the first is the outer one. The signatures that an operator can have follow from its
equation alone. Cut along a letter, operands and result that have it are split there, operands that have not
are whole, and a result that has not is a sum with one term a rank:

    bd,df->bf     b: S(0), B -> S(0)     f: B, S(1) -> S(1)     d: S(1), S(0) -> P
                  linear in each operand:   P, B -> P           B, P -> P            and whole: B, B -> B

the six that the paper lists for a product of matrices. Yuan et al. 2021, OneFlow, arXiv:2110.15032, section
3. `sharding.Placement` tells of parameters, cut for good over known groups; this is about any tensor between
two operators, and about no group: planners can read it. No torch.
"""

from __future__ import annotations

from typing import NamedTuple

from minitrain.ranks.checks import require_ints, require_one_of
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
    found = [Signature((BROADCAST,) * len(terms), BROADCAST)]
    for letter in op.letters:
        inputs = tuple(_at(term, letter, BROADCAST) for term in terms)
        found.append(Signature(inputs, _at(result, letter, PARTIAL), letter))
    if op.function == "product":  # linear in each operand, but not in several at once
        for at in range(len(terms)):
            inputs = tuple(PARTIAL if i == at else BROADCAST for i in range(len(terms)))
            found.append(Signature(inputs, PARTIAL))
    elif op.function in LINEAR:
        found.append(Signature((PARTIAL,) * len(terms), PARTIAL))
    return found


def cut_along(op: Op, letter: str | None) -> Signature:
    every = {one.letter: one for one in signatures(op)}
    require_one_of(every, letter=letter)
    return every[letter]


def _at(term: str, letter: str, otherwise: Place) -> Place:
    return Split(term.index(letter)) if letter in term else otherwise


def local_shape(shape: tuple[int, ...], spec: Spec, axes: dict[str, int], what: str) -> tuple[int, ...]:
    """What one rank has of a tensor; ValueError where a dim does not divide."""
    if shape:
        require_ints(shape=shape)
    local = list(shape)
    for place, (axis, ranks) in zip(spec, axes.items()):
        if isinstance(place, Split):
            if not 0 <= place.dim < len(shape):
                raise ValueError(f"{what} {list(shape)} has no dim {place.dim} to cut over {axis}")
            if local[place.dim] % ranks:
                found = f"{local[place.dim]} along dim {place.dim} of {list(shape)}"
                cure = "choose another size, or leave this dim whole"
                raise ValueError(f"{what}: {found} is not a multiple of the {ranks} ranks of {axis}; {cure}")
            local[place.dim] //= ranks
    return tuple(local)
