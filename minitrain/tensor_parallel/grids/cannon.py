"""Cannon's algorithm: blocks move past each other on a torus of q×q ranks, and only ever to the neighbour.

    skew      A(i, j) goes i places left, B(i, j) goes j places up:   rank (i, j) holds A(i, i+j) and B(i+j, j)
    step s    C(i, j) += A(i, i+j+s) · B(i+j+s, j)                    then all of A one place left, all of B one up

All indices are modulo q. After the skew every rank holds two blocks that fit, and one place further the next two fit
again: where SUMMA brings step s to everybody at the same time, here each rank starts the sum at another place of it.
Row group and column group are those of summa.py, and so is `block`, which cuts a matrix.

With A[m, k] and B[k, n] a rank sends (q-1)/q² · (mk + kn) elements in its q-1 steps, as in SUMMA, and before it mk/q²
if i > 0 and kn/q² if j > 0 for the skew, (q-1)/q · (mk + kn)/q² on the average. A step is one message each way between
neighbours, free of the log2(q) rounds of a broadcast, and it travels while the blocks before are multiplied.
Memory beside the blocks: two of A and two of B, one in work and one on its way.
Raises ValueError, before any rank waits, for what `grid_side` refuses and for blocks that do not fit.

Cannon 1969, A cellular computer to implement the Kalman filter algorithm, PhD thesis, Montana State University.
Differs: the skew is one message to the place where the block belongs, not i shifts by one; C · Bᵀ and Aᵀ · C, which a
layer needs for its backward, are left to summa.py.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.collectives import rotate
from minitrain.tensor_parallel.grids.summa import grid_side


@torch.no_grad()
def cannon(a: Tensor, b: Tensor, row_group: ProcessGroup, column_group: ProcessGroup) -> Tensor:
    """C = A · B. Blocks a `[.., m/q, k/q]` and b `[k/q, n/q]` -> c `[.., m/q, n/q]`; dims in front are rows, too."""
    side = grid_side(row_group, column_group)
    if a.size(-1) != b.size(0):
        raise ValueError(
            f"cannon: blocks {list(a.shape)} and {list(b.shape)} do not fit: {a.size(-1)} and {b.size(0)} "
            "along the dim that is summed; cut both matrices over the same grid"
        )
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
    """Send a to the left and b up the grid; what is returned waits for those that come instead."""
    handles = rotate(a, row_group, -left, async_op=True), rotate(b, column_group, -up, async_op=True)
    return lambda: [handle.wait() for handle in handles]
