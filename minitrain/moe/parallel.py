"""A layer of experts on ranks: experts spread over ep, each expert cut over tp, tokens that are sent once.

    ep     expert e is on rank e // (E/ep) of the group      up[E/ep, D, F]    gradient: a sum over what is
           (tokens go there and back: dispatch.py)                             left of dp × cp beside ep
    tp     hidden units of every expert                      up[E/ep, D, F/tp] gradient: complete
           tokens: each rank routes and sends T/tp of them, so none travels twice; at the experts the rows
           of all tp ranks are gathered, every rank computes its hidden units, and sums go back by row

Without dropping duplicates every tp rank would send all tokens: the bytes over ep fall by exactly tp. Sends
over tp per layer and pass, R the rows of this rank: (t-1)·R·D elements in, as many out; where the sequence
is not cut already, (t-1)/t·B·T·D to put the tokens together again. A router has seen T/tp tokens: its
gradient is a term of a sum over tp.
Singh et al. 2023 (DeepSpeed-TED), arXiv:2303.06318, sections 4.1 and 5.1 (duplicate token dropping); Liu et
al. 2025 (MoE parallel folding), arXiv:2504.14960, section 3. Differs: rows of uneven number, nothing padded.
"""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.moe.dispatch import by_expert, inverse
from minitrain.ranks import collectives
from minitrain.ranks.sharding import Shard, place, placement, shard

TIME = 1  # the dim of the sequence in [B, T, D]


def spread(mixture: nn.Module, group: ProcessGroup, dispatch: Callable) -> None:
    """A layer has made its part of the experts only: they are parts over `group` of whole parameters, and
    rows travel to them by `dispatch(routing)`."""
    mixture.dispatch = dispatch
    for param in mixture.experts.parameters():
        place(param, shards=(Shard(0, group), *placement(param).shards))


def cut(mixture: nn.Module, group: ProcessGroup, own_time: Callable | None = None) -> list[nn.Parameter]:
    """Each expert over `group`, in place. `own_time(positions)`: those of the tokens that a rank has, where
    the sequence is cut over the group already. Returns the parameters that see some of the tokens only."""
    experts = mixture.experts
    for name, dim in (("up", 2), ("gate", 2), ("down", 1)):
        if getattr(experts, name) is not None:
            setattr(experts, name, shard(getattr(experts, name), dim, group))
    mixture.experts = CutExperts(experts, group)
    if own_time is None:
        mixture.enter, mixture.leave = partial(own_tokens, group=group), partial(all_tokens, group=group)
    else:
        mixture.enter = lambda x, positions: (x, own_time(positions), False)
    return list(mixture.router.parameters())


def own_tokens(x: Tensor, positions: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, bool]:
    """x [B, T, D], alike on all ranks -> this rank's [B, T/t, D], rounded up with padding at the end."""
    missing = -x.shape[TIME] % group.size()
    x, positions = F.pad(x, (0, 0, 0, missing)), F.pad(positions, (0, missing), value=-1)
    own = positions.chunk(group.size(), -1)[group.rank()]
    return collectives.scatter_to(x, group, TIME), own, missing > 0


def all_tokens(y: Tensor, length: int, group: ProcessGroup) -> Tensor:
    """The opposite: [B, T/t, D] -> the first `length` of [B, T, D]."""
    return collectives.gather_from(y, group, TIME).narrow(TIME, 0, length)


class CutExperts(nn.Module):
    """Experts of F/t hidden units each, which work on the rows of all ranks of the group."""

    def __init__(self, experts: nn.Module, group: ProcessGroup):
        super().__init__()
        self.act, self.way, self.group = experts.act, experts.way, group
        self.up, self.gate, self.down = experts.up, experts.gate, experts.down

    def forward(self, rows: Tensor, counts: Tensor, sizes: list[int] | None = None, way=None) -> Tensor:
        t, here = self.group.size(), len(rows)
        each = collectives.all_gather(counts[None], self.group, 0)  # [t, E]
        lengths = each.sum(1).tolist() if sizes is None else [here] * t
        # a copy of the rows to every rank; backward adds up what they give back
        rows = rows.expand(t, *rows.shape).flatten(0, 1)
        rows = collectives.all_to_all(rows, self.group, send_sizes=[here] * t, receive_sizes=lengths)
        turn, sizes = by_expert(each, sum(lengths)), sizes and [t * size for size in sizes]
        matrices = dict(gate=self.gate, sizes=sizes)
        y = (way or self.way)(rows[turn], each.sum(0), self.up, self.down, self.act, **matrices)
        back = dict(send_sizes=lengths, receive_sizes=[here] * t)
        y = collectives.all_to_all(y[inverse(turn)], self.group, **back)
        return y.unflatten(0, (t, here)).sum(0)
