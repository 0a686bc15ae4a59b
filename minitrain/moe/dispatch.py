"""Tokens to their experts and back: sort, all-to-all, work, all-to-all, weigh and add up.

    x [N, D] of this rank                                    expert e is on rank e // (E/n) of the group
      -> rows [A, D]      a copy for each choice, by expert  A = k·N, less what goes nowhere
      -> rows [R, D]      all-to-all: what all ranks send to this rank's experts, sorted by expert
      -> y [R, D]         each expert works on its rows
      -> y [A, D]         all-to-all back, in the order in which the rows left
      -> [N, D]           sum over a token's choices, times their weights

Nothing is dropped or padded here: counts are exchanged first (8·E·(n-1)/n bytes per rank), then exactly the
rows that are wanted travel, twice forward and twice backward, D elements each; rows for experts of the same
rank send nothing. Kept for backward: the rows at the experts, the results that came home, and the weights.
Lepikhin et al. 2020 (GShard, arXiv:2006.16668, section 3.2) with capacities; Gale et al. 2022 (MegaBlocks,
arXiv:2211.15841, section 4) without; Singh et al. 2023 (DeepSpeed-TED), arXiv:2303.06318, sections 4.1 and
5.1 (duplicate token dropping); Liu et al. 2025 (MoE parallel folding), arXiv:2504.14960, section 3. Differs:
capacity is the router's affair (`Routing.within`); rows of uneven number, padding is the experts'.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.moe.router import Routing
from minitrain.ranks import collectives
from minitrain.ranks.autograd import custom_vjp
from minitrain.ranks.sharding import Shard, place, placement, shard

Meanwhile = Callable[[], None] | None


class Dispatch:
    """One batch on its way. `counts` [E/n]: the rows of each expert of this rank, and `sizes` the same as
    numbers, if the routing knows them. `meanwhile()` is called while rows or gradients are under way."""

    def __init__(self, routing: Routing, group: ProcessGroup | None = None, meanwhile: Meanwhile = None):
        experts, n = routing.probs.shape[1], 1 if group is None else group.size()
        if experts % n:
            raise ValueError(f"{experts} experts on {n} ranks; each gets as many, so ep divides the experts")
        chosen, counts = routing.experts.flatten(), routing.counts
        order = chosen.argsort(stable=True)  # by expert, then by token
        going = int(counts.sum()) if routing.sizes is None else sum(routing.sizes)
        self.choices = order[len(order) - going :]  # those that go nowhere come first
        self.tokens, self.num_tokens = self.choices // routing.experts.shape[1], len(routing.experts)
        self.group, self.meanwhile = group, meanwhile
        if group is None:
            self.counts, self.sizes = counts, routing.sizes and list(routing.sizes)
            return
        # row s: how many rows rank s has for each expert of this rank
        self.received, here = collectives.all_to_all(counts, group).view(n, -1), experts // n
        self.counts = self.received.sum(0)
        if routing.sizes is None:
            self.send_sizes = counts.view(n, -1).sum(1).tolist()
            self.receive_sizes, self.sizes = self.received.sum(1).tolist(), None
        else:  # a dry run: every rank has as many tokens
            mine = routing.sizes[group.rank() * here : (group.rank() + 1) * here]
            self.send_sizes = [sum(routing.sizes[first : first + here]) for first in range(0, experts, here)]
            self.receive_sizes, self.sizes = [sum(mine)] * n, [n * size for size in mine]
        self.order = by_expert(self.received, sum(self.receive_sizes))

    def there(self, x: Tensor) -> Tensor:
        """x [N, D] -> [R, D], the rows of this rank's experts, one expert after the other."""
        rows = x.index_select(0, self.tokens)
        if self.group is None:
            return rows
        rows = self._sent(rows, self.send_sizes, self.receive_sizes)
        return permuted(rows, self.order, inverse(self.order))

    def back(self, y: Tensor, weights: Tensor) -> Tensor:
        """y [R, D] of this rank's experts -> [N, D]: for each token of this rank the sum of its choices."""
        if self.group is not None:
            y = permuted(y, inverse(self.order), self.order)
            y = self._sent(y, self.receive_sizes, self.send_sizes)
        return combined(y, weights.flatten().index_select(0, self.choices), self.tokens, self.num_tokens)

    def _sent(self, rows: Tensor, send_sizes: list[int], receive_sizes: list[int]) -> Tensor:
        sizes = dict(send_sizes=send_sizes, receive_sizes=receive_sizes)
        return collectives.all_to_all(rows, self.group, meanwhile=self.meanwhile, **sizes)


class AllToAll:
    """What a layer of experts does with its tokens: rows travel to their experts and back.

    x [N, D], its routing, `experts(rows, counts, sizes)` -> [N, D]. Without a group all experts are here."""

    def __init__(self, group: ProcessGroup | None = None, meanwhile: Meanwhile = None):
        self.dispatch = partial(Dispatch, group=group, meanwhile=meanwhile)

    def __call__(self, x: Tensor, routing: Routing, experts: Callable) -> Tensor:
        trip = self.dispatch(routing)
        return trip.back(experts(trip.there(x), trip.counts, trip.sizes), routing.weights)


def by_expert(received: Tensor, total: int) -> Tensor:
    """[n, E] rows that n ranks send for each of E experts, `total` in all -> their order by expert, rank."""
    experts = torch.arange(received.shape[1], device=received.device).repeat(len(received))
    return experts.repeat_interleave(received.flatten(), output_size=total).argsort(stable=True)


def inverse(order: Tensor) -> Tensor:
    """Where each entry of a permutation stands."""
    return torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))


def permuted(rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Rows in another order. Written out, for autograd would add the gradient's rows to zeros."""

    def backward(dys: tuple[Tensor], *_) -> tuple[Tensor]:
        return (dys[0].index_select(0, back),)

    return custom_vjp(lambda rows: (rows.index_select(0, order), ()), backward, rows)


def combined(y: Tensor, weights: Tensor | None, tokens: Tensor, num_tokens: int) -> Tensor:
    """[N, D]: row r of y [A, D], times weights[r] if there are weights, added to token tokens[r].

    Written out, for `index_add` keeps what it adds, [A, D], of which it needs nothing but the shape."""
    learns = weights is not None and weights.requires_grad

    def forward(y: Tensor, weights: Tensor | None) -> tuple[Tensor, tuple]:
        weighed = y if weights is None else y * weights[:, None]
        sums = y.new_zeros(num_tokens, y.shape[1]).index_add_(0, tokens, weighed)
        return sums, (y if learns else None, weights, tokens)

    def backward(dys: tuple[Tensor], saved: tuple, _) -> tuple[Tensor, Tensor | None]:
        y, weights, tokens = saved
        drows = dys[0].index_select(0, tokens)
        dweights = None if y is None else (drows * y).sum(1)
        return drows if weights is None else drows.mul_(weights[:, None]), dweights

    return custom_vjp(forward, backward, y, weights)


# ---- with tensor parallelism ------------------------------------------------------------------------------

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
    """In the place of a layer's experts: F/t hidden units of each, for the rows of all ranks of the group.

    Each rank routes and sends T/t of the tokens (`Tokens`), so none travels twice: the bytes over ep fall by
    t. Here the rows of all tp ranks are gathered, and sums go back by row. Sent over tp per layer and pass,
    with the R rows of this rank: (t-1)·R·D elements in, as many out; and (t-1)/t·B·T·D to put the tokens
    together again, if the sequence is not cut already. A router's gradient is a term of a sum over tp."""

    def __init__(self, experts: nn.Module, group: ProcessGroup):
        super().__init__()
        self.act, self.work, self.group = experts.act, experts.work, group
        self.up = shard(experts.up, 2, group)
        self.gate = None if experts.gate is None else shard(experts.gate, 2, group)
        self.down = shard(experts.down, 1, group)

    def forward(self, rows: Tensor, counts: Tensor, sizes=None, work: Callable | None = None) -> Tensor:
        t, here = self.group.size(), len(rows)
        each = collectives.all_gather(counts[None], self.group, 0)  # [t, E]
        lengths = each.sum(1).tolist() if sizes is None else [here] * t
        # a copy of the rows to every rank; backward adds up what they give back
        rows = rows.expand(t, *rows.shape).flatten(0, 1)
        rows = collectives.all_to_all(rows, self.group, send_sizes=[here] * t, receive_sizes=lengths)
        order, work = by_expert(each, sum(lengths)), work or self.work
        sizes = sizes and [t * size for size in sizes]
        y = work(rows[order], each.sum(0), self.up, self.down, self.act, self.gate, sizes=sizes)
        back = dict(send_sizes=lengths, receive_sizes=[here] * t)
        y = collectives.all_to_all(y[inverse(order)], self.group, **back)
        return y.unflatten(0, (t, here)).sum(0)
