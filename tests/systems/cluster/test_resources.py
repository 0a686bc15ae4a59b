"""CPUs, switches, dispatch and evaluations: every optimum beside brute force, every order beside its opposite."""

from itertools import product
from random import Random

import pytest

from minitrain.systems.cluster.resources import dispatched_s, evaluated, hire, run_gangs, synergy
from minitrain.systems.network.topologies import leaf_spine


def test_synergy():
    """Nobody has less than with equal CPUs, all together more; and no split of CPUs is better."""
    draw = Random(0)
    reached = lambda needs, cpus: [min(1.0, c / need) for need, c in zip(needs, cpus)]
    needs = [draw.choice([1, 1, 2, 6, 9]) for _ in range(8)]
    given = synergy([lambda c, need=need: min(1.0, c / need) for need in needs], 24)
    equal, found = reached(needs, [3] * 8), reached(needs, given)
    assert sum(given) <= 24 and all(after >= before - 1e-12 for after, before in zip(found, equal))
    assert (sum(equal), sum(found)) == (pytest.approx(5 + 1 / 3), pytest.approx(6))
    for _ in range(20):
        needs = [draw.randint(1, 9) for _ in range(3)]
        given = synergy([lambda c, need=need: min(1.0, c / need) for need in needs], 9)
        splits = [split for split in product(range(10), repeat=3) if sum(split) <= 9]
        equal = reached(needs, [3] * 3)
        fair = [s for s in splits if all(a >= b - 1e-12 for a, b in zip(reached(needs, s), equal))]
        assert sum(reached(needs, given)) == pytest.approx(max(sum(reached(needs, split)) for split in fair))


def test_hire():
    """Eight jobs, eight slots: 80 hops against 88 by chance; slots are respected; with hops counted on a real
    network, as good as every assignment tried."""
    draw, slots = Random(0), dict(enumerate([1, 2, 1, 1, 2, 1]))
    racks = [draw.sample(range(6), 3) for _ in range(8)]
    hops = [{s: sum(2 if rack == s else 4 for rack in job) for s in slots} | {None: 14} for job in racks]
    chosen = hire(hops, slots)
    total = lambda chosen: sum(job[switch] for job, switch in zip(hops, chosen))
    assert total(chosen) == 80 and all(chosen.count(switch) <= room for switch, room in slots.items())
    pool, unaware = [switch for switch, room in slots.items() for _ in range(room)], []
    for seed in range(200):
        unaware.append(total(Random(seed).sample(pool, 8)))
    assert sum(unaware) / 200 == pytest.approx(88, abs=0.5)
    graph = leaf_spine(3, 2, 2)
    leaves = list(dict.fromkeys(graph.next[host][0] for host in graph.hosts))
    for seed in range(5):
        servers = [Random(10 * seed + i).sample(graph.hosts, 2) for i in range(4)]
        far = [
            {leaf: sum(graph.distances(leaf)[host] for host in job) for leaf in leaves} | {None: 7}
            for job in servers
        ]
        every = [
            sum(job[leaf] for job, leaf in zip(far, leaves_of))
            for leaves_of in product([*leaves, None], repeat=4)
            if all(leaves_of.count(leaf) <= 1 for leaf in leaves)
        ]
        assert sum(job[leaf] for job, leaf in zip(far, hire(far, dict.fromkeys(leaves, 1)))) == min(every)
    with pytest.raises(ValueError, match="more jobs need a switch"):
        hire([{0: 1}, {0: 1}], {0: 1})


def test_pathways():
    """Enqueued ahead, all but the first enqueue is hidden if compute takes longer, and else all compute but the
    last; one order on all devices ends, orders of their own get stuck."""
    assert dispatched_s(20, 1, 3, asynchronous=False) == 20 * (1 + 3) and dispatched_s(20, 1, 3) == 1 + 20 * 3
    assert dispatched_s(20, 3, 1) == 20 * 3 + 1
    gangs = [f"{program}{i}" for i in range(4) for program in "AB"]
    assert run_gangs([gangs] * 3) == (gangs, [])
    stuck = 0
    for seed in range(50):
        draw, queues = Random(seed), []
        for _ in range(2):  # each device: both programs in their own order, mixed by chance
            names = {program: iter(range(4)) for program in "AB"}
            queues.append([f"{p}{next(names[p])}" for p in draw.sample("AAAABBBB", 8)])
        done, left = run_gangs(queues)
        alike = next((i for i, (a, b) in enumerate(zip(*queues)) if a != b), 8)
        first = {queue[alike] for queue in queues if alike < 8}
        assert len(done) + len(left) == 8 and done[:alike] == queues[0][:alike]
        assert bool(left) == bool(first) and (not left or first <= set(left))
        stuck += bool(left)
    assert stuck > 45


def test_acme():
    """GPU time falls by the share of loading and metrics, as every evaluation has both; results come earlier."""
    for load, run, metric in ((40, 60, 30), (10, 100, 0.5), (200, 50, 100)):
        joined, last = evaluated(63, load, run, metric, 8, split=False)
        split, first = evaluated(63, load, run, metric, 8, split=True)
        assert 1 - split / joined == pytest.approx((load + metric) / (load + run + metric)) and first < last
        assert joined == 63 * (load + run + metric) and last == 8 * (load + run + metric)
        assert first == pytest.approx(load + 8 * run + metric)
