"""Mobius: crossed devices against those in order, loads behind computation."""

import random
from itertools import pairwise

import pytest

from minitrain.systems.plan import offload
from minitrain.systems.plan.offload import StageLayer as Layer
from minitrain.systems.simulate.links import play

ROOTS = (0, 0, 1, 1)
LINKS = {f"{way} {root}": 4 for way in ("to host", "to device") for root in (0, 1)}
ORDERS = {"in order": [0, 1, 2, 3], "crossed": offload.crossed(ROOTS)}


def alone_s(stages, devices, m, bytes_per_s=4, prefetch=True):
    """If every copy has its link to itself."""
    links = {f"{way} {d}": bytes_per_s for way in ("to host", "to device") for d in range(devices)}
    tasks = offload.mobius_tasks(stages, m, [*range(devices)], range(devices), prefetch=prefetch)
    return play(tasks, links).end_s


def loads_at_once(run, stages, devices=4):
    """The most loads under way on one root complex, of the forward behind the first round of stages."""
    names = [f"load F{s}" for s in range(devices, stages)]
    same = lambda a, b: run.tasks[a].links == run.tasks[b].links
    return max(sum(same(a, b) and run.start(b) <= run.start(a) < run.end(b) for b in names) for a in names)


def test_mobius():
    """Two roots, four GPUs, loads of twice a microbatch's forward: with neighbouring stages on neighbouring
    GPUs two loads at a time share a root; crossed, one at a time has it alone, at full rate."""
    assert ORDERS["crossed"] == [0, 2, 1, 3] and offload.crossed((0, 0, 0, 1)) == [0, 3, 1, 2]
    stages = [Layer(1, 2, 8)] * 16
    tasks = lambda order: offload.mobius_tasks(stages, 4, order, ROOTS)
    runs = {name: play(tasks(order), LINKS) for name, order in ORDERS.items()}
    assert {name: loads_at_once(run, 16) for name, run in runs.items()} == {"in order": 2, "crossed": 1}
    later = [f"load F{s}" for s in range(4, 16)]
    assert all(runs["in order"].is_slowed(name) for name in later)
    assert not any(runs["crossed"].is_slowed(name) for name in later)
    deep = [Layer(2, 4, 16)] * 12
    with_it, without = (alone_s(deep, 4, 4, prefetch=prefetch) for prefetch in (True, False))
    assert 4 + 12 * 2 + 3 * 2 + 12 * 4 + 3 * 4 + 4 <= with_it < without


@pytest.mark.parametrize("prefetch", [True, False])
def test_crossed_is_never_slower_and_often_faster(prefetch):
    faster = 0
    for m in (1, 2, 4):
        for load_s in (1, 2, 3, 4, 6, 8):
            stages = [Layer(2, 4, 4 * load_s)] * 12
            ends = {
                name: play(offload.mobius_tasks(stages, m, order, ROOTS, prefetch=prefetch), LINKS).end_s
                for name, order in ORDERS.items()
            }
            assert alone_s(stages, 4, m, prefetch=prefetch) <= ends["crossed"] <= ends["in order"]
            faster += ends["crossed"] < ends["in order"]
    assert faster == (6 if prefetch else 9)


def test_neighbours_are_behind_different_roots_while_there_are_such():
    assert offload.crossed((0,)) == [0] and offload.crossed((0, 0)) == [0, 1]
    draw = random.Random(0)
    for _ in range(100):
        roots = [draw.randint(0, 3) for _ in range(draw.randint(1, 9))]
        order = offload.crossed(roots)
        assert sorted(order) == [*range(len(roots))]
        most = max(roots.count(root) for root in roots)
        together = sum(roots[a] == roots[b] for a, b in pairwise(order))
        assert together == max(0, 2 * most - len(roots) - 1)
