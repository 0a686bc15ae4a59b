"""Tesseract (2.5-D): d copies of a q×q grid, each with the same weights and its own part of the batch.

    X[B, T, D]   rows cut over depth, then over grid rows; width over grid columns      X[B/(q·d), T, D/q]
    A = Wᵀ       cut q×q and the same on every depth layer                              A[D/q, F/q]
    Y = X · A    every depth layer does SUMMA on its rows                               Y[B/(q·d), T, F/q]
    dA           = Σ over depth of the layers' own dA: an all-reduce of each block over `depth_group`

The grid of a layer is optimus.py's. Groups come as row, column, depth: mesh.group("column"), ("row"),
("depth") of Mesh(depth=d, row=q, column=q). Depth 1 is optimus.py to the bit. With m = B·T rows, p = q²·d
ranks, a linear without bias sends (q-1)/q² · (m/d · in + in·out) elements forward, twice that backward and
2(d-1)/d · in·out/q² for the gradients over depth. The price is d copies of weights, gradients and optimizer
states, d/p of each per rank.
Wang et al. 2021, arXiv:2105.14500, section 3; Solomonik and Demmel 2011, Euro-Par, LNCS 6853, who copy both
factors and share out the q steps. Differs: any depth (the paper has d <= q); vectors as in optimus.py.
"""

from functools import partial

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.context.double_ring import check_crossing
from minitrain.ranks.collectives import copy_to
from minitrain.ranks.sharding import Shard, full_tensor, shard
from minitrain.systems.tensor_parallel.grids import optimus
from minitrain.systems.tensor_parallel.grids.summa import grid_side
from minitrain.tensor_parallel.linear import check_whole


class _OverDepth:
    """A layer of optimus.py, whose parameters are the same on the d ranks of a depth group."""

    def __init__(self, module: nn.Module, row_group, column_group, depth_group: ProcessGroup):
        check_grids(row_group, column_group, depth_group)
        super().__init__(module, row_group, column_group)
        self.depth_group = depth_group


class Linear25D(_OverDepth, optimus.Linear2D):
    """An nn.Linear, one block of which this rank holds: x `[B/(q·d), .., in/q]` -> `[B/(q·d), .., out/q]`."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = over_depth(self, self.depth_group)
        return optimus.linear(x, weight, bias, self.row_group, self.column_group)


class Norm25D(_OverDepth, optimus.Norm2D):
    """An nn.LayerNorm or nn.RMSNorm: `[B/(q·d), .., D/q]` -> the same."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = over_depth(self, self.depth_group)
        return optimus.norm(x, weight, bias, self.eps, self.centred, self.row_group, self.column_group)


def over_depth(module: nn.Module, depth_group: ProcessGroup) -> list[Tensor | None]:
    """Weight and bias on their way into work that differs by depth: backward sums their gradients over it."""
    return [param if param is None else copy_to(param, depth_group) for param in (module.weight, module.bias)]


# As in optimus.py, of layers and groups with depth: activations are `[B/(q·d), T, D/q]`.
cut_block = partial(optimus.cut_block, linear=Linear25D, norm=Norm25D)
cut_attention = partial(optimus.cut_attention, linear=Linear25D)
cut_mlp = partial(optimus.cut_mlp, linear=Linear25D)


def batch_block(x: Tensor, row_group, column_group, depth_group: ProcessGroup) -> Tensor:
    """This rank's block of whole activations: `[B, .., D]` -> `[B/(q·d), .., D/q]`, a copy."""
    q, d = check_grids(row_group, column_group, depth_group), depth_group.size()
    check_whole("batch_block", x)
    if x.size(0) % (q * d):
        raise ValueError(f"batch {x.size(0)} is not a multiple of q·d = {q}·{d} = {q * d}")
    return shard(shard(shard(x, 0, depth_group), 0, column_group), -1, row_group)


def whole_batch(block: Tensor, row_group, column_group, depth_group: ProcessGroup) -> Tensor:
    """The activations `[B, .., D]` on every rank, from blocks `[B/(q·d), .., D/q]`."""
    shards = Shard(0, depth_group), Shard(0, column_group), Shard(block.dim() - 1, row_group)
    return full_tensor(block, shards)


def check_grids(row_group: ProcessGroup, column_group: ProcessGroup, depth_group: ProcessGroup) -> int:
    """q, if row and column are a square grid and depth crosses both in this rank only."""
    check_crossing(row=row_group, column=column_group, depth=depth_group)
    return grid_side(row_group, column_group)
