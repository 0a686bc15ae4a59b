"""Tests before jobs, and who gets what is left: against all choices there are, and jobs that are played."""

import random
from itertools import combinations, product
from math import prod

import pytest

from minitrain.systems.faults import validation
from minitrain.systems.faults.validation import Latent, defective, goodput, preflight, select, similarity
from tests.pipeline.lists import refuse


def test_proactive_validation():
    """A best period inside; Young's formula is right about it only where faults stay hidden for long."""
    short, long = Latent(40, 10, 8, 0.5), Latent(40, 1000, 800, 0.5)
    assert short.period() == pytest.approx(7.07, abs=0.01) and long.period() == short.period()
    found = {period: goodput(short, period) for period in (1, 2, 4, 7.07, 12, 24, 96, 1000)}
    best = max(found, key=found.get)
    assert best == 12 and found[12] - found[7.07] > 0.003 and found[12] > found[1000] + 0.01 > found[1] + 0.1
    late = {period: goodput(long, period, 1e6) for period in (2, 3.5, 7.07, 14, 28)}
    assert max(late, key=late.get) == 7.07
    refuse({"faults=": lambda: goodput(short, 1, 1e9), "period=0": lambda: goodput(short, 0)})


def test_superbench():
    draw = random.Random(3)
    for _ in range(30):
        tests = [(draw.uniform(1, 10), draw.uniform(0.1, 0.7)) for _ in range(8)]
        cost = lambda s: sum(tests[i][0] for i in s) + 60 * prod(1 - tests[i][1] for i in s)
        subsets = (s for size in range(9) for s in combinations(range(8), size))
        assert cost(select(tests, 60)) == pytest.approx(min(map(cost, subsets)))
    assert select([(5, 0.5)], 8) == () and select([(5, 0.5)], 12) == (0,), "5 against half of 8, of 12"
    assert similarity([1, 2, 4], [4, 2, 1]) == 1 and similarity([4, 4], [2, 4]) == 1 - 0.25
    nodes = {f"n{i}": [draw.gauss(100, 1) for _ in range(50)] for i in range(12)}
    assert defective(nodes) == []
    nodes["n5"], nodes["n8"] = ([x * slower for x in nodes[n]] for n, slower in (("n5", 0.9), ("n8", 0.98)))
    assert defective(nodes) == ["n5"] and defective(nodes, 0.985) == ["n5", "n8"]


def test_tpuv4_resilience():
    """40 jobs on 64 cubes, of which 8 break meanwhile; without the tests jobs meet them."""
    for tested in True, False:
        draw, free, bad, met, drained = random.Random(5), list(range(64)), set(), 0, []
        for job in range(40):
            if job % 5 == 0:
                bad.add(draw.choice(free))
            draw.shuffle(free)
            passes = lambda cube: not tested or cube not in bad
            cubes, out = preflight(free, draw.choice([1, 4, 8, 16]), passes)
            assert cubes, "spare ones stand in"
            met, drained = met + bool(bad & set(cubes)), drained + out
            free += cubes  # it ends
        assert (met, set(drained) <= bad, len(drained) >= 6) == (0, True, True) if tested else met > 5
    assert preflight(few := [1, 2, 3], 3, lambda cube: cube != 2) == ([], [2]) and few == [1, 3]


def test_dcgm_row_remap():
    found = validation.remap_actions([(0, 0), (0, 0), (1, 0), (1, 0), (0, 0), (1, 0), (1, 1)])
    assert found == [(2, "reset"), (5, "reset"), (6, "replace")] and validation.remap_actions([(0, 0)]) == []


def test_unicron():
    """Three tasks on 8 nodes, in 50 draws."""
    draw = random.Random(0)
    for _ in range(50):
        one = lambda: [0, *sorted(draw.uniform(1, 10) * k ** draw.uniform(0.5, 1) for k in range(1, 9))]
        worth = [one(), one(), one()]
        now, change = (3, 3, 2), [draw.uniform(0, 3) for _ in range(3)]
        value = lambda ks: sum(worth[t][k] - change[t] * (k != now[t]) for t, k in enumerate(ks))
        every = (ks for ks in product(range(9), repeat=3) if sum(ks) <= 8)
        plan = validation.shares(worth, now, change, 8)
        assert sum(plan) <= 8 and value(plan) == pytest.approx(max(map(value, every)))
    found = [validation.shares([[0, 5, 9.5], [0, 4, 8]], (1, 1), (cost, cost), 2) for cost in (0, 1)]
    assert found == [(2, 0), (1, 1)], "what a change costs keeps them"
