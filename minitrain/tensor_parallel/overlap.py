"""Tensor parallelism whose all-reduces run in pieces, each behind the product of the next piece.

    row, forward         Z = Σ_i Y_i · B_i        Y[0] · B | Y[1] · B | Y[2] · B | Y[3] · B |
                                                           |  sum 0   |  sum 1   |  sum 2   |  sum 3
    column, backward     dX = Σ_i dY_i · A_iᵀ     dY[0]·Aᵀ | dY[1]·Aᵀ | dY[2]·Aᵀ | dY[3]·Aᵀ | Xᵀ · dY = dA
                                                           |  sum 0   |  sum 1   |  sum 2   |  sum 3

The B·T tokens are cut into `chunks` pieces; the last sum of forward stays exposed. More chunks expose less,
but smaller products run at a lower rate and each all-reduce pays its latency: 4 is a compromise. On a CPU it
rarely gains. Bytes and memory are those of linear.py (a piece that does not divide by t falls unevenly on the
ranks); sums are formed in place.
Jangda et al. 2022 (CoCoNet), arXiv:2105.05720; Wang et al. 2024 (Domino), arXiv:2409.15241. No fused kernels.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.ranks import collectives
from minitrain.ranks.autograd import vjp_of_inputs
from minitrain.ranks.checks import require_positive_ints
from minitrain.tensor_parallel.linear import columns_vjp, tokens


def column(x: Tensor, linears: Sequence[nn.Module], group: ProcessGroup, *, chunks=4) -> tuple[Tensor, ...]:
    require_positive_ints(chunks=chunks)
    return columns_vjp(x, linears, column_forward, partial(column_backward, group=group, chunks=chunks))


def row(x: Tensor, linear: nn.Module, group: ProcessGroup, *, chunks: int = 4) -> Tensor:
    require_positive_ints(chunks=chunks)
    y = vjp_of_inputs(partial(row_forward, group=group, chunks=chunks), row_backward, x, linear.weight)
    return y if linear.bias is None else y.add_(linear.bias)


@torch.no_grad()
def row_forward(x: Tensor, weight: Tensor, group: ProcessGroup, chunks: int) -> Tensor:
    """x `[.., F/t]`, weight `[D, F/t]` -> `[.., D]`, summed over the group."""
    y = x.new_empty(*x.shape[:-1], len(weight))
    sums = []
    for piece, place in zip(tokens(x).tensor_split(chunks), tokens(y).tensor_split(chunks)):
        torch.mm(piece, weight.T, out=place)
        sums.append(collectives.all_reduce(place, group, out=place, async_op=True))  # behind the next product
    for handle in sums:
        handle.wait()
    return y


@torch.no_grad()
def column_backward(dys, x: Tensor, weights, wanted: Sequence[bool], group: ProcessGroup, chunks: int):
    """dX `[.., D]`, summed over the group, and dW `[F/t, D]` of the `wanted` (not frozen) matrices."""
    dx = x.new_empty(x.shape)
    sums = []
    for place, *pieces in zip(*(tokens(whole).tensor_split(chunks) for whole in (dx, *dys))):
        torch.mm(pieces[0], weights[0], out=place)
        for piece, weight in zip(pieces[1:], weights[1:]):
            torch.addmm(place, piece, weight, out=place)
        sums.append(collectives.all_reduce(place, group, out=place, async_op=True))  # behind what follows
    dweights = [tokens(dy).T @ tokens(x) if want else None for dy, want in zip(dys, wanted)]
    for handle in sums:
        handle.wait()
    return dx, dweights


def column_forward(x: Tensor, weights: Sequence, biases: Sequence) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases))


def row_backward(dys: Sequence, saved: Sequence, wanted: Sequence[bool]) -> tuple[Tensor, Tensor | None]:
    (dy,), (x, weight) = dys, saved
    return dy @ weight, tokens(dy).T @ tokens(x) if wanted[1] else None
