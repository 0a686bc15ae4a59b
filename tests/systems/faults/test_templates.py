"""Pipelines for the nodes that are left: sums by listing them, survivors by drawing them, plans by trying all."""

import random
from fractions import Fraction
from itertools import combinations, combinations_with_replacement, pairwise, product
from statistics import fmean

import pytest

from minitrain.systems.faults.templates import instantiate, liveput, proactive, templates
from tests.pipeline.lists import refuse


def test_oobleck():
    """All numbers of nodes from (f + 1)·n0 to N have a sum of f + 1 pipelines or more."""
    tried = 0
    for failures in range(4):
        for nodes in range(2 * (failures + 1), 41):
            sizes = templates(nodes, 2, failures)
            for left in range(2 * (failures + 1), nodes + 1):
                found = instantiate(left, sizes, failures + 1)
                assert sum(found) == left and len(found) > failures and set(found) <= set(sizes)
                tried += 1
    assert tried == 2674
    draw = random.Random(1)
    for _ in range(60):
        nodes, sizes, f = draw.randrange(1, 15), draw.choices(range(1, 8), k=3), draw.randrange(3)
        every = (c for n in range(f + 1, nodes + 1) for c in combinations_with_replacement(sorted(sizes), n))
        sums = (c for c in every if sum(c) == nodes)
        best = min(sums, key=lambda c: (len(c), sum(x * x for x in c), c), default=None)
        assert instantiate(nodes, sizes, f + 1) == best
    assert instantiate(7, [2, 4], 2) is None and instantiate(7, range(2, 8), 4) is None, "odd; 4 x 2 > 7"
    refuse({"nodes=11; 2 losses need 3 x 4 = 12": lambda: templates(11, 4, 2)})


def survivors(pipelines, stages, gone, migrate):
    """Pipelines that go on, of workers numbered by pipeline."""
    left = [[p * stages + s not in gone for s in range(stages)] for p in range(pipelines)]
    return min(map(sum, zip(*left))) if migrate else sum(map(all, left))


def test_parcae():
    """Every set of workers that leave, and draws of them; then plans against all sequences of layouts."""
    assert liveput(4, 3, 3) == Fraction(123, 55) and liveput(4, 3, 3, migrate=False) == Fraction(84, 55)
    for pipelines, stages in (1, 1), (2, 3), (3, 2), (4, 2):
        for preempted, migrate in product(range(pipelines * stages + 1), (True, False)):
            sets = list(combinations(range(pipelines * stages), preempted))
            mean = Fraction(sum(survivors(pipelines, stages, gone, migrate) for gone in sets), len(sets))
            assert liveput(pipelines, stages, preempted, migrate) == mean
    draw = random.Random(0)
    for migrate in True, False:
        mean = fmean(survivors(4, 3, draw.sample(range(12), 3), migrate) for _ in range(20_000))
        assert mean == pytest.approx(float(liveput(4, 3, 3, migrate)), abs=0.02)
    layouts = [(1, 2), (2, 2), (3, 2), (1, 4), (2, 3)]
    rate = lambda layout: layout[0] * (1 - 1 / (2 + layout[1]))
    change_s = lambda old, new: 15 if old[1] == new[1] else 45

    def work(plan, change_s=change_s):
        """What is trained in a minute each, less a change at its beginning."""
        lost = [0, *(change_s(old, new) if old != new else 0 for old, new in pairwise(plan))]
        return sum(rate(one) * max(0, 60 - seconds) for one, seconds in zip(plan, lost) if all(one))

    fits = lambda nodes: [(0, 0), *(one for one in layouts if one[0] * one[1] <= nodes)]
    reactive = lambda trace: [max(fits(n), key=lambda one: all(one) and rate(one)) for n in trace]
    for _ in range(6):
        trace = [draw.randrange(1, 8) for _ in range(5)]
        plan = proactive(trace, layouts, rate, change_s)
        assert work(plan) == pytest.approx(max(map(work, product(*map(fits, trace)))))
    for _ in range(20):
        trace = [draw.randrange(2, 8) for _ in range(30)]
        assert work(proactive(trace, layouts, rate, change_s)) >= work(reactive(trace)) - 1e-9
    blip = [4, 4, 6, 4, 4]
    assert reactive(blip)[2] != (2, 2) == proactive(blip, layouts, rate, change_s)[2]
    longer = proactive([2, 4], [(1, 2), (2, 2)], rate, lambda *_: 90.0)
    assert longer == [(1, 2)] * 2, "a change longer than the interval"
    wrong = lambda: proactive((), layouts, rate, change_s)
    refuse({"preempted=13": lambda: liveput(4, 3, 13), "nodes=()": wrong})
