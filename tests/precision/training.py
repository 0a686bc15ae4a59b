"""Trainings of a few steps that the tests of narrow numbers share, and how far two of them are apart."""

from dataclasses import replace

import torch

from minitrain.compose.parallelize import parallelize
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def rows(size=4, length=8):
    return Rows(
        lambda step, rank, ranks: random_tokens(step, rank, ranks, size, length, 29, seed=5), size, length
    )


def started(strategy, config, precision=None, **more):
    """A run whose start is the same in every layout."""
    strategy = replace(strategy, precision=precision or strategy.precision)
    return parallelize(config, strategy, lambda params: AdamW(params, lr=1e-2, eps=1e-3), seed=3, **more)


def trained(config, products, steps=2, *, first=0, state=None, size=4, length=8, **strategy):
    """(losses, state) of a run on this rank, the same in every layout."""
    run = started(Strategy(**dict(precision="float64", products=products) | strategy), config)
    if state:
        run.load_state_dict(state)
    batches = [run.batch(rows(size, length), step) for step in range(first, first + steps)]
    return [run.total(run.step(batch, 0.5).loss).item() for batch in batches], run.state_dict()


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def distance(one, other) -> float:
    """Of losses and parameters, at most."""
    mine, theirs = one[1]["parameters"], other[1]["parameters"]
    assert mine.keys() == theirs.keys()
    losses = [abs(a - b) for a, b in zip(one[0], other[0], strict=True)]
    return max(*((mine[name] - theirs[name]).abs().max().item() for name in mine), *losses)
