"""Ring attention: every rank keeps its queries, and blocks of keys and values go round.

    step s, rank r     has K, V of rank r - s     O, lse merged with them     while those of rank r - s - 1 arrive

n ranks hold T/n tokens each and after n steps every query has met every key, though nobody ever held more than two blocks of keys.
A block travels as K and V in one message, of the few heads that there are (GQA), and hides behind the products with the block before.
Backward goes round again: P is computed anew from the final lse, dQ stays, and dK, dV of a block travel with it, gathering every
rank's share until they are home; the owner's own share never leaves.

`layout` (layout.py) says which tokens a rank holds. Under a causal mask contiguous runs leave the first rank idle in all steps but
one; zig-zag halves and stripes give all ranks the same work in every step.

    forward     (n-1) · 2 · B·H_kv·T/n·K elements          backward     twice that: K, V once more, and dK, dV

Memory beside q, k, v, O: two blocks of K and V (four in backward, with their gradients); what `blocks` needs for one tile.
Raises ValueError in one line, before any rank waits, for shapes that do not fit each other and what the layout refuses.

Li et al. 2021, arXiv:2105.13120 (ring_self_attention.py has its two passes); Liu et al. 2023 (Ring Attention), arXiv:2310.01889, section
3; Brandon et al. 2023 (Striped Attention), arXiv:2311.09431. Differs: one text for all layouts; the block at home sends no gradient.
"""
from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain import collectives
from minitrain.context.blocks import FUSED, Blocks, merge, nothing_yet
from minitrain.context.layout import Layout, Tile, contiguous, tiles


def ring_attention(q: Tensor, k: Tensor, v: Tensor, *, group: ProcessGroup, layout: Layout = contiguous, causal: bool = True,
                   blocks: Blocks = FUSED) -> Tensor:
    """q `[B, H, T/n, K]`, k, v `[B, H_kv, T/n, K]`, this rank's tokens -> `[B, H, T/n, K]`. A core for the model's attention."""
    check_shapes("ring_attention", q, k, v)
    return _Ring.apply(q, k, v, group, layout, causal, blocks)


def ring_forward(q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, layout: Layout, causal: bool, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """-> out `[B, H, T/n, K]` in q's dtype, and lse `[B, H, T/n]`."""
    plan = tiles_by_step(group, layout, q.size(-2), causal)
    out, lse = nothing_yet(q)
    kv = torch.stack((k, v))
    for step, seen in enumerate(plan):
        last = step == len(plan) - 1
        arriving = None if last else collectives.rotate(kv, group, async_op=True)
        for tile in seen:
            rows = (..., tile.queries, slice(None))
            merge(out[rows], lse[..., tile.queries], *blocks.forward(q[rows], *kv[..., tile.keys, :], tile.causal))
        kv = kv if last else arriving.wait()
    return out.to(q.dtype), lse


def ring_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, group: ProcessGroup, layout: Layout,
                  causal: bool, blocks: Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv of this rank's tokens."""
    plan = tiles_by_step(group, layout, q.size(-2), causal)
    dq, kv = torch.zeros_like(q), torch.stack((k, v))
    home = travelling = None
    for step, seen in enumerate(plan):
        last = step == len(plan) - 1
        arriving = None if last else collectives.rotate(kv, group, async_op=True)
        shares = None if step < 2 else collectives.rotate(travelling, group, async_op=True)     # gradients of the block that is here
        dkv = torch.zeros_like(kv)
        for tile in seen:
            rows, columns = (..., tile.queries, slice(None)), (..., tile.keys, slice(None))
            tile_dq, *tile_dkv = blocks.backward(dout[rows], q[rows], *kv[columns], out[rows], lse[..., tile.queries], tile.causal)
            dq[rows] += tile_dq
            dkv[columns] += torch.stack(tile_dkv)
        if step == 0:
            home = dkv
        else:
            travelling = dkv if shares is None else dkv.add_(shares.wait())
        kv = kv if last else arriving.wait()
    if travelling is not None:
        home = home.add_(collectives.rotate(travelling, group))
    return dq, *home


def tiles_by_step(group: ProcessGroup, layout: Layout, tokens: int, causal: bool) -> list[list[Tile]]:
    """For each step of the ring what this rank's queries see of the keys that are here then."""
    rank, ranks = group.rank(), group.size()
    own = layout(rank, ranks, tokens * ranks)
    return [tiles(own, layout((rank - step) % ranks, ranks, tokens * ranks), causal) for step in range(ranks)]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, layout: Layout, causal: bool, blocks: Blocks) -> Tensor:
        out, lse = ring_forward(q, k, v, group, layout, causal, blocks)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.way = group, layout, causal, blocks
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout: Tensor):
        return *ring_backward(dout, *ctx.saved_tensors, *ctx.way), None, None, None, None


def check_shapes(what: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 4 or k.shape != v.shape or (q.size(0), *q.shape[2:]) != (k.size(0), *k.shape[2:]):
        raise ValueError(f"{what}: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; expected [B, H, T/n, K] and twice [B, H_kv, T/n, K]")
    if q.size(1) % k.size(1):
        raise ValueError(f"{what}: {q.size(1)} query heads are not a multiple of {k.size(1)} K/V heads")
