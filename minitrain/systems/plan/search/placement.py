"""Device placement by reinforcement learning: a policy draws where each operator runs, time is its reward.

    policy     softmax over devices for each operator, independent           logits[operators, devices]
    reward     -log(step time), normed by the mean and spread of the batch
    update     logits += rate · mean of reward · (one-hot of what was drawn - probabilities)     (REINFORCE)

The step time is simulated (pipeline/simulate.py): operators in a row, microbatches one after the other, an
operator at a time on a device, and a message wherever the device changes. A placement of L operators on d
devices: d^L. No gradient of the time is needed, but many runs are.
Mirhoseini et al. 2017, arXiv:1706.04972. Differs: their policy is a recurrent network that reads
the graph, ours a table.
"""

from collections.abc import Sequence
from functools import cache

import numpy

from minitrain.pipeline.schedule import F, Schedule
from minitrain.pipeline.simulate import Costs, simulate
from minitrain.systems.plan.search.problem import Found, Option, Problem


def step_seconds(problem: Problem, placement: Sequence[int]) -> float:
    """Forward and backward of an operator as one action; the message is that of the widest layer."""
    ranks = [[] for _ in range(problem.devices)]
    for microbatch in range(problem.microbatches):
        for layer, device in enumerate(placement):
            ranks[device].append(F(layer, microbatch))
    alone = Option(())
    times = {i: problem.compute_seconds(layer, alone, ()) for i, layer in enumerate(problem.layers)}
    size = max(layer.takes for layer in problem.layers[1:]) * problem.rows * problem.element_bytes
    message = 2 * size / problem.levels[-1].bytes_per_s
    schedule = Schedule("placement", ranks, len(times), problem.microbatches)
    return simulate(schedule, Costs(F=1, send=message, stage=times)).makespan


def reinforce(problem: Problem, steps: int = 100, batch: int = 16, rate: float = 0.7, seed: int = 0) -> Found:
    """Where the policy ends: its likeliest placement. Looked at: different ones that it drew."""
    draw, operators, devices = numpy.random.default_rng(seed), len(problem.layers), problem.devices
    logits, time = numpy.zeros((operators, devices)), cache(lambda placed: step_seconds(problem, placed))
    seen = {}
    for _ in range(steps):
        shares = numpy.exp(logits - logits.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        below = shares.cumsum(1)[None] < draw.random((batch, operators, 1))
        placed = numpy.minimum(below.sum(2), devices - 1)
        seen |= {(one := tuple(map(int, row))): time(one) for row in placed}
        reward = -numpy.log([seen[tuple(map(int, row))] for row in placed])
        advantage = (reward - reward.mean()) / (reward.std() + 1e-9)
        drawn = numpy.eye(devices)[placed]  # [batch, operators, devices]
        logits += rate * (advantage[:, None, None] * (drawn - shares)).mean(0)
    likeliest = tuple(map(int, logits.argmax(1)))
    return Found(likeliest, time(likeliest), len(seen))
