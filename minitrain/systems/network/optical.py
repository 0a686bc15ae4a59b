"""Networks of light: wavelengths on a ring, and rings that are chosen together with the strategy.

    wavelengths(n, flows)    SiP-ML's ring: on each segment a flow needs a wavelength of its own there
    turns(n, flows)          mirrors: in each turn a port sends to one and hears one
    totients(n)              steps p for which 0, p, 2p, .. visits all n servers: another ring to sum over
    alternate(n, degree)     TopoOpt: the best strategy for the topology, the best topology for it, ...

A wavelength is used again where its flows do not pass: neighbours need one, whatever n is; all pairs
n(n-1)/2. A port with d flows needs d turns, and first fit takes 2d-1 at most, since a flow finds no more than
2d-2 taken at its two ports. To all-reduce any ring is as good, so TopoOpt lets the other traffic choose the
rings; as neither half of the search makes the sum worse, it ends. Khani et al. 2021 (SiP-ML); Wang et al.
2023, arXiv:2202.00433 (TopoOpt). Differs: switching takes no time; a strategy is how far away every server's
one other partner is.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import combinations, count
from math import gcd
from typing import NamedTuple

from minitrain.ranks.checks import require_ints, require_positive_ints
from minitrain.systems.network.graph import Graph, loads, spray

RING_UNITS = 10  # that are all-reduced, for every unit to the partner


def wavelengths(n: int, flows: Iterable[tuple[int, int]]) -> list[int]:
    """[flow] -> the lowest wavelength that is free on all its segments of a ring in one direction."""
    return _first_fit(n, flows, lambda a, b: [(a + i) % n for i in range((b - a) % n)])


def turns(n: int, flows: Iterable[tuple[int, int]]) -> list[int]:
    """[flow] -> the first turn in which an optical switch with n ports each way can join its two."""
    return _first_fit(n, flows, lambda a, b: [("out", a), ("in", b)])


def _first_fit(n: int, flows: Iterable[tuple[int, int]], places: Callable[[int, int], list]) -> list[int]:
    require_positive_ints(1024, n=n)
    used, chosen = defaultdict(set), []
    for source, target in flows:
        require_ints(0, n - 1, source=source, target=target)
        taken = [used[place] for place in places(source, target)]
        chosen.append(next(number for number in count() if not any(number in each for each in taken)))
        for each in taken:
            each.add(chosen[-1])
    return chosen


def totients(n: int) -> list[int]:
    require_positive_ints(n=n)
    return [step for step in range(1, n) if gcd(step, n) == 1]


class Design(NamedTuple):
    steps: tuple[int, ...]  # a cable from every server i to i + p, for each p
    partner: int  # the other traffic goes from i to i + partner
    seconds: Fraction


def designed(n: int, steps: tuple[int, ...], partner: int) -> Design:
    """All-reduce over all the rings, both ways round, then the other traffic, on cables of 1."""
    require_positive_ints(256, n=n)
    require_ints(1, n - 1, steps=steps, partner=partner)
    network = Graph(range(n), [(i, (i + step) % n) for step in steps for i in range(n)], forwards=True)
    others = max(loads(network, [(i, (i + partner) % n) for i in range(n)], spray).values())
    return Design(steps, partner, Fraction(2 * (n - 1) * RING_UNITS, n * 2 * len(steps)) + others)


def alternate(n: int, degree: int) -> list[Design]:
    """From the first `degree` rings on, until neither half improves. Partners are 2 to n/2 - 1 away."""
    require_ints(6, 64, n=n)
    candidates = [step for step in totients(n) if step <= n // 2]
    require_positive_ints(len(candidates), degree=degree)
    history = [designed(n, tuple(candidates[:degree]), n // 2 - 1)]
    while len(history) < 2 or history[-1].seconds < history[-2].seconds:
        here, seconds = history[-1], lambda design: design.seconds
        strategies = (designed(n, here.steps, partner) for partner in range(2, n // 2))
        partner = min(strategies, key=seconds).partner
        topologies = (designed(n, steps, partner) for steps in combinations(candidates, degree))
        history.append(min(topologies, key=seconds))
    return history
