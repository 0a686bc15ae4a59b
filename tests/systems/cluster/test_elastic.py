"""Pollux, Sia and Crius beside brute force and grids, the noise scale on real gradients, all on the trace."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest
import torch

from minitrain.compose.dry_runs import work_of
from minitrain.model.config import GPTConfig
from minitrain.plan.planner import Task
from minitrain.plan.simulate.machines import machine
from minitrain.systems.cluster.elastic import cells, elastic, goodput, noise_scale, pollux, sia
from minitrain.systems.cluster.jobs import Job, Node, simulate, trace
from minitrain.systems.cluster.orders import gang, sjf

BATCHES = [32, 64, 128, 256, 512, 1024, 2048]


def test_pollux():
    """Devices and batches equal those of a grid over both; a batch's efficiency is the rise of its signal; the
    noise scale of two batch sizes is that of all gradients within 20 %; on the trace jobs end earlier."""
    rate = lambda a: lambda n, batch: batch / (0.02 + a * batch / n + 0.005 * (n > 1) + 0.002 * n)
    parts = (0.001, 500, 64), (0.004, 4000, 64), (0.002, 100, 32)
    worth = [goodput(rate(a), noise, batch) for a, noise, batch in parts]
    tables = [[0.0] + [max(job(n, batch) for batch in BATCHES) for n in range(1, 13)] for job in worth]
    counts, best = pollux(tables, 12)
    grid = max(
        sum(n and job(n, batch) for job, n, batch in zip(worth, split, chosen))
        for split in product(range(13), repeat=3)
        if sum(split) <= 12
        for chosen in product(BATCHES[::2], repeat=3)
    )
    fine = max(
        (sum(table[n] for table, n in zip(tables, split)), list(split))
        for split in product(range(13), repeat=3)
        if sum(split) <= 12
    )
    assert (pytest.approx(best), counts) == fine and best >= grid > 0.9 * best
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    x, target, weight = normal(20_000, 200), normal(200), torch.zeros(200, requires_grad=True)
    y = x @ target + 4 * normal(20_000)
    gradients = x * (x @ weight - y).detach()[:, None]
    chosen = torch.randint(20_000, (16,), generator=generator)
    (real,) = torch.autograd.grad(((x[chosen] @ weight - y[chosen]) ** 2 / 2).mean(), weight)
    assert torch.allclose(real, gradients[chosen].mean(0), rtol=1e-4, atol=1e-4)  # they are torch's gradients
    mean = gradients.mean(0)
    exact = float((gradients - mean).square().sum(1).mean() / mean.square().sum())
    drawn = gradients[torch.randint(20_000, (200, 512), generator=generator)]
    big = float(drawn.mean(1).square().sum(1).mean())
    small = float(drawn.view(200, 32, 16, 200).mean(2).square().sum(2).mean())
    assert noise_scale(16, 512, small, big) == pytest.approx(exact, rel=0.05) and 150 < exact < 250
    signal = lambda batch: 1 / (1 + exact / batch)  # |G|^2 of mean |g|^2
    worth_512 = 64 * signal(512) / signal(64)  # samples: 512 in one batch, in steps of 64 that go as far
    assert goodput(lambda n, batch: batch, exact, 64)(1, 512) == pytest.approx(worth_512)
    for seed in (1,):
        fixed, found = (
            simulate(trace(40, seed), [Node("fast", 8)] * 16, p).mean_jct_s for p in (sjf, elastic())
        )
        assert found < 0.7 * fixed


def test_sia():
    """Four jobs, two kinds: as good as every combination tried; with one kind and every count, Pollux's sum; on
    a mixed fleet jobs end earlier than by gangs, and than without knowing the kinds' speeds."""
    for seed in range(5):
        draw = Random(seed)
        capacity = {"fast": 4, "slow": 4}
        speed = lambda kind, n: (
            (1.7 if kind == "fast" else 1) * n ** draw.uniform(0.5, 1) * draw.uniform(0.5, 2)
        )
        worth = [{(kind, n): speed(kind, n) for kind in capacity for n in (1, 2, 4)} for _ in range(4)]
        chosen, best = sia(worth, capacity), 0
        for combination in product(*[[None, *job] for job in worth]):
            used = {kind: sum(c[1] for c in combination if c and c[0] == kind) for kind in capacity}
            if all(used[kind] <= room for kind, room in capacity.items()):
                best = max(best, sum(job[c] for job, c in zip(worth, combination) if c))
        assert sum(worth[j][choice] for j, choice in chosen.items()) == pytest.approx(best)
        table = [[0.0] + [speed("slow", n) for n in range(1, 9)] for _ in range(3)]
        alone = [{("slow", n): job[n] for n in range(1, 9)} for job in table]
        assert sum(alone[j][c] for j, c in sia(alone, {"slow": 8}).items()) == pytest.approx(
            pollux(table, 8)[1]
        )
    fleet = [Node("fast", 8)] * 8 + [Node("slow", 8)] * 8
    blind = elastic(lambda job, kind, n: job.rate("fast", n))
    gangs, without, found = (simulate(trace(40, 3), fleet, p).mean_jct_s for p in (gang, blind, elastic()))
    assert found < 0.6 * without < gangs


def test_crius():
    """Each cell's best plan is no slower than the plan a job came with, and the cluster that chooses both ends
    the same jobs earlier; each plan is one that the planner allows."""
    model = GPTConfig(d_model=256, num_layers=4, num_heads=4, vocab_size=512, max_positions=512)
    kinds = {kind: replace(machine(kind), devices_per_node=2, nics_per_node=2) for kind in ("a100", "h100")}
    tasks = [Task(model, kinds[kind], n, 8, 512) for kind in kinds for n in (1, 2, 4)]
    usual = lambda plan: plan.recompute == "none" and plan.zero == 0
    joint = cells(tasks, work_of, usual)
    axes = ("dp", "tp", "pp")
    fixed = {
        axis: cells(
            tasks, work_of, lambda plan: usual(plan) and all(getattr(plan, o) == 1 for o in axes if o != axis)
        )
        for axis in axes
    }
    assert len(joint) == 6 and {
        axis for axis in axes for cell in joint.values() if getattr(cell.run.strategy, axis) > 1
    }
    for own in fixed.values():
        assert all(joint[cell].step_s <= plan.step_s for cell, plan in own.items())
    fleet = [Node(of.device.name, 2) for of in kinds.values() for _ in range(3)]
    step_s = joint[kinds["a100"].device.name, 1].step_s

    def ends(table) -> float:
        """The same nine jobs, three that came with each axis: `table(axis)` is what their cells reach."""
        speeds = {axis: {cell: step_s / plan.step_s for cell, plan in table(axis).items()} for axis in axes}
        jobs = [Job(f"{i}", 40 * i, 2, 500 + 100 * i, speeds[axes[i % 3]], restart_s=5) for i in range(9)]
        return simulate(jobs, fleet, elastic(lambda job, kind, n: job.speeds.get((kind, n), 0))).mean_jct_s

    assert ends(lambda axis: joint) < ends(lambda axis: fixed[axis])
