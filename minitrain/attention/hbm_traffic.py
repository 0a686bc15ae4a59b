"""What moves between slow and fast memory, counted at the line that moves it; and attention without tiles.

    q_i, k_j = memory.load(q[rows], k[columns])     out[rows] = memory.store(out_i)     memory.divide(x, sums)

These count elements and return their arguments (`UNCOUNTED` counts nothing), on meta tensors, too. An A100's
multiprocessor has a fast memory of M = 98,304 numbers of 2 bytes before the slow one, HBM. `standard_*` is
attention in whole matrices: each operation reads its operands and writes its result. Per head, N = T, d = K:

                loads             stores           divisions
    forward     2·N² + 3·N·d      2·N² + N·d       N        S = Q Kᵀ; P = softmax S; O = P V
    backward    5·N² + 5·N·d      2·N² + 3·N·d     0        dV = Pᵀ dO; dP = dO Vᵀ; dS; dQ = dS K; dK = dSᵀ Q

That is Θ(N·d + N²); `flash_traffic` is Θ(N²·d²/M), in forward 12·N²·d²/M (version 1), 8·N²·d²/M (2). A GPT-2
layer (N = 1,024, d = 64, 16 heads, batch 64, 2 bytes) has 25.2 GB and 4.1 GB (version 1, A100). With a mask
added (2·N²) and dropout (4·N², its mask of 1 byte twice) the first is 40.3 GB, as in the paper, which has 4.4
for the second; its FLOPs grow by the same product as ours. Sends nothing.
Dao et al. 2022, arXiv:2205.14135, algorithms 0 to 4, theorem 2, figure 2. Differs: elements, not bytes.
"""

from dataclasses import dataclass

from torch import Tensor

from minitrain.attention.kernel import repeat_kv, sum_kv_copies
from minitrain.attention.score_tiles import diagonal, score_matrix
from minitrain.ranks.checks import require_positive_ints


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
