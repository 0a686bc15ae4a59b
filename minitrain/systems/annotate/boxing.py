"""From one placement to another: which collective that takes, and how many elements it sends. No torch.

    T elements, p ranks       -> S(i)                   -> B                    -> P
    S(i)                      all-to-all, for i ≠ j     all-gather              nothing (zeros around it)
                              (p-1)/p · T               (p-1) · T
    B                         nothing (a slice)         nothing                 nothing (one keeps it)
    P                         reduce-scatter            all-reduce              nothing
                              (p-1) · T                 2 (p-1) · T

Counted over all ranks of the axis: what one sends is the p-th part. On a mesh a tensor moves along one axis
after the other (`moves`), and T is what the other axes leave of it at that point.
Yuan et al. 2021, OneFlow, arXiv:2110.15032, table 2, for the same devices before and after.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from minitrain.ranks.checks import require_nonnegative, require_positive_ints
from minitrain.systems.annotate.signature import BROADCAST, PARTIAL, Place, Spec, Split


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
    """Elements sent by all ranks together, of a tensor that has so many whole: table 2."""
    require_positive_ints(ranks=ranks)
    require_nonnegative(elements=elements)
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
    now, found = list(source), []

    def move(axis: int, to: Place) -> None:
        if now[axis] != to:
            found.append(Move(axis, now[axis], to))
            now[axis] = to

    for axis in reversed(range(len(now))):
        outside = [pair for pair in zip(now[:axis], target[:axis]) if pair[0] != pair[1]]
        if isinstance(now[axis], Split) and any(now[axis] in pair for pair in outside):
            move(axis, BROADCAST)
    for axis, to in enumerate(target):
        move(axis, to)
    return found


def sent_along(path: list[Move], source: Spec, elements: int, ranks: tuple[int, ...]) -> list[Fraction]:
    """Elements that each move sends, over all groups of its axis together."""
    require_positive_ints(ranks=ranks)
    if len(source) != len(ranks):
        raise ValueError(f"places {source} on ranks {ranks}: give a place for each axis of the mesh")
    now, totals = list(source), []
    for axis, before, after in path:
        others = [place for place in enumerate(now) if place[0] != axis]
        cut = math.prod(ranks[other] for other, place in others if isinstance(place, Split))
        groups = math.prod(ranks) // ranks[axis]
        totals.append(groups * sent(before, after, Fraction(elements, cut), ranks[axis]))
        now[axis] = after
    return totals
