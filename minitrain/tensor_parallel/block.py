"""Which matrices of a Transformer layer are cut how: attention by heads, the MLP by hidden units, in place.

    attention   q, k, v by columns = whole heads, H/t per rank    core: local            out by rows
    MLP         up (and gate) by columns, F/t hidden units        activation: local      down by rows

Parameters keep their names; a layer infers its number of heads from its width. `column` and `row` say how
activations travel (linear.py, sequence.py, overlap.py, ring_overlap.py). K/V heads that the ranks divide are
cut as well. Fewer ones, which divide the ranks, stay whole on all ranks: each computes the head its queries
need, and the gradient is summed, 2(t-1)/t of the bytes of two narrow matrices in backward.
Shoeybi et al. 2019, arXiv:1909.08053, section 3; Ainslie et al. 2023 (GQA), arXiv:2305.13245, section 2.2.
Differs from Megatron-LM, which keeps a copy of the K/V head per rank and sums over the ranks that share it.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.ranks import collectives
from minitrain.ranks.checks import require_positive_ints
from minitrain.ranks.sharding import shard
from minitrain.tensor_parallel.linear import ColumnLinear, RowLinear, check_divides, check_whole, divisors


def cut_mlp(mlp: nn.Module, group: ProcessGroup, column: Callable, row: Callable) -> None:
    """up, gate (if there is one) and down of `mlp`."""
    for name in ("up", "gate"):
        if hasattr(mlp, name):
            setattr(mlp, name, ColumnLinear(getattr(mlp, name), group, column))
    mlp.down = RowLinear(mlp.down, group, row)


def cut_attention(attention: nn.Module, head_dim: int, group: ProcessGroup, column: Callable, row: Callable):
    """q, k, v and out of `attention`, whose heads are `head_dim` wide; ALiBi's slopes go with their heads."""
    require_positive_ints(head_dim=head_dim)
    heads, kv_heads = (linear.out_features // head_dim for linear in (attention.q, attention.k))
    check_heads(heads, kv_heads, group)
    kv = partial(SharedHead, head_dim=head_dim) if kv_heads % group.size() else ColumnLinear
    attention.q = ColumnLinear(attention.q, group, column)
    attention.k, attention.v = kv(attention.k, group, column), kv(attention.v, group, column)
    attention.out = RowLinear(attention.out, group, row)
    if hasattr(attention, "slopes"):
        attention.slopes = shard(attention.slopes, 0, group)


class SharedHead(nn.Module):
    """Keys or values with fewer heads than ranks: a whole weight on every rank, which uses one head of it."""

    together = ColumnLinear.together

    def __init__(self, linear: nn.Linear, group: ProcessGroup, column: Callable, head_dim: int):
        super().__init__()
        check_whole("SharedHead", linear)
        self.weight, self.bias, self.group, self.column = linear.weight, linear.bias, group, column
        ranks_per_head = group.size() // (linear.out_features // head_dim)
        self.first, self.head_dim = group.rank() // ranks_per_head * head_dim, head_dim

    def own(self) -> tuple[Tensor, Tensor | None]:
        """The rows of this rank's head. Backward sums the gradient over the ranks: each has one head."""

        def rows(param: Tensor) -> Tensor:
            return collectives.copy_to(param, self.group).narrow(0, self.first, self.head_dim)

        return rows(self.weight), None if self.bias is None else rows(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.column(x, (self,), self.group)[0]


def check_heads(heads: int, kv_heads: int, group: ProcessGroup) -> None:
    check_divides("attention: query heads", heads, group)
    ranks = group.size()
    if kv_heads % ranks and ranks % kv_heads:
        what = f"{kv_heads} K/V heads over {ranks} ranks of {collectives.axis_of(group)}"
        fits = f"{divisors(kv_heads, kv_heads + 1)} ranks, or a multiple of {kv_heads}"
        raise ValueError(f"attention: {what}: neither divides the other; take {fits}")
