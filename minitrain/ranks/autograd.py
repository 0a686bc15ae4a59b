"""Passes that are written by hand, as functions of autograd, which only saves and calls.

    ys = by_hand(forward, backward, *tensors)        forward(*tensors) -> ys
                                                     backward(dys, tensors, wanted) -> a gradient for each

`wanted` says which gradients are asked for (none of a frozen parameter). Saves these tensors only, `saving`
those that forward returns beside ys, which backward is given.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def by_hand(forward: Callable, backward: Callable, *tensors: Tensor | None) -> Tensor | tuple[Tensor, ...]:
    return saving(lambda *tensors: (forward(*tensors), tensors), backward, *tensors)


def saving(forward: Callable, backward: Callable, *tensors: Tensor | None) -> Tensor | tuple[Tensor, ...]:
    return _Saving.apply(forward, backward, *tensors)


class _Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx, forward: Callable, backward: Callable, *tensors: Tensor | None):
        ys, saved = forward(*tensors)
        ctx.save_for_backward(*saved)
        ctx.backward_of = backward
        return ys

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *dys: Tensor):
        return None, None, *ctx.backward_of(dys, ctx.saved_tensors, ctx.needs_input_grad[2:])
