"""ALiBi: a bias on the scores of attention that is a function of positions.

    S[b, h, i, j] = Q_i K_jᵀ / sqrt(K) - slope_h · (i - j)          i, j: positions of query and key

The slopes are a geometric sequence over the heads and not trained; they are cut as the heads are cut. A core
that has the whole sequence takes the positions that came with its tokens (`full`). One that computes tiles,
over ranks or slice after slice, knows the positions of every tile, also of keys of others (`between`).

Sends nothing. Memory: a tile of H scores, for all rows of a batch.
Press et al. 2021, arXiv:2108.12409, section 3. Differs: distances come from positions, not from a length.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from minitrain.ranks.checks import require_positive_ints


def alibi_slopes(num_heads: int) -> list[float]:
    """One slope per head, a geometric sequence to 2^-8; other counts than powers of 2 add some of 2n."""
    require_positive_ints(num_heads=num_heads)
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes + [2 ** (-4 * (2 * i + 1) / power) for i in range(num_heads - power)]


class Alibi(NamedTuple):
    """The `bias` of a call of a core: slopes `[H]` of its heads, positions `[T]` or `[B, T]` of tokens."""

    slopes: Tensor
    positions: Tensor

    def full(self, like: Tensor) -> Tensor:
        """Of all its tokens with each other, `[(B,) H, T, T]` in the dtype of `like`."""
        return self.between(self.positions, self.positions).to(like.dtype)

    def between(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Positions `[.., Tq]` and `[.., Tk]` -> the bias `[.., H, Tq, Tk]`, in at least float32."""
        distance = keys.unsqueeze(-2) - queries.unsqueeze(-1)  # <= 0 for what a query sees
        exact = torch.promote_types(self.slopes.dtype, torch.float32)  # 1001/256 is no bfloat16
        return self.slopes.to(exact)[:, None, None] * distance.unsqueeze(-3)


def check_bias(what: str, bias: Alibi | None, heads: int) -> None:
    """What a core by tiles can be given; before anything is sent."""
    if bias is None:
        return
    if not isinstance(bias, Alibi):
        found = f"a bias {list(bias.shape)} is about the keys that are here, others come by too"
        raise ValueError(f"{what}: {found}; give an Alibi(slopes, positions)")
    if bias.positions.dim() != 1:
        found = f"ALiBi with positions {list(bias.positions.shape)}, other ones in each row"
        cure = "give positions [T], or attend in one piece, with causal_attention"
        raise ValueError(f"{what}: {found}; tiles have the same in all: {cure}")
    if len(bias.slopes) != heads:
        raise ValueError(f"{what}: ALiBi has {len(bias.slopes)} slopes for {heads} heads; cut both alike")
