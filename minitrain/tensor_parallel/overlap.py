"""Tensor parallelism whose all-reduces run in pieces, each behind the product of the next piece.

    row, forward         Z = Σ_i Y_i · B_i        Y[0] · B | Y[1] · B | Y[2] · B | Y[3] · B |
                                                           |  sum 0   |  sum 1   |  sum 2   |  sum 3
    column, backward     dX = Σ_i dY_i · A_iᵀ     dY[0]·Aᵀ | dY[1]·Aᵀ | dY[2]·Aᵀ | dY[3]·Aᵀ | Xᵀ · dY = dA
                                                           |  sum 0   |  sum 1   |  sum 2   |  sum 3

A sum needs its product first, so that whole they can only follow each other. But each token's row of Z depends on the same row of
Y alone: cut the tokens into `chunks` pieces, and the sum of one piece travels while the next is multiplied. What stays exposed is
the last piece's sum in forward; in backward the product for dA, which waits for nobody, hides that one too. The other two passes
(column forward, row backward) send nothing, as in linear.py, whose layers and shapes these are:

    column   X[B, T, D] alike on all ranks -> Y_i[B, T, F/t]          row   Y_i[B, T, F/t] -> Z[B, T, D] alike on all ranks

The pieces are runs of the B·T tokens, of one size or one more. The last piece's part of the wait shrinks with `chunks`, while
smaller products read the whole matrix once each and run at a lower rate, and every all-reduce pays its latency: 4 is a
compromise. On a CPU, where the ranks' processes compute and communicate with the same cores, it rarely gains.
Sends what linear.py sends, 2(t-1)/t · B·T·D elements in row's forward and as much in column's backward (a piece that does not
divide by t falls unevenly on the ranks). Memory: as linear.py; the pieces are summed in their place in Z or dX.

Raises ValueError in one line, before any rank waits, for chunks below 1, and what linear.py refuses.
Jangda et al. 2022 (CoCoNet), arXiv:2105.05720; Wang et al. 2024 (Domino), arXiv:2409.15241, cut a whole layer's batch in this
way. Differs: pieces of one product, on streams and threads of the collectives, where CoCoNet fuses kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain import collectives
from minitrain.tensor_parallel.linear import check_column, check_row


def column(
    x: Tensor, linears: Sequence[nn.Module], group: ProcessGroup, *, chunks: int = 4
) -> tuple[Tensor, ...]:
    """x `[.., D]`, the same on all ranks -> for each matrix this rank's slice of the output, `[.., F/t]`."""
    check_column(x, linears, group)
    check_chunks(chunks)
    weights, biases = zip(*(linear.own() for linear in linears))
    return _Column.apply(x, group, chunks, *weights, *biases)


def row(x: Tensor, linear: nn.Module, group: ProcessGroup, *, chunks: int = 4) -> Tensor:
    """x `[.., F/t]`, this rank's slice -> the whole product `[.., D]`, the same on all ranks. The bias is added once."""
    check_row(x, linear, group)
    check_chunks(chunks)
    y = _Row.apply(x, group, chunks, linear.weight)
    return y if linear.bias is None else y.add_(linear.bias)


def check_chunks(chunks: int) -> None:
    if not isinstance(chunks, int) or chunks < 1:
        raise ValueError(
            f"overlap: chunks={chunks!r}; use a whole number of pieces, 1 (nothing overlaps) or more"
        )


# ---- the two passes that communicate ---------------------------------------------------------------------------------


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
def column_backward(
    dys: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    wanted: Sequence[bool],
    group: ProcessGroup,
    chunks: int,
) -> tuple[Tensor, list[Tensor | None]]:
    """dX `[.., D]`, summed over the group, and dW `[F/t, D]` of the matrices that are `wanted` (not frozen)."""
    dx = x.new_empty(x.shape)
    sums = []
    for place, *pieces in zip(*(tokens(whole).tensor_split(chunks) for whole in (dx, *dys))):
        torch.mm(pieces[0], weights[0], out=place)
        for piece, weight in zip(pieces[1:], weights[1:]):
            torch.addmm(place, piece, weight, out=place)
        sums.append(
            collectives.all_reduce(place, group, out=place, async_op=True)
        )  # behind the next products
    dweights = [tokens(dy).T @ tokens(x) if want else None for dy, want in zip(dys, wanted)]
    for handle in sums:
        handle.wait()
    return dx, dweights


def tokens(x: Tensor) -> Tensor:
    """`[.., D]` as a list of tokens `[N, D]`."""
    return x.reshape(-1, x.size(-1))


# ---- autograd only saves and calls -----------------------------------------------------------------------------------


class _Column(torch.autograd.Function):
    """`params`: all weights, then a bias or None for each."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup, chunks: int, *params: Tensor | None):
        weights, biases = params[: len(params) // 2], params[len(params) // 2 :]
        ctx.save_for_backward(x, *weights)
        ctx.group, ctx.chunks = group, chunks
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *dys: Tensor):
        x, *weights = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        dx, dweights = column_backward(dys, x, weights, wanted[: len(weights)], ctx.group, ctx.chunks)
        dbiases = [tokens(dy).sum(0) if want else None for dy, want in zip(dys, wanted[len(weights) :])]
        return dx, None, None, *dweights, *dbiases


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup, chunks: int, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return row_forward(x, weight, group, chunks)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):
        x, weight = ctx.saved_tensors
        return dy @ weight, None, None, tokens(dy).T @ tokens(x) if ctx.needs_input_grad[3] else None
