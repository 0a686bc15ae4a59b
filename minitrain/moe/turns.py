"""Experts one after the other, forward and backward by hand.

    rows · up_e, rows · gate_e -> z      d up_e = rowsᵀ · dz;  d rows = dz · up_eᵀ
    hidden(z) · down_e -> y              d hidden = dy · down_eᵀ;  d down_e = hiddenᵀ · dy;  dz by autograd

Saved are x, z [R, F] (two with a gate) and the weights of the routing, but no result: hidden [rows, F] is
there for one turn and made again in backward, as is dz, and with weight w the result is w · (hidden ·
down_e), so dw = hidden · d hidden. A forward turn makes (F + D) · rows elements, or 2F · rows with a gate if
that is more; a backward turn 3F · rows, 5F with a gate; and 2D where rows are copies of tokens.
FLOPs: 2·R·D·F per matrix and twice that in backward, less one product for a frozen matrix.
Tan et al. 2024 (ScatterMoE, arXiv:2403.08245, section 3) read and write through indices inside one kernel.
Differs: a copy of one expert's rows at a time.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from minitrain.ranks.autograd import custom_vjp

Given = Tensor | None
Tensors = Sequence[Tensor]
Act = Callable[[Tensor], Tensor]


def in_turns(x, tokens: Given, weights: Given, up, down, gate: Given, act: Act, sizes: list[int]) -> Tensor:
    """The rows of the experts, sizes[e] of each, are x itself; or row r is x[tokens[r]], and weights[r] times
    its result is added to y[tokens[r]]."""

    def forward(x: Tensor, weights: Given, down: Tensor, *matrices: Tensor) -> tuple[Tensor, tuple]:
        made = [x.new_empty(sum(sizes), matrix.shape[2]) for matrix in matrices]
        y = (x.new_empty if tokens is None else x.new_zeros)(len(x), down.shape[2])
        for e, here in enumerate(slices(sizes)):
            given = rows_at(x, tokens, here), weight_at(weights, here), of(e, matrices), down[e]
            add_rows(y, tokens, here, turn(*given, of(here, made), act))
            del given  # lest the rows stay beside those of the next turn
        return y, (x, tokens, weights, down, *matrices, *made)

    def backward(dys: Tensors, saved: Tensors, wanted: Sequence[bool]) -> tuple[Given, ...]:
        (dy,), (x, tokens, weights, down, *rest) = dys, saved
        matrices, made = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        wants = zip((weights, down, *matrices), wanted[1:])
        dweights, *grads = (torch.empty_like(param) if want else None for param, want in wants)
        dx = (torch.empty_like(x) if tokens is None else torch.zeros_like(x)) if wanted[0] else None
        for e, here in enumerate(slices(sizes)):
            given = rows_at(dy, tokens, here), rows_at(x, tokens, here), weight_at(weights, here)
            given += of(e, matrices), down[e], of(here, made), act, [*of(here, [dweights]), *of(e, grads)]
            drows = turn_backward(*given, wanted[0], dx[here] if wanted[0] and tokens is None else None)
            if wanted[0] and tokens is not None:
                add_rows(dx, tokens, here, drows)
            del given, drows
        return dx, dweights, *grads

    return custom_vjp(forward, backward, x, weights, down, up, *(() if gate is None else (gate,)))


def hidden(act: Act, up: Tensor, gate: Given = None) -> Tensor:
    """The layer between, [rows, F], from what one or two products made of the rows."""
    return act(up) if gate is None else act(gate) * up


def turn(rows: Tensor, weight: Given, matrices: Tensors, down: Tensor, made: Tensors, act: Act) -> Tensor:
    """One expert's rows [rows, D] -> their results. The products before act are written into `made`."""
    for matrix, room in zip(matrices, made):
        torch.mm(rows, matrix, out=room)
    y = hidden(act, *made) @ down
    return y if weight is None else y.mul_(weight)


def turn_backward(dy, rows, weight: Given, matrices, down, made, act, rooms, wants_rows, out: Given = None):
    """dy of an expert's rows -> that of the rows; those of weight, down and matrices go into `rooms`."""
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
    del layer, dlayer
    for d, room in zip(dmade, dmatrices):
        if room is not None:
            torch.mm(rows.T, d, out=room)
    if not wants_rows:
        return None
    drows = torch.mm(dmade[0], matrices[0].T, out=out)
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


def weight_at(weights: Given, here: slice) -> Given:
    return None if weights is None else weights[here, None]


def rows_at(x: Tensor, tokens: Given, here: slice) -> Tensor:
    """The rows of a turn: a view of x, or a copy of those of its tokens."""
    return x[here] if tokens is None else x.index_select(0, tokens[here])


def add_rows(out: Tensor, tokens: Given, here: slice, rows: Tensor) -> None:
    """What a turn makes: written once, or added to its tokens."""
    if tokens is None:
        out[here] = rows
    else:
        out.index_add_(0, tokens[here], rows)
