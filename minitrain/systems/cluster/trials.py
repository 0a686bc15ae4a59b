"""Hydro: learning rates are searched on a narrow model, all trials at once, in a pipeline's bubbles.

muP     a hidden weight of a model `width/base` times as wide has Adam's rate divided by that, the last weight
        starts that much smaller too, the first as ever: then the best rate does not depend on the width
fused   N trials are one model: weights [N, in, out], one batched product where N were
filled  a trial's steps run where a stage idles, and the pipeline ends when it did

Hu et al. 2023, OSDI (Hydro), sections 3 and 4; Yang et al. 2021, arXiv:2203.03466 (muP), table 3. Differs: a
perceptron in place of a traced model; trials differ in their rate alone; memory in bubbles is not looked at.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minitrain.pipeline.schedule import Schedule
from minitrain.pipeline.simulate import Costs, Time, simulate
from minitrain.ranks import checks


def trained(width: int, rates: Sequence[float], x: Tensor, y: Tensor, base=None, steps: int = 60) -> Tensor:
    """Losses [steps, trials] of a trial for each rate: x [batches, B, in] to y [batches, B, out], two
    hidden layers of `width`, Adam. With `base`, muP from that width on; without, one rate for all weights."""
    checks.require_positive_ints(width=width, steps=steps, base=width if base is None else base)
    checks.require_nonempty(rates=rates)
    checks.require_positive(rates=list(rates))
    sizes, wider = [x.shape[-1], width, width, y.shape[-1]], width / (base or width)
    generator, weights, moments = torch.Generator().manual_seed(0), [], []
    for i, (a, b) in enumerate(zip(sizes, sizes[1:])):
        start = torch.randn(a, b, generator=generator, dtype=x.dtype) * a**-0.5
        start /= wider**0.5 if i == 2 else 1
        weights.append(start.expand(len(rates), a, b).clone().requires_grad_())
        moments.append((torch.zeros_like(weights[-1]), torch.zeros_like(weights[-1])))
    rate, losses = torch.tensor(rates, dtype=x.dtype)[:, None, None], []
    for t in range(1, steps + 1):
        hidden, goal = x[(t - 1) % len(x)], y[(t - 1) % len(y)]
        hidden = (hidden @ weights[0]).relu() * 2**0.5
        hidden = (hidden @ weights[1]).relu() * 2**0.5
        loss = (hidden @ weights[2] - goal).square().mean((1, 2))
        losses.append(loss.detach())
        gradients = torch.autograd.grad(loss.sum(), weights)
        with torch.no_grad():
            for i, gradient in enumerate(gradients):
                first, second = moments[i]
                first.lerp_(gradient, 0.1)
                second.lerp_(gradient.square(), 0.05)
                size = (second / (1 - 0.95**t)).sqrt() + 1e-8
                weights[i] -= rate / (wider if i else 1) * (first / (1 - 0.9**t)) / size
    return torch.stack(losses)


def filled(schedule: Schedule, step: Time, costs: Costs = Costs()) -> list[list[Time]]:
    """On each rank, when steps of a trial begin that end before it is needed again, or all have ended."""
    checks.require_positive(step=step)
    run, begins = simulate(schedule, costs), []
    checks.require_ints(0, 10**6, steps=int(run.makespan / step))
    for spans in run.spans:
        ends, starts = [0, *(span.end for span in spans)], [*(span.start for span in spans), run.makespan]
        gaps = zip(ends, starts)
        begins.append([at + i * step for at, until in gaps for i in range(int((until - at) // step))])
    return begins
