"""Mobius: the recursion against tasks that are played, the partition against all there are."""

import random
from itertools import combinations, pairwise

import pytest

from minitrain.plan.simulate.links import play
from minitrain.systems.plan import offload
from minitrain.systems.plan.offload import StageLayer as Layer

ROOTS = (0, 0, 1, 1)
LINKS = {f"{way} {root}": 4 for way in ("up", "down") for root in (0, 1)}
ORDERS = {"in order": [0, 1, 2, 3], "crossed": offload.crossed(ROOTS)}


def loads_at_once(run, stages, devices=4):
    """The most loads under way on one root complex, of the forward behind the first round of stages."""
    names = [f"load F{s}" for s in range(devices, stages)]
    return max(
        sum(
            run.tasks[a].links == run.tasks[b].links and run.start(b) <= run.start(a) < run.end(b)
            for b in names
        )
        for a in names
    )


def test_mobius():
    """Two roots, four GPUs, loads of twice a microbatch's forward: with neighbouring stages on neighbouring
    GPUs two loads at a time share a root; crossed, one at a time has it alone, at full rate."""
    assert ORDERS["crossed"] == [0, 2, 1, 3]
    stages = [Layer(1, 2, 8)] * 16
    runs = {
        name: play(offload.mobius_tasks(stages, 4, order, ROOTS), LINKS) for name, order in ORDERS.items()
    }
    assert {name: loads_at_once(run, 16) for name, run in runs.items()} == {"in order": 2, "crossed": 1}
    later = [f"load F{s}" for s in range(4, 16)]
    assert all(runs["in order"].is_slowed(name) for name in later)
    assert not any(runs["crossed"].is_slowed(name) for name in later)
    alone = play(
        offload.mobius_tasks(stages, 4, [0, 1, 2, 3], range(4)),
        {f"{way} {d}": 4 for way in ("up", "down") for d in range(4)},
    )
    assert alone.end_s == offload.makespan(stages, 4, 4, 4)


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
            assert offload.makespan(stages, 4, m, 4, prefetch=prefetch) <= ends["crossed"] <= ends["in order"]
            faster += ends["crossed"] < ends["in order"]
    assert faster == (6 if prefetch else 9)


@pytest.mark.parametrize("prefetch", [True, False])
def test_the_recursion_is_what_a_simulation_finds(prefetch):
    draw = random.Random(0)
    for _ in range(150):
        devices, m = draw.randint(1, 4), draw.randint(1, 5)
        count = draw.randint(devices, 9)
        stages = [Layer(draw.randint(1, 5), draw.randint(1, 9), draw.randint(1, 40)) for _ in range(count)]
        links = {f"{way} {d}": 4 for way in ("up", "down") for d in range(devices)}
        tasks = offload.mobius_tasks(stages, m, [*range(devices)], range(devices), prefetch=prefetch)
        assert play(tasks, links).end_s == offload.makespan(stages, devices, m, 4, prefetch=prefetch)


def test_prefetch_hides_loads():
    stages = [Layer(2, 4, 16)] * 12
    with_it, without = (offload.makespan(stages, 4, 4, 4, prefetch=prefetch) for prefetch in (True, False))
    compute = 4 + 12 * 2 + 3 * 2 + 12 * 4 + 3 * 4 + 4
    assert with_it < without and with_it >= compute


def cuts(layers, devices, room):
    """All cuts in which no device holds more than its room."""
    for count in range(1, len(layers) + 1):
        for inner in combinations(range(1, len(layers)), count - 1):
            ends = [0, *inner, len(layers)]
            stages = [Layer(*(sum(column) for column in zip(*layers[a:b]))) for a, b in pairwise(ends)]
            sizes = [stage.bytes for stage in stages]
            if max(sizes) <= room and all(a + b <= room for a, b in zip(sizes, sizes[devices:])):
                yield stages, tuple(range(a, b) for a, b in pairwise(ends))


def test_the_partition_is_the_best_of_all():
    draw, tried, every, refused = random.Random(2), 0, 0, 0
    for _ in range(25):
        devices, m = draw.randint(1, 3), draw.randint(1, 4)
        layers = [
            Layer(draw.randint(1, 5), draw.randint(1, 9), draw.randint(1, 20))
            for _ in range(draw.randint(3, 8))
        ]
        room = draw.randint(20, 80)
        links = {f"{way} {d}": 3 for way in ("up", "down") for d in range(devices)}
        found = {
            cut: play(offload.mobius_tasks(stages, m, [*range(devices)], range(devices)), links).end_s
            for stages, cut in cuts(layers, devices, room)
        }
        if not found:
            refused += 1
            with pytest.raises(
                ValueError, match=f"{len(layers)} layers on {devices} devices with {room} bytes"
            ):
                offload.plan_mobius(layers, devices, m, room, 3)
            continue
        best = offload.plan_mobius(layers, devices, m, room, 3)
        assert best.seconds == min(found.values()) == found[best.cut]
        tried, every = tried + best.tried, every + len(found)
    assert tried < every / 2 and refused < 10


def test_cuts_that_were_timed_are_counted_and_the_room_may_be_full(monkeypatch):
    timed, makespan = [], offload.makespan
    monkeypatch.setattr(offload, "makespan", lambda *given: timed.append(given) or makespan(*given))
    layers = [Layer(1, 2, 10)] * 4
    found = offload.plan_mobius(layers, 2, 2, 20, 10)
    assert found.tried == len(timed) and found.seconds == min(makespan(*given) for given in timed)
    assert found.cut == (range(1), range(1, 2), range(2, 3), range(3, 4)), (
        "two stages of 10 bytes on a device of 20"
    )
    assert offload.plan_mobius(layers, 2, 2, 40, 10).seconds <= found.seconds
    assert offload.plan_mobius([Layer(1, 2, 10)], 1, 1, 10, 10).cut == (range(1),)
    # three layers on one device: single ones take 20 s, and so does 0 | 1 2; what can be no faster is not timed
    thirds = (range(1), range(1, 2), range(2, 3))
    assert offload.plan_mobius(layers[:3], 1, 2, 30, 10) == (20, thirds, 2)
    with pytest.raises(ValueError, match="4 layers on 2 devices with 19 bytes"):
        offload.plan_mobius(layers, 2, 2, 19, 10)


def test_neighbours_are_behind_different_roots_while_there_are_such():
    assert offload.crossed((0, 0, 0, 1)) == [0, 3, 1, 2]
    assert offload.crossed((0,)) == [0] and offload.crossed((0, 0)) == [0, 1]
    draw = random.Random(0)
    for _ in range(100):
        roots = [draw.randint(0, 3) for _ in range(draw.randint(1, 9))]
        order = offload.crossed(roots)
        assert sorted(order) == [*range(len(roots))]
        most = max(roots.count(root) for root in roots)
        together = sum(roots[a] == roots[b] for a, b in pairwise(order))
        assert together == max(0, 2 * most - len(roots) - 1)
