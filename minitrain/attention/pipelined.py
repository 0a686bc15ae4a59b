"""FlashAttention-3: products and exponentials at the same time, 8 bits despite outliers. A model of both.

Time. A block of keys takes two products (S = Q Kᵀ and P V, together `gemm`) on one unit, softmax on another:

    sequential    n · (gemm + softmax)                       S_j  softmax_j  PV_j  S_j+1 ..
    ping-pong     n · max(gemm, softmax) + a start           two warpgroups: products of one, softmax of other
    within one    n · (gemm/2 + max(gemm/2, softmax)) + ..   PV_j-1 runs while softmax_j does

per block of a warpgroup. On an H100 with K = 128 softmax is half of gemm: 1.5 becomes 1.

Precision. float8_e4m3 ends at 448; with one scale for a tensor an outlier pushes all else to the bottom. Two
answers: a scale for each block of rows, and Q, K turned by one orthogonal matrix, which spreads an outlier:

    (Q M)(K M)ᵀ = Q Kᵀ          M = diag(random signs) · H / sqrt(K),  H: Hadamard, in K log K additions

Root mean square errors for N(0, 1), one entry in a thousand more by N(0, 100), 4 heads, T = 1,024, K = 64:
one scale 2.4e-2, of 64 rows 2.0e-2, turned 1.5e-2, both 1.4e-2 (paper: 2.4e-2, 2.4e-2, 9.3e-3, 9.1e-3). Sends
nothing. Shah et al. 2024, arXiv:2407.08608, section 3, table 3. Differs: simulated, forward only.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minitrain.attention.score_tiles import diagonal, pieces, score_matrix


@dataclass(frozen=True)
class Step:
    """Work of one warpgroup on one unit. `after`: names of the steps that must be done before."""

    name: str
    unit: str
    duration: float
    after: tuple[str, ...] = ()


def play_steps(steps: list[Step]) -> dict[str, tuple[float, float]]:
    """-> {name: (start, end)}. Each unit takes its steps in the order of the list."""
    free, times = {}, {}
    for step in steps:
        start = max([free.get(step.unit, 0.0), *(times[name][1] for name in step.after)])
        times[step.name] = start, start + step.duration
        free[step.unit] = start + step.duration
    return times


def elapsed(steps: list[Step]) -> float:
    return max(end for _, end in play_steps(steps).values())


def _block(group: str, j: int, gemm: float, softmax: float) -> list[Step]:
    """S, softmax and P·V of key block j, chained by their data."""
    product, exponential, weighted = (f"{group}.{kind}{j}" for kind in ("S", "softmax", "PV"))
    return [
        Step(product, "products", gemm / 2),
        Step(exponential, "exponentials", softmax, (product,)),
        Step(weighted, "products", gemm / 2, (exponential,)),
    ]


def sequential(blocks: int, gemm: float, softmax: float, groups: str = "A") -> list[Step]:
    """One warpgroup after the other, one step after the other."""
    return [step for group in groups for j in range(blocks) for step in _block(group, j, gemm, softmax)]


def pingpong(blocks: int, gemm: float, softmax: float) -> list[Step]:
    """Two warpgroups: PV_j and S_j+1 of one, then of the other, each while the other's softmax runs."""
    steps = []
    for j in range(blocks + 1):
        for group in "AB":
            if j > 0:
                steps.append(_block(group, j - 1, gemm, softmax)[2])
            if j < blocks:
                steps += _block(group, j, gemm, softmax)[:2]
    return steps


def within(blocks: int, gemm: float, softmax: float) -> list[Step]:
    """One warpgroup, two stages (algorithm 2): softmax_j runs beside PV_j-1, which is issued with S_j."""
    steps = []
    for j in range(blocks + 1):
        if j < blocks:
            product, softmax_j, _ = _block("A", j, gemm, softmax)
            steps += [replace(product, after=(f"A.softmax{j - 1}",) if j else ()), softmax_j]
        if j > 0:
            steps.append(_block("A", j - 1, gemm, softmax)[2])
    return steps


LARGEST = torch.finfo(torch.float8_e4m3fn).max


def to_fp8(x: Tensor, rows: int | None = None) -> Tensor:
    """x `[.., T, K]` rounded to 8 bits and back, with a scale for each `rows` rows (None: for the tensor)."""
    if rows is None:
        return _rounded(x, x.abs().amax())
    blocks = (x[..., here, :] for here in pieces(x.size(-2), rows))
    return torch.cat([_rounded(block, block.abs().amax((-2, -1), keepdim=True)) for block in blocks], dim=-2)


def _rounded(x: Tensor, largest: Tensor) -> Tensor:
    """The scale takes the largest value to the end of the format; of zeros alone it is small, not zero."""
    scale = largest.clamp(min=torch.finfo(largest.dtype).tiny * LARGEST) / LARGEST
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


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
    """`[K]` of +1 and -1, the same for Q and K."""
    return torch.randint(2, (width,), generator=torch.Generator().manual_seed(seed)) * 2 - 1


def fp8_attention(q, k, v, *, causal=True, rows: int | None = None, signs: Tensor | None = None) -> Tensor:
    """q, k, v `[B, H, T, K]` -> the same, products in 8 bits. `rows` as in `to_fp8`; `signs` turn Q and K."""
    if signs is not None:
        q, k = hadamard(q * signs), hadamard(k * signs)
    q, k, v = (to_fp8(x, rows) for x in (q, k, v))
    scores = score_matrix(q, k, diagonal(q, k, causal))
    weights = (scores - scores.amax(-1, keepdim=True)).exp()  # at most 1: no scale needed
    return weights.to(torch.float8_e4m3fn).to(v.dtype) @ v / weights.sum(-1, keepdim=True)
