"""Wavelengths and rings: conflicts looked for segment by segment, coprime steps walked, searches enumerated."""

from collections import Counter
from fractions import Fraction
from itertools import combinations, permutations

import numpy as np

from minitrain.systems.network.optical import RING_UNITS, alternate, designed, totients, turns, wavelengths


def test_sip_ml():
    """No (segment, wavelength) twice; neighbours need one, all pairs n(n-1)/2, the load of a segment."""
    for n in (8, 12, 16):
        flows = list(permutations(range(n), 2))
        chosen = wavelengths(n, flows)
        places = [((a + i) % n, w) for (a, b), w in zip(flows, chosen) for i in range((b - a) % n)]
        assert len(places) == len(set(places)) and len(set(chosen)) == n * (n - 1) // 2 == len(places) // n
    assert [len(set(wavelengths(n, [(i, (i + 1) % n) for i in range(n)]))) for n in (8, 64, 256)] == [1, 1, 1]


def test_optical_computing():
    """In no turn a port is used twice; at most 2d-1 turns of the d that the busiest port needs, and d for flows by
    distance."""
    draw = np.random.default_rng(0)
    for n in (4, 6, 8):
        every = list(permutations(range(n), 2))
        for flows in (every, [every[i] for i in draw.integers(0, len(every), 20)]):
            chosen = turns(n, flows)
            busiest = max(Counter(end for a, b in flows for end in (("out", a), ("in", b))).values())
            for port in (0, 1):
                assert len({(turn, flow[port]) for turn, flow in zip(chosen, flows)}) == len(flows)
            assert busiest <= 1 + max(chosen) <= 2 * busiest - 1
        shifts = [(i, (i + k) % n) for k in range(1, n) for i in range(n)]
        assert turns(n, shifts) == [k for k in range(n - 1) for _ in range(n)], "all to all: n-1 turns"
    assert turns(3, [(0, 1), (1, 0), (0, 2), (2, 1)]) == [0, 0, 1, 1]


def seconds_by_matrix(n: int, steps: tuple, partner: int) -> Fraction:
    """All-reduce, and the other traffic over a circulant network, whose shortest paths are counted by powers of
    its matrix; all of a kind of cable are alike, so the first server's traffic is divided over the kinds."""
    moves = sorted({move for step in steps for move in (step, n - step)})
    ways, hops = {0: 1}, 0
    history = [ways]
    while partner not in history[-1]:
        after: dict[int, int] = {}
        for at, count in history[-1].items():
            for move in moves:
                after[(at + move) % n] = after.get((at + move) % n, 0) + count
        history.append(after)
        hops += 1
    to_go = [{(partner - at) % n: count for at, count in each.items()} for each in history]  # by symmetry
    load = dict.fromkeys(moves, Fraction(0))

    def walk(at: int, left: int, share: Fraction) -> None:
        if left:
            good = [move for move in moves if (at + move) % n in to_go[left - 1]]
            for move in good:
                load[move] += share / len(good)
                walk((at + move) % n, left - 1, share / len(good))

    walk(0, hops, Fraction(1))
    return Fraction(2 * (n - 1) * RING_UNITS, n) / (2 * len(steps)) + max(load.values())


def test_topoopt():
    """Rings for coprime steps; the search never gets worse and ends where no half of it can better."""
    assert totients(12) == [1, 5, 7, 11] and len(totients(16)) == 8
    for n in (12, 15, 16):
        walks = {p: len({p * i % n for i in range(n)}) for p in range(1, n)}
        assert totients(n) == [p for p, visited in walks.items() if visited == n]
    history = alternate(16, 2)
    seconds = [design.seconds for design in history]
    assert all(np.diff([float(each) for each in seconds]) <= 0)
    for steps, partner, found in history:
        assert found == seconds_by_matrix(16, steps, partner) == designed(16, steps, partner).seconds
    steps, partner, best = history[-1]
    assert best <= min(seconds_by_matrix(16, steps, other) for other in range(2, 8))
    assert best == min(seconds_by_matrix(16, rings, partner) for rings in combinations((1, 3, 5, 7), 2))
    assert [round(float(each), 2) for each in seconds] == [6.02, 5.35, 5.35]
