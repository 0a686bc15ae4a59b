"""Ring self-attention, as it began: keys go round until ranks have whole rows of scores, then values do.

    pass 1    S[T/n, T] = Q [K_0 .. K_n-1]ᵀ / sqrt(K)    one block of columns per step  P = softmax(S)
    pass 2    O[T/n, K] = Σ_j P[:, j] V_j                 one term per step

Backward keeps P and takes four passes: V and K once more, and the sums of dV and dK, one share per step:

    V goes round    dP[:, j] = dO V_jᵀ      dV_j = Σ over ranks of P[:, j]ᵀ dO   dS = P (dP - rowsum(dP · P))
    K goes round    dQ = Σ_j dS[:, j] K_j   dK_j = Σ over ranks of dS[:, j]ᵀ Q   both by 1 / sqrt(K)

    forward    2 passes of n-1 steps, B·H_kv·T/n·K elements each                   backward    4 of them

Each rank holds all its scores: P is B·H·T²/n elements, kept for backward, with dP as many again there;
ring.py sends the same without them. Li et al. 2021 (Sequence Parallelism), arXiv:2105.13120, section 3.2.
Differs: any layout, causal too, fewer K/V heads; sums of dK, dV go round, half of an all-reduce.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.attention.kernel import repeat_kv, sum_kv_copies
from minitrain.attention.placed import Alibi, Documents, DropMask
from minitrain.context.layout import Layout, contiguous, positions_of
from minitrain.context.ring import Tensors, check_core, ring_pass
from minitrain.ranks.autograd import custom_vjp


def ring_self_attention(q, k, v, *, group: ProcessGroup, layout=contiguous, causal=True, **places) -> Tensor:
    """q `[B, H, T/n, K]`, k, v `[B, H_kv, T/n, K]` -> `[B, H, T/n, K]`. `places` as in placed.py."""
    check_core("ring_self_attention", q, k, v, fewer=True, **places)
    rows = Rows(group, layout, causal, **places)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensors]:
        out, p = rows_forward(q, k, v, rows)
        return out, (q, k, v, p)

    return custom_vjp(forward, lambda dys, saved, _: rows_backward(*dys, *saved, rows), q, k, v)


class Rows(NamedTuple):
    """This rank's rows of scores `[B, H, T/n, T]`, columns in the order in which the ranks hold the keys."""

    group: ProcessGroup
    layout: Layout = contiguous
    causal: bool = True
    bias: Alibi | None = None
    dropout: DropMask | float = 0.0
    documents: Documents | None = None

    def columns(self, rows: Tensor, step: int) -> Tensor:
        """`[B, H, T/n, T/n]`, those of the keys that are here in that step."""
        return rows.chunk(self.group.size(), -1)[(self.group.rank() - step) % self.group.size()]

    def positions(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """`[T/n]` of the queries, `[T]` of the keys; fewer queries are this rank's last."""
        ranks, (queries, keys) = self.group.size(), scores.shape[-2:]
        by_rank = [positions_of(self.layout(rank, ranks, keys), scores.device) for rank in range(ranks)]
        return by_rank[self.group.rank()][-queries:], torch.cat(by_rank)

    def dropped(self, p: Tensor) -> Tensor:
        """Times the mask of their places (placed.py), which is made anew each time."""
        return p * self.dropout.factors(p, lambda device: self.positions(p)) if self.dropout else p


def rows_forward(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """-> out `[B, H, T/n, K]` and the probabilities `[B, H, T/n, T]`."""
    exact = torch.promote_types(q.dtype, torch.float32)
    scores = q.new_empty(*q.shape[:-1], rows.group.size() * k.size(-2), dtype=exact)
    out = v.new_zeros(*q.shape[:-1], v.size(-1), dtype=exact)

    def score(step: int, k: Tensor) -> None:
        k, _ = repeat_kv(q, k, k)
        rows.columns(scores, step).copy_(q @ k.transpose(-2, -1)).div_(math.sqrt(q.size(-1)))

    def average(step: int, v: Tensor) -> None:
        v, _ = repeat_kv(q, v, v)
        out.add_(rows.columns(weights, step) @ v)

    ring_pass((k,), rows.group, score)
    queries, keys = rows.positions(scores)
    if rows.bias:
        scores.add_(rows.bias.between(queries, keys))
    if rows.causal:
        scores.masked_fill_(queries.unsqueeze(-1) < keys, -math.inf)
    if rows.documents:
        first = rows.documents.starts
        scores.masked_fill_((first(queries)[..., None] != first(keys)[:, None])[:, None], -math.inf)
    p = scores.sub_(scores.logsumexp(-1, keepdim=True)).exp_().to(q.dtype)
    weights = rows.dropped(p)
    ring_pass((v,), rows.group, average)
    return out.to(q.dtype), p


def rows_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor, rows: Rows) -> Tensors:
    """-> dq, dk, dv of this rank's tokens."""
    exact = torch.promote_types(p.dtype, torch.float32)
    kv_heads, ds, dq = k.size(1), torch.empty_like(p, dtype=exact), torch.zeros_like(q, dtype=exact)
    weights = rows.dropped(p)

    def through_values(step: int, v: Tensor) -> tuple[Tensor]:
        v, _ = repeat_kv(q, v, v)
        rows.columns(ds, step).copy_(dout @ v.transpose(-2, -1))
        share = rows.columns(weights, step).transpose(-2, -1) @ dout
        return (sum_kv_copies(share, kv_heads).to(exact),)

    def through_scores(step: int, k: Tensor) -> tuple[Tensor]:
        k, _ = repeat_kv(q, k, k)
        part = rows.columns(ds, step).to(q.dtype)
        dq.add_(part @ k)
        return (sum_kv_copies(part.transpose(-2, -1) @ q, kv_heads).to(exact),)

    (dv,) = ring_pass((v,), rows.group, through_values)
    ds = rows.dropped(ds)
    ds.sub_(torch.einsum("...ij,...ij->...i", ds, p.to(exact)).unsqueeze(-1))
    ds.mul_(p).div_(math.sqrt(q.size(-1)))
    (dk,) = ring_pass((k,), rows.group, through_scores)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
