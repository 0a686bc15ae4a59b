"""Lazy softmax: sum e^s v and e^s over chunks of keys, divide once at the end, and save only the inputs.

    chunk of keys   m = max_j s_j     u = Σ_j e^(s_j - m) v_j     z = Σ_j e^(s_j - m)        summary (u, z, m)
    two chunks      m' = max(m_1, m_2)     u' = Σ_c u_c e^(m_c - m')     z' = Σ_c z_c e^(m_c - m')
    at the end      O = u / z                                          Q[B, H, Tq, K]   K, V[B, H_kv, Tk, K]

m prevents overflow and carries no gradient. Backward is two checkpoints: around a chunk of queries, which
keeps q, k, v, and inside around a chunk of keys, whose summary is kept, and of one the scores. Memory per
head beside arguments and results, with chunks of c_q queries and c_k keys:

    forward  O(c_q · (c_k + K)), flat in T      backward  O(c_q · (c_k + K · Tk / c_k)), hence O(sqrt(Tk))

for 9 products instead of 6: forward twice more, the second time S only. Sends nothing.
Rabe and Staats 2021, arXiv:2112.05682, sections 2 to 4. Differs: hidden chunks are skipped.
"""

import math
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from minitrain.attention.kernel import diagonal, largest, nothing_seen, pieces, repeat_kv, score_tile, visible

# Nothing inside is saved, backward calls the function again. It draws no random numbers.
_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def lazy_attention(q, k, v, *, causal=True, query_chunk=1024, key_chunk: int | None = None) -> Tensor:
    """q `[B, H, Tq, K]`, k, v `[B, H_kv, Tk, K]` -> `[B, H, Tq, K]`. `key_chunk=None`: sqrt(Tk) keys."""
    shift = diagonal(q, k, causal)
    key_chunk = math.isqrt(k.size(-2)) if key_chunk is None else key_chunk
    chunks = zip(pieces(q.size(-2), query_chunk), q.split(query_chunk, dim=-2))
    return torch.cat([_again(attend_rows, q_i, k, v, rows, shift, key_chunk) for rows, q_i in chunks], dim=-2)


def attend_rows(q: Tensor, k: Tensor, v: Tensor, rows: slice, shift: int | None, key_chunk: int) -> Tensor:
    """One chunk of queries `[B, H, c_q, K]`, which are these rows, and all keys -> `[B, H, c_q, K]`."""
    k, v = repeat_kv(q, k, v)
    weighted, total, top = nothing_seen(q, v)
    for columns in pieces(k.size(-2), key_chunk):
        if visible(rows, columns, shift):
            u, z, m = _again(summarize, q, k[..., columns, :], v[..., columns, :], rows, columns, shift)
            higher = torch.maximum(top, m)
            before, now = (top - higher).exp(), (m - higher).exp()
            weighted, total, top = weighted * before + u * now, total * before + z * now, higher
    return (weighted / total).to(q.dtype)


def summarize(q: Tensor, k: Tensor, v: Tensor, rows: slice, columns: slice, shift: int | None):
    """A chunk of keys as these queries see it: u `[B, H, c_q, K]`, z and m `[B, H, c_q, 1]`."""
    scores = score_tile(q, k, rows, columns, shift)
    m = largest(scores.detach())
    weights = (scores - m).exp()
    return weights.to(v.dtype) @ v, weights.sum(-1, keepdim=True), m
