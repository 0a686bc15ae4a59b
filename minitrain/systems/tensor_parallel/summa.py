"""SUMMA and Cannon: products of matrices of which rank (i, j) of a q×q grid has a block each.

    summa      C(i, j) = Σ_s A(i, s) · B(s, j)      step s: column s of A along rows, row s of B along columns
    summa_nt   A(i, l) = Σ_j C(i, j) · B(l, j)ᵀ     C · Bᵀ: row l of B along columns, sums along rows
    summa_tn   B(l, j) = Σ_i A(i, l)ᵀ · C(i, j)     Aᵀ · C: column l of A along rows, sums along columns

As dA = dC · Bᵀ and dB = Aᵀ · dC, they are forward and backward of a linear layer. `row_group` is the q ranks
of my grid row, which differ in their column: mesh.group("column") of Mesh(row=q, column=q); `column_group` is
mesh.group("row"). With A[m, k], B[k, n], C[m, n] a rank sends and receives (q-1)/q² of the two matrices that
move: mk + kn, kn + mk, and mk + kn elements. One dimension (Megatron) moves (p-1)/p of the activations.
Memory beside operands and result: blocks, 1/q² of a matrix. van de Geijn and Watts 1997, Concurrency:
Practice and Experience 9(4). Differs: a panel is a whole block; sums are not reduced to one root per
step: q of them go round at once, and every rank they pass adds its product, for the same bytes. Cannon 1969,
PhD thesis, Montana State University. Differs: the skew is one message, not i shifts by one.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.context.ring import check_crossing
from minitrain.ranks.collectives import broadcast, rotate
from minitrain.ranks.sharding import Shard, full_tensor, shard
from minitrain.tensor_parallel.linear import check_whole


@torch.no_grad()
def summa(a: Tensor, b: Tensor, row_group: ProcessGroup, column_group: ProcessGroup) -> Tensor:
    """C = A · B. Blocks a `[.., m/q, k/q]`, b `[k/q, n/q]` -> c `[.., m/q, n/q]`; dims in front are rows."""
    steps = grid_side(row_group, column_group)
    check_fit("summa", a, b, a.size(-1), b.size(0))
    c = a.new_zeros(*a.shape[:-1], b.size(1))
    for step in range(steps):
        a_step = broadcast(a, step, row_group)  # A(i, step)
        b_step = broadcast(b, step, column_group)  # B(step, j)
        _rows(c).addmm_(_rows(a_step), b_step)
    return c


@torch.no_grad()
def summa_overlapped(a: Tensor, b: Tensor, row_group: ProcessGroup, column_group: ProcessGroup) -> Tensor:
    """`summa` to the bit; the blocks of the next step are on their way while this step multiplies."""
    steps = grid_side(row_group, column_group)
    check_fit("summa_overlapped", a, b, a.size(-1), b.size(0))

    def start(step: int):
        return broadcast(a, step, row_group, async_op=True), broadcast(b, step, column_group, async_op=True)

    c = a.new_zeros(*a.shape[:-1], b.size(1))
    coming = start(0)
    for step in range(steps):
        a_step, b_step = (handle.wait() for handle in coming)
        if step + 1 < steps:
            coming = start(step + 1)
        _rows(c).addmm_(_rows(a_step), b_step)
    return c


@torch.no_grad()
def summa_nt(c: Tensor, b: Tensor, row_group: ProcessGroup, column_group: ProcessGroup) -> Tensor:
    """A = C · Bᵀ. Blocks c `[.., m/q, n/q]` and b `[k/q, n/q]` -> a `[.., m/q, k/q]`."""
    steps, me = grid_side(row_group, column_group), row_group.rank()
    check_fit("summa_nt", c, b, c.size(-1), b.size(1))
    a = c.new_zeros(*c.shape[:-1], b.size(0))
    for step in range(steps):
        if step > 0:
            a = rotate(a, row_group)
        row = (me - 1 - step) % steps  # whose sum is here: it ends at rank `row` of my row
        b_row = broadcast(b, row, column_group)  # B(row, j)
        _rows(a).addmm_(_rows(c), b_row.t())
    return a


@torch.no_grad()
def summa_tn(a: Tensor, c: Tensor, row_group: ProcessGroup, column_group: ProcessGroup) -> Tensor:
    """B = Aᵀ · C. Blocks a `[.., m/q, k/q]` and c `[.., m/q, n/q]` -> b `[k/q, n/q]`."""
    steps, me = grid_side(row_group, column_group), column_group.rank()
    check_fit("summa_tn", a, c, a[..., 0].numel(), c[..., 0].numel())
    b = c.new_zeros(a.size(-1), c.size(-1))
    for step in range(steps):
        if step > 0:
            b = rotate(b, column_group)
        column = (me - 1 - step) % steps  # whose sum is here: it ends at rank `column` of mine
        a_column = broadcast(a, column, row_group)  # A(i, column)
        b.addmm_(_rows(a_column).t(), _rows(c))
    return b


@torch.no_grad()
def cannon(a: Tensor, b: Tensor, row_group: ProcessGroup, column_group: ProcessGroup) -> Tensor:
    """C = A · B, as `summa`, on a torus, where blocks move past each other and always to a neighbour.

    skew      A(i, j) goes i places left, B(i, j) goes j up:  rank (i, j) has A(i, i+j), B(i+j, j)  (mod q)
    step s    C(i, j) += A(i, i+j+s) · B(i+j+s, j)            then all of A one place left, all of B one up

    Sends what `summa` does, and for the skew mk/q² if i > 0, kn/q² if j > 0. Memory: two blocks of each."""
    side = grid_side(row_group, column_group)
    check_fit("cannon", a, b, a.size(-1), b.size(0))
    i, j = column_group.rank(), row_group.rank()
    c = a.new_zeros(a.shape[:-1].numel(), b.size(1))
    a_here, b_here = _shifted(a.flatten(0, -2), row_group, i, b, column_group, j)()
    for _ in range(side - 1):
        arrive = _shifted(a_here, row_group, 1, b_here, column_group, 1)
        c.addmm_(a_here, b_here)
        a_here, b_here = arrive()
    c.addmm_(a_here, b_here)
    return c.view(*a.shape[:-1], b.size(1))


def _shifted(a: Tensor, row_group: ProcessGroup, left: int, b: Tensor, column_group: ProcessGroup, up: int):
    """Sends a to the left and b up the grid; what is returned waits for those that come instead."""
    handles = rotate(a, row_group, -left, async_op=True), rotate(b, column_group, -up, async_op=True)
    return lambda: [handle.wait() for handle in handles]


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


def block(matrix: Tensor, *groups: ProcessGroup) -> Tensor:
    """Block (i, j) of a whole `[m, .., n]` -> `[m/q, .., n/q]`, a copy; of activations B and D are cut.
    `groups`: row, column (and depth: d grids, each with its part of the rows, `[m/(q·d), .., n/q]`)."""
    grid_side(*groups)
    check_whole("block", matrix)
    for cut in _shards(matrix, *groups):
        matrix = shard(matrix, cut.dim, cut.group)
    return matrix


def whole(block: Tensor, *groups: ProcessGroup) -> Tensor:
    """The matrix `[m, .., n]` on every rank, from its blocks. Sends (q-1)/q² and (q-1)/q of it."""
    return full_tensor(block, _shards(block, *groups))


def _shards(x: Tensor, row_group, column_group, *depth_group: ProcessGroup) -> tuple[Shard, ...]:
    return *(Shard(0, group) for group in (*depth_group, column_group)), Shard(x.dim() - 1, row_group)


def grid_side(*groups: ProcessGroup) -> int:
    """q, if row and column (and depth) are of a square grid and cross in this rank and nowhere else."""
    check_crossing(**dict(zip(("row", "column", "depth"), groups)))
    rows, columns, *_ = (group.size() for group in groups)
    if rows != columns:
        raise ValueError(f"a grid of {rows} x {columns} is not square; use Mesh(row=2, column=2)")
    return rows


def check_fit(what: str, left: Tensor, right: Tensor, size: int, other: int) -> None:
    if size != other:
        raise ValueError(f"{what}: {list(left.shape)} and {list(right.shape)} sum over {size} and {other}")
