"""Tensor parallelism in one dimension: cut the first matrix by columns, the second by rows, and sum once.

    column   Y_i = X · A_i             X[B, T, D] alike on all ranks     A_i[D, F/t]     Y_i[B, T, F/t]
    row      Z = Σ_i Y_i · B_i         Y_i[B, T, F/t]                    B_i[F/t, D]     Z[B, T, D] alike on all ranks

Whatever works on each column of Y alone (an activation, a head of attention) may stand between the two: act([Y_1, Y_2]) is
[act(Y_1), act(Y_2)]. The other way round, row then column, would need the sum before the activation, for act(a + b) is not
act(a) + act(b). Two functions carry all that is sent, each the adjoint of the other:

    f = copy_to       forward: nothing           backward: all-reduce of dX, as each rank knows its columns' share only
    g = reduce_from   forward: all-reduce of Z   backward: nothing, dZ is needed whole by all

`column(x, linears, group)` takes all matrices that share one input (Q, K and V; up and gate), so that f stands before them once.
Sends 2(t-1)/t · B·T·D elements in forward and as much in backward; a layer has two such pairs, hence four all-reduces. Memory:
1/t of the matrices and of what is between them; X and Z are whole on every rank (sequence.py cuts those too).
torch keeps W[out, in] = Aᵀ: a column of the paper's A is a row of the tensor here, dim 0.

Raises ValueError in one line, before any rank waits, for sizes that do not divide, a layer or a bias that is cut already, a
matrix that is cut over another group, an input of the wrong width.
Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3. Differs: Q, K and V stay three matrices, as the model has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain import collectives
from minitrain.sharding import placement, shard


def column(x: Tensor, linears: Sequence[nn.Module], group: ProcessGroup) -> tuple[Tensor, ...]:
    """x `[.., D]`, the same on all ranks -> for each matrix this rank's slice of the output, `[.., F/t]`."""
    check_column(x, linears, group)
    x = collectives.copy_to(x, group)
    return tuple(F.linear(x, *linear.own()) for linear in linears)


def row(x: Tensor, linear: nn.Module, group: ProcessGroup) -> Tensor:
    """x `[.., F/t]`, this rank's slice -> the whole product `[.., D]`, the same on all ranks. The bias is added once."""
    check_row(x, linear, group)
    y = collectives.reduce_from(F.linear(x, linear.weight), group)
    return y if linear.bias is None else y + linear.bias


class ColumnLinear(nn.Module):
    """An nn.Linear cut by the columns of the paper's A: W[F/t, D] and b[F/t]. `column` is how its input gets here; with `pad` the last
    ranks may have columns of zeros."""

    def __init__(self, linear: nn.Linear, group: ProcessGroup, column: Callable = column, pad: bool = False):
        super().__init__()
        check_whole("ColumnLinear", linear)
        if not pad:
            check_divides("ColumnLinear: out_features", linear.out_features, group)
        self.weight = shard(linear.weight, 0, group, pad)
        self.bias = None if linear.bias is None else shard(linear.bias, 0, group, pad)
        self.group, self.column = group, column

    def own(self) -> tuple[Tensor, Tensor | None]:
        """What this rank multiplies with: the matrix and the bias."""
        return self.weight, self.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.column(x, (self,), self.group)[0]


class RowLinear(nn.Module):
    """An nn.Linear cut by the rows of the paper's B: W[D, F/t]; the bias `[D]` is whole, it belongs to the sum."""

    def __init__(self, linear: nn.Linear, group: ProcessGroup, row: Callable = row):
        super().__init__()
        check_whole("RowLinear", linear)
        check_divides("RowLinear: in_features", linear.in_features, group)
        self.weight, self.bias = shard(linear.weight, 1, group), linear.bias
        self.group, self.row = group, row

    def forward(self, x: Tensor) -> Tensor:
        return self.row(x, self, self.group)


# ---- what is refused -------------------------------------------------------------------------------------------------


def check_whole(what: str, linear: nn.Module) -> None:
    for name, param in linear.named_parameters():
        for cut in placement(param).shards:
            raise ValueError(
                f"{what}: {name} {list(param.shape)} is cut already, along dim {cut.dim} over "
                f"{collectives.axis_of(cut.group)}; give a layer that is whole"
            )


def check_divides(what: str, size: int, group: ProcessGroup) -> None:
    if size % group.size():
        raise ValueError(
            f"{what} = {size} is not a multiple of the {group.size()} ranks of {collectives.axis_of(group)}; "
            f"change the size or take {divisors(size, group.size())} ranks"
        )


def divisors(size: int, below: int) -> str:
    return " or ".join(str(n) for n in range(1, below) if size % n == 0)


def check_group(linear: nn.Module, group: ProcessGroup) -> None:
    for cut in placement(linear.weight).shards:
        if cut.group is not group:
            raise ValueError(
                f"the matrix {list(linear.weight.shape)} is cut over {collectives.axis_of(cut.group)}, but the call is "
                f"over {collectives.axis_of(group)}; use one group for a layer and its communication"
            )


def check_column(x: Tensor, linears: Sequence[nn.Module], group: ProcessGroup) -> None:
    for linear in linears:
        check_group(linear, group)
        if x.size(-1) != linear.weight.size(1):
            raise ValueError(
                f"column: x {list(x.shape)} is {x.size(-1)} wide, the matrix takes {linear.weight.size(1)}: give the "
                "whole width, a column-parallel layer cuts its output"
            )


def check_row(x: Tensor, linear: nn.Module, group: ProcessGroup) -> None:
    check_group(linear, group)
    if x.size(-1) != linear.weight.size(1):
        raise ValueError(
            f"row: x {list(x.shape)} is {x.size(-1)} wide, this rank's slice of the matrix takes {linear.weight.size(1)} "
            f"of {linear.weight.size(1) * group.size()}: give the slice that a column-parallel layer leaves here"
        )
