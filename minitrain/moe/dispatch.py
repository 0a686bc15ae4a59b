"""Tokens to their experts and back: sort, all-to-all, work, all-to-all, weigh and add up.

    x [N, D] of this rank                                    expert e lives on rank e // (E/n) of the group
      -> rows [A, D]      a copy for each choice, by expert  A = k·N, less what goes nowhere
      -> rows [R, D]      all-to-all: what all ranks send to this rank's experts, sorted by expert
      -> y [R, D]         each expert works on its own rows
      -> y [A, D]         all-to-all back, in the order in which the rows left
      -> [N, D]           sum over a token's choices, times their weights

Nothing is dropped or padded here: counts are exchanged first (8·E·(n-1)/n bytes a rank), then exactly the
rows that are wanted travel, twice forward and twice backward, D elements each; a row whose expert is on its
own rank stays. Kept for backward: the rows at the experts, the results that came home, and the weights.

Lepikhin et al. 2020 (GShard, arXiv:2006.16668, section 3.2) with capacities; Gale et al. 2022 (MegaBlocks,
arXiv:2211.15841, section 4) without. Differs: capacity is the router's affair (`Routing.within`), so that one
dispatch serves both; padding is the experts' (experts.py).
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain import collectives
from minitrain.moe.router import NOWHERE, Routing


class Dispatch:
    """The way of one batch, made from its routing. `counts` [E/n]: the rows of each expert that is here."""

    def __init__(self, routing: Routing, group: ProcessGroup | None = None) -> None:
        experts, n = routing.probs.shape[1], 1 if group is None else group.size()
        if experts % n:
            raise ValueError(
                f"{experts} experts on {n} ranks; each rank gets as many, so ep divides the experts"
            )
        chosen = routing.experts.flatten()
        order = chosen.argsort(stable=True)[(chosen == NOWHERE).sum() :]  # by expert, then by token
        self.group, self.choices = group, order
        self.tokens, self.num_tokens = order // routing.experts.shape[1], len(routing.experts)
        counts = routing.counts
        if group is None:
            self.counts, self.turn = counts, None
            return
        # row s of `arriving`: how many rows rank s has for each expert of this rank
        arriving = collectives.all_to_all(counts, group).view(n, -1)
        self.counts = arriving.sum(0)
        self.send_sizes = counts.view(n, -1).sum(1).tolist()
        self.receive_sizes = arriving.sum(1).tolist()
        which = torch.arange(experts // n, device=counts.device).repeat(n)  # the expert of each piece
        self.turn = which.repeat_interleave(arriving.flatten()).argsort(stable=True)

    def there(self, x: Tensor) -> Tensor:
        """x [N, D] -> [R, D], the rows of this rank's experts, one expert after the other."""
        rows = x[self.tokens]
        if self.group is None:
            return rows
        sizes = {"send_sizes": self.send_sizes, "receive_sizes": self.receive_sizes}
        return collectives.all_to_all(rows, self.group, **sizes)[self.turn]

    def back(self, y: Tensor, weights: Tensor) -> Tensor:
        """y [R, D] of this rank's experts -> [N, D]: for each token of this rank the sum of its choices."""
        if self.group is not None:
            sizes = {"send_sizes": self.receive_sizes, "receive_sizes": self.send_sizes}
            home = torch.empty_like(self.turn)
            home[self.turn] = torch.arange(len(home), device=home.device)
            y = collectives.all_to_all(y[home], self.group, **sizes)
        weighed = y * weights.flatten()[self.choices, None]
        return y.new_zeros(self.num_tokens, y.shape[1]).index_add(0, self.tokens, weighed)
