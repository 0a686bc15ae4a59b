"""Megatron's sequence parallelism: between the cut matrices the sequence is cut, all-reduces become halves.

    norm, dropout, residual     X[B, T/t, D]     each rank its own tokens
    column   all-gather along T      X[B, T, D]      Y_i = X · A_i[D, F/t]
    row      Z = Σ_i Y_i · B_i       reduce-scatter along T     Z[B, T/t, D]

What plain tensor parallelism keeps whole, 10 of the 34 s·b·h bytes of a layer, is cut by t as well.
`column_keeping` sends what linear.py sends, (t-1)/t · B·T·D elements into a pair of matrices and out of it in
each pass, but keeps X whole. `column` keeps the slice and gathers again in backward, behind a product, for
(t-1)/t · B·T·D more. Norms, biases behind the scatter and positions see T/t tokens on each rank: their
gradients are terms of a sum over `group`, which the reducer of gradients forms.
Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2. Differs: with B > 1 pieces along T are copied.
"""

from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.ranks import collectives
from minitrain.tensor_parallel.linear import add_bias, columns_vjp, tokens

TIME = -2  # the dim of the sequence in [.., T, D]


def column_keeping(x: Tensor, linears: Sequence[nn.Module], group: ProcessGroup) -> tuple[Tensor, ...]:
    """x `[B, T/t, D]`, this rank's tokens -> for each matrix `[B, T, F/t]`: all tokens, its columns."""
    x = collectives.gather_to(x, group, TIME)
    return tuple(F.linear(x, *linear.local_params()) for linear in linears)


def column(x: Tensor, linears: Sequence[nn.Module], group: ProcessGroup) -> tuple[Tensor, ...]:
    """The same, keeping this rank's tokens only."""
    passes = partial(column_forward, group=group), partial(column_backward, group=group)
    return columns_vjp(x, linears, *passes)


def row(x: Tensor, linear: nn.Module, group: ProcessGroup) -> Tensor:
    """x `[B, T, F/t]` -> this rank's tokens of the whole product, `[B, T/t, D]`."""
    return add_bias(scatter_time(F.linear(x, linear.weight), group), linear)


def scatter_time(x: Tensor, group: ProcessGroup) -> Tensor:
    """The ranks' terms `[B, T, D]` -> this rank's tokens of their sum, `[B, T/t, D]`."""
    check_time(x.size(TIME), group)
    return collectives.reduce_scatter_to(x, group, TIME)


def local_tokens(positions: Tensor, group: ProcessGroup) -> Tensor:
    """`[.., T]` -> those of this rank's tokens, `[.., T/t]`."""
    check_time(positions.size(-1), group)
    return positions.chunk(group.size(), -1)[group.rank()]


def check_time(length: int, group: ProcessGroup) -> None:
    if length % group.size():
        axis = f"{collectives.axis_of(group)}={group.size()}"
        raise ValueError(f"T={length} tokens are not a multiple of {axis}; pad the sequence")


def column_forward(x: Tensor, weights: Sequence, biases: Sequence, group: ProcessGroup) -> tuple[Tensor, ...]:
    """x `[B, T/t, D]`, weights `[F/t, D]` -> `[B, T, F/t]` each."""
    whole = collectives.all_gather(x, group, TIME)
    return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases))


def column_backward(dys: Sequence, x: Tensor, weights: Sequence, wanted: Sequence[bool], group: ProcessGroup):
    """dX `[B, T/t, D]` and dW `[F/t, D]` of the matrices that are `wanted` (not frozen)."""
    gathering = collectives.all_gather(x, group, TIME, async_op=True)  # hidden behind the products below
    dx = dys[0] @ weights[0]
    for dy, weight in zip(dys[1:], weights[1:]):
        dx += dy @ weight
    scattering = collectives.reduce_scatter(dx, group, TIME, async_op=True)  # hidden behind those that follow
    whole = tokens(gathering.wait())
    dweights = [tokens(dy).T @ whole if want else None for dy, want in zip(dys, wanted)]
    return scattering.wait(), dweights
