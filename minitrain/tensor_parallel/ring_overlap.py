"""Sequence parallelism without gather and scatter: slices go round a ring, each hop behind the product of the slice before.

sequence.py gathers X[B, T, D], then multiplies; and multiplies, then scatters the sum. But a slice of the tokens can be
multiplied when it comes, and a sum for one rank can leave when its last term is there. With t = 4, what rank 0 does (X_j: the
tokens that rank j brings or takes, A and B: this rank's slices of the matrices):

    column, forward      Y[j] = X_j · A               row, forward         Z_j = Σ_i Y_i[j] · B_i
    compute   X_0·A | X_3·A | X_2·A | X_1·A           compute   Y[3]·B | Y[2]·B | Y[1]·B | Y[0]·B
    arriving   X_3  |  X_2  |  X_1  |                 arriving         | sum 2  | sum 1  | sum 0        + what was computed

`pass_round` is an all-gather taken apart, `sum_round` a reduce-scatter. Each is the other's adjoint, and backward uses both:

    column, backward     dX by sum_round: Σ_i dY_i[j] · A_iᵀ          dA = Σ_j X_jᵀ · dY[j]      X passes round once more
    row, backward        dY passes round: dX[j] = dY_j · Bᵀ           dB = Σ_j Y[j]ᵀ · dY_j

Layers and shapes are those of sequence.py: column X[B, T/t, D] -> Y[B, T, F/t], row Y[B, T, F/t] -> Z[B, T/t, D].
Sends what sequence.py sends, to the byte: t-1 messages of B·T/t·D elements a round; one round in each forward, two in column's
backward (one where all its weights are frozen, as X has no use then), one in row's.
Memory: no rank ever holds all of X, Z or their gradients. pass_round holds two slices of B·T/t·D, the one at work and the one that
arrives; sum_round three, with the term at work.

What it costs. The products are t times smaller. Each reads the whole matrix, and dA and dB are read and written t times: half of the
number of tokens in a slice is their FLOPs per byte in bf16, and an H100 wants 295. `dw_by_slice=False` takes dA and dB whole, in one
product each, and holds all of X and dY in backward: column's backward is then sequence.py's, which finds enough to hide behind as
it is; row's collects dY as it passes. One layer of GPT-3, T=2048, t=8, replayed on an H100, in ms:

                      B=1   step   exposed   peak            B=4   step   exposed   peak
    sequence.py              3.9     0.62   1.13 GB               15.9      2.38   2.10 GB
    dw_by_slice=True         5.2     0.02   0.98 GB               13.3      0.12   1.22 GB
    dw_by_slice=False        3.7     0.03   1.13 GB               13.8      0.24   2.10 GB

The sums are added in the order of the ring, and rounded at each hop: in bf16 that is coarser than reduce_scatter, which rounds
once. On a CPU, where the ranks' processes compute and communicate with the same cores, it rarely gains.

Raises ValueError in one line, before any rank waits, for what sequence.py and linear.py refuse.
Wang et al. 2023, Overlap communication with dependent computation via decomposition in large deep learning models, ASPLOS. PyTorch's
asynchronous tensor parallelism and Megatron's --tp-comm-overlap do the same. Differs: one ring that turns one way, where Wang et
al. use both; Megatron takes dA and dB whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain import collectives
from minitrain.tensor_parallel import sequence
from minitrain.tensor_parallel.linear import check_column, check_row
from minitrain.tensor_parallel.sequence import TIME, add_bias, check_time


def column(
    x: Tensor, linears: Sequence[nn.Module], group: ProcessGroup, *, dw_by_slice: bool = True
) -> tuple[Tensor, ...]:
    """x `[B, T/t, D]`, this rank's tokens -> for each matrix `[B, T, F/t]`: all tokens, this rank's columns."""
    check_column(x, linears, group)
    weights, biases = zip(*(linear.own() for linear in linears))
    return _Column.apply(x, group, dw_by_slice, *weights, *biases)


def row(x: Tensor, linear: nn.Module, group: ProcessGroup, *, dw_by_slice: bool = True) -> Tensor:
    """x `[B, T, F/t]` -> this rank's tokens of the whole product, `[B, T/t, D]`."""
    check_row(x, linear, group)
    check_time(x.size(TIME), group)
    return add_bias(_Row.apply(x, group, dw_by_slice, linear.weight), linear)


# ---- the ring --------------------------------------------------------------------------------------------------------


def pass_round(x: Tensor, group: ProcessGroup, visit: Callable[[int, Tensor], None]) -> None:
    """visit(j, X_j) for the slices of all ranks j, the own one first; the next one arrives while `visit` computes."""
    rank, size = group.rank(), group.size()
    for step in range(size - 1):
        arriving = collectives.rotate(x, group, async_op=True)
        visit((rank - step) % size, x)
        x = arriving.wait()
    visit((rank + 1) % size, x)


def sum_round(term: Callable[[int], Tensor], group: ProcessGroup) -> Tensor:
    """Σ over the ranks of term(own rank): the sum for rank j starts at rank j+1 and ends at j, with a term of each it passes."""
    rank, size = group.rank(), group.size()
    total = term((rank - 1) % size)
    for step in range(1, size):
        arriving = collectives.rotate(total, group, async_op=True)
        own = term((rank - 1 - step) % size)
        total = own.add_(arriving.wait())
    return total


# ---- the four passes -------------------------------------------------------------------------------------------------


@torch.no_grad()
def column_forward(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], group: ProcessGroup
) -> tuple[Tensor, ...]:
    """x `[B, T/t, D]`, weights `[F/t, D]` -> `[B, T, F/t]` each."""
    size = group.size()
    ys = [x.new_empty(*x.shape[:TIME], size * x.size(TIME), len(weight)) for weight in weights]

    def multiply(owner: int, x: Tensor) -> None:
        for y, weight, bias in zip(ys, weights, biases):
            y.chunk(size, TIME)[owner].copy_(F.linear(x, weight, bias))

    pass_round(x, group, multiply)
    return tuple(ys)


@torch.no_grad()
def column_backward(
    dys: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], wanted: Sequence[bool], group: ProcessGroup
) -> tuple[Tensor, list[Tensor | None]]:
    """dX `[B, T/t, D]` and dW `[F/t, D]` of the matrices that are `wanted` (not frozen)."""
    slices = [dy.chunk(group.size(), TIME) for dy in dys]

    def term(owner: int) -> Tensor:
        dx = slices[0][owner] @ weights[0]
        for dy, weight in zip(slices[1:], weights[1:]):
            add_product(dx.flatten(0, -2), dy[owner].flatten(0, -2), weight)
        return dx

    dx = sum_round(term, group)
    dweights = [torch.zeros_like(weight) if want else None for weight, want in zip(weights, wanted)]

    def add_products(owner: int, x: Tensor) -> None:
        for dy, dweight in zip(slices, dweights):
            if dweight is not None:
                add_product(dweight, dy[owner].flatten(0, -2).T, x.flatten(0, -2))

    if any(wanted):
        pass_round(x, group, add_products)
    return dx, dweights


@torch.no_grad()
def row_forward(x: Tensor, weight: Tensor, group: ProcessGroup) -> Tensor:
    """x `[B, T, F/t]`, weight `[D, F/t]` -> `[B, T/t, D]`."""
    slices = x.chunk(group.size(), TIME)
    return sum_round(lambda owner: F.linear(slices[owner], weight), group)


@torch.no_grad()
def row_backward(
    dy: Tensor, x: Tensor, weight: Tensor, wanted: bool, group: ProcessGroup
) -> tuple[Tensor, Tensor | None]:
    """dy `[B, T/t, D]` -> dX `[B, T, F/t]`, and dW `[D, F/t]` if it is wanted."""
    dx, dweight = x.new_empty(x.shape), torch.zeros_like(weight) if wanted else None
    dx_slices, x_slices = dx.chunk(group.size(), TIME), x.chunk(group.size(), TIME)

    def multiply(owner: int, dy: Tensor) -> None:
        dx_slices[owner].copy_(dy @ weight)
        if dweight is not None:
            add_product(dweight, dy.flatten(0, -2).T, x_slices[owner].flatten(0, -2))

    pass_round(dy, group, multiply)
    return dx, dweight


@torch.no_grad()
def row_backward_whole(
    dy: Tensor, x: Tensor, weight: Tensor, wanted: bool, group: ProcessGroup
) -> tuple[Tensor, Tensor | None]:
    """The same, but dW in one product, of all of dY `[B, T, D]`."""
    dx, dys = x.new_empty(x.shape), [dy] * group.size()
    dx_slices = dx.chunk(group.size(), TIME)

    def multiply(owner: int, dy: Tensor) -> None:
        dx_slices[owner].copy_(dy @ weight)
        dys[owner] = dy

    pass_round(dy, group, multiply)
    return dx, torch.cat(dys, TIME).flatten(0, -2).T @ x.flatten(0, -2) if wanted else None


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a · b, in one operator: no second matrix of its size."""
    torch.addmm(total, a, b, out=total)


# ---- autograd only saves and calls -----------------------------------------------------------------------------------


class _Column(torch.autograd.Function):
    """Saves the slice of x. `params`: all weights, then a bias or None for each."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup, dw_by_slice: bool, *params: Tensor | None):
        weights, biases = params[: len(params) // 2], params[len(params) // 2 :]
        ctx.save_for_backward(x, *weights)
        ctx.group, ctx.backward_of = group, column_backward if dw_by_slice else sequence.column_backward
        return column_forward(x, weights, biases, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *dys: Tensor):
        x, *weights = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        dx, dweights = ctx.backward_of(dys, x, weights, wanted[: len(weights)], ctx.group)
        dbiases = [
            dy.flatten(0, -2).sum(0) if want else None for dy, want in zip(dys, wanted[len(weights) :])
        ]
        return dx, None, None, *dweights, *dbiases


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup, dw_by_slice: bool, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.backward_of = group, row_backward if dw_by_slice else row_backward_whole
        return row_forward(x, weight, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):
        dx, dweight = ctx.backward_of(dy, *ctx.saved_tensors, ctx.needs_input_grad[3], ctx.group)
        return dx, None, None, dweight
