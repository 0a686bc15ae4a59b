"""Passes that are written by hand, as functions of autograd, which only saves and calls.

    ys = by_hand(forward, backward, *tensors)        forward(*tensors) -> ys
                                                     backward(dys, tensors, wanted) -> a gradient for each

`wanted` says which gradients are asked for (none of a frozen parameter). Saves these tensors only, `saving`
those that forward returns beside ys, which backward is given.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


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


def columns_by_hand(x: Tensor, linears: Sequence[nn.Module], forward: Callable, backward: Callable):
    """By `forward(x, weights, biases) -> ys` and `backward(dys, x, weights, wanted) -> dx, dweights`."""
    weights, biases = zip(*(linear.local_params() for linear in linears))
    count = len(linears)

    def run(x: Tensor, *params: Tensor | None):
        return forward(x, params[:count], params[count:])

    def run_backward(dys: Sequence[Tensor], saved: Sequence[Tensor], wanted: Sequence[bool]):
        (x, *weights), of_biases = saved[: count + 1], wanted[count + 1 :]
        dx, dweights = backward(dys, x, weights, wanted[1 : count + 1])
        return dx, *dweights, *(tokens(dy).sum(0) if want else None for dy, want in zip(dys, of_biases))

    return by_hand(run, run_backward, x, *weights, *biases)


def linear_by_hand(x: Tensor, weight: Tensor, bias: Tensor | None, forward: Callable, backward: Callable):
    """`forward(x, weight, bias)` and `backward(dy, x, weight, bias)`, of x `[m, k]`, for x `[.., k]`."""

    def run(x: Tensor, *params: Tensor | None) -> Tensor:
        return forward(x.flatten(0, -2), *params).view(*x.shape[:-1], -1)

    def run_backward(dys: Sequence[Tensor], saved: Sequence[Tensor], wanted: Sequence[bool]):
        x, *params = saved
        dx, *dparams = backward(dys[0].flatten(0, -2), x.flatten(0, -2), *params)
        return dx.view_as(x), *dparams

    return by_hand(run, run_backward, x, weight, bias)


def tokens(x: Tensor) -> Tensor:
    """`[.., D]` as a list of tokens `[N, D]`."""
    return x.reshape(-1, x.size(-1))
