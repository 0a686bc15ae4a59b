"""The simulator of jobs by hand and by what it must conserve; orders on many traces; pods, gangs and pairs."""

from random import Random

import pytest

from minitrain.systems.cluster.jobs import Job, Node, Share, simulate, trace
from minitrain.systems.cluster.orders import gang, lucid, pods, sjf, srtf

FLEET = [Node("fast", 8)] * 16


def small_trace(seed: int, devices=(1,)) -> list[Job]:
    draw = Random(seed)
    loads = (0.2, 0.3, 0.5, 0.9)
    one = lambda i: Job(
        f"{i}",
        draw.uniform(0, 1500),
        draw.choice(devices),
        draw.lognormvariate(4.5, 1),
        load=draw.choice(loads),
    )
    return [one(i) for i in range(80)]


def test_gang_scheduling():
    """Two jobs of 8 on 12 devices: 6 and 6 for ever, or one after the other; on the trace pods are stuck too."""
    jobs = [Job("a", 0, 8, 100), Job("b", 0, 8, 50)]
    alone = simulate(jobs, [Node("x", 12)], pods)
    assert alone.stuck == ["a", "b"] and alone.working_s == 0 and not alone.jct_s
    assert [share.count for share in alone.history[-1][1].values()] == [6, 6]
    both = simulate(jobs, [Node("x", 12)], gang)
    assert both.makespan_s == 100 + 50 and both.jct_s == {"a": 100, "b": 150}
    assert both.working_s == 8 * 150 and both.idle_s == 0
    jobs = trace(150, seed=1)
    assert simulate(jobs, FLEET, pods).stuck and not simulate(jobs, FLEET, gang).stuck
    for _, shares in simulate(jobs, FLEET, gang).history:
        wanted = {job.name: job.devices for job in jobs}
        assert all(share.count == wanted[name] for name, share in shares.items())


def test_time_is_conserved_and_restarts_cost():
    """Device seconds of work are those of the jobs; a job moved once stands still for its restart, once."""
    for policy in (gang, sjf, srtf):
        jobs = trace(60, seed=3)
        found = simulate(jobs, FLEET, policy)
        assert found.working_s == pytest.approx(sum(job.work_s * job.devices for job in jobs))
        assert found.idle_s <= sum(64 * job.restart_s for job in jobs) * found.restarts
    long, short = Job("long", 0, 1, 100, restart_s=7), Job("short", 10, 1, 20)
    found = simulate([long, short], [Node("x", 1)], srtf)
    assert found.jct_s == {"short": 20, "long": 127} and found.restarts == 1 and found.idle_s == 7
    slow = simulate([Job("a", 0, 1, 100, {"slow": 0.5})], [Node("slow", 1)], gang, until_s=50)
    assert slow.left_s == {"a": 75} and slow.makespan_s == 50 and long.left_s == 0
    with pytest.raises(ValueError, match="node 0 has 1 devices, 2 are given away"):
        simulate(
            [long], [Node("x", 1)], lambda now, waiting, running, nodes: {waiting[0]: Share(((0, 2),), 1)}
        )


def test_shortest_first():
    """SRTF <= SJF <= FIFO without gangs, on 20 traces; on the trace with gangs by an order of magnitude."""
    for seed in range(20):
        fifo, shortest, remaining = (
            simulate(small_trace(seed), [Node("x", 8)], policy).mean_jct_s for policy in (gang, sjf, srtf)
        )
        assert remaining <= shortest <= fifo
    fifo, shortest, remaining = (simulate(trace(150, 1), FLEET, p).mean_jct_s for p in (gang, sjf, srtf))
    assert fifo > 5 * shortest > 10 * remaining


def test_the_trace_is_as_uneven_as_a_cluster_for_language_models():
    """A few percent of the jobs have nine tenths of the device time; each seed another, the same one again."""
    jobs = [job for seed in range(10) for job in trace(150, seed)]
    large = [job for job in jobs if job.name.startswith("pretraining")]
    time = lambda jobs: sum(job.devices * job.work_s for job in jobs)
    assert len(large) / len(jobs) < 0.06 and time(large) / time(jobs) > 0.9
    assert str(trace(9, 4)) == str(trace(9, 4)) != str(trace(9, 5))


def test_lucid():
    """Pairs fit in one device and are a tenth slower at most; jobs end earlier than first come, first served,
    in ten traces of ten, and on the trace earlier than in the same order without pairs."""
    for seed in range(10):
        jobs = small_trace(seed, (1, 1, 2))
        plain = simulate(jobs, [Node("x", 1)] * 8, gang)
        found = simulate(jobs, [Node("x", 1)] * 8, lucid(order=lambda job: job.at_s))
        assert found.mean_jct_s < plain.mean_jct_s
        pairs = [(n, s) for _, shares in found.history for n, s in shares.items() if s.partner]
        load = {job.name: job.load for job in jobs}
        assert pairs and all(load[name] + share.partner.load <= 1 for name, share in pairs)
        assert all(share.rate == pytest.approx(1 / 1.1) for _, share in pairs)
        for job in jobs:
            there = [at for at, shares in found.history if job.name in shares]
            assert job.at_s + found.jct_s[job.name] - there[0] <= 1.1 * job.work_s + 1e-6
    assert (round(found.mean_jct_s), round(plain.mean_jct_s)) == (172, 286)
    pairs, alone = (simulate(trace(150, 1), FLEET, policy).mean_jct_s for policy in (lucid(), sjf))
    assert pairs < 0.9 * alone
