"""A training step one layer after the other, forth and back: whoever holds the layers is asked for each.

    forward     x0 -> x1 -> ... -> xL                  without a graph; the inputs are kept
    backward    layer L, with the loss; ... layer 1    each runs again from its input; its graph goes with it

That is recomputation of every layer but the last. `before(i)` must bring layer i's parameters; `after(i)` may
take them and their gradients away. Layers must do the same twice: dropout by place, not by torch's stream.
Of several microbatches each passes a layer before the next one is asked for.
Memory: an input a layer and microbatch, and what one layer keeps. Sends what the layers send.
Chen et al. 2016, arXiv:1604.06174, section 3. Differs: no hook of autograd between layers, just this order.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minitrain.ranks.checks import MOST, require_ints


def order_of_use(count: int) -> list[int]:
    """Which layer is asked for, step by step, by `forward_backward`: the last one once."""
    require_ints(0, MOST, count=count)
    return [*range(count - 1), *reversed(range(count))]


class Kept:
    """An input that stays where it is until its layer runs again."""

    def __init__(self, x: Tensor):
        self.x = x

    def settle(self) -> None:
        """What it leaves has its memory back; here it leaves nothing."""

    def wait(self) -> Tensor:
        return self.x


def _nobody(number: int) -> None:
    """Is asked for a layer, where layers are there anyway."""


def _settle(inputs: Sequence[Kept]) -> None:
    for x in inputs:
        x.settle()


def forward_backward(
    layers: Sequence[Callable], x: Tensor, loss_of: Callable, before=_nobody, after=_nobody, others=()
) -> Tensor:
    """The loss; gradients are where loss_of(layers(x)).backward() leaves them. Each layer gets `others`."""
    return of_microbatches(layers, [x], lambda y, u: loss_of(y), before, after, others)


def of_microbatches(
    layers: Sequence[Callable], x: Sequence[Tensor], loss_of: Callable, before, after, others=(), keep=Kept
) -> Tensor:
    """The sum of loss_of(layers(x[u]), u); `keep(x)` holds an input of a layer until its backward."""
    kept: list[list[Kept | None]] = []
    x, last = list(x), len(layers) - 1
    with torch.no_grad():
        for number in range(last):
            before(number)
            if kept:
                _settle(kept[-1])
            kept.append([keep(part) for part in x])
            x = [layers[number](part, *others) for part in x]
    kept.append([Kept(part) for part in x])
    total, gradients = 0, [None] * len(x)
    for number in range(last, -1, -1):
        before(number)
        inputs = kept.pop()
        for u in range(len(inputs)):
            x, inputs[u] = inputs[u].wait().detach(), None
            x.requires_grad_(number > 0 and x.is_floating_point())
            y = layers[number](x, *others)
            if number == last:
                y = loss_of(y, u)
                total = total + y.detach()
            if y.requires_grad:
                y.backward(gradients[u])
            gradients[u] = x.grad
            del x, y
        after(number)
    return total
