"""Linear layers whose products are in few bits: what stands in the place of a module, and its two passes.

    x -> enter -> codes, saved -> whole -> forward with each W -> y -> total
    dy -> enter -> whole -> backward with the codes -> whole and each W -> dW, dx -> total

`project(x, linears)` quantises x once for all matrices that read it: Q, K and V; up and gate. `Route` says
what stands between a rank's operands and whole ones; alone nothing does (tensor_parallel/low_precision.py).
A product is an object like those of products.py: `enter`, `forward`, `enter_grad`, `backward`.
Saved for backward: what `enter` gives, and no x. FLOPs: those of the plain layer.
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
class Route:
    """Of operands and results between this rank and the others."""

    x: Callable = as_it_is  # what enters -> of all tokens; called again in backward
    y: Callable = as_it_is  # terms of the result -> their sum
    dy: Callable | None = None  # the gradient that enters -> of all tokens
    dx: Callable = as_it_is


def project(x: Tensor, linears: Sequence["LowLinear"]) -> tuple[Tensor, ...]:
    """One input [.., K], several matrices [N, K] -> [.., N] each."""
    weights, scales = [linear.weight for linear in linears], [linear.scales for linear in linears]
    ys = multiply(x, weights, scales, linears[0].products)
    return tuple(y if linear.bias is None else y + linear.bias for y, linear in zip(ys, linears))


class LowLinear(nn.Module):
    """An nn.Linear with the same parameters."""

    together = staticmethod(project)

    def __init__(self, linear: nn.Linear, products: Products, scales: Scales):
        super().__init__()
        self.weight, self.bias, self.products, self.scales = linear.weight, linear.bias, products, scales

    def forward(self, x: Tensor) -> Tensor:
        return project(x, (self,))[0]


def multiply(x, weights, scales, products: Products, route: Route = Route()) -> tuple[Tensor, ...]:
    """x [.., K] by each of the weights [N, K], without biases; what x is scaled by, the first one says."""
    return _Multiply.apply(x, products, scales, route, *weights)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, products, scales, route, *weights):
        saved = products.enter(x, scales[0])
        tensors, ctx.rebuild = split_tensors(saved)
        ctx.save_for_backward(*weights, *tensors)
        ctx.rest = products, scales, route
        whole = route.x(saved)
        return tuple(route.y(products.forward(whole, w, of_w)) for w, of_w in zip(weights, scales))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *dys):
        products, scales, route = ctx.rest
        saved = ctx.saved_tensors  # once: what is recomputed is gone when it has been read
        weights, tensors = saved[: len(scales)], saved[len(scales) :]
        wants_x, *wanted = ctx.needs_input_grad[0], *ctx.needs_input_grad[4:]
        x, dx, dweights = route.x(ctx.rebuild(tensors)), None, []
        for dy, weight, of_w, wants in zip(dys, weights, scales, wanted):
            if route.dy is not None:
                dy = route.dy(products.enter_grad(dy, of_w))
            term, dweight = products.backward(dy, x, weight, (wants_x, wants), of_w)
            dx = term if dx is None or term is None else dx + term
            dweights.append(dweight)
        return route.dx(dx) if wants_x else None, None, None, None, *dweights


def split_tensors(saved: Any) -> tuple[list[Tensor], Callable]:
    """What autograd can save of a tensor, something quantised, or a tuple of these; and how to join it."""
    if isinstance(saved, Tensor):
        return [saved], lambda tensors: tensors[0]
    if isinstance(saved, Quantized):
        names = [n for n in ("codes", "scales", "tensor_scale") if getattr(saved, n) is not None]
        empty = replace(saved, codes=None, scales=None, tensor_scale=None)
        return [getattr(saved, n) for n in names], lambda tensors: replace(empty, **dict(zip(names, tensors)))
    parts = [split_tensors(part) for part in saved]

    def rebuild(tensors: Sequence[Tensor]) -> tuple:
        left = iter(tensors)
        return tuple(join([next(left) for _ in tensors_of]) for tensors_of, join in parts)

    return [tensor for tensors, _ in parts for tensor in tensors], rebuild
