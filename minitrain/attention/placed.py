"""What depends on the positions of a score: ALiBi's bias and the mask of dropout, also tile by tile.

    S = Q Kᵀ / sqrt(K) + A          A[b, h, i, j] = - slope_h (i - j)       slopes: a geometric sequence
    O = (P ∘ M') V                  M' = M / (1-p)         M[b, h, i, j] = keep(seed; b, h, i, j)   dropout.py

Slopes are not trained, and cut as the heads are. A core that has the whole sequence takes the positions that
came with its tokens (`full`); one that computes tiles, over ranks or slice after slice, knows the positions i
of queries and j of keys of every tile (`between`, layout.Tile). A is in all scores and hence in lse; backward
adds it again. The softmax is over *all* scores, dropped or not, so lse and P are those without dropout,
results merge by lse, and a ring sends what it sent:

    O = Σ_blocks e^(lse_b - lse) O_b        O_b = (P_b ∘ M'_b) V_b        dV = (P ∘ M')ᵀ dO
    dP = M' ∘ (dO Vᵀ)        dS = P ∘ (dP - D)        D = Σ_j P_j dP_j = rowsum(dO · O), still

A and M are made again in backward. torch's flash kernel for CPUs takes A as a mask, that for CUDA takes none,
and neither takes M: such tiles compute scores as `plain_*` does. Sends nothing. Memory: H scores of a tile
for A; a tile of scores with dropout or on CUDA, and 16 bytes per score for M. Press et al. 2021 (ALiBi),
arXiv:2108.12409, section 3; Dao et al. 2022, arXiv:2205.14135, appendix B. Differs: distances come from
positions, not from a length.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from minitrain.attention.dropout import DropMask, Positions
from minitrain.attention.kernel import FUSED, PLAIN, Kernel
from minitrain.ranks.checks import require_fractions, require_positive_ints


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


class Placed(NamedTuple):
    """A `Kernel` for each tile, which knows the positions of the tile's queries and keys."""

    kernel: Kernel
    bias: Alibi | None
    mask: DropMask | None

    def on(self, tile) -> Kernel:
        """`tile.positions(device)` says where it is (layout.Tile)."""
        return self.at(tile.positions)

    def at(self, positions: Positions) -> Kernel:
        more = {}
        if self.bias:
            more["bias"] = lambda device: self.bias.between(*positions(device))
        if self.mask:
            more["factors"] = partial(self.mask.factors, positions=positions)
        return Kernel(*(partial(pass_, **more) for pass_ in (PLAIN if self.mask else self.kernel)))


def placed(kernel: Kernel, bias: Alibi | None = None, dropout: DropMask | float = 0.0) -> Kernel | Placed:
    """The kernel itself; with ALiBi or a mask, one that adds the first and multiplies by the second."""
    if isinstance(dropout, int | float):
        require_fractions(dropout=dropout)
    if bias is None and not dropout:
        return kernel
    if kernel not in (FUSED, PLAIN):
        what = "dropout" if dropout else "ALiBi"
        raise ValueError(f"{what} needs a kernel that makes scores; use FUSED or PLAIN of kernel.py")
    return Placed(kernel, bias, dropout or None)


def check_places(what: str, q: Tensor, bias: Alibi | None = None, dropout: DropMask | float = 0.0) -> None:
    """What a core by tiles can be given; before anything is sent."""
    wrong = ""
    if bias is not None and not isinstance(bias, Alibi):
        wrong = f"a bias {list(bias.shape)} is about the keys that are here; give an Alibi(slopes, positions)"
    elif bias is not None and bias.positions.dim() != 1:
        wrong = f"ALiBi with positions {list(bias.positions.shape)}, other ones in each row; give [T]"
    elif bias is not None and len(bias.slopes) != q.size(1):
        wrong = f"ALiBi has {len(bias.slopes)} slopes for {q.size(1)} heads; cut both alike"
    elif dropout and not isinstance(dropout, DropMask):
        wrong = f"dropout={dropout} is a rate without a seed; give a DropMask, as dropout.drop_scores does"
    elif dropout and not 0 <= dropout.p < 1:
        wrong = f"dropout p={dropout.p}; must be in [0, 1)"
    if wrong:
        raise ValueError(f"{what}: {wrong}")
