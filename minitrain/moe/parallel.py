"""A layer of experts on ranks: experts over ep, each expert cut over tp, and every token sent once.

    ep     expert e is on rank e // (E/ep) of the group        up [E/ep, D, F]
           tokens go there and back (dispatch.py); the gradient is a sum over the other ranks of dp × cp
    tp     hidden units of every expert                        up [E/ep, D, F/tp]
           each rank routes and sends T/tp of the tokens, so none travels twice; at the experts the rows of
           all tp ranks are gathered, every rank computes its hidden units, and sums go back by row

With duplicates every rank of tp would send all tokens: the bytes over ep fall by exactly tp. Sent over tp per
layer and pass, with the R rows of this rank: (t-1)·R·D elements in, as many out; and (t-1)/t·B·T·D to put the
tokens together again, if the sequence is not cut already. A router sees T/tp tokens: its gradient is a term
of a sum over tp.
Singh et al. 2023 (DeepSpeed-TED), arXiv:2303.06318, sections 4.1 and 5.1 (duplicate token dropping); Liu et
al. 2025 (MoE parallel folding), arXiv:2504.14960, section 3. Differs: rows of uneven number, nothing padded.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.moe.dispatch import by_expert, inverse
from minitrain.ranks import collectives
from minitrain.ranks.sharding import Shard, place, placement, shard

TIME = 1  # the dim of the sequence in [B, T, D]


@dataclass(frozen=True)
class Tokens:
    """Which tokens of a layer's input [B, T, D] this rank routes: all of them, or 1/t where all ranks of
    `tp_group` have the same input. With `sequence_parallel` the input is 1/t already, its positions are not.
    """

    tp_group: ProcessGroup | None = None
    sequence_parallel: bool = False
    row_group: ProcessGroup | None = None  # ranks that route the other tokens of the same rows
    row_ranks: int = 1  # over how many of these the rows of the input are cut

    def enter(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, bool]:
        """This rank's tokens, their positions (-1: padding), and whether any are padding."""
        if self.tp_group is None:
            return x, positions, False
        t, rank = self.tp_group.size(), self.tp_group.rank()
        if self.sequence_parallel:
            return x, positions.chunk(t, -1)[rank], False
        missing = -x.shape[TIME] % t
        x, positions = F.pad(x, (0, 0, 0, missing)), F.pad(positions, (0, missing), value=-1)
        return collectives.scatter_to(x, self.tp_group, TIME), positions.chunk(t, -1)[rank], missing > 0

    def leave(self, y: Tensor, length: int) -> Tensor:
        """The opposite, [B, T, D] of the first `length` tokens."""
        if self.tp_group is None or self.sequence_parallel:
            return y
        return collectives.gather_from(y, self.tp_group, TIME).narrow(TIME, 0, length)


def place_experts(experts: nn.Module, group: ProcessGroup) -> None:
    """The experts that a rank has made are its part of stacked parameters, over `group`."""
    for param in experts.parameters():
        place(param, shards=(Shard(0, group), *placement(param).shards))


class CutExperts(nn.Module):
    """In the place of a layer's experts: F/t hidden units of each, for the rows of all ranks of the group."""

    def __init__(self, experts: nn.Module, group: ProcessGroup):
        super().__init__()
        self.act, self.work, self.group = experts.act, experts.work, group
        self.up = shard(experts.up, 2, group)
        self.gate = None if experts.gate is None else shard(experts.gate, 2, group)
        self.down = shard(experts.down, 1, group)

    def forward(
        self, rows: Tensor, counts: Tensor, sizes: list[int] | None = None, work: Callable | None = None
    ) -> Tensor:
        t, here = self.group.size(), len(rows)
        each = collectives.all_gather(counts[None], self.group, 0)  # [t, E]
        lengths = each.sum(1).tolist() if sizes is None else [here] * t
        # a copy of the rows to every rank; backward adds up what they give back
        rows = rows.expand(t, *rows.shape).flatten(0, 1)
        rows = collectives.all_to_all(rows, self.group, send_sizes=[here] * t, receive_sizes=lengths)
        order, work = by_expert(each, sum(lengths)), work or self.work
        sizes = sizes and [t * size for size in sizes]
        y = work(rows[order], each.sum(0), self.up, self.down, self.act, self.gate, sizes=sizes)
        y = collectives.all_to_all(
            y[inverse(order)], self.group, send_sizes=lengths, receive_sizes=[here] * t
        )
        return y.unflatten(0, (t, here)).sum(0)
