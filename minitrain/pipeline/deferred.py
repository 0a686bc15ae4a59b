"""A backward in two halves: the gradient of the input now, the gradients of the weights later.

    y = x · Wᵀ          now:    dx = dy · W          later:  dW = dyᵀ · x, from the kept (x, dy)

Inside `with Deferred() as later:` (a torch function mode) each product with a parameter (`F.linear`) becomes
one whose backward returns dx and puts (W, bias, x, dy) on a list; `later.weights()` adds to W.grad. Norms,
tables, attention and products whose weight is no parameter get all gradients at once. Memory: between I and W
a linear keeps x and dy. Qi et al. 2023 (Zero Bubble), arXiv:2401.10241, section 4. Differs: theirs patches
Megatron's linear layers, torch.distributed.pipelining cuts autograd's graph where parameters enter.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Deferred(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.products: list[tuple[nn.Parameter, nn.Parameter | None, Tensor, Tensor]] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.linear and torch.is_grad_enabled():
            x, weight, bias = (*args, *(kwargs or {}).values(), None)[:3]
            # a narrow copy knows its parameter (systems/precision/jit_copies.py)
            params = [getattr(tensor, "copy_of", tensor) for tensor in (weight, bias)]
            trained = isinstance(params[0], nn.Parameter) and params[0].requires_grad
            if trained and (bias is None or params[1].is_leaf):
                return _Linear.apply(x, weight, bias, self.products, *params)
        return function(*args, **(kwargs or {}))

    @torch.no_grad()
    def weights(self) -> None:
        """The second half: all products on the list, each added to its parameter's gradient."""
        for weight, bias, x, dy in self.products:
            x, dy = x.reshape(-1, x.size(-1)), dy.reshape(-1, dy.size(-1))
            if weight.grad is None:
                weight.grad = (dy.T @ x).to(weight.grad_dtype)
            elif weight.grad_dtype == x.dtype:
                weight.grad.addmm_(dy.T, x)
            else:
                weight.grad.add_(dy.T @ x)
            if bias is not None and bias.requires_grad:
                db = dy.sum(0, dtype=bias.grad_dtype)
                bias.grad = db if bias.grad is None else bias.grad.add_(db)
        self.products.clear()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, products: list, *params) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.products, ctx.params = products, params
        return F.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):
        x, weight = ctx.saved_tensors
        ctx.products.append((*ctx.params, x, dy))
        return dy @ weight if ctx.needs_input_grad[0] else None, *[None] * 5
