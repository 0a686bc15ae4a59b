"""Attention with all keys gathered: an all-gather of K and V in front, one device's attention of this rank's queries, and a reduce-scatter behind.

    forward      K, V of all ranks [B, T, H_kv, 2K]  <- all-gather        O = this rank's queries against the keys that each sees
    backward     dK, dV of all ranks                 -> reduce-scatter    dQ stays

Nothing hides behind anything, and every rank holds K and V of the whole sequence. What that buys: attention as it is on one device, with any
mask, in fewer and larger tiles (in the order of the sequence, all keys before a run of queries are one, whoever held them). What is exposed
grows with T and the K/V heads, attention with T² and all heads. Under a causal mask zig-zag halves are even, as in a ring.

    sent, forward  (n-1) · 2·B·H_kv·T/n·K elements, as a ring        backward  the same once more, where a ring sends twice that
    keep=False     K, V are not kept but gathered again: a ring's bytes, and between forward and backward a ring's memory

q `[B, H, T/n, K]`, k, v `[B, H_kv, T/n, K]` -> `[B, H, T/n, K]`. Memory beside them: K, V of all tokens, twice while they are put in
order (zig-zag; 8 bytes a token say how), and dK, dV of all tokens in at least float32 in backward. Raises ValueError in one line as ring.py does.
Dubey et al. 2024 (Llama 3), arXiv:2407.21783, section 3.3.2. Differs: any layout and several documents in a row, ALiBi and dropout.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain import collectives
from minitrain.attention.alibi import Alibi
from minitrain.attention.dropout import DropMask
from minitrain.attention.kernel import FUSED, GradSum, Kernel, OnlineSoftmax, add_tiles_backward
from minitrain.attention.placed import placed
from minitrain.context.layout import Documents, Layout, Tile, contiguous, last, positions_of, tiles
from minitrain.context.ring import check_core


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup,
    layout: Layout = contiguous,
    causal: bool = True,
    kernel: Kernel = FUSED,
    bias: Alibi | None = None,
    dropout: DropMask | float = 0.0,
    keep: bool = True,
) -> Tensor:
    """This rank's tokens of attention over all; a core for the model's attention. Fewer queries than keys are the last of each rank's."""
    check_core("gathered_attention", q, k, v, bias, dropout, fewer=True)
    return _Gathered.apply(q, k, v, group, layout, causal, placed(kernel, bias, dropout), keep)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        group: ProcessGroup,
        layout: Layout,
        causal: bool,
        kernel: Kernel,
        keep: bool,
    ) -> Tensor:
        seen, order = seen_and_order(q, k, group, layout, causal)
        everyones, found = gather(k, v, group, order), OnlineSoftmax(q)
        found.add_tiles(seen, *everyones, kernel)
        out, lse = found.result()
        ctx.save_for_backward(q, *(everyones if keep else (k, v)), out, lse)
        ctx.way = group, seen, order, kernel, keep
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout: Tensor):
        (q, k, v, out, lse), (group, seen, order, kernel, keep) = ctx.saved_tensors, ctx.way
        k, v = (k, v) if keep else gather(k, v, group, order)
        dq, dk, dv = GradSum(q), GradSum(k), GradSum(v)
        add_tiles_backward(seen, dout, q, k, v, out, lse, dq, dk, dv, kernel)
        return dq.total.to(q.dtype), *scatter(dk, dv, group, order, k.dtype), *[None] * 5


def seen_and_order(
    q: Tensor, k: Tensor, group: ProcessGroup, layout: Layout, causal: bool
) -> tuple[list[Tile], Tensor | None]:
    """What this rank's queries see of all keys in the order of the sequence, and where in rank order each of those is (None: there)."""
    ranks, length = group.size(), group.size() * k.size(-2)
    held = [layout(rank, ranks, length) for rank in range(ranks)]
    keys = in_order(held)
    by_rank = positions_of([run for runs in held for run in runs], q.device)
    order = by_rank.argsort()[positions_of(keys, q.device)]
    there = all(here == run for here, run in zip([run for runs in held for run in runs], keys))
    return tiles(last(held[group.rank()], q.size(-2)), keys, causal), None if there else order


def in_order(held: list[list[range]]) -> list[range]:
    """The runs of all ranks as they follow each other in the sequence, document by document if there are any."""

    def by_start(runs: Iterable[range]) -> list[range]:
        return sorted(runs, key=lambda run: run.start)

    if isinstance(held[0], Documents):
        return Documents(
            [by_start(run for runs in parts for run in runs) for parts in zip(*(runs.parts for runs in held))]
        )
    return by_start(run for runs in held for run in runs)


def gather(k: Tensor, v: Tensor, group: ProcessGroup, order: Tensor | None) -> tuple[Tensor, Tensor]:
    """K and V `[B, H_kv, T, K]` of all ranks, in one message."""
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(1, 2), group, dim=1)  # [B, T, H_kv, 2K]
    both = (both if order is None else both.index_select(1, order)).transpose(1, 2)
    return both[..., : k.size(-1)], both[..., k.size(-1) :]


def scatter(
    dk: GradSum, dv: GradSum, group: ProcessGroup, order: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """This rank's tokens of the sums over ranks, `[B, H_kv, T/n, K]`."""
    both = torch.cat((dk.by_token, dv.by_token), -1).to(dtype)
    if order is not None:
        both = both.index_select(1, order.argsort())
    own = collectives.reduce_scatter(both, group, dim=1).transpose(1, 2)
    return own[..., : dk.x.size(-1)], own[..., dk.x.size(-1) :]
