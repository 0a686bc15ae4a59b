"""Which matrices of a Transformer layer are cut how: attention by heads, the MLP by its hidden units. In place.

    attention   q, k, v by columns = whole heads, H/t a rank      core: local      out by rows
    MLP         up (and gate) by columns, F/t hidden units        activation: local     down by rows

The modules stay what they are and their parameters keep their names: a layer counts its heads in the width it finds, so cutting
the weights is all there is to do. `column` and `row` say how activations travel (linear.py, sequence.py, overlap.py).

Grouped queries. Where the ranks divide the K/V heads, these are cut as well. Where there are fewer K/V heads than ranks (and they
divide the ranks), the K/V weights stay whole on all ranks, each rank computes the one head its queries need, and the gradient is
summed over the group: 2(t-1)/t of the two matrices' bytes per backward, which is small, as such matrices are narrow.

Raises ValueError in one line, before any rank waits, for heads that do not divide (with the numbers of ranks that would).
Shoeybi et al. 2019, arXiv:1909.08053, section 3; Ainslie et al. 2023 (GQA), arXiv:2305.13245, section 2.2, on K/V heads under
tensor parallelism. Differs from Megatron-LM, which keeps a copy of the K/V head per rank and sums over the ranks that share it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain import collectives
from minitrain.sharding import shard
from minitrain.tensor_parallel.linear import ColumnLinear, RowLinear, check_divides, check_whole, divisors


def cut_mlp(mlp: nn.Module, group: ProcessGroup, column: Callable, row: Callable) -> None:
    """up, gate (if there is one) and down of `mlp`."""
    for name in ("up", "gate"):
        if hasattr(mlp, name):
            setattr(mlp, name, ColumnLinear(getattr(mlp, name), group, column))
    mlp.project = partial(column, group=group)
    mlp.down = RowLinear(mlp.down, group, row)


def cut_attention(
    attention: nn.Module, head_dim: int, group: ProcessGroup, column: Callable, row: Callable
) -> None:
    """q, k, v and out of `attention`, whose heads are `head_dim` wide; ALiBi's slopes go with their heads."""
    check_heads(attention.q.out_features // head_dim, attention.k.out_features // head_dim, group)
    kv = (
        ColumnLinear
        if attention.k.out_features // head_dim % group.size() == 0
        else partial(SharedHead, head_dim=head_dim)
    )
    attention.q = ColumnLinear(attention.q, group, column)
    attention.k, attention.v = kv(attention.k, group, column), kv(attention.v, group, column)
    attention.project = partial(column, group=group)
    attention.out = RowLinear(attention.out, group, row)
    if hasattr(attention, "slopes"):
        attention.slopes = shard(attention.slopes, 0, group)


class SharedHead(nn.Module):
    """Keys or values of fewer heads than ranks: the weight is whole on all ranks, each of which uses one head of it."""

    def __init__(self, linear: nn.Linear, group: ProcessGroup, column: Callable, head_dim: int):
        super().__init__()
        check_whole("SharedHead", linear)
        self.weight, self.bias, self.group, self.column = linear.weight, linear.bias, group, column
        ranks_per_head = group.size() // (linear.out_features // head_dim)
        self.first, self.head_dim = group.rank() // ranks_per_head * head_dim, head_dim

    def own(self) -> tuple[Tensor, Tensor | None]:
        """The rows of this rank's head. Backward sums the gradient over the ranks: each has seen one head."""
        return tuple(
            param
            if param is None
            else collectives.copy_to(param, self.group).narrow(0, self.first, self.head_dim)
            for param in (self.weight, self.bias)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.column(x, (self,), self.group)[0]


def check_heads(heads: int, kv_heads: int, group: ProcessGroup) -> None:
    check_divides("attention: query heads", heads, group)
    ranks = group.size()
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(
            f"attention: {kv_heads} K/V heads over {ranks} ranks of {collectives.axis_of(group)}: neither divides the "
            f"other; take {divisors(kv_heads, kv_heads + 1)} ranks, or a multiple of {kv_heads}"
        )
