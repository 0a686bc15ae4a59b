"""Recomputation on a page: keep the input of a block, and run it again when backward needs what is inside.

    forward     y = block(x), nothing saved but x and the state of the generators of random numbers
    backward    y again, with the same random numbers, this time with a graph; then its backward

Of L blocks that keep A bytes each, L inputs and A bytes stay, for one more forward: a third more time. With
sqrt(L) blocks in a segment memory grows with sqrt(L). Without the states a dropout would draw other masks the
second time, and gradients would be of another function, in silence. Chen et al. 2016, arXiv:1604.06174,
section 4; Korthikanti et al. 2022, arXiv:2205.05198, section 5 (keep all but attention's scores). General:
recompute.py (what to keep, by name or by policy), recompute_policies.py.
"""

from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import Tensor


def states(device: torch.device) -> list[Tensor]:
    cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *cuda]


@contextmanager
def drawing_from(old: list[Tensor], device: torch.device):
    """Random numbers as they were; afterwards those that were due go on."""
    now = states(device)
    for state in (old, now):
        torch.set_rng_state(state[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(state[1], device)
        if state is old:
            yield


class Recompute(torch.autograd.Function):
    """Recompute.apply(block, x, *params) -> y. Parameters are arguments, so that autograd asks for their
    gradients also where x needs none."""

    @staticmethod
    def forward(ctx, block: Callable, x: Tensor, *params: Tensor) -> Tensor:
        """y, without a graph; x and the states are kept."""
        ctx.block, ctx.params, ctx.states = block, params, states(x.device)
        ctx.save_for_backward(x)
        return block(x)  # autograd is off in here

    @staticmethod
    def backward(ctx, dy: Tensor):
        [x] = ctx.saved_tensors
        x = x.detach().requires_grad_(x.requires_grad)
        with torch.enable_grad(), drawing_from(ctx.states, x.device):
            y = ctx.block(x)
        wanted = [one for one in (x, *ctx.params) if one.requires_grad]
        found = dict(zip(wanted, torch.autograd.grad(y, wanted, dy, allow_unused=True)))
        return None, *(found.get(one) for one in (x, *ctx.params))


def recompute(block: torch.nn.Module, x: Tensor) -> Tensor:
    return Recompute.apply(block, x, *block.parameters())
