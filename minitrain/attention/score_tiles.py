"""A tile of the score matrix: some rows of queries against some columns of keys, and what a causal mask leaves of it.

    S[rows, columns] = Q[rows] K[columns]ᵀ / sqrt(K)        causal: query i sees keys 0 .. i + shift        shift = Tk - Tq >= 0

The last query sees the last key. So Tq queries may be the last ones of a longer text whose keys are all here, and a square is the
usual triangle. A tile with no visible score is not `visible` and need not be computed; one that the diagonal crosses gets -inf where
the key comes too late; all others need no mask.

Costs one product; sends nothing. Raises ValueError in one line for causal queries that would see no key and for tiles of no size.
Dao 2023 (FlashAttention-2), arXiv:2307.08691, section 3.1, "Causal masking".
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def pieces(length: int, size: int) -> list[slice]:
    """0 .. length in runs of `size`, the last one perhaps shorter."""
    if size < 1:
        raise ValueError(f"tiles of {size} tokens; a tile has 1 or more")
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def diagonal(q: Tensor, k: Tensor, causal: bool) -> int | None:
    """The shift of the mask, or None if every query sees every key."""
    if causal and q.size(-2) > k.size(-2):
        raise ValueError(
            f"causal: {q.size(-2)} queries end where {k.size(-2)} keys do, so the first ones see nothing; give them their keys"
        )
    return k.size(-2) - q.size(-2) if causal else None


def visible(rows: slice, columns: slice, shift: int | None) -> bool:
    """Some query of the rows sees some key of the columns."""
    return shift is None or columns.start < rows.stop + shift


def score_tile(q: Tensor, k: Tensor, rows: slice, columns: slice, shift: int | None) -> Tensor:
    """q `[.., r, K]` and k `[.., c, K]`, which are these rows and columns -> `[.., r, c]` in at least float32."""
    scores = (q @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32)) / math.sqrt(q.size(-1))
    if shift is None or columns.stop <= rows.start + shift + 1:
        return scores
    return scores + scores.new_full(scores.shape[-2:], -math.inf).triu(rows.start + shift - columns.start + 1)


def largest(scores: Tensor) -> Tensor:
    """The maximum of each row `[.., r, 1]`, finite even where a row sees nothing: -inf - (-inf) would be no number."""
    return scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
