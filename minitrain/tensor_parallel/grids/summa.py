"""SUMMA: the product of two matrices that nobody holds, on a grid of q×q ranks.

Every matrix is cut into q×q blocks and rank (i, j) of the grid, in row i and column j, holds block (i, j) of each:

    summa      C(i, j) = Σ_s A(i, s) · B(s, j)       at step s column s of A goes along the rows, row s of B along the columns
    summa_nt   A(i, l) = Σ_j C(i, j) · B(l, j)ᵀ      C · Bᵀ: row l of B goes along the columns, sums go along the rows
    summa_tn   B(l, j) = Σ_i A(i, l)ᵀ · C(i, j)      Aᵀ · C: column l of A goes along the rows, sums go along the columns

If C = A · B then dA = dC · Bᵀ and dB = Aᵀ · dC: the three are forward and backward of a linear layer, and no matrix
leaves its place, whatever is differentiated. `row_group` is the q ranks of my grid row: they differ in their column, so
on Mesh(row=q, column=q) it is mesh.group("column"). `column_group` is my grid column, mesh.group("row").

With A[m, k], B[k, n] and C[m, n] a rank receives, and sends just as much,

    summa      (q-1)/q² · (mk + kn)          summa_nt   (q-1)/q² · (kn + mk)          summa_tn   (q-1)/q² · (mk + kn)

elements: over the q steps it takes every place in the tree of a broadcast once. As a share of the matrices this falls
with 1/√p, where cutting one dim only (Megatron) moves (p-1)/p of the activations whatever p is. Memory beside operands
and result: a block of A and of B, each with the next one on its way; of the other two products a broadcast block and a
sum that arrives. So nothing is ever larger than a block, 1/q² of a matrix.
Raises ValueError, before any rank waits, for a grid that is not square, for groups that do not cross in exactly this
rank, for a matrix that is cut already, for sizes not a multiple of q and for blocks that do not fit each other.

van de Geijn and Watts 1997, SUMMA, Concurrency: Practice and Experience 9(4), with C · Bᵀ and Aᵀ · C as there. Differs:
one panel is a whole block (they pipeline narrower ones). Where they reduce to one root at each step, here q sums travel
at once, each around the ring of its axis to the rank where it belongs, and every rank it passes adds its product: a
reduce-scatter whose terms come into being on the way. It sends the same bytes, keeps all ranks busy, and never holds
the q partial products together which a reduce-scatter takes for its input.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.collectives import axis_of, broadcast, channel_of, rotate
from minitrain.sharding import Shard, full_tensor, placement, shard


@torch.no_grad()
def summa(a: Tensor, b: Tensor, row_group: ProcessGroup, column_group: ProcessGroup) -> Tensor:
    """C = A · B. Blocks a `[.., m/q, k/q]` and b `[k/q, n/q]` -> c `[.., m/q, n/q]`; dims in front are rows, too."""
    steps = grid_side(row_group, column_group)
    _check_fit("summa", a, b, a.size(-1), b.size(0))
    c = a.new_zeros(*a.shape[:-1], b.size(1))
    for step in range(steps):
        a_step = broadcast(a, step, row_group)  # A(i, step)
        b_step = broadcast(b, step, column_group)  # B(step, j)
        _rows(c).addmm_(_rows(a_step), b_step)
    return c


@torch.no_grad()
def summa_overlapped(a: Tensor, b: Tensor, row_group: ProcessGroup, column_group: ProcessGroup) -> Tensor:
    """`summa` to the bit; the blocks of the next step are on their way while those of this step are multiplied."""
    steps = grid_side(row_group, column_group)
    _check_fit("summa_overlapped", a, b, a.size(-1), b.size(0))

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
    _check_fit("summa_nt", c, b, c.size(-1), b.size(1))
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
    _check_fit("summa_tn", a, c, a[..., 0].numel(), c[..., 0].numel())
    b = c.new_zeros(a.size(-1), c.size(-1))
    for step in range(steps):
        if step > 0:
            b = rotate(b, column_group)
        column = (me - 1 - step) % steps  # whose sum is here: it ends at rank `column` of mine
        a_column = broadcast(a, column, row_group)  # A(i, column)
        b.addmm_(_rows(a_column).t(), _rows(c))
    return b


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


# ---- a matrix and its blocks -----------------------------------------------------------------------------------------


def block(matrix: Tensor, row_group: ProcessGroup, column_group: ProcessGroup) -> Tensor:
    """Block (i, j) of a whole `[m, .., n]` -> `[m/q, .., n/q]`, a copy. Of activations `[B, T, D]` it cuts B and D."""
    grid_side(row_group, column_group)
    check_whole("block", matrix)
    return shard(shard(matrix, 0, column_group), -1, row_group)


def whole(block: Tensor, row_group: ProcessGroup, column_group: ProcessGroup) -> Tensor:
    """The matrix `[m, .., n]` on every rank, from blocks `[m/q, .., n/q]`. Sends (q-1)/q² and (q-1)/q of it."""
    return full_tensor(block, (Shard(0, column_group), Shard(block.dim() - 1, row_group)))


# ---- what is refused -------------------------------------------------------------------------------------------------


def grid_side(row_group: ProcessGroup, column_group: ProcessGroup) -> int:
    """q, if the two groups are row and column of a square grid that cross in this rank and nowhere else."""
    row, column = channel_of(row_group).members, channel_of(column_group).members
    if len(row) != len(column):
        raise ValueError(
            f"the grid is not square: row group of {len(row)} ranks, column group of {len(column)}; use "
            f"q×q ranks, such as Mesh(row={len(row)}, column={len(row)})"
        )
    me, shared = row[row_group.rank()], sorted(set(row) & set(column))
    if shared != [me]:
        raise ValueError(
            f"row group {list(row)} and column group {list(column)} share ranks {shared}, but must cross "
            f"in rank {me} only; on Mesh(row=q, column=q) they are group('column') and group('row')"
        )
    return len(row)


def check_whole(what: str, tensor: Tensor) -> None:
    """Blocks are cut from whole tensors; a parameter that is cut already has its cuts in `.placement`."""
    if cuts := placement(tensor).shards:
        axes = ", ".join(axis_of(cut.group) for cut in cuts)
        raise ValueError(
            f"{what}: the tensor {list(tensor.shape)} is cut already, over {axes}; give the whole, "
            "full_tensor(tensor), or cut it once only"
        )


def _check_fit(what: str, left: Tensor, right: Tensor, size: int, other: int) -> None:
    if size != other:
        raise ValueError(
            f"{what}: blocks {list(left.shape)} and {list(right.shape)} do not fit: {size} and {other} "
            "along the dim that is summed; cut both matrices over the same grid"
        )
