"""Tesseract (2.5-D): d copies of a q×q grid, each with the same weights and its own part of the batch.

    X[B, T, D]    rows cut d ways over depth, then q ways over grid rows; width over grid columns      X[B/(q·d), T, D/q]
    A = Wᵀ        cut q×q and the same on every depth layer                                            A[D/q, F/q]
    Y = X · A     every depth layer does SUMMA on its rows and needs no other                          Y[B/(q·d), T, F/q]
    dA            = Σ over depth of the layers' own dA: an all-reduce of each block over `depth_group`

The grid of one layer is optimus.py's; a parameter on p = q²·d ranks is its parameter with a gradient that is summed
over depth, which is `copy_to`. On Mesh(depth=d, row=q, column=q) the ranks of my grid row differ in their column:
row_group = mesh.group("column"), column_group = mesh.group("row"), depth_group = mesh.group("depth"). Depth 1 is
optimus.py to the bit; q = 1 is data parallelism.

With m = B·T rows a linear without bias sends

    forward     (q-1)/q² · (m/d · in + in·out)
    backward    twice that, and 2(d-1)/d · in·out/q² for the gradients over depth

elements per rank. Activations are cut p ways and travel in grids of side √(p/d): (q-1)/(q²·d) · m·in, less the deeper.
The price is d copies of every weight, gradient and optimizer state, d/p of each a rank, larger blocks of them to send
and, with the next step's on their way forward, to hold twice, and the sum over depth: depth pays where activations
outweigh weights.
Raises ValueError in one line, before any rank waits, where optimus.py does, for a depth group that meets row or column
in another rank than this one, and for a batch that is not a multiple of q·d.

Wang et al. 2021, Tesseract, arXiv:2105.14500, section 3; Solomonik and Demmel 2011, Communication-optimal parallel 2.5D
matrix multiplication, Euro-Par 2011, LNCS 6853, who copy both factors and share the q steps out over the layers.
Differs: any depth (the paper has d <= q); vectors as in optimus.py.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.collectives import channel_of, copy_to
from minitrain.sharding import Shard, full_tensor, shard
from minitrain.tensor_parallel.grids.optimus import (
    Linear2D,
    Norm2D,
    linear,
    norm,
    replace_in_attention,
    replace_in_block,
    replace_in_mlp,
)
from minitrain.tensor_parallel.grids.summa import check_whole, grid_side


class Linear25D(Linear2D):
    """An nn.Linear, one block of which this rank holds, as do the d - 1 others of its depth group.

    x `[B/(q·d), .., in/q]` -> `[B/(q·d), .., out/q]`.
    """

    def __init__(
        self,
        linear: nn.Linear,
        row_group: ProcessGroup,
        column_group: ProcessGroup,
        depth_group: ProcessGroup,
    ):
        check_grids(row_group, column_group, depth_group)
        super().__init__(linear, row_group, column_group)
        self.depth_group = depth_group

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = over_depth(self, self.depth_group)
        return linear(x, weight, bias, self.row_group, self.column_group)


class Norm25D(Norm2D):
    """An nn.LayerNorm or nn.RMSNorm whose parameters are the same on every depth layer: `[B/(q·d), .., D/q]` -> the same."""

    def __init__(
        self,
        norm: nn.LayerNorm | nn.RMSNorm,
        row_group: ProcessGroup,
        column_group: ProcessGroup,
        depth_group: ProcessGroup,
    ):
        check_grids(row_group, column_group, depth_group)
        super().__init__(norm, row_group, column_group)
        self.depth_group = depth_group

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = over_depth(self, self.depth_group)
        return norm(x, weight, bias, self.eps, self.centred, self.row_group, self.column_group)


def over_depth(module: nn.Module, depth_group: ProcessGroup) -> list[Tensor | None]:
    """Weight and bias on their way into work that differs by depth layer: backward sums their gradients over depth."""
    return [param if param is None else copy_to(param, depth_group) for param in (module.weight, module.bias)]


# ---- the layers of a Transformer, in place ---------------------------------------------------------------------------


def cut_block(
    block: nn.Module, row_group: ProcessGroup, column_group: ProcessGroup, depth_group: ProcessGroup
) -> None:
    """norm1, attention, norm2 and mlp: block(x, positions) takes and gives `[B/(q·d), T, D/q]`, positions are `[T]`."""
    replace_in_block(block, *_makers(row_group, column_group, depth_group), row_group)


def cut_attention(
    attention: nn.Module, row_group: ProcessGroup, column_group: ProcessGroup, depth_group: ProcessGroup
) -> None:
    """q, k, v and out; a rank has 1/q of the heads, and of ALiBi's slopes. `[B/(q·d), T, D/q]` -> the same."""
    replace_in_attention(attention, _makers(row_group, column_group, depth_group)[0], row_group)


def cut_mlp(
    mlp: nn.Module, row_group: ProcessGroup, column_group: ProcessGroup, depth_group: ProcessGroup
) -> None:
    """up, gate (if there is one) and down. `[B/(q·d), T, D/q]` -> the same; between them `[B/(q·d), T, F/q]`."""
    replace_in_mlp(mlp, _makers(row_group, column_group, depth_group)[0])


def _makers(row_group: ProcessGroup, column_group: ProcessGroup, depth_group: ProcessGroup) -> list[Callable]:
    groups = dict(row_group=row_group, column_group=column_group, depth_group=depth_group)
    return [partial(kind, **groups) for kind in (Linear25D, Norm25D)]


# ---- activations and their blocks ------------------------------------------------------------------------------------


def batch_block(
    x: Tensor, row_group: ProcessGroup, column_group: ProcessGroup, depth_group: ProcessGroup
) -> Tensor:
    """This rank's block of whole activations: `[B, .., D]` -> `[B/(q·d), .., D/q]`, a copy."""
    q, d = check_grids(row_group, column_group, depth_group), depth_group.size()
    check_whole("batch_block", x)
    if x.size(0) % (q * d):
        raise ValueError(
            f"batch {x.size(0)} is not a multiple of q·d = {q}·{d} = {q * d}; choose a batch that is"
        )
    return shard(shard(shard(x, 0, depth_group), 0, column_group), -1, row_group)


def whole_batch(
    block: Tensor, row_group: ProcessGroup, column_group: ProcessGroup, depth_group: ProcessGroup
) -> Tensor:
    """The activations `[B, .., D]` on every rank, from blocks `[B/(q·d), .., D/q]`."""
    return full_tensor(
        block, (Shard(0, depth_group), Shard(0, column_group), Shard(block.dim() - 1, row_group))
    )


def check_grids(row_group: ProcessGroup, column_group: ProcessGroup, depth_group: ProcessGroup) -> int:
    """q, if row and column are a square grid and depth crosses both in this rank only."""
    q = grid_side(row_group, column_group)
    depth = channel_of(depth_group).members
    me = depth[depth_group.rank()]
    for name, group in (("row", row_group), ("column", column_group)):
        shared = sorted(set(depth) & set(channel_of(group).members))
        if shared != [me]:
            raise ValueError(
                f"depth group {list(depth)} and {name} group {list(channel_of(group).members)} share ranks {shared}, but "
                f"must cross in rank {me} only; on Mesh(depth=d, row=q, column=q) it is group('depth')"
            )
    return q
