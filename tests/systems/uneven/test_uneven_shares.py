"""Whale, AccPar and HAP beside every choice there is; uneven rows, heads and hidden units on ranks."""

import time
from fractions import Fraction
from functools import cache
from itertools import pairwise, product
from random import Random

import numpy
import pytest
import torch
from scipy.optimize import linprog, minimize_scalar

from minitrain import collectives, launch
from minitrain.compose.parallelize import parallelize
from minitrain.data_parallel import states
from minitrain.model.gpt import GPT
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.ranks.ledger import Ledger
from minitrain.systems.plan.search.problem import linear
from minitrain.systems.uneven.shares import CUTS, Device, accpar, best_shares, hap, priced, synthesize, whale
from minitrain.systems.uneven.unequal_ranks import rows_by, split_block
from tests.parallel import TOLERANCE, Outcome, Problem, difference, one_process, rows_of_problem, small


def test_whale():
    """Shares are those of least time among all; on two ranks, of which one is half as fast, training with them
    equals one process, each rank's FLOPs are its rows', and the slowest takes 2/3 of what even rows take."""
    draw, step = Random(0), lambda counts, speeds: max(map(Fraction, counts, speeds))
    for _ in range(20):
        speeds, most = [draw.choice([1, 2, 3, 5]) for _ in range(3)], [draw.randint(3, 9) for _ in range(3)]
        counts = [c for c in product(range(10), repeat=3) if sum(c) == 9 and all(map(int.__le__, c, most))]
        assert step(whale(9, speeds, most), speeds) == min(step(one, speeds) for one in counts)
    problem, speeds = Problem(batch_sizes=(12, 9)), (2, 1)

    def trained(shares):
        strategy, adam = Strategy(dp=2, precision="float64"), lambda params: AdamW(params, lr=problem.lr)
        run = parallelize(problem.config, strategy, adam, seed=3, frozen=(problem.frozen,))
        losses, flops = [], []
        for number, size in enumerate(problem.batch_sizes):
            batch = run.batch(rows_by(rows_of_problem(problem, number), whale(size, shares)), number)
            time.sleep(0.001 * len(batch.tokens) / speeds[run.data_group.rank()])
            with Ledger() as ledger:
                losses.append(run.total(run.step(batch, problem.clip).loss).item())
            flops.append(ledger.flops)
        return Outcome(losses, states.full_grads(run.sync), states.full_tensors(run.sync)), flops[0]

    reference, slowest = one_process(problem), []
    for shares in ((1, 1), speeds):
        outcomes, flops = zip(*launch.run(trained, shares))
        assert all(difference(outcome, reference) < TOLERANCE for outcome in outcomes)
        assert Fraction(*flops) == Fraction(*shares)
        slowest.append(step(flops, speeds))
    assert slowest[1] / slowest[0] == Fraction(2, 3)


FETCHED = {  # the paper's table: of the tensor between two layers, a device with share a, b = 1 - a
    **dict.fromkeys([("rows", "rows"), ("inputs", "outputs"), ("outputs", "inputs")], lambda a, b: 0),
    **dict.fromkeys([("rows", "inputs"), ("outputs", "rows")], lambda a, b: 2 * a * b),
    **dict.fromkeys([("rows", "outputs"), ("inputs", "rows")], lambda a, b: b),
    **dict.fromkeys([("inputs", "inputs"), ("outputs", "outputs"), (None, "any")], lambda a, b: b),
}


def drawn_layers(draw: Random) -> tuple:
    widths = [draw.choice([64, 256, 1024]) for _ in range(6)]
    return [linear(f"{i}", *pair) for i, pair in enumerate(pairwise(widths))], draw.choice([256, 1024])


def test_accpar():
    """The best of all 3^L sequences of cuts, each at the share where the later of two accelerators is earliest;
    there both take equally long."""
    draw = Random(1)
    for _ in range(4):
        layers, rows = drawn_layers(draw)
        devices = Device(4e9, 2e8), Device(draw.choice([1e9, 3e9]), draw.choice([2e8, 1e8]))

        def both(layer, before, cut, a):
            x, w, y = rows * layer.takes, layer.takes * layer.gives, rows * layer.gives
            terms = dict(rows=w, inputs=y, outputs=x)[cut]
            fetched = lambda a: x * FETCHED[before, cut](a, 1 - a) if before else 0
            for share, (speed, link, *_) in zip((a, 1 - a), devices):
                yield 6 * w * rows * share / speed + 4 * (terms + fetched(share)) / link

        within = dict(bounds=(0, 1), options={"xatol": 1e-12})
        least = lambda *at: minimize_scalar(lambda a: max(both(*at, a)), **within)
        later = cache(lambda *at: least(*at).fun)
        total = lambda cuts: sum(later(*at) for at in zip(layers, (None, *cuts), cuts))
        found = accpar(layers, rows, devices)
        assert found.cost == pytest.approx(min(map(total, product(CUTS, repeat=5))), rel=1e-6)
        cuts, shares = zip(*found.choice)
        for at in zip(layers, (None, *cuts), cuts, shares):
            first, second = both(*at)
            assert abs(first - second) < 1e-6 * first and 0 < at[-1] < 1
    assert len(set(cuts)) > 1


def test_hap():
    """A* ends at the cost of Dijkstra's search and of all 3^L programs, and leaves fewer states; its shares beat a
    grid and are by speed where nothing is padded. Three ranks with 3, 2 and 1 of six heads equal one process in
    loss and gradients, and their FLOPs are in that ratio: at such speeds half the time of even shares."""
    draw, states_left = Random(2), [0, 0]
    for _ in range(6):
        layers, rows = drawn_layers(draw)
        devices = [Device(draw.choice([1e9, 2e9, 4e9]), 2e8) for _ in range(3)]
        latency_s = draw.choice([0.0, 1e-3, 1e-2])
        found, shares = hap(layers, rows, devices, latency_s)
        price = lambda i, *at, shares=shares: priced(layers[i], rows, *at, devices, latency_s, shares)
        total = lambda cuts, shares=shares: sum(
            sum(price(i, *at, shares=shares)[:2]) for i, at in enumerate(zip((None, *cuts), cuts))
        )
        plain = synthesize(5, price, guided=False)
        assert plain.cost == pytest.approx(found.cost) == min(map(total, product(CUTS, repeat=5)))
        states_left = [states_left[0] + found.looked_at, states_left[1] + plain.looked_at]
        grid = [(a / 10, b / 10, (10 - a - b) / 10) for a in range(1, 9) for b in range(1, 10 - a)]
        assert found.cost <= min(total(found.choice, other) for other in grid) * (1 + 1e-6)
    assert states_left[0] < states_left[1]
    for padded_s in (0.0, 0.3, 0.7, 1.5, 9.0):  # by scipy: shares a, b, c, the latest end, the largest share
        ends = numpy.repeat([[-1, 0], [0, -1]], 3, axis=0)
        above = numpy.hstack([numpy.vstack([numpy.diag([1 / 3, 1 / 2, 1]), numpy.eye(3)]), ends])
        least = linprog([0, 0, 0, 1, padded_s], above, [0] * 6, [[1, 1, 1, 0, 0]], [1])
        assert best_shares(1.0, padded_s, [3, 2, 1]) == pytest.approx(list(least.x[:3]))
    config, speeds = small(d_model=24, num_heads=6, num_kv_heads=6, d_ff=24), (3, 2, 1)
    x = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def trained(heads=None):
        blocks, y = GPT(config, seed=3, layers=range(1, 3), dtype=torch.float64), x.clone().requires_grad_()
        if heads:
            time.sleep(0.01 * heads[collectives.world().rank()] / speeds[collectives.world().rank()])
            for block in blocks.layers:
                split_block(block, heads, [4 * n for n in heads], collectives.world())
        with Ledger() as ledger:
            loss = blocks(y).sin().sum()
            loss.backward()
        grads = {"loss": loss.detach(), "x": y.grad} | {name: p.grad for name, p in blocks.named_parameters()}
        return grads, ledger.flops

    (wanted, all_flops), slowest = trained(), []
    for heads in ((2, 2, 2), tuple(whale(6, speeds))):
        grads, flops = zip(*launch.run(trained, heads, ranks=3))
        for name, whole in wanted.items():
            parts = [each[name] for each in grads]
            size = lambda dim: sum(part.size(dim) for part in parts)
            cut = [dim for dim in range(whole.dim()) if size(dim) == whole.size(dim)]
            joined = [torch.cat(parts, cut[0])] if cut else parts
            assert all((part - whole).abs().max() < TOLERANCE for part in joined)
        assert sum(flops) == all_flops
        slowest.append(max(map(Fraction, flops, speeds)))
    assert slowest == [Fraction(all_flops, 3), Fraction(all_flops, 6)]
