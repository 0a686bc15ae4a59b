"""Sequence parallelism on a ring: slices are multiplied as they come, each hop behind the product before.

In place of sequence.py's gather and scatter rank 0 of 4 does (X_j: the tokens that rank j brings or takes):

    column, forward      Y[j] = X_j · A               row, forward         Z_j = Σ_i Y_i[j] · B_i
    compute   X_0·A | X_3·A | X_2·A | X_1·A           compute   Y[3]·B | Y[2]·B | Y[1]·B | Y[0]·B
    arriving   X_3  |  X_2  |  X_1  |                 arriving         | sum 2  | sum 1  | sum 0      + own
    column, backward     dX by sum_round: Σ_i dY_i[j] · A_iᵀ       dA = Σ_j X_jᵀ · dY[j], X passes once more
    row, backward        dY passes round: dX[j] = dY_j · Bᵀ        dB = Σ_j Y[j]ᵀ · dY_j

Sends what sequence.py sends: t-1 messages of B·T/t·D elements per round, two rounds in column's backward (one
if all weights are frozen). Memory: pass_round holds two slices, sum_round three. Products are t times
smaller, and dA, dB read and written t times; `dw_by_slice=False` takes them in one product and holds X and dY
in backward. GPT-3's layer, t = 8, replayed on an H100 (B=1, B=4): 3.9 and 15.9 ms in sequence.py, 5.2 and
13.3 by slice, 3.7 and 13.8 whole. Sums are rounded at each hop.
Wang et al. 2023, ASPLOS. Differs: the ring turns one way.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.ranks import collectives
from minitrain.ranks.autograd import vjp_of_inputs
from minitrain.tensor_parallel import sequence
from minitrain.tensor_parallel.linear import add_bias, columns_vjp, tokens
from minitrain.tensor_parallel.sequence import TIME, check_time


def column(x: Tensor, linears: Sequence[nn.Module], group: ProcessGroup, *, dw_by_slice: bool = True):
    """x `[B, T/t, D]`, this rank's tokens -> for each matrix `[B, T, F/t]`: all tokens, its columns."""
    backward = column_backward if dw_by_slice else sequence.column_backward
    return columns_vjp(x, linears, partial(column_forward, group=group), partial(backward, group=group))


def row(x: Tensor, linear: nn.Module, group: ProcessGroup, *, dw_by_slice: bool = True) -> Tensor:
    """x `[B, T, F/t]` -> this rank's tokens of the whole product, `[B, T/t, D]`."""
    check_time(x.size(TIME), group)

    def backward(dys: Sequence, saved: Sequence, wanted: Sequence[bool]) -> tuple[Tensor, Tensor | None]:
        return row_backward(*dys, *saved, wanted[1], group, dw_by_slice)

    return add_bias(vjp_of_inputs(partial(row_forward, group=group), backward, x, linear.weight), linear)


def pass_round(x: Tensor, group: ProcessGroup, visit: Callable[[int, Tensor], None]) -> None:
    """visit(j, X_j) for the slice of each rank j, its own first; the next arrives while it computes."""
    rank, size = group.rank(), group.size()
    for step in range(size - 1):
        arriving = collectives.rotate(x, group, async_op=True)
        visit((rank - step) % size, x)
        x = arriving.wait()
    visit((rank + 1) % size, x)


def sum_round(term: Callable[[int], Tensor], group: ProcessGroup) -> Tensor:
    """Σ over ranks of term(rank): the sum for j starts at rank j+1 and gets a term of each rank it passes."""
    rank, size = group.rank(), group.size()
    total = term((rank - 1) % size)
    for step in range(1, size):
        arriving = collectives.rotate(total, group, async_op=True)
        own = term((rank - 1 - step) % size)
        total = own.add_(arriving.wait())
    return total


@torch.no_grad()
def column_forward(x: Tensor, weights: Sequence, biases: Sequence, group: ProcessGroup) -> tuple[Tensor, ...]:
    """x `[B, T/t, D]`, weights `[F/t, D]` -> `[B, T, F/t]` each."""
    size = group.size()
    ys = [x.new_empty(*x.shape[:TIME], size * x.size(TIME), len(weight)) for weight in weights]

    def multiply(owner: int, x: Tensor) -> None:
        for y, weight, bias in zip(ys, weights, biases):
            y.chunk(size, TIME)[owner].copy_(F.linear(x, weight, bias))

    pass_round(x, group, multiply)
    return tuple(ys)


@torch.no_grad()
def column_backward(dys: Sequence, x: Tensor, weights: Sequence, wanted: Sequence[bool], group: ProcessGroup):
    """dX `[B, T/t, D]` and dW `[F/t, D]` of the matrices that are `wanted` (not frozen)."""
    slices = [dy.chunk(group.size(), TIME) for dy in dys]

    def term(owner: int) -> Tensor:
        dx = slices[0][owner] @ weights[0]
        for dy, weight in zip(slices[1:], weights[1:]):
            add_product(tokens(dx), tokens(dy[owner]), weight)
        return dx

    dx = sum_round(term, group)
    dweights = [torch.zeros_like(weight) if want else None for weight, want in zip(weights, wanted)]

    def add_products(owner: int, x: Tensor) -> None:
        for dy, dweight in zip(slices, dweights):
            if dweight is not None:
                add_product(dweight, tokens(dy[owner]).T, tokens(x))

    if any(wanted):
        pass_round(x, group, add_products)
    return dx, dweights


@torch.no_grad()
def row_forward(x: Tensor, weight: Tensor, group: ProcessGroup) -> Tensor:
    """x `[B, T, F/t]`, weight `[D, F/t]` -> `[B, T/t, D]`."""
    slices = x.chunk(group.size(), TIME)
    return sum_round(lambda owner: F.linear(slices[owner], weight), group)


@torch.no_grad()
def row_backward(dy: Tensor, x: Tensor, weight: Tensor, wanted: bool, group: ProcessGroup, dw_by_slice=True):
    """dy `[B, T/t, D]` -> dX `[B, T, F/t]`, and dW `[D, F/t]` if it is wanted."""
    size, dx, passed = group.size(), x.new_empty(x.shape), {}
    dweight = torch.zeros_like(weight) if wanted and dw_by_slice else None
    dx_slices, x_slices = dx.chunk(size, TIME), x.chunk(size, TIME)

    def multiply(owner: int, dy: Tensor) -> None:
        dx_slices[owner].copy_(dy @ weight)
        if not dw_by_slice:
            passed[owner] = dy
        elif wanted:
            add_product(dweight, tokens(dy).T, tokens(x_slices[owner]))

    pass_round(dy, group, multiply)
    if wanted and not dw_by_slice:
        dweight = tokens(torch.cat([passed[owner] for owner in range(size)], TIME)).T @ tokens(x)
    return dx, dweight


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a · b, in one operator: no second matrix of its size."""
    torch.addmm(total, a, b, out=total)
