"""FlashAttention-3: products and exponentials at the same time, and 8-bit numbers that outliers do not spoil. A model of both.

Time. A block of keys takes two products (S = Q Kᵀ and P V, together `gemm`) on one unit and a softmax on another, one after the other:

    sequential    n · (gemm + softmax)                       S_j  softmax_j  PV_j  S_j+1 ..
    ping-pong     n · max(gemm, softmax) + a start           two warpgroups: one has the products while the other has its softmax
    within one    n · (gemm/2 + max(gemm/2, softmax)) + ..   PV_j-1 runs while softmax_j does; S_j+1 waits for softmax_j

each per block of a warpgroup. A schedule is a list of steps in the order of issue; `run` starts a step when its unit is free and what
it needs is done. On an H100 with K = 128 a score costs 4·128 operations at 989 T/s and one exponential at 3.9 T/s: softmax is half of
gemm, and 1.5 becomes 1. With FP8 products (1,978 T/s) they are alike, and 2 becomes 1.

Precision. float8_e4m3 has 3 bits after the point and ends at 448; x is scaled by its largest value, and one outlier pushes all others
to the bottom. Two answers: a scale for each block of rows instead of one for a tensor; and to turn Q and K by the same orthogonal matrix

    (Q M)(K M)ᵀ = Q Kᵀ          M = diag(random signs) · H / sqrt(K),  H the Hadamard matrix, in K log K additions

which spreads an outlier over its row. With entries N(0, 1) and one in a thousand more by N(0, 100), root mean square errors of the
output without a mask (4 heads of 1,024 tokens, K = 64, one seed) against float64 are

    one scale 2.4e-2          scales of 64 rows 2.0e-2          turned 1.5e-2          both 1.4e-2, 1.7 times less

where the paper has 2.4e-2, 2.4e-2, 9.3e-3 and 9.1e-3, 2.6 times less, for sizes that it does not give. Rounding V and P, which nothing
turns, accounts for 0.6e-2 and 0.3e-2 of each; of Q and K alone it is 2.3e-2 against 1.25e-2.

Sends nothing. Raises ValueError in one line for a width that is no power of two and for blocks of no size.
Shah et al. 2024, arXiv:2407.08608, sections 3.1 to 3.3, table 3. Differs: simulated; the clock has no launches and no copies;
8-bit products are made of rounded numbers multiplied exactly; forward only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minitrain.attention.score_tiles import diagonal, pieces, score_tile

# ---- time ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Work of one warpgroup on one unit. `after`: names of the steps that must be done before."""

    name: str
    unit: str
    duration: float
    after: tuple[str, ...] = ()


def run(steps: list[Step]) -> dict[str, tuple[float, float]]:
    """-> {name: (start, end)}. Each unit takes its steps in the order of the list."""
    free, times = {}, {}
    for step in steps:
        start = max([free.get(step.unit, 0.0), *(times[name][1] for name in step.after)])
        times[step.name] = start, start + step.duration
        free[step.unit] = start + step.duration
    return times


def elapsed(steps: list[Step]) -> float:
    return max(end for _, end in run(steps).values())


def _block(group: str, j: int, gemm: float, softmax: float) -> tuple[Step, Step, Step]:
    """S, softmax and P·V of key block j, chained by their data."""
    return (
        Step(f"{group}.S{j}", "products", gemm / 2),
        Step(f"{group}.softmax{j}", "exponentials", softmax, (f"{group}.S{j}",)),
        Step(f"{group}.PV{j}", "products", gemm / 2, (f"{group}.softmax{j}",)),
    )


def sequential(blocks: int, gemm: float, softmax: float, groups: str = "A") -> list[Step]:
    """One warpgroup after the other, one step after the other."""
    return [step for group in groups for j in range(blocks) for step in _block(group, j, gemm, softmax)]


def pingpong(blocks: int, gemm: float, softmax: float) -> list[Step]:
    """Two warpgroups: PV_j and S_j+1 of one, then of the other, each while the other's softmax runs."""
    steps: list[Step] = []
    for j in range(blocks + 1):
        for group in "AB":
            if j > 0:
                steps.append(_block(group, j - 1, gemm, softmax)[2])
            if j < blocks:
                steps += _block(group, j, gemm, softmax)[:2]
    return steps


def within(blocks: int, gemm: float, softmax: float) -> list[Step]:
    """One warpgroup, two stages (algorithm 2): S_j and PV_j-1 are issued together, then softmax_j while PV_j-1 runs."""
    steps: list[Step] = []
    for j in range(blocks + 1):
        if j < blocks:
            product, softmax_j, _ = _block("A", j, gemm, softmax)
            waits = (f"A.softmax{j - 1}",) if j else ()
            steps += [Step(product.name, product.unit, product.duration, waits), softmax_j]
        if j > 0:
            steps.append(_block("A", j - 1, gemm, softmax)[2])
    return steps


# ---- precision -------------------------------------------------------------------------------------------------------

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def to_fp8(x: Tensor, rows: int | None = None) -> Tensor:
    """x `[.., T, K]` rounded to 8 bits and back, with a scale for each `rows` of its rows; None: one for the whole tensor."""
    if rows is None:
        scale = _scale(x.abs().amax())
        return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale
    rounded = torch.empty_like(x)
    for here in pieces(x.size(-2), rows):
        scale = _scale(x[..., here, :].abs().amax((-2, -1), keepdim=True))
        rounded[..., here, :] = (x[..., here, :] / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale
    return rounded


def _scale(largest: Tensor) -> Tensor:
    """What takes the largest value to the end of the format; of nothing but zeros it is small, not zero."""
    return largest.clamp(min=torch.finfo(largest.dtype).tiny * LARGEST) / LARGEST


def hadamard(x: Tensor) -> Tensor:
    """x `[.., K]` times the orthogonal Hadamard matrix: every sum and difference, log2 K times."""
    width = x.size(-1)
    if width & (width - 1):
        raise ValueError(
            f"a Hadamard matrix of {width} columns: give a power of two, {1 << width.bit_length()} with zeros at the end"
        )
    distance = 1
    while distance < width:
        a, b = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        distance *= 2
    return x / math.sqrt(width)


def random_signs(width: int, seed: int = 0) -> Tensor:
    """`[K]` of +1 and -1, the same for Q and K."""
    return torch.randint(2, (width,), generator=torch.Generator().manual_seed(seed)) * 2 - 1


def fp8_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    rows: int | None = None,
    signs: Tensor | None = None,
) -> Tensor:
    """q, k, v `[B, H, T, K]` -> `[B, H, T, K]`, all four operands of its products in 8 bits. `rows`: as in `to_fp8`; `signs`: turn Q, K."""
    if signs is not None:
        q, k = hadamard(q * signs), hadamard(k * signs)
    q, k, v = (to_fp8(x, rows) for x in (q, k, v))
    scores = score_tile(q, k, slice(0, q.size(-2)), slice(0, k.size(-2)), diagonal(q, k, causal))
    weights = (scores - scores.amax(-1, keepdim=True)).exp()  # at most 1: no scale needed
    return weights.to(torch.float8_e4m3fn).to(v.dtype) @ v / weights.sum(-1, keepdim=True)
