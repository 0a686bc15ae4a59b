"""Tensor parallelism on a page: a layer's matrices cut over t ranks, without and with sequence parallelism.

    column   Y_i = f(X) A_i    A cut by outputs      row   Z = g(Y_i B_i)    B cut by inputs

    f   copy      forward nothing          backward all-reduce         between layers X [B, T, D] is whole
    g   reduce    forward all-reduce       backward nothing
    f'  gather    forward all-gather       backward reduce-scatter     between layers X is [B, T/t, D]: norms
    g'  scatter   forward reduce-scatter   backward all-gather         and dropout work on 1/t of the tokens

Each is the adjoint of the other. With f' and g' gradients of what works on 1/t of the tokens (norms, biases)
are terms of a sum over the ranks. Both ways a rank sends 4(t-1)/t B T D elements in all. The vocabulary's
loss needs of other ranks their maximum, sum of exponentials and the target's logit: 3 numbers per token,
where whole logits would be V. Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3; Korthikanti et
al. 2022, arXiv:2205.05198, section 4.2. General: linear.py, sequence.py, vocabulary.py.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F


def all_reduce(x: Tensor, group: dist.ProcessGroup, op=dist.ReduceOp.SUM) -> Tensor:
    dist.all_reduce(x := x.clone(memory_format=torch.contiguous_format), op, group)
    return x


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    dist.all_gather(parts := [torch.empty_like(x) for _ in range(group.size())], x, group)
    return torch.cat(parts, dim=1)  # of tokens


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [part.contiguous() for part in x.chunk(group.size(), dim=1)]
    dist.reduce_scatter(mine := torch.empty_like(parts[0]), parts, group=group)
    return mine


def adjoint(there, back) -> type[torch.autograd.Function]:
    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return there(x, group)

        @staticmethod
        def backward(ctx, dy):
            return back(dy, ctx.group), None

    return Pair


copy, reduce = adjoint(lambda x, _: x.view_as(x), all_reduce), adjoint(all_reduce, lambda dy, _: dy)
gather, scatter = adjoint(all_gather, reduce_scatter), adjoint(reduce_scatter, all_gather)


def mlp(x: Tensor, a: Tensor, b: Tensor, group: dist.ProcessGroup, sequence: bool = False) -> Tensor:
    """a [F/t, D] and b [D, F/t] of this rank (torch keeps W[out, in]); x is whole, or with `sequence` T/t."""
    enter, leave = (gather, scatter) if sequence else (copy, reduce)
    return leave.apply(F.gelu(enter.apply(x, group) @ a.T) @ b.T, group)


class VocabularyLoss(torch.autograd.Function):
    """logits [N, V/t] of this rank's words and targets [N] of all -> the sum of -log p(target)."""

    @staticmethod
    def forward(ctx, logits, targets, group):
        shifted = logits - all_reduce(logits.amax(-1), group, dist.ReduceOp.MAX).unsqueeze(-1)
        place = targets - group.rank() * logits.size(-1)
        ctx.onehot = torch.zeros_like(logits)
        mine = ((place >= 0) & (place < logits.size(-1))).nonzero().squeeze(-1)
        ctx.onehot[mine, place[mine]] = 1
        total, hit = all_reduce(torch.stack([shifted.exp().sum(-1), (shifted * ctx.onehot).sum(-1)]), group)
        ctx.softmax = shifted.exp() / total.unsqueeze(-1)
        return (total.log() - hit).sum()

    @staticmethod
    def backward(ctx, dloss):
        return (ctx.softmax - ctx.onehot) * dloss, None, None
