"""Pipelines that save energy, beside every choice of durations; Zeus beside its grid."""

from itertools import product
from random import Random

import pytest

from minitrain.pipeline.schedules.one_direction import gpipe, interleaved, one_f_one_b
from minitrain.pipeline.schedules.zero_bubble import zb_h1
from minitrain.pipeline.simulate import Measured, simulate
from minitrain.systems.cluster.energy import frontier, slack, stretched, tried, zeus

WORK = dict(F=2, B=4, I=2, W=2)


def task(schedule, more: int):
    """Later stages compute more; power is 1 and c f^3, the time 1/f: energy c work^3/d^2 + d."""
    work = {action: WORK[action.kind] + action.stage for action in schedule.place}
    energy = lambda action, d: 10 * work[action] ** 3 / d**2 + d
    return energy, work, {action: w + more for action, w in work.items()}


def makespan(schedule, durations) -> int:
    """The longest path, action by action."""
    ends = {}
    queues = [list(own) for own in schedule.ranks]
    while any(queues):
        for queue in queues:
            while queue and all(before in ends for before in schedule.needs[queue[0]]):
                action = queue.pop(0)
                same = [ends[other] for other in ends if schedule.place[other] == schedule.place[action]]
                ends[action] = max([0, *same, *(ends[b] for b in schedule.needs[action])]) + durations[action]
    return max(ends.values())


def test_envpipe():
    """Less energy in exactly the same makespan, by two independent plays; what is critical keeps its speed."""
    saved = {}
    for schedule in (one_f_one_b(4, 8), gpipe(4, 8), interleaved(2, 4, 2), zb_h1(4, 8)):
        energy, shortest, longest = task(schedule, 2)
        durations = stretched(schedule, energy, shortest, longest)
        assert makespan(schedule, durations) == makespan(schedule, shortest)
        assert simulate(schedule, Measured(durations)).makespan == makespan(schedule, shortest)
        _, _, free, _ = slack(schedule, shortest)
        assert all(shortest[a] <= d <= (longest[a] if free[a] else shortest[a]) for a, d in durations.items())
        total = lambda durations: sum(energy(action, d) for action, d in durations.items())
        saved[schedule.name] = 1 - total(durations) / total(shortest)
        for action, d in durations.items():  # none can be longer
            longer = durations | {action: d + 1}
            assert d == longest[action] or makespan(schedule, longer) > makespan(schedule, shortest)
    assert 0.22 < saved[one_f_one_b(4, 8).name] < 0.24 and all(saving > 0 for saving in saved.values())


def test_perseus():
    """Each point of the front is the least energy of all choices of durations; its fast end is as fast as all at
    the highest frequency, for a tenth less energy."""
    schedule = one_f_one_b(2, 2)
    energy, shortest, longest = task(schedule, 2)
    actions, best = list(shortest), {}
    for choice in product(*(range(shortest[a], longest[a] + 1) for a in actions)):
        durations = dict(zip(actions, choice))
        span = makespan(schedule, durations)
        best[span] = min(best.get(span, 1e9), sum(energy(a, d) for a, d in durations.items()))
    every = {span: least for span, least in best.items() if all(least < best[s] for s in best if s < span)}
    points = dict(frontier(schedule, energy, shortest, longest))
    assert points == pytest.approx(every) and len(points) == 13
    fast = sum(energy(a, d) for a, d in shortest.items())
    assert min(points) == makespan(schedule, shortest) == 22
    assert points[22] == pytest.approx(274.778, abs=1e-3) and 1 - points[22] / fast == pytest.approx(
        0.108, abs=1e-3
    )
    larger = one_f_one_b(3, 4)
    energy, shortest, longest = task(larger, 3)
    points = frontier(larger, energy, shortest, longest)
    assert [span for span, _ in points] == list(range(points[0][0], makespan(larger, shortest) - 1, -1))
    gains = [later - earlier for (_, earlier), (_, later) in zip(points, points[1:])]
    assert all(0 < a <= b + 1e-9 for a, b in zip(gains, gains[1:])), "each unit costs more than the last"
    assert points[-1][1] <= sum(energy(a, d) for a, d in stretched(larger, energy, shortest, longest).items())


def test_zeus():
    """The optimum of the grid; all for time is the fastest, all for energy the thriftiest; trying batch sizes
    with random times ends with the best, and costs 6 % more than it at most."""
    limits = 150, 200, 250, 300
    steps = lambda batch: 500 * (1 + 200 / batch) / (1 + batch / 800)
    seconds = lambda batch, watts: steps(batch) * batch**0.8 / (watts / 300) ** 0.45
    joules = lambda batch, watts: watts * (0.6 + 0.4 * min(1, batch / 128)) * seconds(batch, watts)
    costs = {b: [(joules(b, w), seconds(b, w)) for w in limits] for b in (32, 64, 128, 256)}
    grid = [(b, i) for b in costs for i in range(4)]
    for eta in (0, 0.25, 0.5, 0.75, 1):
        cost = lambda pair: eta * costs[pair[0]][pair[1]][0] + (1 - eta) * 300 * costs[pair[0]][pair[1]][1]
        batch, limit, found = zeus(costs, eta, 300)
        assert found == cost((batch, limit)) == min(map(cost, grid))
    assert zeus(costs, 0, 300)[:2] == min(grid, key=lambda pair: costs[pair[0]][pair[1]][1])
    assert zeus(costs, 1, 300)[:2] == min(grid, key=lambda pair: costs[pair[0]][pair[1]][0])
    best, draw = {32: 130.0, 64: 100.0, 128: 120.0, 256: 160.0}, Random(0)
    chosen = tried(lambda batch: best[batch] * draw.gauss(1, 0.05), list(best), 80, seed=0)
    assert chosen[-20:].count(64) > 15 and set(chosen[:4]) == set(best)
    assert sum(best[batch] for batch in chosen) < 1.06 * 100 * 80
    with pytest.raises(ValueError, match="eta"):
        zeus(costs, 2, 300)
