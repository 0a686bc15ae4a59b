"""One interpreter for every plan of recomputation in a chain of layers: runs a list of F, T, D, B.

    forward = chain(layers, every(12, 4))         layers (x, ...) -> x, plan: chain_plan.py
    y = forward(x, positions)                     y.backward() does the rest of the plan

The chain is one operator of autograd's graph; gradients are bit-equal to those without a plan. A layer that
runs again draws the random numbers of its first run. A shared parameter gets its gradient in parts, which
buckets sent beside backward refuse (buckets.py). What a layer gives besides x (a router's losses) gets no
gradient: use recompute.py. Memory: exactly `chain_plan.peak_bytes`. Griewank and Walther 2000 (revolve),
Algorithm 799. Differs: theirs calls back for one action at a time.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from minitrain.ranks.autograd import custom_vjp
from minitrain.ranks.random_state import drawing_from, random_state
from minitrain.systems.memory.chain_plan import Action, check, walk


def chain(layers: Sequence[nn.Module], plan: Sequence[Action], replay: Iterable[Callable] = ()) -> Callable:
    """-> run(x, *others), which is layers[-1](.. layers[0](x, *others) .., *others) carried out by the plan.
    `others` have no gradient; `replay` as in recompute.py."""
    layers, replay = list(layers), tuple(replay)
    check(plan, len(layers))

    def run(x: Tensor, *others) -> Tensor:
        trained = [any(p.requires_grad for p in layer.parameters()) for layer in layers]
        if not torch.is_grad_enabled() or not (x.requires_grad or any(trained)):
            for layer in layers:
                x = layer(x, *others)
            return x
        wanted = [x.requires_grad or any(trained[:i]) for i in range(len(layers))]
        # an operator whose inputs are all without gradient would be left out: tokens have none
        anchor = torch.empty(0, device=x.device, requires_grad=True)
        interpreter = _Interpreter(layers, others, plan, wanted, replay)
        return custom_vjp(interpreter.forward, interpreter.backward, x, anchor)

    return run


class _Interpreter:
    def __init__(self, layers: Sequence[nn.Module], others: tuple, plan, wanted: list[bool], replay: tuple):
        self.layers, self.others, self.wanted, self.replay = layers, others, wanted, replay
        self.steps = walk(plan)
        self.x: dict[int, Tensor] = {}  # by number
        self.tapes: dict[int, tuple[Tensor, GradientEdge | None]] = {}  # layer -> its input, its graph's end
        self.first: dict[int, list[Callable]] = {}  # layer -> contexts in which it runs as it did at first
        self.gradient: Tensor | None = None  # of the x at which backward has arrived

    def forward(self, x: Tensor, anchor: Tensor) -> tuple[Tensor, tuple]:
        self.x[0] = x.detach()
        return self.play(), ()

    def backward(self, dys: Sequence[Tensor], *_) -> tuple[Tensor | None, None]:
        if self.steps is None:
            raise RuntimeError("chain: backward a second time; a plan lets everything go in the first")
        (self.gradient,) = dys
        self.play()
        dx, self.gradient, self.steps = self.gradient, None, None
        return dx, None

    def play(self) -> Tensor | None:
        """Up to the output of the last layer; the next call goes on from there to the end."""
        for (kind, i), held in self.steps:
            if kind != "D":
                getattr(self, kind)(i)
            output = self.x.pop(len(self.layers), None)
            self.x = {number: x for number, x in self.x.items() if number in held}
            if output is not None:
                return output

    def F(self, i: int) -> None:
        with torch.no_grad():
            self.x[i + 1] = self.run(i, self.x[i])

    def T(self, i: int) -> None:
        x = self.x[i].detach()
        x.requires_grad_(self.wanted[i])
        with torch.enable_grad():
            y = self.run(i, x)
        self.tapes[i] = x, get_gradient_edge(y) if y.requires_grad else None
        self.x[i + 1] = y.detach()

    def B(self, i: int) -> None:
        x, end = self.tapes.pop(i)
        if end is not None and self.gradient is not None:
            torch.autograd.backward((end,), (self.gradient,))
        self.gradient = x.grad

    def run(self, i: int, x: Tensor) -> Tensor:
        with ExitStack() as stack:
            if i in self.first:
                for context in self.first[i]:
                    stack.enter_context(context())
            else:
                drawing = partial(drawing_from, random_state(x.device), x.device)
                self.first[i] = [drawing, *(kept() for kept in self.replay)]
            return self.layers[i](x, *self.others)
