"""Cannon's algorithm: blocks move past each other on a torus of q×q ranks, always to a neighbour.

    skew      A(i, j) goes i places left, B(i, j) goes j up:  rank (i, j) holds A(i, i+j), B(i+j, j)  (mod q)
    step s    C(i, j) += A(i, i+j+s) · B(i+j+s, j)            then all of A one place left, all of B one up

Groups and blocks are those of summa.py. With A[m, k], B[k, n] a rank sends (q-1)/q² · (mk + kn) elements in
q-1 steps, as in SUMMA, and before it mk/q² if i > 0 and kn/q² if j > 0. A step is one message to a neighbour,
behind the product before. Memory beside the blocks: two of A and two of B, one in work and one on its way.
Cannon 1969, PhD thesis, Montana State University. Differs: the skew is one message, not i shifts by one.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.ranks.collectives import rotate
from minitrain.systems.tensor_parallel.grids.summa import check_fit, grid_side


@torch.no_grad()
def cannon(a: Tensor, b: Tensor, row_group: ProcessGroup, column_group: ProcessGroup) -> Tensor:
    """C = A · B. Blocks a `[.., m/q, k/q]`, b `[k/q, n/q]` -> c `[.., m/q, n/q]`; dims in front are rows."""
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
