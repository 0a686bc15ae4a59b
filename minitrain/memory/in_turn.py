"""A training step one layer after the other, forth and back: whoever holds the layers is asked for each.

    forward     x0 -> x1 -> ... -> xL                  without a graph; the inputs are kept
    backward    layer L, with the loss; ... layer 1    each runs again from its input; its graph goes with it

That is recomputation of every layer but the last. `before(i)` must bring layer i's parameters; `after(i)` may
take them and their gradients away. Layers must do the same twice: dropout by place, not by torch's stream.
Memory: an input a layer, and what one layer keeps. Sends what the layers send.
Chen et al. 2016, arXiv:1604.06174, section 3. Differs: no hook of autograd between layers, just this order.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def order_of_use(count: int) -> list[int]:
    """Which layer is asked for, step by step, by `forward_backward`: the last one once."""
    return [*range(count - 1), *reversed(range(count))]


def forward_backward(
    count: int,
    run: Callable[[int, Tensor], Tensor],
    x: Tensor,
    loss_of: Callable[[Tensor], Tensor],
    before: Callable[[int], object] = lambda number: None,
    after: Callable[[int], object] = lambda number: None,
) -> Tensor:
    """The loss; gradients are where loss_of(layers(x)).backward() leaves them. `run(i, x)` is layer i."""
    inputs = [x]
    with torch.no_grad():
        for number in range(count - 1):
            before(number)
            inputs.append(run(number, inputs[-1]))
    loss, gradient = None, None
    for number in reversed(range(count)):
        before(number)
        x = inputs.pop().detach()
        x.requires_grad_(x.is_floating_point())
        y = run(number, x)
        if loss is None:
            y = loss = loss_of(y)
        y.backward(gradient)
        gradient = x.grad
        loss, y = loss.detach(), None
        after(number)
    return loss
