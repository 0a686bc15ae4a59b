"""Experts one after the other, forward and backward by hand, each kind of product in a node of its own.

    rows · up_e, rows · gate_e -> z      d up_e = rowsᵀ · dz;  d rows = dz · up_eᵀ
    hidden(z) · down_e -> y              d hidden = dy · down_eᵀ;  d down_e = hiddenᵀ · dy;  dz by autograd

Saved are x, z [R, F] (two with a gate) and the weights of the routing, but no result: hidden [rows, F] is
there for one turn and made again in backward, and with weight w the result is w · (hidden · down_e), so
dw = hidden · d hidden. In backward each node frees what it saved: all z and dz are there with the gradient of
down alone; with all gradients one dz is left, or both where rows are copies of tokens, made once for both.
A forward turn makes (F + D) · rows elements, or 2F · rows with a gate if that is more. FLOPs: 2·R·D·F per
matrix and twice that in backward, less one product for a frozen matrix.
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


def in_turns(x, tokens: Given, weights: Given, up, down, gate: Given, act: Act, sizes: list[int]) -> Tensor:
    """The rows of the experts, sizes[e] of each, are x itself; or row r is x[tokens[r]], and weights[r] times
    its result is added to y[tokens[r]]."""
    matrices = (up,) if gate is None else (up, gate)
    if tokens is None:
        made = [_Inwards.apply(x, None, sizes, matrix)[0] for matrix in matrices]
    else:  # rows are copied once for both
        made = _Inwards.apply(x, tokens, sizes, *matrices)
    return _Outwards.apply(len(x), tokens, weights, down, act, sizes, *made)


def hidden(act: Act, up: Tensor, gate: Given = None) -> Tensor:
    """The layer between, [rows, F], from what one or two products made of the rows."""
    return act(up) if gate is None else act(gate) * up


class _Inwards(torch.autograd.Function):
    """Rows of x, by one matrix of their expert or by several: [R, F] each."""

    @staticmethod
    def forward(ctx, x, tokens, sizes, *matrices):
        made = [x.new_empty(sum(sizes), matrix.shape[2]) for matrix in matrices]
        for e, here in enumerate(slices(sizes)):
            rows = rows_at(x, tokens, here)
            for matrix, room in zip(matrices, made):
                torch.mm(rows, matrix[e], out=room[here])
        ctx.save_for_backward(x, tokens, *matrices)
        ctx.sizes = sizes
        return tuple(made)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *dmade):
        x, tokens, *matrices = ctx.saved_tensors
        wants_x, _, _, *wanted = ctx.needs_input_grad
        grads = [torch.empty_like(matrix) if wants else None for matrix, wants in zip(matrices, wanted)]
        dx = (torch.empty_like(x) if tokens is None else torch.zeros_like(x)) if wants_x else None
        for e, here in enumerate(slices(ctx.sizes)):
            rows = rows_at(x, tokens, here)
            for d, room in zip(dmade, of(e, grads)):
                if room is not None:
                    torch.mm(rows.T, d[here], out=room)
            if wants_x:
                given = of(here, dmade), of(e, matrices)
                drows = rows_backward(*given, out=dx[here] if tokens is None else None)
                if tokens is not None:
                    dx.index_add_(0, tokens[here], drows)
            rows = drows = None  # lest they stay beside those of the next turn
        return dx, None, None, *grads


class _Outwards(torch.autograd.Function):
    """What one or two products made, through act and down: y [length, D]."""

    @staticmethod
    def forward(ctx, length, tokens, weights, down, act, sizes, *made):
        y = (down.new_empty if tokens is None else down.new_zeros)(length, down.shape[2])
        for e, here in enumerate(slices(sizes)):
            weight = None if weights is None else weights[here, None]
            add_rows(y, tokens, here, leave(of(here, made), weight, down[e], act))
        ctx.save_for_backward(tokens, weights, down, *made)
        ctx.act, ctx.sizes = act, sizes
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        tokens, weights, down, *made = ctx.saved_tensors
        _, _, wants_weights, wants_down, _, _, *wants_made = ctx.needs_input_grad
        wanted = (weights, wants_weights), (down, wants_down), *zip(made, wants_made)
        dweights, ddown, *dmade = (torch.empty_like(x) if wants else None for x, wants in wanted)
        for e, here in enumerate(slices(ctx.sizes)):
            weight = None if weights is None else weights[here, None]
            rooms = *of(here, [dweights]), *of(e, [ddown]), *of(here, dmade[:1])
            given = rows_at(dy, tokens, here), weight, down[e], of(here, made), ctx.act
            for room, d in zip(of(here, dmade), leave_backward(*given, *rooms)):
                if room is not None:
                    room.copy_(d)
            del given, d  # lest they stay beside those of the next turn
        return None, None, dweights, ddown, None, None, *dmade


def turn(rows: Tensor, weight: Given, matrices: Tensors, down: Tensor, made: Tensors, act: Act) -> Tensor:
    """One expert's rows [rows, D] -> their results. The products before act are written into `made`."""
    for matrix, room in zip(matrices, made):
        torch.mm(rows, matrix, out=room)
    return leave(made, weight, down, act)


def leave(made: Tensors, weight: Given, down: Tensor, act: Act) -> Tensor:
    """The second half of a turn."""
    y = hidden(act, *made) @ down
    return y if weight is None else y.mul_(weight)


def turn_backward(dy, rows, weight: Given, matrices, down, made, act, rooms, wants_rows: bool) -> Given:
    """dy of one expert's rows -> that of the rows; the others are written into `rooms`."""
    dweight, ddown, *dmatrices = rooms
    dmade = leave_backward(dy, weight, down, made, act, dweight, ddown)
    for d, room in zip(dmade, dmatrices):
        if room is not None:
            torch.mm(rows.T, d, out=room)
    return rows_backward(dmade, matrices) if wants_rows else None


def rows_backward(dmade: Tensors, matrices: Tensors, out: Given = None) -> Tensor:
    """The gradient of an expert's rows [rows, D]: a sum over its matrices."""
    drows = torch.mm(dmade[0], matrices[0].T, out=out)
    for d, matrix in zip(dmade[1:], matrices[1:]):
        drows.addmm_(d, matrix.T)
    return drows


def leave_backward(dy, weight: Given, down, made, act, dweight, ddown, dlayer: Given = None) -> Tensors:
    """dy of one expert's rows -> those of `made`; the others are written into dweight and ddown. `dlayer`:
    where [rows, F] may be overwritten."""
    with torch.enable_grad():
        leaves = [room.detach().requires_grad_() for room in made]
        layer = hidden(act, *leaves)
    dlayer = torch.mm(dy, down.T, out=dlayer)
    if dweight is not None:
        torch.sum(dlayer * layer.detach(), 1, out=dweight)
    if weight is not None:
        dy, dlayer = dy * weight, dlayer.mul_(weight)
    if ddown is not None:
        torch.mm(layer.detach().T, dy, out=ddown)
    return torch.autograd.grad(layer, leaves, dlayer)


def of(which: int | slice, tensors: Sequence[Given]) -> list[Given]:
    """An expert's matrices, or its rows, of each."""
    return [None if tensor is None else tensor[which] for tensor in tensors]


def slices(sizes: list[int]) -> list[slice]:
    """Where the rows of each expert are."""
    ends = list(accumulate(sizes))
    return [slice(end - size, end) for end, size in zip(ends, sizes)]


def rows_at(x: Tensor, tokens: Given, here: slice) -> Tensor:
    """The rows of a turn: a view of x, or a copy of those of its tokens."""
    return x[here] if tokens is None else x.index_select(0, tokens[here])


def add_rows(out: Tensor, tokens: Given, here: slice, rows: Tensor) -> None:
    """What a turn makes: written once, or added to its tokens."""
    if tokens is None:
        out[here] = rows
    else:
        out.index_add_(0, tokens[here], rows)
