"""What moves between slow and fast memory, counted at the line that moves it; and attention as it is without tiles.

A GPU's multiprocessor has a fast memory of M elements (an A100: 192 KB, 98,304 numbers of 2 bytes) in front of a slow one, HBM. What
an algorithm computes with must have been loaded, what it leaves behind must be stored:

    q_i, k_j = memory.load(q[rows], k[columns])          out[rows] = memory.store(out_i)          memory.divide(x, row_sums)

The words count elements and hand back what they were given. `UNCOUNTED` hands back and counts nothing: with it the tiled loops of
flash.py are ordinary code. Loops run on meta tensors too, so that the traffic of any size is counted without the arithmetic.

`standard_*` is attention in whole matrices, each operation of which reads its operands and writes its result. For each head, N = T, d = K

                 loads                stores              divisions
    forward      2·N² + 3·N·d         2·N² + N·d          N           S = Q Kᵀ;  P = softmax S;  O = P V
    backward     5·N² + 5·N·d         2·N² + 3·N·d        0           dV = Pᵀ dO;  dP = dO Vᵀ;  dS;  dQ = dS K;  dK = dSᵀ Q

which is Θ(N·d + N²). `flash_traffic` is the same table for tiles and is Θ(N²·d²/M): forward of version 1 has 12·N²·d²/M and lower terms,
that of version 2 has 8·N²·d²/M.

A GPT-2 layer (N = 1,024, d = 64, 16 heads, batch 64, 2 bytes), forward and backward, has 25.2 GB with whole matrices and 4.1 GB with
version 1's tiles for an A100, where the paper measured 40.3 and 4.4. We count what algorithms 0 and 3 name; a baseline also drops and masks.
A pass over N² numbers costs 2.1 GB; dropout, with a byte a number for its mask, makes five (36.0 GB), and a causal mask as an operator
of its own four more (44.6 GB), which has the measured number in between.
Tiles cost products: 7 instead of 6, times 1.17 (paper: 75.2 / 66.6 GFLOPs = 1.13; six products of all those heads are 825 GFLOPs, so their
figures are not of the whole batch).

Memory: nothing of its own. Sends nothing. Raises nothing of its own.
Dao et al. 2022, arXiv:2205.14135, algorithms 0 to 4, theorem 2, figure 2. Differs: counts elements and no bytes; scale and mask belong
to the product; caches are not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minitrain.attention.kernel import repeat_kv, sum_kv_copies
from minitrain.attention.score_tiles import diagonal, score_tile


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
    """Counts elements loaded and stored, and rows that were divided by their sum. Two with the same numbers are equal."""

    loads: int = 0
    stores: int = 0
    divisions: int = 0

    @property
    def elements(self) -> int:
        return self.loads + self.stores

    def load(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.loads += sum(tensor.numel() for tensor in tensors)
        return tensors

    def store(self, tensor: Tensor) -> Tensor:
        self.stores += tensor.numel()
        return tensor

    def divide(self, x: Tensor, row_sums: Tensor) -> Tensor:
        self.divisions += row_sums.numel()
        return x / row_sums


# ---- whole matrices --------------------------------------------------------------------------------------------------


def standard_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, memory: SlowMemory = UNCOUNTED
) -> tuple[Tensor, Tensor]:
    """q `[B, H, T, K]`, k, v `[B, H_kv, T, K]` -> O `[B, H, T, K]` and P `[B, H, T, T]`, which backward wants to have."""
    k, v = repeat_kv(q, k, v)
    whole = slice(0, q.size(-2)), slice(0, k.size(-2))
    scores = memory.store(score_tile(*memory.load(q, k), *whole, diagonal(q, k, causal)))
    (scores,) = memory.load(scores)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    p = memory.store(memory.divide(weights, weights.sum(-1, keepdim=True)))
    p, v = memory.load(p, v)
    return memory.store(p.to(v.dtype) @ v), p


def standard_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor, memory: SlowMemory = UNCOUNTED
) -> tuple[Tensor, ...]:
    """-> dq, dk, dv in the shapes of q, k, v."""
    kv_heads, (k, v) = k.size(1), repeat_kv(q, k, v)

    def product(a: Tensor, b: Tensor, transposed: bool = False) -> Tensor:
        a, b = memory.load(a, b)
        return memory.store((a.transpose(-2, -1) if transposed else a).to(b.dtype) @ b)

    dv = product(p, dout, transposed=True)
    dp = memory.store(_outer(*memory.load(dout, v)))
    weights, dp = memory.load(p, dp)
    ds = memory.store(weights * (dp - (weights * dp).sum(-1, keepdim=True)) / q.size(-1) ** 0.5)
    return (
        product(ds, k),
        sum_kv_copies(product(ds, q, transposed=True), kv_heads),
        sum_kv_copies(dv, kv_heads),
    )


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.transpose(-2, -1)


# ---- closed forms, per head ------------------------------------------------------------------------------------------


def standard_traffic(tokens: int, width: int) -> tuple[Traffic, Traffic]:
    """(forward, backward) in whole matrices."""
    matrix, rows = tokens * tokens, tokens * width
    return Traffic(2 * matrix + 3 * rows, 2 * matrix + rows, tokens), Traffic(
        5 * matrix + 5 * rows, 2 * matrix + 3 * rows
    )


def flash_traffic(
    version: int, tokens: int, width: int, outer: int, inner: int, causal: bool
) -> tuple[Traffic, Traffic]:
    """(forward, backward) of FlashAttention 1 or 2 with these tiles (flash.py: `tile_sizes`).

    Every outer tile meets the rows, or keys, that it sees: `met` of them in all, T · ceil(T/outer) without a mask.
    """
    starts = range(0, tokens, outer)
    met = (
        sum(tokens - start // inner * inner for start in starts) if causal else tokens * len(starts)
    )  # rows, for tiles of keys
    both = 2 * tokens * width  # K and V, or dK and dV
    if version == 1:
        forward = Traffic(both + met * (2 * width + 2) + 2 * tokens, met * (width + 2) + tokens, met)
        return forward, Traffic(both + met * (4 * width + 1), both + met * width)
    keys = (
        sum(min(tokens, -(-min(start + outer, tokens) // inner) * inner) for start in starts)
        if causal
        else tokens * len(starts)
    )
    forward = Traffic(tokens * width + keys * 2 * width, tokens * width + tokens, tokens)
    return forward, Traffic(2 * both + met * (3 * width + 2), both + tokens + met * width)
