"""Straws, stripes, bursts and caches: closed forms beside a play of each read."""

from collections import Counter
from itertools import product
from random import Random

import pytest

from minitrain.plan.accounting import checkpoint_bytes
from minitrain.systems.cluster.shared_storage import silod, straw2, striped_s, throughput, written_s
from minitrain.systems.simulate.storage import stalls


def test_ceph_objects():
    """A new node of n + 1 equal ones takes 1/(n+1) of the objects and nobody else gets any; of unequal nodes each
    has its weight's share, and a heavier one takes from all and gives to none."""
    items = [f"object {i}" for i in range(10_000)]
    near = lambda share: pytest.approx(share, abs=3 * (share * (1 - share) / len(items)) ** 0.5)  # 3 sigma
    for n in (4, 9):
        placed = lambda count: [straw2(i, {f"{k}": 1.0 for k in range(count)}) for i in items]
        before, after = placed(n), placed(n + 1)
        moved = [(old, new) for old, new in zip(before, after) if old != new]
        assert len(moved) / len(items) == near(1 / (n + 1)) and {new for _, new in moved} == {f"{n}"}
        assert set(Counter(old for old, _ in moved)) == {f"{k}" for k in range(n)}
    weights = dict(a=1.0, b=2.0, c=5.0)
    places = Counter(straw2(item, weights) for item in items)
    assert all(places[node] / len(items) == near(w / 8) for node, w in weights.items())
    grown = [(straw2(item, weights), straw2(item, weights | dict(b=3.0))) for item in items]
    assert {new for old, new in grown if old != new} == {"b"}


def test_lustre_gpfs_beegfs():
    """64 chunks of 1 GB, targets of 1 GB/s, a client of 5 GB/s: S / min(k·b, link) but for the first chunk."""
    for targets in (1, 2, 4, 5, 8, 16):
        expected = 64 / min(targets * 1, 5)
        found = striped_s(6400, targets, 0.01, 0.002)
        assert expected <= found <= expected * 1.01 + 0.02
    assert striped_s(64, 1, 1.0, 0.2) == 64.2


def test_tectonic():
    """A checkpoint of Llama 3's 405 billion parameters is 5.67 TB: 2.8 s at the sustained rate, 0.81 s at the
    peak; between them, a play in small steps of a buffer that fills and drains."""
    size = checkpoint_bytes(405_000_000_000)
    assert size == 14 * 405e9 and written_s(size, 2e12, 7e12, 0) == pytest.approx(2.835)
    assert written_s(size, 2e12, 7e12, 1e15) == pytest.approx(0.81)
    for buffer in (5e11, 2e12, 4e12):
        written = filled = seconds = 0.0
        while written < size:
            rate = 7e12 if filled < buffer else 2e12
            filled += (rate - 2e12) * 1e-4
            written += rate * 1e-4
            seconds += 1e-4
        assert written_s(size, 2e12, 7e12, buffer) == pytest.approx(seconds, rel=1e-3)


def test_silod():
    """The closed form beside random reads of which the cache has some, within 2 %; the split of cache and remote
    rate beside a grid of both, and beside equal parts."""
    for cached in (0, 300, 800, 950):
        draw = Random(cached)
        reads = [0.0 if draw.randrange(1000) < cached else 1 / 5 for _ in range(20_000)]
        seconds = 20_000 / 20 + sum(stalls(reads, 1 / 20, depth=500, streams=1))
        assert 20_000 / seconds == pytest.approx(throughput(20, 5, cached, 1000), rel=0.02)
    assert throughput(20, 5, 1000, 1000) == 20
    draw = Random(1)
    for _ in range(10):
        jobs = [(draw.uniform(5, 30), draw.choice([20, 40, 100])) for _ in range(3)]
        reached = lambda cache, remote: [throughput(m, b, c, s) for (m, s), c, b in zip(jobs, cache, remote)]
        cache, remote = silod(jobs, 60, 12)
        assert sum(cache) <= 60 + 1e-9 and sum(remote) <= 12 + 1e-9
        found = min(r / most for r, (most, _) in zip(reached(cache, remote), jobs))
        best = 0
        for split in product(range(0, 61, 5), repeat=2):
            if sum(split) <= 60:
                parts = [min(c, size) for c, (_, size) in zip((*split, 60 - sum(split)), jobs)]
                wants = [most * (1 - c / size) for (most, size), c in zip(jobs, parts)]
                best = max(best, min(1, 12 / max(sum(wants), 1e-9)))
        assert found >= best - 1e-9
        equal = min(r / most for r, (most, _) in zip(reached([min(20, s) for _, s in jobs], [4] * 3), jobs))
        assert found >= equal - 1e-9
