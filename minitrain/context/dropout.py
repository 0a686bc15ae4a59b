"""Dropout of attention probabilities over blocks of keys: each tile multiplies by the mask of its places (minitrain/dropout.py).

    O = (P ∘ M') V          M' = M / (1-p)          M[b, h, i, j] = keep(seed; row b, head h, query i, key j)

Blocks still merge by their lse (blocks.py). The softmax is over *all* scores, dropped or not: lse and P are as without dropout, and

    O = Σ_blocks e^(lse_b - lse) O_b          O_b = (P_b ∘ M'_b) V_b          for M' multiplies e^(S - lse_b) and e^(S - lse) alike
    dV = (P ∘ M')ᵀ dO          dP = M' ∘ (dO Vᵀ)          dS = P ∘ (dP - D)          D = Σ_j P_j dP_j = rowsum(dO · O), still

so a ring sends what it sent, in every layout and order of blocks. The seed is kept, and the mask made again in backward, a tile at a
time. It is no part of a fused kernel: with dropout, a block computes its scores as `plain_*` does.

Sends nothing. Memory: a tile of scores, as PLAIN; 16 bytes a score while its mask is made.
Raises ValueError in one line for a rate without a seed, a rate outside [0, 1), and blocks that make no scores to multiply.
Dao et al. 2022, arXiv:2205.14135, appendix B.3 and B.4 (the state of the generator instead of the mask; dropout in both passes).
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from minitrain.context.blocks import FUSED, PLAIN, Blocks, plain_backward, plain_forward
from minitrain.dropout import DropMask, Positions


class Dropping(NamedTuple):
    """In the place of Blocks: each tile has its own, which know the positions of its queries and keys."""

    mask: DropMask

    def on(self, tile) -> Blocks:
        """`tile.positions(device)` says where it is (layout.Tile)."""
        return self.at(tile.positions)

    def at(self, positions: Positions) -> Blocks:
        factors = partial(self.mask.factors, positions=positions)
        return Blocks(partial(plain_forward, factors=factors), partial(plain_backward, factors=factors))


def dropping(blocks: Blocks, dropout: DropMask | float) -> Blocks | Dropping:
    """The blocks as they are; with a mask, those that multiply by it."""
    if not dropout:
        return blocks
    if blocks not in (FUSED, PLAIN):
        raise ValueError("dropout needs blocks that make scores, and these keep theirs to themselves; use FUSED or PLAIN of blocks.py")
    return Dropping(dropout)


def check_dropout(what: str, dropout: DropMask | float) -> None:
    """What a core over ranks can be given; before anything is sent."""
    if dropout and not isinstance(dropout, DropMask):
        raise ValueError(f"{what}: dropout={dropout} is a rate without a seed, and each rank would draw its own mask; give a DropMask, as "
                         "dropout.drop_scores does")
    if dropout and not 0 <= dropout.p < 1:
        raise ValueError(f"{what}: dropout p={dropout.p}; must be in [0, 1)")


# ---- where the seed comes from ---------------------------------------------------------------------------------------

def seeded(core: Callable, agree: Callable[[Tensor], Tensor] = lambda seed: seed, first_row: int = 0, part: int = 0) -> Callable:
    """core(x, .., dropout=p), with a DropMask of a new seed for each p. `agree` makes of every rank's seed that of all; `part`: of
    the parts into which x `[B, H, ..]` is cut along its heads, which one is here."""
    def run(x: Tensor, *others: Tensor, dropout: float = 0.0, **more) -> Tensor:
        if dropout:
            seed = agree(torch.randint(2**63 - 1, (), device=x.device))
            more["dropout"] = DropMask(dropout, seed, first_row, part * x.size(1))
        return core(x, *others, **more)
    return run


def drop_tokens(x: Tensor, *, positions: Callable[[Tensor], Tensor], dropout: DropMask | float = 0.0) -> Tensor:
    """Activations `[B, T/n, D]`, some of them 0 and the others larger; channels are in the place of keys. positions(x) `[T/n]`."""
    if not dropout:
        return x
    kept = dropout.keep(x.size(0), 1, positions(x), torch.arange(x.size(-1), device=x.device)).squeeze(1)
    return torch.where(kept, x / (1 - dropout.p), 0.0)
