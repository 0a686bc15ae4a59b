"""DT-FM beside every placement, SDPipe beside all-reduce, HetPipe's staleness counted and trained on ranks."""

import time
from itertools import combinations, permutations
from math import inf
from random import Random

import torch
from torch import nn

from minitrain import collectives, launch
from minitrain.systems.data_parallel.parameter_server import Worker, serve
from minitrain.systems.uneven.stage_devices import dt_fm
from minitrain.systems.uneven.unequal_ranks import sdpipe, staleness, train, waves
from tests.parallel import TOLERANCE


def test_dt_fm_yuan():
    """Eight devices in two regions: within 5 % of all placements in each of six drawn networks; slow links carry
    gradients or activations, whichever are fewer."""
    draw, region = Random(2), [i % 2 for i in range(8)]
    for gradients, activations in [(4.0, 0.05), (0.1, 2.0)] * 3:
        draw.shuffle(region)
        links = {}
        for pair in combinations(range(8), 2):
            near = region[pair[0]] == region[pair[1]]
            delay, rate = (0.001, 10) if near else (0.05, 0.3)
            links[pair] = links[pair[::-1]] = delay * draw.uniform(0.8, 1.2), rate * draw.uniform(0.8, 1.2)
        seconds, best = lambda a, b, size: links[a, b][0] + size / links[a, b][1], inf
        for first in combinations(range(1, 8), 3):
            stages = (0, *first), [i for i in range(1, 8) if i not in first]
            sums = [sum(seconds(a, b, gradients / 4) for b in s if b != a) for s in stages for a in s]
            for order in permutations(stages[1]):
                hops = [seconds(a, b, activations) for a, b in zip(stages[0], order)]
                best = min(best, 2 * max(sums) + 2 * max(hops))
        found = dt_fm(4, 2, seconds, gradients, activations)
        assert best - 1e-12 <= found.seconds <= 1.05 * best
        assert len({region[device] for device in found.stages[0]}) == 1 + (gradients < activations)


def test_sdpipe():
    """One of four workers at half speed: groups of two do half as much again as all-reduce; models that average
    in these groups keep their mean and come together, also where all are equally fast."""
    done, _ = sdpipe([1.0, 1.0, 1.0, 2.0], 400.0)
    assert done == [333, 334, 333, 200]
    assert sdpipe([1.0, 1.0, 1.0, 2.0], 400.0, size=4) == ([200] * 4, [(0, 1, 2, 3)] * 200)
    for step_s in ([1.0, 1.0, 1.0, 2.0], [1.0] * 4):
        models = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        mean = models.mean(0)
        for group in sdpipe(step_s, 100.0)[1]:
            models[list(group)] = models[list(group)].mean(0)
        assert (models.mean(0) - mean).abs().max() < TOLERANCE and (models - mean).abs().max() < 1e-9


def test_hetpipe():
    """No minibatch of three drawn workers misses more updates than it may, of its worker or of others, and some
    miss all they may. On two ranks, one slowed down, weights equal those of one process in the plan's order;
    with one in flight and D = 0 those of a synchronous parameter server; with D = 1 both are done earlier."""
    draw = Random(0)
    for (k, distance), bounds in {(1, 0): (0, 0), (4, 0): (3, 6), (4, 1): (3, 10), (2, 3): (1, 8)}.items():
        seconds = [[draw.uniform(0.8, 1.2) / speed for _ in range(120)] for speed in (1.0, 0.6, 0.35)]
        plan, missing = waves(seconds, k, distance), [0, 0]
        for v, minibatches in enumerate(plan):
            for p, minibatch in enumerate(minibatches):
                ended = [sum(other.end <= minibatch.start for other in row) for row in plan]
                assert minibatch.seen == tuple(n if u == v else n // k * k for u, n in enumerate(ended))
                missing = [max(missing[0], p - ended[v]), max(missing[1], p - min(ended) // k * k)]
        assert tuple(missing) == bounds == staleness(k, distance)

    x = torch.randn(12, 2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def made() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    def backward(net, v: int, p: int) -> None:
        time.sleep(0.001 * v)
        net.zero_grad()
        net(x[p, v]).square().sum().backward()

    def worker(plan, k):
        net, group = made(), collectives.world()
        train(net.parameters(), lambda p: backward(net, group.rank(), p), plan, k, 0.05, group)
        return nn.utils.parameters_to_vector(net.parameters()).detach()

    def replayed(plan):
        net, updates = made(), [[], []]
        start = nn.utils.parameters_to_vector(net.parameters()).detach()
        for _, v, p in sorted((one.start, v, p) for v, row in enumerate(plan) for p, one in enumerate(row)):
            seen = [update for u, n in enumerate(plan[v][p].seen) for update in updates[u][:n]]
            nn.utils.vector_to_parameters(start + sum(seen), net.parameters())
            backward(net, v, p)
            updates[v].append(-0.05 * nn.utils.parameters_to_vector(p.grad for p in net.parameters()))
        return start + sum(updates[0]) + sum(updates[1])

    def served():
        net, group = made(), collectives.world()
        sgd = lambda params: torch.optim.SGD(params, lr=0.05)
        if group.rank() == 0:
            return serve(net.parameters(), sgd, 12, group)
        other = Worker(net.parameters(), group)
        for p in range(12):
            backward(net, group.rank() - 1, p)
            other.push_pull()

    times, ends = [[1.0 + (p // 2 % 2 == v) for p in range(12)] for v in range(2)], {}  # slow by turns
    for k, distance in ((1, 0), (2, 0), (2, 1)):
        plan = waves(times, k, distance)
        ends[k, distance] = max(row[-1].end for row in plan)
        weights = launch.run(worker, plan, k) if (k, distance) != (2, 0) else []
        assert all((found - replayed(plan)).abs().max() < TOLERANCE for found in weights)
        if k == 1:
            assert (launch.run(served, ranks=3)[0] - weights[0]).abs().max() < TOLERANCE
    assert ends[2, 1] < ends[2, 0]
