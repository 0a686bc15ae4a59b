"""Whose memory holds whose checkpoint, and what k failures at once leave. No torch.

N machines stand in rings; each keeps its own state and that of the m - 1 before it in its ring (Gemini):

    groups    rings of m where m divides N; else the last one has m + N mod m machines ("mixed")
    ring      one ring of N

A state is lost when m neighbours of a ring fail: s/(s-k)·[x^k](1 + x + .. + x^(m-1))^(s-k) sets of k < s
failures leave a ring of s whole, and rings multiply as polynomials in x. Where m divides N, no placement
survives k = m more often; else mixed is at most (2m-3)/C(N,m) below the best.
Wang et al. 2023 (Gemini), SOSP. Differs: when copies travel is left to systems/checkpoint.
"""

from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction
from math import comb
from typing import NamedTuple

import numpy

from minitrain.plan.simulate.links import Number
from minitrain.ranks.checks import require_nonnegative, require_positive_ints


def groups(machines: int, replicas: int) -> list[range]:
    """Gemini's rings: of `replicas` machines each; what is left over joins the last."""
    starts = range(0, len(ring(machines, replicas)[0]) - replicas + 1, replicas)
    return [range(a, b) for a, b in zip(starts, [*starts[1:], machines])]


def ring(machines: int, replicas: int) -> list[range]:
    """All machines in one."""
    require_positive_ints(machines=machines)
    require_positive_ints(machines, replicas=replicas)
    return [range(machines)]


def holders(rings: Iterable[Sequence[int]], replicas: int) -> dict[int, frozenset[int]]:
    """The machines that have each machine's state: itself and the next in its ring."""
    require_positive_ints(replicas=replicas)
    return {
        machine: frozenset(members[(i + step) % len(members)] for step in range(replicas))
        for members in rings
        for i, machine in enumerate(members)
    }


def recovers(placement: dict[int, frozenset[int]], failed: Collection[int]) -> bool:
    """Whether each state has a holder that did not fail."""
    return all(not held <= set(failed) for held in placement.values())


def survivals(rings: Iterable[Sequence[int]], replicas: int) -> list[int]:
    """The sets of k failed machines that lose nothing, for k = 0 .. N."""
    total = numpy.array([1], dtype=object)
    for members in rings:
        size, one_ring = len(members), []
        for k in range(size):  # failed machines fill the gaps between those left, at most m - 1 in each
            gaps = size - k
            fillings = sum(
                (-1) ** full * comb(gaps, full) * comb(k - full * replicas + gaps - 1, gaps - 1)
                for full in range(k // replicas + 1)
            )
            one_ring.append(size * fillings // gaps)
        total = numpy.convolve(total, numpy.array([*one_ring, 0], dtype=object))
    return total.tolist()


def probability(survivals: Sequence[int], failures: int) -> Fraction:
    """That so many machines at once, any of them, lose nothing."""
    return Fraction(survivals[failures], comb(len(survivals) - 1, failures))


class Protection(NamedTuple):
    """Bytes a machine: kept beside its own state, sent at a save, received to have a lost state again."""

    stored: Number
    sent: Number
    received: Number


def replicas_cost(state_bytes: Number, replicas: int) -> Protection:
    """Of whole copies on `replicas` - 1 other machines."""
    require_positive_ints(replicas=replicas)
    require_nonnegative(state_bytes=state_bytes)
    return Protection((replicas - 1) * state_bytes, (replicas - 1) * state_bytes, state_bytes)
