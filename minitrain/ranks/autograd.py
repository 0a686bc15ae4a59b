"""Forward and backward as two plain functions, made one step of autograd, which only saves and calls.

    ys = custom_vjp(forward, backward, *tensors)       forward(*tensors) -> ys, saved
                                                       backward(dys, saved, wanted) -> a gradient for each
    ys = vjp_of_inputs(forward, backward, *tensors)    forward(*tensors) -> ys; saved are the tensors

`wanted` says which gradients are asked for (none of a frozen parameter). Named as in JAX.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def custom_vjp(forward: Callable, backward: Callable, *tensors: Tensor | None) -> Tensor | tuple[Tensor, ...]:
    return _CustomVJP.apply(forward, backward, *tensors)


def vjp_of_inputs(forward: Callable, backward: Callable, *tensors: Tensor | None):
    return custom_vjp(lambda *tensors: (forward(*tensors), tensors), backward, *tensors)


class _CustomVJP(torch.autograd.Function):
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
