"""FlashAttention: attention by tiles that fit into fast memory, so that no score ever goes to slow memory.

    version 1   for K_j, V_j: for Q_i, O_i, l_i, m_i:   O_i = (l e^(m - m') O_i + e^(m~ - m') P~ V_j) / l'
    version 2   for Q_i: for K_j, V_j:                  O_i = e^(m - m') O_i + P~ V_j       at the end O_i / l

m is the largest score of a row so far, l the sum of e^(S - m), ~ of this tile alone, ' after it. Version 1
holds keys: O, l and m come and go for every K_j. Version 2 holds rows, in any order. Backward makes P = e^(S
- lse) again and holds K_j, V_j and their gradients; version 2 has D = rowsum(dO · O) from a pass before, 1
makes it of O_i. A fast memory of M numbers holds an outer tile of ceil(M/4K) tokens (keys in 1, rows in 2)
and an inner one of min(that, K). What moves is counted at its line; per head, unmasked, c = ceil(N·4d/M):

                version 1 loads        stores          version 2 loads      stores         divisions  1   2
    forward     2Nd + c(2Nd+2N) + 2N   c(Nd+2N) + N    Nd + 2cNd            Nd + N                   cN   N
    backward    2Nd + c(4Nd+N)         2Nd + cNd       4Nd + c(3Nd+2N)      2Nd + N + cNd             0   0

Memory beside inputs and results: one tile, flat in T (CPU: of all batches and heads). Sends nothing.
Dao et al. 2022, arXiv:2205.14135, algorithms 0 to 4, theorem 2, figure 2; Dao 2023, arXiv:2307.08691,
algorithms 1, 2. Differs: version 1 skips hidden tiles and keeps lse for l and m; dropout takes all scores.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from minitrain.attention.kernel import (
    FUSED,
    Kernel,
    diagonal,
    largest,
    nothing_seen,
    pieces,
    recomputed,
    repeat_kv,
    row_sums,
    score_matrix,
    score_tile,
    sum_kv_copies,
    visible,
    wide,
)
from minitrain.attention.placed import Placed, check_places, placed
from minitrain.ranks.checks import require_ints, require_positive_ints


class SlowMemory:
    """Loads and stores that nobody counts."""

    def load(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    def store(self, tensor: Tensor) -> Tensor:
        return tensor

    def divide(self, x: Tensor, row_sums: Tensor) -> Tensor:
        return x / row_sums


UNCOUNTED = SlowMemory()


@dataclass
class Traffic(SlowMemory):
    """Counts elements loaded and stored, and rows that were divided by their sum. Equal if these are."""

    loads: int = 0
    stores: int = 0
    divisions: int = 0

    elements = property(lambda self: self.loads + self.stores)

    def load(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.loads += sum(tensor.numel() for tensor in tensors)
        return tensors

    def store(self, tensor: Tensor) -> Tensor:
        self.stores += tensor.numel()
        return tensor

    def divide(self, x: Tensor, row_sums: Tensor) -> Tensor:
        self.divisions += row_sums.numel()
        return x / row_sums


A100_ELEMENTS = 192 * 1024 // 2  # fast memory of one multiprocessor, in numbers of 2 bytes


def flash_attention(q, k, v, *, causal=True, kernel=FUSED, **places) -> Tensor:
    """q `[B, H, T, K]`, k, v `[B, H_kv, T, K]` -> `[B, H, T, K]`; fewer queries than keys are the last.
    `places`: bias, an Alibi; dropout, a DropMask; documents (placed.py)."""
    check_places("flash_attention", q, **places)
    kernel = placed(kernel, **places)
    if isinstance(kernel, Placed):
        kernel = kernel.between([range(k.size(-2) - q.size(-2), k.size(-2))], [range(k.size(-2))])
    return recomputed(kernel.forward, kernel.backward, q, k, v, causal)


def flash_1(fast_elements: int = A100_ELEMENTS, memory: SlowMemory = UNCOUNTED) -> Kernel:
    """The first FlashAttention, for tiles that fit a fast memory of so many numbers."""
    settings = {"fast_elements": fast_elements, "memory": memory}
    backward = partial(flash_2_backward, **settings, delta_first=False)
    return Kernel(partial(flash_1_forward, **settings), backward)


def flash_2(fast_elements=A100_ELEMENTS, memory=UNCOUNTED, order: Sequence[int] | None = None) -> Kernel:
    """The second. `order`: in which the tiles of rows are computed in forward, e.g. backwards."""
    settings = {"fast_elements": fast_elements, "memory": memory}
    return Kernel(partial(flash_2_forward, **settings, order=order), partial(flash_2_backward, **settings))


def tile_sizes(fast_elements: int, width: int) -> tuple[int, int]:
    """Tokens of an outer and an inner tile for heads of this width: ceil(M/4d) and min(that, d)."""
    require_ints(1, 1 << 60, fast_elements=fast_elements)
    require_positive_ints(width=width)
    outer = -(-fast_elements // (4 * width))
    return outer, min(outer, width)


def flash_1_forward(q, k, v, causal: bool, *, fast_elements: int, memory=UNCOUNTED) -> tuple[Tensor, Tensor]:
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


def flash_2_forward(q, k, v, causal: bool, *, fast_elements: int, memory=UNCOUNTED, order=None):
    """-> O `[B, H, T, K]` and lse `[B, H, T]`."""
    k, v = repeat_kv(q, k, v)
    shift = diagonal(q, k, causal)
    outer, inner = tile_sizes(fast_elements, q.size(-1))
    row_tiles = pieces(q.size(-2), outer)
    count = len(row_tiles)
    order = range(count) if order is None else order
    if sorted(order) != list(range(count)):
        raise ValueError(f"order {list(order)} is none of {count} tiles; name each of 0 .. {count - 1} once")
    out = q.new_empty(*q.shape[:-1], v.size(-1))
    lse = q.new_empty(*q.shape[:-1], 1, dtype=wide(q))
    for tile in order:
        rows = row_tiles[tile]
        (q_i,) = memory.load(q[..., rows, :])
        out_i, lse_i = flash_2_rows(q_i, k, v, rows, shift, inner, memory)
        out[..., rows, :], lse[..., rows, :] = memory.store(out_i), memory.store(lse_i)
    return out, lse.squeeze(-1)


def flash_2_rows(q_i, k, v, rows: slice, shift: int | None, inner: int, memory=UNCOUNTED):
    """One tile of rows `[B, H, r, K]`, alone with all keys -> its O `[B, H, r, K]` and lse `[B, H, r, 1]`."""
    state = nothing_seen(q_i, v)
    for columns in pieces(k.size(-2), inner):
        if visible(rows, columns, shift):
            k_j, v_j = memory.load(k[..., columns, :], v[..., columns, :])
            state = see(state, score_tile(q_i, k_j, rows, columns, shift), v_j)
    summed, row_sum, row_max = state
    return memory.divide(summed, row_sum), row_max + row_sum.log()


def see(state: tuple[Tensor, Tensor, Tensor], scores: Tensor, v_j: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The state after more keys: scores `[.., r, c]`, values `[.., c, K]`. Sums are rescaled, not divided."""
    summed, row_sum, row_max = state
    new_max = torch.maximum(row_max, largest(scores))
    p, kept = (scores - new_max).exp(), (row_max - new_max).exp()
    return kept * summed + p.to(v_j.dtype) @ v_j, kept * row_sum + p.sum(-1, keepdim=True), new_max


def flash_2_backward(dout, q, k, v, out, lse, causal, *, fast_elements, memory=UNCOUNTED, delta_first=True):
    """-> dq, dk, dv in the shapes of q, k, v. Version 1 makes D of dO_i and O_i anew for every K_j."""
    kv_heads, (k, v) = k.size(1), repeat_kv(q, k, v)
    shift, lse = diagonal(q, k, causal), lse.unsqueeze(-1)
    outer, inner = tile_sizes(fast_elements, q.size(-1))
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    row_tiles = pieces(q.size(-2), inner)
    if delta_first:
        delta = torch.empty_like(lse)
        for rows in row_tiles:
            dout_i, out_i = memory.load(dout[..., rows, :], out[..., rows, :])
            delta[..., rows, :] = memory.store(row_sums(dout_i, out_i).unsqueeze(-1))
    for columns in pieces(k.size(-2), outer):
        there = (..., columns, slice(None))
        k_j, v_j = memory.load(k[there], v[there])
        dk_j, dv_j = (torch.zeros_like(x, dtype=lse.dtype) for x in (k_j, v_j))
        for rows in row_tiles:
            if visible(rows, columns, shift):
                here = (..., rows, slice(None))
                q_i, dout_i, dq_i, lse_i = memory.load(q[here], dout[here], dq[here], lse[here])
                (delta_i,) = memory.load(delta[here] if delta_first else out[here])
                if not delta_first:
                    delta_i = row_sums(dout_i, delta_i).unsqueeze(-1)
                p = (score_tile(q_i, k_j, rows, columns, shift) - lse_i).exp()
                dq[here] = memory.store(dq_i + tile_backward(p, delta_i, dout_i, q_i, k_j, v_j, dk_j, dv_j))
        dk[there], dv[there] = memory.store(dk_j), memory.store(dv_j)
    return dq.to(q.dtype), sum_kv_copies(dk, kv_heads).to(q.dtype), sum_kv_copies(dv, kv_heads).to(q.dtype)


def tile_backward(p, delta, dout, q, k, v, dk: Tensor, dv: Tensor) -> Tensor:
    """P `[.., r, c]` and D `[.., r, 1]` of a tile -> its part of dQ `[.., r, K]`; adds those of dK, dV."""
    dv += p.to(dout.dtype).transpose(-2, -1) @ dout
    ds = (p * (dout @ v.transpose(-2, -1) - delta)).to(q.dtype) / math.sqrt(q.size(-1))
    dk += ds.transpose(-2, -1) @ q
    return ds @ k


# ---- attention in whole matrices, and formulas ------------------------------------------------------------
#
# Each operation reads its operands and writes its result. Per head, N = T, d = K:
#
#     forward     loads 2·N² + 3·N·d   stores 2·N² + N·d     N divisions   S = Q Kᵀ; P = softmax S; O = P V
#     backward    loads 5·N² + 5·N·d   stores 2·N² + 3·N·d   dV = Pᵀ dO; dP = dO Vᵀ; dS; dQ = dS K; dK = dSᵀ Q
#
# That is Θ(N·d + N²); `flash_traffic` is Θ(N²·d²/M), in forward 12·N²·d²/M (version 1), 8·N²·d²/M (2). A
# GPT-2 layer (N = 1,024, d = 64, 16 heads, batch 64, 2 bytes) has 25.2 GB and 4.1 GB (version 1, A100). With
# a mask added (2·N²) and dropout (4·N²) the first is 40.3 GB, as in the paper, which has 4.4 for the second.


def standard_forward(q: Tensor, k: Tensor, v: Tensor, causal=True, memory=UNCOUNTED) -> tuple[Tensor, Tensor]:
    """q `[B, H, T, K]`, k, v `[B, H_kv, T, K]` -> O `[B, H, T, K]` and P `[B, H, T, T]` for backward."""
    k, v = repeat_kv(q, k, v)
    scores = memory.store(score_matrix(*memory.load(q, k), diagonal(q, k, causal)))
    (scores,) = memory.load(scores)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    p = memory.store(memory.divide(weights, weights.sum(-1, keepdim=True)))
    p, v = memory.load(p, v)
    return memory.store(p.to(v.dtype) @ v), p


def standard_backward(dout, q, k, v, p, memory: SlowMemory = UNCOUNTED) -> tuple[Tensor, ...]:
    """-> dq, dk, dv in the shapes of q, k, v."""
    kv_heads, (k, v) = k.size(1), repeat_kv(q, k, v)

    def product(a: Tensor, b: Tensor, transposed: bool = False) -> Tensor:
        a, b = memory.load(a, b)
        return memory.store((a.transpose(-2, -1) if transposed else a).to(b.dtype) @ b)

    dv = product(p, dout, transposed=True)
    dp = product(dout, v.transpose(-2, -1))
    weights, dp = memory.load(p, dp)
    ds = memory.store(weights * (dp - (weights * dp).sum(-1, keepdim=True)) / q.size(-1) ** 0.5)
    dq, dk = product(ds, k), product(ds, q, transposed=True)
    return dq, sum_kv_copies(dk, kv_heads), sum_kv_copies(dv, kv_heads)


def standard_traffic(tokens: int, width: int) -> tuple[Traffic, Traffic]:
    """(forward, backward) of one head in whole matrices."""
    matrix, rows = tokens * tokens, tokens * width
    forward = Traffic(2 * matrix + 3 * rows, 2 * matrix + rows, tokens)
    return forward, Traffic(5 * matrix + 5 * rows, 2 * matrix + 3 * rows)


def flash_traffic(version: int, tokens: int, width: int, outer: int, inner: int, causal: bool):
    """(forward, backward) of one head in FlashAttention 1 or 2 with these tiles (flash.py: `tile_sizes`)."""
    require_positive_ints(tokens=tokens, width=width, outer=outer, inner=inner)
    starts = range(0, tokens, outer)
    rows = keys = tokens * len(starts)  # that outer tiles see, in all: T · ceil(T/outer) without a mask
    if causal:
        rows = sum(tokens - start // inner * inner for start in starts)
        keys = sum(min(tokens, -(-(start + outer) // inner) * inner) for start in starts)
    both = 2 * tokens * width  # K and V, or dK and dV
    if version == 1:
        forward = Traffic(both + rows * (2 * width + 2) + 2 * tokens, rows * (width + 2) + tokens, rows)
        return forward, Traffic(both + rows * (4 * width + 1), both + rows * width)
    forward = Traffic(tokens * width + keys * 2 * width, tokens * width + tokens, tokens)
    return forward, Traffic(2 * both + rows * (3 * width + 2), both + tokens + rows * width)
