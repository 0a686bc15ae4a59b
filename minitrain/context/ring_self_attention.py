"""Ring self-attention, as it began: keys go round until a rank has whole rows of scores, then values go round.

    pass 1    S[T/n, T]  = Q [K_0 .. K_n-1]ᵀ / sqrt(K)      one block of columns a step          P = softmax(S), each row whole
    pass 2    O[T/n, K]  = Σ_j P[:, j] V_j                  one term a step

and backward, which keeps P, in four passes: V and K once more, and the sums of dV and dK, each collecting a share a step until home,

    V goes round    dP[:, j] = dO V_jᵀ      dV_j = Σ over ranks of P[:, j]ᵀ dO         dS = P (dP - rowsum(dP · P))
    K goes round    dQ = Σ_j dS[:, j] K_j   dK_j = Σ over ranks of dS[:, j]ᵀ Q         both by 1 / sqrt(K)

    forward    2 passes of n-1 steps, B·H_kv·T/n·K elements each                backward    4 of them

No rank ever holds all keys, but each holds all its scores: P is B·H·T²/n elements, kept for backward, with dP as many again there. A
sequence twice as long on twice the ranks needs twice the memory a rank. ring.py has the same traffic without the scores: what was
missing was the softmax of a part of a row (kernel.py). A causal mask hides scores here and saves no work.

q `[B, H, T/n, K]`, k, v `[B, H_kv, T/n, K]` -> `[B, H, T/n, K]`. Raises ValueError in one line as ring.py does.
Li et al. 2021 (Sequence Parallelism), arXiv:2105.13120, section 3.2 and figures 2 and 3. Differs: any layout, causal too, fewer K/V
heads; the paper's implementation all-reduces whole dK and dV where here sums go round, for half the bytes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.attention.alibi import Alibi
from minitrain.attention.dropout import DropMask
from minitrain.attention.kernel import repeat_kv, sum_kv_copies
from minitrain.context.layout import Layout, Tile, contiguous, last
from minitrain.context.ring import check_core, ring_pass


def ring_self_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup,
    layout: Layout = contiguous,
    causal: bool = True,
    bias: Alibi | None = None,
    dropout: DropMask | float = 0.0,
) -> Tensor:
    """This rank's tokens of attention over all; a core for the model's attention."""
    check_core("ring_self_attention", q, k, v, bias, dropout, fewer=True)
    return _RingSelfAttention.apply(q, k, v, group, layout, causal, bias, dropout)


def rows_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: ProcessGroup,
    layout: Layout,
    causal: bool,
    bias: Alibi | None = None,
    dropout: DropMask | float = 0.0,
) -> tuple[Tensor, Tensor]:
    """-> out `[B, H, T/n, K]` and the probabilities `[B, H, T/n, T]`, columns in the order in which the ranks hold the keys."""
    hidden = future_keys(q, k, group, layout) if causal else None
    scores = q.new_empty(
        *q.shape[:-1], group.size() * k.size(-2), dtype=torch.promote_types(q.dtype, torch.float32)
    )
    columns, out = scores.chunk(group.size(), -1), v.new_zeros(*q.shape[:-1], v.size(-1), dtype=scores.dtype)

    def score(step: int, k: Tensor) -> None:
        k, _ = repeat_kv(q, k, k)
        here = columns[owner(group, step)].copy_(q @ k.transpose(-2, -1)).div_(math.sqrt(q.size(-1)))
        if bias:
            here.add_(bias.between(*block(here, group, layout, step).positions(here.device)))

    def average(step: int, v: Tensor) -> None:
        v, _ = repeat_kv(q, v, v)
        out.add_(dropped(p.chunk(group.size(), -1)[owner(group, step)], dropout, group, layout, step) @ v)

    ring_pass((k,), group, score)
    if causal:
        scores.masked_fill_(hidden, -math.inf)
    p = scores.sub_(scores.logsumexp(-1, keepdim=True)).exp_().to(q.dtype)
    ring_pass((v,), group, average)
    return out.to(q.dtype), p


def rows_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    group: ProcessGroup,
    layout: Layout = contiguous,
    dropout: DropMask | float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv of this rank's tokens."""
    kv_heads, ds = k.size(1), torch.empty_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
    dq, ps, parts = torch.zeros_like(q, dtype=ds.dtype), p.chunk(group.size(), -1), ds.chunk(group.size(), -1)

    def through_values(step: int, v: Tensor) -> tuple[Tensor]:
        v, _ = repeat_kv(q, v, v)
        parts[owner(group, step)].copy_(dropped(dout @ v.transpose(-2, -1), dropout, group, layout, step))
        return (
            sum_kv_copies(
                dropped(ps[owner(group, step)], dropout, group, layout, step).transpose(-2, -1) @ dout,
                kv_heads,
            ).to(ds.dtype),
        )

    def through_scores(step: int, k: Tensor) -> tuple[Tensor]:
        k, _ = repeat_kv(q, k, k)
        part = parts[owner(group, step)].to(q.dtype)
        dq.add_(part @ k)
        return (sum_kv_copies(part.transpose(-2, -1) @ q, kv_heads).to(ds.dtype),)

    (dv,) = ring_pass((v,), group, through_values)
    ds.sub_(torch.einsum("...ij,...ij->...i", ds, p.to(ds.dtype)).unsqueeze(-1)).mul_(p).div_(
        math.sqrt(q.size(-1))
    )
    (dk,) = ring_pass((k,), group, through_scores)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def dropped(x: Tensor, dropout: DropMask | float, group: ProcessGroup, layout: Layout, step: int) -> Tensor:
    """Columns of that step `[B, H, T/n, T/n]`, times the mask of their places (placed.py), which is made anew each time."""
    return x * dropout.factors(x, block(x, group, layout, step).positions) if dropout else x


def block(x: Tensor, group: ProcessGroup, layout: Layout, step: int) -> Tile:
    """Where the columns of that step are."""
    own, keys = (
        layout(rank, group.size(), x.size(-1) * group.size()) for rank in (group.rank(), owner(group, step))
    )
    return Tile(slice(None), slice(None), runs=(last(own, x.size(-2)), keys))


def owner(group: ProcessGroup, step: int) -> int:
    """Whose block is here in that step."""
    return (group.rank() - step) % group.size()


def future_keys(q: Tensor, k: Tensor, group: ProcessGroup, layout: Layout) -> Tensor:
    """`[T/n, T]`: True where this rank's query comes before the key."""
    ranks = group.size()
    held = [
        torch.tensor(
            [place for run in layout(rank, ranks, ranks * k.size(-2)) for place in run], device=q.device
        )
        for rank in range(ranks)
    ]
    return held[group.rank()][-q.size(-2) :].unsqueeze(-1) < torch.cat(held)


class _RingSelfAttention(torch.autograd.Function):
    """Saves the rows of probabilities: O(T²/n)."""

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        group: ProcessGroup,
        layout: Layout,
        causal: bool,
        bias: Alibi | None,
        dropout: DropMask | float,
    ) -> Tensor:
        out, p = rows_forward(q, k, v, group, layout, causal, bias, dropout)
        ctx.save_for_backward(q, k, v, p)
        ctx.way = group, layout, dropout
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout: Tensor):
        return *rows_backward(dout, *ctx.saved_tensors, *ctx.way), None, None, None, None, None
