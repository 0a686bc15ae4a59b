"""FlashAttention-3: products beside exponentials, as a model of its time, and FP8 despite outliers.

A block of keys takes two products (S = Q Kᵀ and P V, together `gemm`) on one unit, softmax on another:

    sequential    n · (gemm + softmax)                       S_j  softmax_j  PV_j  S_j+1 ..
    ping-pong     n · max(gemm, softmax) + a start           two warpgroups: products of one, softmax of other
    within one    n · (gemm/2 + max(gemm/2, softmax)) + ..   PV_j-1 runs while softmax_j does

per block of a warpgroup; systems/simulate/links.py plays them. On an H100 with K = 128 softmax is half of
gemm: 1.5 becomes 1. Incoherent processing turns Q and K by one orthogonal matrix, and shares an outlier out:

    (Q M)(K M)ᵀ = Q Kᵀ          M = diag(random signs) · H / sqrt(K),  H: Hadamard

An outlier of size a among K small numbers becomes K numbers of size a / sqrt(K), and the scores stay, for
K log2 K additions per row. Sends nothing. Shah et al. 2024, arXiv:2407.08608, sections 3.1 to 3.3, table 3.
Differs: simulated; FP8 forward only, emulated, layouts stay, not fused with the rotation.
"""

import math

import torch
from torch import Tensor

from minitrain.attention import kernel
from minitrain.precision.blocks import Blocks, dequantize, quantize
from minitrain.precision.formats import E4M3
from minitrain.precision.rounding import rounded
from minitrain.ranks.checks import require_ints, require_positive, require_positive_ints
from minitrain.systems.simulate.links import Task

TILE = 128  # tokens of a tile where one scale is for the tensor


def _block(group: str, j: int, gemm: float, softmax: float) -> list[Task]:
    """S, softmax and P·V of key block j, chained by their data."""
    require_positive(gemm=gemm, softmax=softmax)
    product, exponential, weighted = (f"{group}.{kind}{j}" for kind in ("S", "softmax", "PV"))
    middle, half = Task(exponential, "exponentials", softmax, after=(product,)), gemm / 2
    return [Task(product, "products", half), middle, Task(weighted, "products", half, after=(exponential,))]


def sequential(blocks: int, gemm: float, softmax: float, groups: str = "A") -> list[Task]:
    """One warpgroup after the other, one step after the other."""
    require_positive_ints(blocks=blocks)
    return [step for group in groups for j in range(blocks) for step in _block(group, j, gemm, softmax)]


def pingpong(blocks: int, gemm: float, softmax: float) -> list[Task]:
    """Two warpgroups: PV_j and S_j+1 of one, then of the other, each while the other's softmax runs."""
    require_positive_ints(blocks=blocks)
    steps = []
    for j in range(blocks + 1):
        for group in "AB":
            if j > 0:
                steps.append(_block(group, j - 1, gemm, softmax)[2])
            if j < blocks:
                steps += _block(group, j, gemm, softmax)[:2]
    return steps


def within(blocks: int, gemm: float, softmax: float) -> list[Task]:
    """One warpgroup, two stages (algorithm 2): softmax_j runs beside PV_j-1, which is issued with S_j."""
    require_positive_ints(blocks=blocks)
    steps = []
    for j in range(blocks + 1):
        if j < blocks:
            product, softmax_j, _ = _block("A", j, gemm, softmax)
            steps += [product._replace(after=(f"A.softmax{j - 1}",) if j else ()), softmax_j]
        if j > 0:
            steps.append(_block("A", j - 1, gemm, softmax)[2])
    return steps


def turned(x: Tensor, signs: Tensor) -> Tensor:
    """x `[.., K]` times M; the same signs `[K]` for Q and K."""
    return hadamard(x * signs.to(x.device))


def hadamard(x: Tensor) -> Tensor:
    """x `[.., K]` times the orthogonal Hadamard matrix: every sum and difference, log2 K times."""
    width = x.size(-1)
    if width & (width - 1):
        power = 1 << width.bit_length()
        raise ValueError(f"a Hadamard matrix of {width} columns: give a power of two, {power} with zeros")
    distance = 1
    while distance < width:
        a, b = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        distance *= 2
    return x / math.sqrt(width)


def random_signs(width: int, seed: int = 0) -> Tensor:
    """`[K]` of +1 and -1, equal for equal seeds."""
    require_positive_ints(width=width)
    require_ints(seed=seed)
    return torch.randint(2, (width,), generator=torch.Generator().manual_seed(seed)) * 2 - 1


# ---- FP8 ---------------------------------------------------------------------------------------------------
#
#     S_ij = (codes of Q_i · codes of K_jᵀ) · q_i k_j / sqrt(K)      q_i, k_j, v_j: scales of blocks of tokens
#     O_i  = e^(m - m') O_i + (E4M3 of e^(S_ij - m')) · codes of V_j · v_j       P is at most 1: no scale
#
# A block's scale is that of a whole tile of the loop. A normal E4M3 number errs by at most 1/16 of itself,
# whatever the scale: an outlier spoils its product, the largest of all, more than its neighbours. Turned,
# that is a sum of many products whose errors cancel. So block scales alone help little, turning does, and
# more in long texts. Root mean square errors of 256 queries, means of 16 seeds, K = 128, N(0, 1) and one
# entry in a thousand more by N(0, 100), T = 1,024 to 16,384: with one scale a tensor 1.2e-2 to 3.2e-2 (paper,
# sizes not given: 2.4e-2), turned and of 128 rows 7.7e-3 to 9.4e-3 (9.1e-3).


@torch.no_grad()
def fp8_attention(q, k, v, *, causal=True, rows: int | None = None, signs: Tensor | None = None) -> Tensor:
    """q `[B, H, T, K]`, k, v `[B, H_kv, T, K]` -> `[B, H, T, K]`, as an attention core.
    A scale for `rows` tokens of a head (None: for a tensor); `signs` turn Q and K before."""
    if signs is not None:
        q, k = turned(q, signs), turned(k, signs)
    blocks, out = Blocks(E4M3, (rows, 0) if rows else ()), torch.empty_like(q)
    q, k, v = (dequantize(quantize(x, blocks, fill=True), kernel.wide(x)) for x in (q, k, v))
    k, v = kernel.repeat_kv(q, k, v)
    shift = kernel.diagonal(q, k, causal)
    for here in kernel.pieces(q.size(-2), rows or TILE):
        q_i = q[..., here, :]
        summed, row_sum, row_max = kernel.nothing_seen(q_i, v)
        for there in kernel.pieces(k.size(-2), rows or TILE):
            if not kernel.visible(here, there, shift):
                continue
            scores = kernel.score_tile(q_i, k[..., there, :], here, there, shift)
            new_max = torch.maximum(row_max, kernel.largest(scores))
            p, kept = (scores - new_max).exp(), (row_max - new_max).exp()
            summed = kept * summed + rounded(p, E4M3, "nearest") @ v[..., there, :]
            row_sum, row_max = kept * row_sum + p.sum(-1, keepdim=True), new_max
        out[..., here, :] = summed / row_sum
    return out
