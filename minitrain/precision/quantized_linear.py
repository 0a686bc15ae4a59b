"""Linear layers whose products are in few bits: what stands in the place of a module, and its two passes.

    x -> enter -> kept (codes) -> whole -> forward with each W -> y -> total
    dy -> enter -> whole -> backward with kept -> whole and each W -> dW, dx -> total

`project(x, linears)` quantises x once for all matrices that read it: Q, K and V; up and gate. `Way` says what
stands between a rank's operands and whole ones; alone nothing does (tensor_parallel/low_precision.py). A
product is an object like those of products.py: `enter`, `forward`, `enter_grad`, `backward`.
Kept for backward: what `enter` gives, and no x. FLOPs: those of the plain layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from minitrain.precision.blocks import Quantized
from minitrain.precision.products import Products, Scales


def as_it_is(x):
    return x


@dataclass(frozen=True)
class Way:
    """Of operands and results between this rank and the others."""

    x: Callable = as_it_is  # what enters -> of all tokens; called again in backward
    y: Callable = as_it_is  # terms of the result -> their sum
    dy: Callable | None = None  # the gradient that enters -> of all tokens
    dx: Callable = as_it_is


class LowLinear(nn.Module):
    """An nn.Linear with the same parameters."""

    def __init__(self, linear: nn.Linear, products: Products, scales: Scales):
        super().__init__()
        self.weight, self.bias, self.products, self.scales = linear.weight, linear.bias, products, scales

    def forward(self, x: Tensor) -> Tensor:
        return project(x, (self,))[0]


def project(x: Tensor, linears: Sequence[LowLinear]) -> tuple[Tensor, ...]:
    """One input [.., K], several matrices [N, K] -> [.., N] each."""
    weights, scales = [linear.weight for linear in linears], [linear.scales for linear in linears]
    ys = multiply(x, weights, scales, linears[0].products)
    return tuple(y if linear.bias is None else y + linear.bias for y, linear in zip(ys, linears))


def multiply(x, weights, scales, products: Products, way: Way = Way()) -> tuple[Tensor, ...]:
    """x [.., K] by each of the weights [N, K], without biases; what x is scaled by, the first one says."""
    return _Multiply.apply(x, products, scales, way, *weights)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, products, scales, way, *weights):
        kept = products.enter(x, scales[0])
        tensors, ctx.rebuild = taken_apart(kept)
        ctx.save_for_backward(*weights, *tensors)
        ctx.rest = products, scales, way
        whole = way.x(kept)
        return tuple(way.y(products.forward(whole, w, own)) for w, own in zip(weights, scales))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *dys):
        products, scales, way = ctx.rest
        saved = ctx.saved_tensors  # once: what is recomputed is gone when it has been read
        weights, tensors = saved[: len(scales)], saved[len(scales) :]
        wants_x, *wanted = ctx.needs_input_grad[0], *ctx.needs_input_grad[4:]
        x, dx, dweights = way.x(ctx.rebuild(tensors)), None, []
        for dy, weight, own, wants in zip(dys, weights, scales, wanted):
            if way.dy is not None:
                dy = way.dy(products.enter_grad(dy, own))
            term, dweight = products.backward(dy, x, weight, (wants_x, wants), own)
            dx = term if dx is None or term is None else dx + term
            dweights.append(dweight)
        return way.dx(dx) if wants_x else None, None, None, None, *dweights


def taken_apart(kept: Any) -> tuple[list[Tensor], Callable]:
    """What autograd can save of a tensor, something quantised, or a tuple of these; and the way back."""
    if isinstance(kept, Tensor):
        return [kept], lambda tensors: tensors[0]
    if isinstance(kept, Quantized):
        names = [n for n in ("codes", "scales", "tensor_scale") if getattr(kept, n) is not None]
        empty = replace(kept, codes=None, scales=None, tensor_scale=None)
        return [getattr(kept, n) for n in names], lambda tensors: replace(empty, **dict(zip(names, tensors)))
    parts = [taken_apart(part) for part in kept]

    def rebuild(tensors: Sequence[Tensor]) -> tuple:
        left = iter(tensors)
        return tuple(back([next(left) for _ in own]) for own, back in parts)

    return [one for own, _ in parts for one in own], rebuild
