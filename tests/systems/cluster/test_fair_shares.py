"""Gavel's program beside a grid and its rounds beside it; a trade that both users gain by."""

from random import Random

import numpy as np
import pytest

from minitrain.systems.cluster.fair_shares import gavel, max_min, trade
from minitrain.systems.cluster.jobs import Job, Node, simulate, trace

SPEEDS = np.array([[1.0, 0.25], [1.0, 0.5], [1.0, 0.9]])


def best_on_a_grid(speeds: np.ndarray, steps: int) -> float:
    """Three jobs of one device, one device of each of two kinds: all shares of the second kind in multiples of
    1/steps; for each the highest throughput that the first kind can complete for all, by halving."""
    points = [
        (a, b, c) for a in range(steps + 1) for b in range(steps + 1 - a) for c in range(steps + 1 - a - b)
    ]
    second, equal = np.array(points) / steps, speeds.sum(1) / 3
    low, high = np.zeros(len(points)), np.full(len(points), 3.0)
    for _ in range(40):
        middle = (low + high) / 2
        first = np.maximum(0, middle[:, None] * equal - second * speeds[:, 1]) / speeds[:, 0]
        fits = (first.sum(1) <= 1) & (first + second <= 1).all(1)
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    return low.max()


def test_gavel():
    """The program is no worse than any grid, which comes near it; each job has its share of 1/n at least; rounds
    reach it within 0.3 %; on the trace jobs end earlier than where the program knows of no kinds."""
    x, worst = max_min(SPEEDS.tolist(), [1, 1, 1], [1, 1])
    equal = SPEEDS.sum(1) / 3
    assert worst == pytest.approx(1.1825, abs=1e-4)
    assert worst == pytest.approx(((np.array(x) * SPEEDS).sum(1) / equal).min())
    assert np.array(x).sum(0).max() <= 1 + 1e-9 and np.array(x).sum(1).max() <= 1 + 1e-9
    draw = Random(0)
    cases = [SPEEDS, *(np.array([[1, draw.uniform(0.1, 1)] for _ in range(3)]) for _ in range(3))]
    for speeds in cases:
        _, worst = max_min(speeds.tolist(), [1, 1, 1], [1, 1])
        assert 0.99 * worst < best_on_a_grid(speeds, 50) <= worst + 1e-9 and worst >= 1
    jobs = [Job(f"{i}", 0, 1, 6000, {"fast": a, "slow": b}) for i, (a, b) in enumerate(SPEEDS.tolist())]
    found = simulate(jobs, [Node("fast", 1), Node("slow", 1)], gavel(10), round_s=10, until_s=3000)
    for job, share in zip(jobs, equal):
        assert (6000 - found.left_s[job.name]) / 3000 / share == pytest.approx(1.1825, rel=0.003)
    fleet = [Node("fast", 8)] * 8 + [Node("slow", 8)] * 8
    for seed in (1, 5):
        aware, blind = (
            simulate(trace(60, seed), fleet, gavel(600, speed), 600) for speed in (Job.rate, lambda *_: 1.0)
        )
        assert aware.mean_jct_s < blind.mean_jct_s and aware.makespan_s < blind.makespan_s


def test_gandiva_fair():
    """At every price between the two speed-ups both users' throughput rises, at one outside one of them loses;
    devices are conserved."""
    tickets = {user: dict(fast=4.0, slow=4.0) for user in "ab"}
    speedup = dict(a=1.25, b=5.0)
    worth = lambda had, user: had[user]["fast"] * speedup[user] + had[user]["slow"]
    after = trade(tickets, speedup)
    assert [worth(tickets, user) for user in "ab"] == [9, 24]
    assert [worth(after, user) for user in "ab"] == pytest.approx([11.4, 26.4])
    for price in (1.0, 1.3, 2.0, 4.9, 6.0):
        after = trade(tickets, speedup, price)
        gains = [worth(after, user) > worth(tickets, user) for user in "ab"]
        assert gains == [price > 1.25, price < 5]
        for kind in ("fast", "slow"):
            assert sum(had[kind] for had in after.values()) == pytest.approx(8)
            assert all(had[kind] >= 0 for had in after.values())
    with pytest.raises(ValueError, match="speedups"):
        trade(tickets, dict(a=-1.0, b=2.0))
