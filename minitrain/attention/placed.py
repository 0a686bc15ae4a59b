"""What depends on the positions of a score: ALiBi's bias and the mask of dropout, tile by tile.

    S = Q Kᵀ / sqrt(K) + A          A[h, i, j] = - slope_h (i - j)                                    alibi.py
    O = (P ∘ M') V                  M' = M / (1-p)         M[b, h, i, j] = keep(seed; b, h, i, j)   dropout.py

A tile knows the positions i of its queries and j of its keys (layout.Tile). A is in all scores and hence in
lse; backward adds it again. The softmax is over *all* scores, dropped or not, so lse and P are those without
dropout, results merge by lse, and a ring sends what it sent:

    O = Σ_blocks e^(lse_b - lse) O_b        O_b = (P_b ∘ M'_b) V_b        dV = (P ∘ M')ᵀ dO
    dP = M' ∘ (dO Vᵀ)        dS = P ∘ (dP - D)        D = Σ_j P_j dP_j = rowsum(dO · O), still

A and M are made again in backward. torch's flash kernel for CPUs takes A as a mask, that for CUDA takes none,
and neither takes M: such tiles compute scores as `plain_*` does. Sends nothing. Memory: H scores of a tile
for A; a tile of scores with dropout or on CUDA, and 16 bytes per score for M.
Dao et al. 2022, arXiv:2205.14135, appendix B.3, B.4.
"""

from functools import partial
from typing import NamedTuple

from torch import Tensor

from minitrain.attention.alibi import Alibi, check_bias
from minitrain.attention.dropout import DropMask, Positions
from minitrain.attention.kernel import FUSED, PLAIN, Kernel
from minitrain.ranks.checks import require_fractions


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
    check_bias(what, bias, q.size(1))
    if dropout and not isinstance(dropout, DropMask):
        why = f"dropout={dropout} is a rate without a seed, and each rank would draw its own mask"
        raise ValueError(f"{what}: {why}; give a DropMask, as dropout.drop_scores does")
    if dropout and not 0 <= dropout.p < 1:
        raise ValueError(f"{what}: dropout p={dropout.p}; must be in [0, 1)")
