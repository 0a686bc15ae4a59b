"""Megatron's sequence parallelism: between the cut matrices the sequence is cut, and an all-reduce becomes its two halves.

    norm, dropout, residual     X[B, T/t, D]     each rank its own tokens
    column   all-gather along T      X[B, T, D]      Y_i = X · A_i[D, F/t]
    row      Z = Σ_i Y_i · B_i       reduce-scatter along T     Z[B, T/t, D]

Norm and dropout work on each token alone, so the ranks need not all do the same work on all tokens. What plain tensor parallelism
keeps whole on every rank, 10 of the 34 s·b·h bytes of a layer, is cut by t as well.
`column_keeping` sends what linear.py sends, an all-reduce split into its halves: (t-1)/t · B·T·D elements into a pair of matrices
and out of it, in each pass. But it keeps X whole for backward. `column` keeps the slice and gathers the whole once more, behind the
product dY · Aᵀ, for (t-1)/t · B·T·D on top, as the paper does; and dX is scattered behind Xᵀ · dY.

A parameter that is used on a slice of the sequence (norms, the bias behind the scatter, positions) sees T/t tokens on each rank: its
gradients are terms of a sum over the group, as over data-parallel ranks. Whoever reduces gradients adds `group` for these.

Raises ValueError in one line, before any rank waits, for a sequence that is not a multiple of t, and what linear.py refuses.
Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2. Differs: activations are [B, T, D] and not [T, B, D], so that with B > 1
the pieces along T are copied into one block before they travel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain import collectives
from minitrain.tensor_parallel.linear import check_column, check_row

TIME = -2  # the dim of the sequence in [.., T, D]


def column_keeping(x: Tensor, linears: Sequence[nn.Module], group: ProcessGroup) -> tuple[Tensor, ...]:
    """x `[B, T/t, D]`, this rank's tokens -> for each matrix `[B, T, F/t]`: all tokens, this rank's columns."""
    check_column(x, linears, group)
    x = collectives.gather_to(x, group, TIME)
    return tuple(F.linear(x, *linear.own()) for linear in linears)


def column(x: Tensor, linears: Sequence[nn.Module], group: ProcessGroup) -> tuple[Tensor, ...]:
    """The same, keeping this rank's tokens only."""
    check_column(x, linears, group)
    weights, biases = zip(*(linear.own() for linear in linears))
    return _Column.apply(x, group, *weights, *biases)


def row(x: Tensor, linear: nn.Module, group: ProcessGroup) -> Tensor:
    """x `[B, T, F/t]` -> this rank's tokens of the whole product, `[B, T/t, D]`."""
    check_row(x, linear, group)
    return add_bias(scatter_time(F.linear(x, linear.weight), group), linear)


def add_bias(y: Tensor, linear: nn.Module) -> Tensor:
    return y if linear.bias is None else y + linear.bias


def scatter_time(x: Tensor, group: ProcessGroup) -> Tensor:
    """The ranks' terms `[B, T, D]` -> this rank's tokens of their sum, `[B, T/t, D]`."""
    check_time(x.size(TIME), group)
    return collectives.reduce_scatter_to(x, group, TIME)


def own_time(positions: Tensor, group: ProcessGroup) -> Tensor:
    """`[.., T]` -> those of this rank's tokens, `[.., T/t]`."""
    check_time(positions.size(-1), group)
    return positions.chunk(group.size(), -1)[group.rank()]


def check_time(length: int, group: ProcessGroup) -> None:
    if length % group.size():
        raise ValueError(
            f"T={length} tokens are not a multiple of {collectives.axis_of(group)}={group.size()}; pad the sequence, or "
            "turn sequence parallelism off"
        )


class _Column(torch.autograd.Function):
    """Saves the slice of x, never the whole. `params`: all weights, then a bias or None for each."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup, *params: Tensor | None):
        weights, biases = params[: len(params) // 2], params[len(params) // 2 :]
        ctx.save_for_backward(x, *weights)
        ctx.group = group
        return column_forward(x, weights, biases, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *dys: Tensor):
        x, *weights = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        dx, dweights = column_backward(dys, x, weights, wanted[: len(weights)], ctx.group)
        dbiases = [
            dy.flatten(0, -2).sum(0) if want else None for dy, want in zip(dys, wanted[len(weights) :])
        ]
        return dx, None, *dweights, *dbiases


def column_forward(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], group: ProcessGroup
) -> tuple[Tensor, ...]:
    """x `[B, T/t, D]`, weights `[F/t, D]` -> `[B, T, F/t]` each."""
    whole = collectives.all_gather(x, group, TIME)
    return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases))


def column_backward(
    dys: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], wanted: Sequence[bool], group: ProcessGroup
) -> tuple[Tensor, list[Tensor | None]]:
    """dX `[B, T/t, D]` and dW `[F/t, D]` of the matrices that are `wanted` (not frozen)."""
    gathering = collectives.all_gather(x, group, TIME, async_op=True)  # hidden behind the products below
    dx = dys[0] @ weights[0]
    for dy, weight in zip(dys[1:], weights[1:]):
        dx += dy @ weight
    scattering = collectives.reduce_scatter(dx, group, TIME, async_op=True)  # hidden behind those that follow
    whole = gathering.wait().flatten(0, -2)
    dweights = [dy.flatten(0, -2).T @ whole if want else None for dy, want in zip(dys, wanted)]
    return scattering.wait(), dweights
