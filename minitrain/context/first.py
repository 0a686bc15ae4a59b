"""Ring attention on a page: tokens are cut over n ranks, queries stay, and keys and values go round.

    O = softmax(Q K^T / sqrt(d)) V, causal        lse = the logarithm of the row sums of exp
    of all keys    lse = log(exp lse_1 + exp lse_2)    O = O_1 exp(lse_1 - lse) + O_2 exp(lse_2 - lse)

In step s a rank has the keys of the rank s before it, and passes them on while it computes. Backward goes
round again: P is computed anew from lse, dK and dV of a block travel behind it, home in n hops. A rank
sends 2(n-1) blocks of T/n tokens forward and 4n - 2 in backward. With contiguous tokens early ranks idle: in
zig-zag the text is cut into 2n chunks, rank r has chunks r and 2n-1-r, and all have the same work.
Liu et al. 2023, arXiv:2310.01889, section 3; Llama 3 2024, arXiv:2407.21783, section 3.3.2. General: ring.py.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

contiguous = lambda rank, n: [rank]  # the chunks of a rank, of n or 2n in all
zigzag = lambda rank, n: [rank, 2 * n - 1 - rank]


def rotate(tensors, group):
    """To the next rank, from the one before: what comes, once `wait()` has returned."""
    room, n = [torch.empty_like(x) for x in tensors], group.size()
    sends = [dist.P2POp(dist.isend, x, group=group, group_peer=(group.rank() + 1) % n) for x in tensors]
    receives = [dist.P2POp(dist.irecv, x, group=group, group_peer=(group.rank() - 1) % n) for x in room]
    works = dist.batch_isend_irecv(sends + receives) if n > 1 else []
    return (room if n > 1 else tensors), lambda: [work.wait() for work in works]


def around(block, tokens, layout, group):
    """Every rank's keys and values, the own first, with what queries see of them: rows, columns, diagonal?"""
    (rank, n), mine = (group.rank(), group.size()), layout(group.rank(), group.size())
    chunks = [slice(i * tokens // len(mine), (i + 1) * tokens // len(mine)) for i in range(len(mine))]
    for step in range(n):
        arriving, wait = rotate(block, group) if step < n - 1 else (None, list)
        theirs = layout((rank - step) % n, n)
        pairs = [(a, b) for a in zip(chunks, mine) for b in zip(chunks, theirs)]
        yield block, [(rows, columns, i == j) for (rows, i), (columns, j) in pairs if j <= i]
        wait()
        block = arriving


def scores(q: Tensor, k: Tensor, diagonal: bool) -> Tensor:
    s = q @ k.mT / math.sqrt(q.size(-1))
    return s + s.new_full(s.shape[-2:], -math.inf).triu(1) if diagonal else s


class Ring(torch.autograd.Function):  # q, k, v [B, H, T/n, K] of this rank's chunks, in their order -> out
    @staticmethod
    def forward(ctx, q, k, v, group, layout):
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf).unsqueeze(-1)
        for (keys, values), seen in around([k.contiguous(), v.contiguous()], q.size(-2), layout, group):
            for rows, columns, diagonal in seen:
                s = scores(q[..., rows, :], keys[..., columns, :], diagonal)
                new = torch.logaddexp(lse[..., rows, :], s.logsumexp(-1, keepdim=True))
                out[..., rows, :] *= (lse[..., rows, :] - new).exp()
                out[..., rows, :] += (s - new).exp() @ values[..., columns, :]
                lse[..., rows, :] = new
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.where = layout, group
        return out

    @staticmethod
    def backward(ctx, dout):
        (q, k, v, out, lse), (layout, group) = ctx.saved_tensors, ctx.where
        dq, sums, delta = torch.zeros_like(q), [q.new_zeros(q.shape)] * 2, (dout * out).sum(-1, keepdim=True)
        for (keys, values), seen in around([k.contiguous(), v.contiguous()], q.size(-2), layout, group):
            dk, dv = sums[0].clone(), sums[1].clone()
            for rows, columns, diagonal in seen:
                mine, here, do = q[..., rows, :], keys[..., columns, :], dout[..., rows, :]
                p = (scores(mine, here, diagonal) - lse[..., rows, :]).exp()
                ds = p * (do @ values[..., columns, :].mT - delta[..., rows, :]) / math.sqrt(q.size(-1))
                dq[..., rows, :] += ds @ here
                dk[..., columns, :] += ds.mT @ mine
                dv[..., columns, :] += p.mT @ do
            sums, wait = rotate([dk, dv], group)
            wait()
        return dq, *sums, None, None
