"""Experts taking turns, forward and backward by hand: one expert's work is gone when the next begins.

    forward    z = rows · up_e, rows · gate_e      kept, [R, F]: one product, two with a gate
               y = hidden(z) · down_e              hidden [rows, F] lives for this turn
    backward   hidden from z again;  d hidden = dy · down_eᵀ;  d down_e = hiddenᵀ · dy;  dz by autograd
               d up_e = rowsᵀ · dz;  d rows = dz · up_eᵀ

Kept are x, z and the weights of the routing, but no result: with weight w it is w · (hidden · down_e), so
dw = hidden · d hidden, taken before w comes in. A forward turn of `rows` rows makes (F + D) · rows elements,
or 2F · rows with a gate if that is more. FLOPs: 2·R·D·F per matrix and twice that in backward, less one
product for a frozen matrix.
Tan et al. 2024 (ScatterMoE, arXiv:2403.08245, section 3) read and write through indices inside one kernel.
Differs: a copy of one expert's rows at a time.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

Given = Tensor | None
Tensors = Sequence[Tensor]
Act = Callable[[Tensor], Tensor]


def in_turns(
    x: Tensor,
    tokens: Given,
    weights: Given,
    up: Tensor,
    down: Tensor,
    gate: Given,
    act: Act,
    sizes: list[int],
) -> Tensor:
    """The rows of the experts, sizes[e] of each, are x itself; or row r is x[tokens[r]], and weights[r] times
    its result is added to y[tokens[r]].
    """
    return _Turns.apply(x, tokens, weights, up, down, gate, act, sizes)


def hidden(act: Act, up: Tensor, gate: Given = None) -> Tensor:
    """The layer between, [rows, F], from what one or two products made of the rows."""
    return act(up) if gate is None else act(gate) * up


class _Turns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tokens, weights, up, down, gate, act, sizes):
        matrices = [up] if gate is None else [up, gate]
        made = [x.new_empty(sum(sizes), up.shape[2]) for _ in matrices]
        y = torch.empty_like(x) if tokens is None else torch.zeros_like(x)
        for e, here in enumerate(slices(sizes)):
            part = here if tokens is None else tokens[here]
            weight = None if weights is None else weights[here, None]
            put(y, part, turn(take(x, part), weight, of(e, matrices), down[e], of(here, made), act))
        ctx.save_for_backward(x, tokens, weights, down, *matrices, *made)
        ctx.act, ctx.sizes = act, sizes
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, tokens, weights, down, *rest = ctx.saved_tensors
        matrices, made = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        wants_x, _, wants_weights, wants_up, wants_down, wants_gate, *_ = ctx.needs_input_grad
        wanted = [wants_weights, wants_down, wants_up, wants_gate]
        grads = [torch.empty_like(x) if want else None for x, want in zip((weights, down, *matrices), wanted)]
        dx = (torch.empty_like(x) if tokens is None else torch.zeros_like(x)) if wants_x else None
        for e, here in enumerate(slices(ctx.sizes)):
            part = here if tokens is None else tokens[here]
            weight = None if weights is None else weights[here, None]
            rooms = of(here, grads[:1]) + of(e, grads[1:])
            given = take(x, part), weight, of(e, matrices), down[e], of(here, made), ctx.act
            drows = turn_backward(take(dy, part), *given, rooms, wants_x)
            if wants_x:
                put(dx, part, drows)
            del given, drows  # lest they stay beside those of the next turn
        dweights, ddown, dup, dgate = (*grads, None)[:4]
        return dx, None, dweights, dup, ddown, dgate, None, None


def turn(rows: Tensor, weight: Given, matrices: Tensors, down: Tensor, made: Tensors, act: Act) -> Tensor:
    """One expert's rows [rows, D] -> their results. The products before act are written into `made`."""
    for matrix, room in zip(matrices, made):
        torch.mm(rows, matrix, out=room)
    y = hidden(act, *made) @ down
    return y if weight is None else y.mul_(weight)


def turn_backward(
    dy: Tensor,
    rows: Tensor,
    weight: Given,
    matrices: Tensors,
    down: Tensor,
    made: Tensors,
    act: Act,
    rooms: Sequence,
    wants_rows: bool,
) -> Given:
    """dy of one expert's rows -> that of the rows; the others are written into `rooms`."""
    dweight, ddown, *dmatrices = rooms
    with torch.enable_grad():
        leaves = [room.detach().requires_grad_() for room in made]
        layer = hidden(act, *leaves)
    dlayer = dy @ down.T
    if dweight is not None:
        torch.sum(dlayer * layer.detach(), 1, out=dweight)
    if weight is not None:
        dy, dlayer = dy * weight, dlayer.mul_(weight)
    if ddown is not None:
        torch.mm(layer.detach().T, dy, out=ddown)
    dmade = torch.autograd.grad(layer, leaves, dlayer)
    for d, room in zip(dmade, dmatrices):
        if room is not None:
            torch.mm(rows.T, d, out=room)
    if not wants_rows:
        return None
    drows = dmade[0] @ matrices[0].T
    for d, matrix in zip(dmade[1:], matrices[1:]):
        drows.addmm_(d, matrix.T)
    return drows


def of(which: int | slice, tensors: Sequence[Given]) -> list[Given]:
    """An expert's matrices, or its rows, of each."""
    return [None if tensor is None else tensor[which] for tensor in tensors]


def slices(sizes: list[int]) -> list[slice]:
    """Where the rows of each expert are."""
    ends = list(accumulate(sizes))
    return [slice(end - size, end) for end, size in zip(ends, sizes)]


def take(x: Tensor, part: slice | Tensor) -> Tensor:
    """A slice is a view; the rows of tokens are a copy."""
    return x[part] if isinstance(part, slice) else x.index_select(0, part)


def put(out: Tensor, part: slice | Tensor, rows: Tensor) -> None:
    """A slice is written once; of a token, all rows are added."""
    if isinstance(part, slice):
        out[part] = rows
    else:
        out.index_add_(0, part, rows)
