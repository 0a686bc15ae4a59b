"""Experts on a page: a router picks k of E experts for each token; rows travel to the ranks that have them.

    p = softmax(x R)    y = sum over the k largest e of p_e expert_e(x)        x [N, D], R [D, E]

Rank r of n has the E/n experts from r E/n on. Its N k rows are sorted by expert, counts are exchanged, then
the rows, in one uneven all-to-all. On arrival they are sorted by expert again, so that each expert is one
product, and go back the same way; the rank that sent a token weighs and adds up its rows. A rank sends about
2 N k D (n-1)/n elements forward and as many in backward. Nothing is dropped. The balancing loss is E times
the sum over experts of their share of rows times their mean probability: 1 when both are even. An expert's
gradients are complete where it is; the router's are summed over the ranks.
Shazeer et al. 2017, arXiv:1701.06538; Lepikhin et al. 2020, GShard, arXiv:2006.16668; Fedus et al. 2021,
Switch, arXiv:2101.03961, section 2.2. General: router.py, dispatch.py, experts.py.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


class AllToAll(torch.autograd.Function):
    """rows [sum(sends), D], in the order of ranks -> [sum(receives), D]; backward brings gradients home."""

    @staticmethod
    def forward(ctx, rows, sends, receives, group):
        ctx.back = receives, sends, group
        arrived = rows.new_empty(sum(receives), rows.size(1))
        dist.all_to_all_single(arrived, rows.contiguous(), receives, sends, group=group)
        return arrived

    @staticmethod
    def backward(ctx, dy):
        return AllToAll.apply(dy, *ctx.back), None, None, None


class Experts(nn.Module):
    """`experts`: those of this rank; `router`: nn.Linear(D, E, bias=False), the same on all."""

    def __init__(self, router: nn.Linear, experts: list[nn.Module], k: int, group: dist.ProcessGroup):
        super().__init__()
        self.router, self.experts, self.k, self.group = router, nn.ModuleList(experts), k, group

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, D] of this rank -> y [N, D], and this rank's balancing loss."""
        n, probabilities = self.group.size(), self.router(x).softmax(-1)
        weights, chosen = probabilities.topk(self.k)
        order = chosen.flatten().argsort(stable=True)  # rows by expert; row i is of token i // k
        counts = chosen.flatten().bincount(minlength=probabilities.size(1))
        balance = len(probabilities[0]) * (counts / counts.sum() * probabilities.mean(0)).sum()
        theirs = torch.empty_like(counts)  # how many rows each rank sends to each expert of this one
        dist.all_to_all_single(theirs, counts, group=self.group)
        sends, receives = (c.view(n, -1).sum(1).tolist() for c in (counts, theirs))
        rows = AllToAll.apply(x[order // self.k], sends, receives, self.group)
        y = AllToAll.apply(self.compute(rows, theirs), receives, sends, self.group)
        back = torch.empty_like(y).index_copy(0, order, y)  # by token again
        return (back.view(len(x), self.k, -1) * weights.unsqueeze(-1)).sum(1), balance

    def compute(self, rows: Tensor, theirs: Tensor) -> Tensor:
        """Rows come by rank and then by expert; each expert takes all of its rows at once."""
        expert_of = torch.arange(len(theirs), device=rows.device) % len(self.experts)
        order = expert_of.repeat_interleave(theirs).argsort(stable=True)
        each = theirs.view(-1, len(self.experts)).sum(0).tolist()
        y = torch.cat([expert(part) for expert, part in zip(self.experts, rows[order].split(each))])
        return torch.empty_like(y).index_copy(0, order, y)
