"""FlashAttention: attention by tiles which fit into fast memory, so that no score ever goes to slow memory.

    version 1    for K_j, V_j:  for Q_i, O_i, l_i, m_i:     O_i = (l e^(m - m') O_i + e^(m~ - m') P~ V_j) / l'          O_i is always a mean
    version 2    for Q_i:  for K_j, V_j:                    O_i = e^(m - m') O_i + P~ V_j         at the end O_i / l     one division a row

m is the largest score of a row so far and l the sum of e^(S - m); tiles marked ~ are of one K_j; ' is after it. Version 1 holds keys and
lets all rows come by, so O, l and m go out and come back for every K_j. Version 2 holds rows and lets keys come by: their state never
leaves fast memory, K and V are only read, and rows are nobody else's business: any order, or all at once, gives the same to the bit.

Backward keeps q, k, v, O and lse = m + log l, and computes P = e^(S - lse) again, tile by tile. Both versions hold K_j, V_j with their
gradients and let rows come by with dQ_i; version 2 has D = rowsum(dO · O) from one pass before, version 1 loads O_i to find it.

A fast memory of M numbers holds an outer tile of ceil(M/4K) tokens and an inner one of min(that, K). What is outer is K, V in version 1
and Q in version 2: the one that is held should be large, for every outer tile makes the whole rest come by once. Tiles of no visible
score are skipped. Loads and stores per head are `traffic.flash_traffic`, exactly; without a mask, N = T, d = K, c = ceil(N·4d/M),

                 version 1 loads            stores                version 2 loads           stores             divisions    1        2
    forward      2Nd + c(2Nd+2N) + 2N       c(Nd+2N) + N          Nd + 2cNd                 Nd + N                          cN       N
    backward     2Nd + c(4Nd+N)             2Nd + cNd             4Nd + c(3Nd+2N)           2Nd + N + cNd                   0        0

`flash_1(..)` and `flash_2(..)` make `Kernel`, with which `flash_attention` is a core for the model and `ring.ring_attention` a ring of
tiles. Its default, `kernel.FUSED`, is torch's kernel of the same algorithm. Memory beside inputs and results: one tile, flat in T
(CPU: of all batches and heads at once). Sends nothing. Raises ValueError in one line for a fast memory of no size, an `order` that is
no order of the row tiles, dropout or ALiBi by tiles, a rate without a seed, heads that do not divide, and causal queries without keys.

Dao et al. 2022, arXiv:2205.14135, algorithms 1, 2 and 4; Dao 2023, arXiv:2307.08691, algorithms 1 and 2. Differs: no dropout by tiles
(flash_attention makes all scores at once for it, placed.py); version 1 folds l and m into lse at the end and keeps that; version 1
skips hidden tiles too; version 2 does not load O_i for nothing in backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from minitrain.attention.alibi import Alibi
from minitrain.attention.dropout import DropMask, in_order
from minitrain.attention.kernel import FUSED, Kernel, recomputed, repeat_kv, sum_kv_copies
from minitrain.attention.placed import Placed, check_places, placed
from minitrain.attention.score_tiles import diagonal, largest, pieces, score_tile, visible
from minitrain.attention.traffic import UNCOUNTED, SlowMemory

A100_ELEMENTS = 192 * 1024 // 2  # fast memory of one multiprocessor, in numbers of 2 bytes


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    kernel: Kernel = FUSED,
    bias: Alibi | None = None,
    dropout: DropMask | float = 0.0,
) -> Tensor:
    """q `[B, H, T, K]`, k, v `[B, H_kv, T, K]` -> `[B, H, T, K]`. A core for the model's attention."""
    check_places("flash_attention", q, bias, dropout)
    kernel = placed(kernel, bias, dropout)
    if isinstance(kernel, Placed):
        kernel = kernel.at(in_order(q.size(-2), k.size(-2)))
    return recomputed(kernel.forward, kernel.backward, q, k, v, causal)


def flash_1(fast_elements: int = A100_ELEMENTS, memory: SlowMemory = UNCOUNTED) -> Kernel:
    """The first FlashAttention, for tiles that fit a fast memory of so many numbers."""
    settings = {"fast_elements": fast_elements, "memory": memory}
    return Kernel(partial(flash_1_forward, **settings), partial(flash_1_backward, **settings))


def flash_2(
    fast_elements: int = A100_ELEMENTS, memory: SlowMemory = UNCOUNTED, order: Sequence[int] | None = None
) -> Kernel:
    """The second. `order`: in which the tiles of rows are computed in forward, e.g. backwards."""
    settings = {"fast_elements": fast_elements, "memory": memory}
    return Kernel(partial(flash_2_forward, **settings, order=order), partial(flash_2_backward, **settings))


def tile_sizes(fast_elements: int, width: int) -> tuple[int, int]:
    """(tokens of an outer tile, of an inner one) for heads of this width: the paper's ceil(M/4d) and min(ceil(M/4d), d)."""
    if fast_elements < 1:
        raise ValueError(
            f"a fast memory of {fast_elements} elements; give 1 or more (an A100 has {A100_ELEMENTS} of 2 bytes)"
        )
    outer = -(-fast_elements // (4 * width))
    return outer, min(outer, width)


# ---- version 1 -------------------------------------------------------------------------------------------------------


def flash_1_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    *,
    fast_elements: int = A100_ELEMENTS,
    memory: SlowMemory = UNCOUNTED,
) -> tuple[Tensor, Tensor]:
    """-> O `[B, H, T, K]` and lse `[B, H, T]`."""
    k, v = repeat_kv(q, k, v)
    shift = diagonal(q, k, causal)
    outer, inner = tile_sizes(fast_elements, q.size(-1))
    out, row_sum, row_max = nothing_seen(q, v)
    for columns in pieces(k.size(-2), outer):
        k_j, v_j = memory.load(k[..., columns, :], v[..., columns, :])
        for rows in pieces(q.size(-2), inner):
            if not visible(rows, columns, shift):
                continue
            here = (..., rows, slice(None))
            q_i, out_i, sum_i, max_i = memory.load(q[here], out[here], row_sum[here], row_max[here])
            scores = score_tile(q_i, k_j, rows, columns, shift)
            tile_max = largest(scores)
            p = (scores - tile_max).exp()
            new_max = torch.maximum(max_i, tile_max)
            kept, added = (max_i - new_max).exp() * sum_i, (tile_max - new_max).exp()
            new_sum = kept + added * p.sum(-1, keepdim=True)
            out[here] = memory.store(memory.divide(kept * out_i + added * (p.to(v.dtype) @ v_j), new_sum))
            row_sum[here], row_max[here] = memory.store(new_sum), memory.store(new_max)
    row_sum, row_max = memory.load(row_sum, row_max)
    return out.to(q.dtype), memory.store(row_max + row_sum.log()).squeeze(-1)


def flash_1_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    *,
    fast_elements: int = A100_ELEMENTS,
    memory: SlowMemory = UNCOUNTED,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv in the shapes of q, k, v."""
    kv_heads, (k, v) = k.size(1), repeat_kv(q, k, v)
    shift, lse = diagonal(q, k, causal), lse.unsqueeze(-1)
    outer, inner = tile_sizes(fast_elements, q.size(-1))
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    for columns in pieces(k.size(-2), outer):
        there = (..., columns, slice(None))
        k_j, v_j = memory.load(k[there], v[there])
        dk_j, dv_j = (torch.zeros_like(x, dtype=lse.dtype) for x in (k_j, v_j))
        for rows in pieces(q.size(-2), inner):
            if visible(rows, columns, shift):
                here = (..., rows, slice(None))
                q_i, out_i, dout_i, dq_i, lse_i = memory.load(
                    q[here], out[here], dout[here], dq[here], lse[here]
                )
                delta_i = (dout_i * out_i).sum(-1, keepdim=True)
                p = (score_tile(q_i, k_j, rows, columns, shift) - lse_i).exp()
                dq[here] = memory.store(dq_i + tile_backward(p, delta_i, dout_i, q_i, k_j, v_j, dk_j, dv_j))
        dk[there], dv[there] = memory.store(dk_j), memory.store(dv_j)
    return dq.to(q.dtype), sum_kv_copies(dk, kv_heads).to(q.dtype), sum_kv_copies(dv, kv_heads).to(q.dtype)


# ---- version 2 -------------------------------------------------------------------------------------------------------


def flash_2_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    *,
    fast_elements: int = A100_ELEMENTS,
    memory: SlowMemory = UNCOUNTED,
    order: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """-> O `[B, H, T, K]` and lse `[B, H, T]`."""
    k, v = repeat_kv(q, k, v)
    shift = diagonal(q, k, causal)
    outer, inner = tile_sizes(fast_elements, q.size(-1))
    row_tiles = pieces(q.size(-2), outer)
    order = range(len(row_tiles)) if order is None else order
    if sorted(order) != list(range(len(row_tiles))):
        raise ValueError(
            f"order {list(order)} is no order of {len(row_tiles)} tiles of rows; name each of 0 .. {len(row_tiles) - 1} once"
        )
    out, lse = (
        q.new_empty(*q.shape[:-1], v.size(-1)),
        q.new_empty(*q.shape[:-1], 1, dtype=torch.promote_types(q.dtype, torch.float32)),
    )
    for tile in order:
        rows = row_tiles[tile]
        (q_i,) = memory.load(q[..., rows, :])
        out_i, lse_i = flash_2_rows(q_i, k, v, rows, shift, inner, memory)
        out[..., rows, :], lse[..., rows, :] = memory.store(out_i), memory.store(lse_i)
    return out, lse.squeeze(-1)


def flash_2_rows(
    q_i: Tensor,
    k: Tensor,
    v: Tensor,
    rows: slice,
    shift: int | None,
    inner: int,
    memory: SlowMemory = UNCOUNTED,
):
    """One tile of rows `[B, H, r, K]`, alone with all keys -> its O `[B, H, r, K]` and lse `[B, H, r, 1]`."""
    state = nothing_seen(q_i, v)
    for columns in pieces(k.size(-2), inner):
        if visible(rows, columns, shift):
            k_j, v_j = memory.load(k[..., columns, :], v[..., columns, :])
            state = see(state, score_tile(q_i, k_j, rows, columns, shift), v_j)
    summed, row_sum, row_max = state
    return memory.divide(summed, row_sum), row_max + row_sum.log()


def nothing_seen(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The state of rows before the first key, in at least float32: sums 0 `[.., K]` and 0 `[.., 1]`, maximum -inf."""
    exact = torch.promote_types(q.dtype, torch.float32)
    row_sum = q.new_zeros(*q.shape[:-1], 1, dtype=exact)
    return q.new_zeros(*q.shape[:-1], v.size(-1), dtype=exact), row_sum, torch.full_like(row_sum, -math.inf)


def see(state: tuple[Tensor, Tensor, Tensor], scores: Tensor, v_j: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The state after a tile of keys, with scores `[.., r, c]` and values `[.., c, K]`. What was summed is rescaled, not divided."""
    summed, row_sum, row_max = state
    new_max = torch.maximum(row_max, largest(scores))
    p, kept = (scores - new_max).exp(), (row_max - new_max).exp()
    return kept * summed + p.to(v_j.dtype) @ v_j, kept * row_sum + p.sum(-1, keepdim=True), new_max


def flash_2_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    *,
    fast_elements: int = A100_ELEMENTS,
    memory: SlowMemory = UNCOUNTED,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv in the shapes of q, k, v."""
    kv_heads, (k, v) = k.size(1), repeat_kv(q, k, v)
    shift, lse = diagonal(q, k, causal), lse.unsqueeze(-1)
    outer, inner = tile_sizes(fast_elements, q.size(-1))
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    delta = torch.empty_like(lse)
    for rows in pieces(q.size(-2), inner):
        dout_i, out_i = memory.load(dout[..., rows, :], out[..., rows, :])
        delta[..., rows, :] = memory.store((dout_i * out_i).sum(-1, keepdim=True))
    for columns in pieces(k.size(-2), outer):
        there = (..., columns, slice(None))
        k_j, v_j = memory.load(k[there], v[there])
        dk_j, dv_j = (torch.zeros_like(x, dtype=lse.dtype) for x in (k_j, v_j))
        for rows in pieces(q.size(-2), inner):
            if visible(rows, columns, shift):
                here = (..., rows, slice(None))
                q_i, dout_i, dq_i, lse_i, delta_i = memory.load(
                    q[here], dout[here], dq[here], lse[here], delta[here]
                )
                p = (score_tile(q_i, k_j, rows, columns, shift) - lse_i).exp()
                dq[here] = memory.store(dq_i + tile_backward(p, delta_i, dout_i, q_i, k_j, v_j, dk_j, dv_j))
        dk[there], dv[there] = memory.store(dk_j), memory.store(dv_j)
    return dq.to(q.dtype), sum_kv_copies(dk, kv_heads).to(q.dtype), sum_kv_copies(dv, kv_heads).to(q.dtype)


def tile_backward(
    p: Tensor, delta: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor
) -> Tensor:
    """P `[.., r, c]` and the D of its rows `[.., r, 1]` -> this tile's share of dQ `[.., r, K]`; its shares of dK, dV are added to them."""
    dv += p.to(dout.dtype).transpose(-2, -1) @ dout
    ds = (p * (dout @ v.transpose(-2, -1) - delta)).to(q.dtype) / math.sqrt(q.size(-1))
    dk += ds.transpose(-2, -1) @ q
    return ds @ k
