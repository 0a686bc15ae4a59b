"""ALiBi: a bias on the scores of attention that is a function of places, so that whoever computes a score knows its bias.

    S[b, h, i, j] = Q_i K_jᵀ / sqrt(K) - slope_h · (i - j)          i, j: places of query and key in the sequence

The slopes are a geometric sequence over the heads, constants that are not trained; whoever cuts the heads cuts them too. A core that
has the whole sequence takes the positions that came with its tokens (`own`). One that computes tiles of it, over ranks or slice after
slice, knows the places of every tile (`between`), also of keys that are not its own; distances are all that counts.

Sends nothing. Memory: a tile of H scores, for all rows of a batch.
Raises ValueError in one line where a core by tiles is given a bias that is no Alibi, positions that differ from row to row, or slopes
of other heads than it has.
Press et al. 2021, arXiv:2108.12409, section 3. Differs: distances come from positions, where theirs are made once for a length.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


def alibi_slopes(num_heads: int) -> list[float]:
    """One slope per head, a geometric sequence that ends at 2^-8; other counts take every other slope of 2n heads."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes + [2 ** (-4 * (2 * i + 1) / power) for i in range(num_heads - power)]


class Alibi(NamedTuple):
    """The `bias` of one call of a core: slopes `[H]` of the heads it is given, and positions `[T]` or `[B, T]` of the tokens."""

    slopes: Tensor
    positions: Tensor

    def own(self, like: Tensor) -> Tensor:
        """Of all its tokens with each other, `[(B,) H, T, T]` in the dtype of `like`."""
        return self.between(self.positions, self.positions).to(like.dtype)

    def between(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Places `[.., Tq]` and `[.., Tk]` -> what is added to their scores, `[.., H, Tq, Tk]`, in at least float32."""
        distance = keys.unsqueeze(-2) - queries.unsqueeze(-1)  # <= 0 for what a query sees
        slopes = self.slopes.to(
            torch.promote_types(self.slopes.dtype, torch.float32)
        )  # 1001/256 is no bfloat16
        return slopes[:, None, None] * distance.unsqueeze(-3)


def check_bias(what: str, bias: Alibi | None, heads: int) -> None:
    """What a core by tiles can be given; before anything is sent."""
    if bias is None:
        return
    if not isinstance(bias, Alibi):
        raise ValueError(
            f"{what}: a bias {list(bias.shape)} is about the keys that are here, others come by too; give an "
            "Alibi(slopes, positions)"
        )
    if bias.positions.dim() != 1:
        raise ValueError(
            f"{what}: ALiBi with positions {list(bias.positions.shape)}, other ones in each row; tiles know a place in the "
            "sequence, the same for all rows: give positions [T], or attend in one piece, with causal_attention"
        )
    if len(bias.slopes) != heads:
        raise ValueError(
            f"{what}: ALiBi has {len(bias.slopes)} slopes for {heads} heads; cut the slopes as the heads are cut"
        )
