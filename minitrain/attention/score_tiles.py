"""A tile of the score matrix: some queries against some keys, and what a causal mask leaves of it.

    S[rows, columns] = Q[rows] K[columns]ᵀ / sqrt(K)    causal: query i sees keys 0..i+shift; shift = Tk - Tq

The last query sees the last key: Tq queries may be the last ones of a longer text whose keys are all here.
Tiles without a visible score need not be computed; those that the diagonal crosses get -inf; others no mask.

Costs one product; sends nothing.
Dao 2023 (FlashAttention-2), arXiv:2307.08691, section 3.1 (causal masking).
"""

import math

import torch
from torch import Tensor

from minitrain.ranks.checks import MOST, require_ints, require_positive_ints


def wide(x: Tensor) -> torch.dtype:
    """In which softmax and its sums are computed: float32, or x's own dtype where that is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def pieces(length: int, size: int) -> list[slice]:
    """0 .. length in runs of `size`, the last one perhaps shorter."""
    require_positive_ints(size=size)
    require_ints(0, MOST, length=length)
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def diagonal(q: Tensor, k: Tensor, causal: bool) -> int | None:
    """The shift of the mask, or None if every query sees every key."""
    queries, keys = q.size(-2), k.size(-2)
    if causal and queries > keys:
        raise ValueError(f"causal: of {queries} queries with {keys} keys the first ones see nothing")
    return keys - queries if causal else None


def visible(rows: slice, columns: slice, shift: int | None) -> bool:
    """Some query of the rows sees some key of the columns."""
    return shift is None or columns.start < rows.stop + shift


def score_tile(q: Tensor, k: Tensor, rows: slice, columns: slice, shift: int | None) -> Tensor:
    """q `[.., r, K]` and k `[.., c, K]`, which are these rows and columns -> `[.., r, c]`, in `wide`."""
    scores = (q @ k.transpose(-2, -1)).to(wide(q)) / math.sqrt(q.size(-1))
    if shift is None or columns.stop <= rows.start + shift + 1:
        return scores
    return scores + scores.new_full(scores.shape[-2:], -math.inf).triu(rows.start + shift - columns.start + 1)


def score_matrix(q: Tensor, k: Tensor, shift: int | None) -> Tensor:
    """The one tile of all rows and columns, `[.., Tq, Tk]`."""
    return score_tile(q, k, slice(0, q.size(-2)), slice(0, k.size(-2)), shift)


def largest(scores: Tensor) -> Tensor:
    """The maximum of each row `[.., r, 1]`, finite where a row sees nothing, too: -inf - (-inf) is nan."""
    return scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)


def nothing_seen(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The online softmax of rows before the first key: sums 0 `[.., K]` and 0 `[.., 1]`, maximum -inf."""
    summed = q.new_zeros(*q.shape[:-1], v.size(-1), dtype=wide(q))
    row_sum = q.new_zeros(*q.shape[:-1], 1, dtype=wide(q))
    return summed, row_sum, torch.full_like(row_sum, -math.inf)
