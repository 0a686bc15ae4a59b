"""Incoherent processing: Q and K turned by one orthogonal matrix, so that an outlier is spread over its row.

    (Q M)(K M)ᵀ = Q Kᵀ          M = diag(random signs) · H / sqrt(K),  H: Hadamard

An outlier of size a among K small numbers becomes K numbers of size a / sqrt(K), and the scores stay. Costs
K log2 K additions per row, done where positions are rotated anyway; sends nothing. What 8 bits gain by it:
systems/precision/fp8_attention.py.
Shah et al. 2024 (FlashAttention-3), arXiv:2407.08608, section 3.3. Differs: not fused with the rotation.
"""

import math

import torch
from torch import Tensor

from minitrain.ranks.checks import require_ints, require_positive_ints


def turned(x: Tensor, signs: Tensor) -> Tensor:
    """x `[.., K]` times M; the same signs `[K]` for Q and K."""
    return hadamard(x * signs)


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
