"""Two microbatches in turns: while an all-to-all of one is on its way, the other computes.

    backward of b   combine | experts, then their weights | attention, then its weights |
    forward of a            | attention                   | experts                     | sum
                       issue ^ issue                 issue ^ issue

A layer is cut into pieces at its all-to-alls. `forward` and `backward` are generators that give way after
each issue, so that

    dx, (y, saved) = interleave([backward(saved_b, dy), forward(pieces, x)], enter=2)

is the pair (F B) of DualPipe, for any number of layers, and one after the other the same without overlap.
With `params` a piece computes the gradients of its weights after it has sent the gradient of its input on:
more hides, and gradients between its products are computed twice (of experts 5 products, not 4). Sends what
dispatch.py sends; the counts of a batch cross before its rows, and nothing hides them.
DeepSeek-AI 2024 (DeepSeek-V3), arXiv:2412.19437, section 3.2.1 and Figure 4. Differs: a thread or NCCL moves
the rows, no kernels with cores of their own; the layers are cut by hand (a pipeline runs whole stages so,
uncut: pipeline/halves.py). At full size: systems/plan/expert_pair.py.
"""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.moe.dispatch import Dispatch
from minitrain.systems.moe.overlapped_experts import Flight, Part, Work, capacity_parts, combine


class Piece(NamedTuple):
    """Between two transfers: run(arrived, *beside) -> (rows, flight, *beside).

    The flight takes the rows to the next piece (None: they are there), `beside` stays on this rank. `params`:
    gradients of these are taken after the input's has left, of others with it."""

    run: Callable
    params: Sequence[Tensor] = ()


def layer(before: Callable, route: Callable, work: Work, params, group: ProcessGroup, *, dense=None) -> list:
    """The pieces of h = before(x), y = h + experts(h): attention, experts, sum. `route(h)` gives a Routing.

    With `dense`, the parameters of before and route, gradients of all weights wait for the next transfer."""

    def leave(x: Tensor):
        h = before(x)
        routing = route(h)
        trip, (part,) = capacity_parts(routing, group, 1)
        return h.index_select(0, trip.tokens), Flight(part.there, part.back), h, routing.weights, trip, part

    def experts(rows: Tensor, h: Tensor, weights: Tensor, trip: Dispatch, part: Part):
        y = work(rows.index_select(0, part.order), part.counts, *params)
        return y.index_select(0, part.home), Flight(part.back, part.there), h, weights, trip, part

    def arrive(rows: Tensor, h: Tensor, weights: Tensor, trip: Dispatch, part: Part):
        return h + combine([rows], [part], trip, weights), None

    return [Piece(leave, dense or ()), Piece(experts, () if dense is None else params), Piece(arrive)]


def forward(pieces: Sequence[Piece], x: Tensor) -> Generator:
    """A microbatch through the pieces, in turns; returns (y, what `backward` needs)."""
    saved, values = [], (x,)
    for piece in pieces:
        values = [v.detach().requires_grad_() if _wants(v) else v for v in values]
        with torch.enable_grad():
            rows, flight, *beside = piece.run(*values)
        inputs, outputs = ([v for v in some if _wants(v)] for some in (values, [rows, *beside]))
        saved.append((piece, inputs, outputs, flight if rows.requires_grad else None))
        arrived = rows
        if flight is not None:
            flight.leave(rows.detach())
            yield
            arrived = flight.arrive().requires_grad_(rows.requires_grad)
        values = [arrived, *beside]
    return rows.detach(), saved


def backward(saved: list, dy: Tensor) -> Generator:
    """Back through the pieces, in turns; returns dx. Gradients of parameters are added to their .grad."""
    grads, later = [dy], []
    while saved:
        piece, inputs, outputs, flight = saved.pop()
        if flight is not None:
            flight.leave_back(grads[0])
            while later:
                later.pop()()
            yield
            grads[0] = flight.arrive()
        params = [param for param in piece.params if param.requires_grad]
        if params:
            later.append(partial(torch.autograd.backward, outputs, grads, inputs=params))
        if inputs and params:
            torch.autograd.backward(outputs, grads, inputs=inputs, retain_graph=True)
        elif not params:
            torch.autograd.backward(outputs, grads)
        grads = [torch.zeros_like(v) if v.grad is None else v.grad for v in inputs]
    for rest in later:
        rest()
    return grads[0] if grads else None  # nobody asks for that of tokens


def _wants(value) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
