"""Caches in front of training: the hit rates and stalls that minitrain/systems/simulate/storage.py promises."""

import math
import random
from fractions import Fraction
from itertools import islice

import pytest

from minitrain.systems.simulate.storage import LRU, autoscale, read_epoch, read_epoch_substituting, stalls


def shuffled(count, seed):
    return random.Random(seed).sample(range(count), count)


def hits(reads):
    return sum(hit for _, hit in reads)


@pytest.mark.parametrize(
    "read_time, step_time", [(7, 2), (6, 2), (1, 3), (Fraction(10, 3), Fraction(1, 7)), (5, 5)]
)
def test_alluxio_juicefs(read_time, step_time):
    """Without reading ahead an epoch's reads are waited for; from depth ceil(t_io / t_step) on, none is."""
    enough = math.ceil(Fraction(read_time) / step_time)
    assert hits(read_epoch(shuffled(200, 1), LRU(150))) == 0
    on_demand = stalls([read_time] * 200, step_time, depth=0)
    assert on_demand == [read_time] * 200
    for depth in range(enough, enough + 3):
        assert stalls([read_time] * 200, step_time, depth) == [read_time] + [0] * 199
    for depth in range(1, enough):  # control: one less than enough stalls again and again
        assert sum(stalls([read_time] * 200, step_time, depth)[1:]) > 0


def test_reading_ahead_cannot_replace_bandwidth():
    for depth in (4, 40):  # 2 streams bring two samples every 6 s, two steps take 4 s
        assert stalls([6] * 400, 2, depth, streams=2) == [6, 0] + [2, 0] * 199
    assert sum(stalls([6] * 400, 2, 4, streams=3)[1:]) == 0  # control: 3 streams are just enough


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_quiver(share):
    """Substitution finds the whole cache every epoch, LRU c + (1 - c) ln(1 - c); each sample once."""
    count, epochs = 4000, 4
    capacity = int(share * count)
    plain, substituting = LRU(capacity), LRU(capacity)
    for epoch in range(epochs):
        order = shuffled(count, epoch)
        by_lru, by_substitution = [*read_epoch(order, plain)], [*read_epoch_substituting(order, substituting)]
        for reads in (by_lru, by_substitution):
            assert sorted(sample for sample, _ in reads) == list(range(count))
        if epoch:  # the first epoch fills the cache
            assert hits(by_substitution) == capacity
            assert hits(by_lru) / count == pytest.approx(share + (1 - share) * math.log(1 - share), abs=0.02)
            assert hits(by_lru) < capacity


def test_quiver_jobs_share_one_cache():
    """Two jobs with orders of their own: each finds at least the whole cache after its first epoch."""
    cache, count = LRU(300), 1000
    for epoch in range(4):
        jobs = [read_epoch_substituting(shuffled(count, 2 * epoch + job), cache) for job in range(2)]
        both = list(zip(*jobs))
        for job in range(2):
            reads = [pair[job] for pair in both]
            assert sorted(sample for sample, _ in reads) == list(range(count))
            assert epoch == 0 or hits(reads) >= 300


def stall_of_epoch(capacity, read_time, count=60, step_time=2, depth=8, streams=4):
    """What the steps of a second epoch with substitution waited, over a cache of this size."""
    cache = LRU(capacity)
    for epoch in range(2):
        reads = [*read_epoch_substituting(shuffled(count, epoch), cache)]
    return sum(stalls([0 if hit else read_time for _, hit in reads], step_time, depth, streams))


@pytest.mark.parametrize("threshold", [1, 10, 30])
def test_fluid(threshold):
    """The autoscaler settles on the smallest cache whose stall is below the threshold, after changes too."""
    weather = {"read_time": 12}
    sizes = autoscale(lambda capacity: stall_of_epoch(capacity, **weather), 60, threshold)
    for read_time in (12, 10, 16):
        weather["read_time"] = read_time
        best = next(c for c in range(61) if stall_of_epoch(c, read_time) < threshold)
        assert 0 < best < 60, "the control: neither no cache nor all of it is the answer"
        list(islice(sizes, 30))  # at most 10 epochs to notice, then log2(60) to search
        settled = list(islice(sizes, 20))
        assert (
            settled.count(best) == 18 and settled.count(best - 1) == 2
        )  # two trials of one less, both refused
    assert all(
        stall_of_epoch(c, 12) >= stall_of_epoch(c + 1, 12) for c in range(60)
    )  # what halving relies on


def test_fluid_stays_at_the_most_when_nothing_is_enough():
    assert list(islice(autoscale(lambda capacity: 1, 60, 1), 20)) == [60] * 20, "1 is not below 1"


def test_fluid_needs_no_cache_when_nothing_stalls():
    assert list(islice(autoscale(lambda capacity: 0, 3, 1), 15)) == [3, 1] + [0] * 13
