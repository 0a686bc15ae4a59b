"""Tensor parallelism in one dimension: cut the first matrix by columns, the second by rows, and sum once.

    column   Y_i = X · A_i             X[B, T, D] alike on all      A_i[D, F/t]    Y_i[B, T, F/t]
    row      Z = Σ_i Y_i · B_i         Y_i[B, T, F/t]               B_i[F/t, D]    Z[B, T, D] alike on all

What works on each column of Y alone (an activation, a head) may stand between the two. Two functions send
all that is sent, each the adjoint of the other:

    f = copy_to       forward: nothing           backward: all-reduce of dX, the sum of all columns' terms
    g = reduce_from   forward: all-reduce of Z   backward: nothing, all ranks need dZ whole

`column(x, linears, group)` takes all matrices with one input (Q, K and V; up and gate): f is called once.
Sends 2(t-1)/t · B·T·D elements in forward and as much in backward. Memory: 1/t of the matrices and of what is
between them; X and Z are whole. torch keeps W[out, in] = Aᵀ: a column of A is a row of the tensor, dim 0.
Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3. Differs: Q, K and V stay three matrices.
"""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.ranks import collectives
from minitrain.ranks.autograd import vjp_of_inputs
from minitrain.ranks.sharding import placement, shard


def column(x: Tensor, linears: Sequence[nn.Module], group: ProcessGroup) -> tuple[Tensor, ...]:
    """x `[.., D]`, the same on all ranks -> for each matrix this rank's slice of the output, `[.., F/t]`."""
    x = collectives.copy_to(x, group)
    return tuple(F.linear(x, *linear.local_params()) for linear in linears)


def row(x: Tensor, linear: nn.Module, group: ProcessGroup) -> Tensor:
    """x `[.., F/t]`, this rank's slice -> the product `[.., D]`, the same on all ranks; the bias once."""
    return add_bias(collectives.reduce_from(F.linear(x, linear.weight), group), linear)


def add_bias(y: Tensor, linear: nn.Module) -> Tensor:
    return y if linear.bias is None else y + linear.bias


class ColumnLinear(nn.Module):
    """An nn.Linear cut by the columns of the paper's A: W[F/t, D], b[F/t]. `pad`: with zeros at the end."""

    def __init__(self, linear: nn.Linear, group: ProcessGroup, column: Callable = column, pad: bool = False):
        super().__init__()
        check_whole("ColumnLinear", linear)
        if not pad:
            check_divides("ColumnLinear: out_features", linear.out_features, group)
        self.weight = shard(linear.weight, 0, group, pad)
        self.bias = None if linear.bias is None else shard(linear.bias, 0, group, pad)
        self.group, self.column = group, column

    def local_params(self) -> tuple[Tensor, Tensor | None]:
        """What this rank multiplies with: the matrix and the bias."""
        return self.weight, self.bias

    def together(self, x: Tensor, linears: Sequence[nn.Module]) -> tuple[Tensor, ...]:
        """Several matrices of one input, which is copied or gathered once."""
        return self.column(x, linears, self.group)

    def forward(self, x: Tensor) -> Tensor:
        return self.together(x, (self,))[0]


class RowLinear(nn.Module):
    """An nn.Linear cut by the rows of the paper's B: W[D, F/t]; the bias `[D]` is whole, as the sum is."""

    def __init__(self, linear: nn.Linear, group: ProcessGroup, row: Callable = row):
        super().__init__()
        check_whole("RowLinear", linear)
        check_divides("RowLinear: in_features", linear.in_features, group)
        self.weight, self.bias = shard(linear.weight, 1, group), linear.bias
        self.group, self.row = group, row

    def forward(self, x: Tensor) -> Tensor:
        return self.row(x, self, self.group)


def check_whole(what: str, cut: Tensor | nn.Module) -> None:
    """Of a tensor, or of every parameter of a module."""
    for name, tensor in cut.named_parameters() if isinstance(cut, nn.Module) else [("the tensor", cut)]:
        for shards in placement(tensor).shards:
            where = f"along dim {shards.dim} over {collectives.axis_of(shards.group)}"
            raise ValueError(f"{what}: {name} {list(tensor.shape)} is cut already, {where}; give it whole")


def check_divides(what: str, size: int, group: ProcessGroup) -> None:
    if size % group.size():
        ranks = f"{group.size()} ranks of {collectives.axis_of(group)}"
        cure = f"take {divisors(size, group.size())} ranks, or another size"
        raise ValueError(f"{what} = {size} is not a multiple of the {ranks}; {cure}")


def divisors(size: int, below: int) -> str:
    return " or ".join(str(n) for n in range(1, below) if size % n == 0)


# ---- passes that are written by hand ---------------------------------------------------------------------


def columns_vjp(x: Tensor, linears: Sequence[nn.Module], forward: Callable, backward: Callable):
    """By `forward(x, weights, biases) -> ys` and `backward(dys, x, weights, wanted) -> dx, dweights`."""
    weights, biases = zip(*(linear.local_params() for linear in linears))
    count = len(linears)

    def run(x: Tensor, *params: Tensor | None):
        return forward(x, params[:count], params[count:])

    def run_backward(dys: Sequence[Tensor], saved: Sequence[Tensor], wanted: Sequence[bool]):
        (x, *weights), of_biases = saved[: count + 1], wanted[count + 1 :]
        dx, dweights = backward(dys, x, weights, wanted[1 : count + 1])
        return dx, *dweights, *(tokens(dy).sum(0) if want else None for dy, want in zip(dys, of_biases))

    return vjp_of_inputs(run, run_backward, x, *weights, *biases)


def linear_vjp(x: Tensor, weight: Tensor, bias: Tensor | None, forward: Callable, backward: Callable):
    """`forward(x, weight, bias)` and `backward(dy, x, weight, bias)`, of x `[m, k]`, for x `[.., k]`."""

    def run(x: Tensor, *params: Tensor | None) -> Tensor:
        return forward(x.flatten(0, -2), *params).view(*x.shape[:-1], -1)

    def run_backward(dys: Sequence[Tensor], saved: Sequence[Tensor], wanted: Sequence[bool]):
        x, *params = saved
        dx, *dparams = backward(dys[0].flatten(0, -2), x.flatten(0, -2), *params)
        return dx.view_as(x), *dparams

    return vjp_of_inputs(run, run_backward, x, weight, bias)


def tokens(x: Tensor) -> Tensor:
    """`[.., D]` as a list of tokens `[N, D]`."""
    return x.reshape(-1, x.size(-1))
