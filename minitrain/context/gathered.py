"""Attention with all keys gathered: all-gather K, V, attend with the own queries, reduce-scatter dK, dV.

    forward      K, V of all ranks [B, T, H_kv, 2K]  <- all-gather      O = the own queries and what they see
    backward     dK, dV of all ranks                 -> reduce-scatter  dQ stays

Nothing is hidden, and every rank holds K and V of the whole sequence. In return attention is as on one
device, any mask, in fewer and larger tiles: all keys before a run of queries are one tile, whosever they are.
Communication grows with T and the K/V heads, attention with T² and all heads. Zig-zag is even here, too.

    sent, forward  (n-1) · 2·B·H_kv·T/n·K elements, as a ring      backward  the same; a ring sends twice that
    keep=False     K, V are gathered again in backward: a ring's bytes, and a ring's memory until then

Memory: K, V of all tokens, twice while they are put in order (zig-zag; 8 bytes per token for that), and
dK, dV of all tokens in at least float32 in backward. Dubey et al. 2024 (Llama 3), arXiv:2407.21783, section
3.3.2. Differs: any layout, ALiBi, dropout.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.attention.kernel import GradSum, OnlineSoftmax, add_tiles_backward
from minitrain.context.layout import Layout, Tile, contiguous, last, positions_of, tiles
from minitrain.context.ring import Tensors, check_core
from minitrain.ranks import collectives
from minitrain.ranks.autograd import custom_vjp


def gathered_attention(q, k, v, *, group, layout=contiguous, causal=True, keep=True, **how) -> Tensor:
    """q `[B, H, T/n, K]`, k, v `[B, H_kv, T/n, K]`, this rank's tokens -> `[B, H, T/n, K]`. Fewer queries
    than keys are each rank's last. `how`: kernel, bias, dropout (ring.check_core)."""
    kernel = check_core("gathered_attention", q, k, v, fewer=True, **how)
    seen, order = seen_and_order(q, k, group, layout, causal)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensors]:
        keys_values, softmax = gather(k, v, group, order), OnlineSoftmax(q)
        softmax.add_tiles(seen, *keys_values, kernel)
        out, lse = softmax.result()
        return out, (q, *(keys_values if keep else (k, v)), out, lse)

    def backward(dys: Tensors, saved: Tensors, _) -> Tensors:
        q, k, v, out, lse = saved
        k, v = (k, v) if keep else gather(k, v, group, order)
        dq, dk, dv = GradSum(q), GradSum(k), GradSum(v)
        add_tiles_backward(seen, *dys, q, k, v, out, lse, dq, dk, dv, kernel)
        return dq.total.to(q.dtype), *scatter(dk, dv, group, order, k.dtype)

    return custom_vjp(forward, backward, q, k, v)


def seen_and_order(q, k, group, layout: Layout, causal: bool) -> tuple[list[Tile], Tensor | None]:
    """What this rank's queries see of all keys in order, and the place of each by rank (None: the same)."""
    ranks, length = group.size(), group.size() * k.size(-2)
    runs = [layout(rank, ranks, length) for rank in range(ranks)]
    by_rank = sum(runs, [])
    keys = sorted(by_rank, key=lambda run: run.start)
    order = positions_of(by_rank, q.device).argsort()[positions_of(keys, q.device)]
    seen = tiles(last(runs[group.rank()], q.size(-2)), keys, causal)
    return seen, None if by_rank == keys else order


def gather(k: Tensor, v: Tensor, group: ProcessGroup, order: Tensor | None) -> tuple[Tensor, Tensor]:
    """K and V `[B, H_kv, T, K]` of all ranks, in one message."""
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(1, 2), group, dim=1)  # [B, T, H_kv, 2K]
    both = (both if order is None else both.index_select(1, order)).transpose(1, 2)
    return both[..., : k.size(-1)], both[..., k.size(-1) :]


def scatter(dk: GradSum, dv: GradSum, group, order: Tensor | None, dtype) -> tuple[Tensor, Tensor]:
    """This rank's tokens of the sums over ranks, `[B, H_kv, T/n, K]`."""
    both = torch.cat((dk.by_token, dv.by_token), -1).to(dtype)
    if order is not None:
        both = both.index_select(1, order.argsort())
    own = collectives.reduce_scatter(both, group, dim=1).transpose(1, 2)
    return own[..., : dk.x.size(-1)], own[..., dk.x.size(-1) :]
