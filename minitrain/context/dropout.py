"""Dropout of attention probabilities over ranks: the mask is a function of where a score is, so whoever computes the score knows it.

    M[b, h, i, j] = keep(seed; row b, head h, query i, key j)          O = (P ∘ M') V          M' = M / (1-p)

A generator that is drawn from gives the n-th number after n-1 others; two ranks that meet a score, or one that meets it again in
backward, would draw different ones. A counter-based generator is a hash of a counter, and has no state: here the counter is the place
in the whole model (global row, head and positions), the key is a seed of 8 bytes. So layouts, rings, head and row cuts and their
order do not matter. No mask is kept or sent: the seed is kept, and the mask made again, a tile at a time.

Blocks still merge by their lse (blocks.py). The softmax is over *all* scores, dropped or not: lse and P are as without dropout, and

    O = Σ_blocks e^(lse_b - lse) O_b          O_b = (P_b ∘ M'_b) V_b          for M' multiplies e^(S - lse_b) and e^(S - lse) alike
    dV = (P ∘ M')ᵀ dO          dP = M' ∘ (dO Vᵀ)          dS = P ∘ (dP - D)          D = Σ_j P_j dP_j = rowsum(dO · O), still

so a ring sends what it sent. The hash is splitmix64's, taken once for each coordinate: s = mix(s + γ (c + 1)), uniform over 64 bits;
M = [s >= p 2^64]. It is no part of a fused kernel: with dropout, a block computes its scores as `plain_*` does.

`seeded` draws the seed at each call from torch's own generator (torch.utils.checkpoint restores its state, so a layer that is computed
again has the same mask) and lets the ranks agree on it, if told how. `drop_tokens` is dropout of activations by the same function.

Sends nothing; `seeded` what `agree` sends, 8 bytes a call. Memory: a tile of scores, as PLAIN; 16 bytes a score while its mask is made.
Raises ValueError in one line for a rate without a seed, a rate outside [0, 1), and blocks that make no scores to multiply.
Salmon et al. 2011 (Random123), SC'11, section 2 (counter-based generators); Steele et al. 2014, OOPSLA (splitmix64 and its mix);
Dao et al. 2022, arXiv:2205.14135, appendix B.3 and B.4 (the state of the generator instead of the mask; dropout in forward and backward).
Differs: their counter is a place in the kernel's grid on one device, ours in the model; two products of 64 bits a score, where their
Philox-4x32-10 takes 20 of 32 bits for four numbers.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from minitrain.context.blocks import FUSED, PLAIN, Blocks, plain_backward, plain_forward

GAMMA = 0x9E3779B97F4A7C15 - 2**64                              # 2^64 over the golden ratio, as a signed number
ROUNDS = (30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)
Positions = Callable[[torch.device], tuple[Tensor, Tensor]]     # of queries and of keys, on that device


# ---- the generator ---------------------------------------------------------------------------------------------------

def mix(z: Tensor) -> Tensor:
    """int64 -> int64, in place: a permutation in which every bit of the result depends on all bits. Products wrap."""
    for shift, factor in ROUNDS:
        z.bitwise_xor_(shifted(z, shift)).mul_(factor)
    return z.bitwise_xor_(shifted(z, 31))


def shifted(z: Tensor, places: int) -> Tensor:
    """To the right, zeros in front; torch's >> of signed numbers copies the sign."""
    return (z >> places).bitwise_and_(2 ** (64 - places) - 1)


def keep(p: float, seed: Tensor | int, rows: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """int64 `[B]`, `[H]`, `[Tq]`, `[Tk]`, global numbers -> bool `[B, H, Tq, Tk]`: True with probability 1-p."""
    state = mix(torch.as_tensor(seed, dtype=torch.int64, device=keys.device).clone())
    for place in (rows[:, None, None, None], heads[:, None, None], queries[:, None], keys):
        state = mix(state + (place + 1) * GAMMA)
    return state >= round(p * 2**64) - 2**63


class DropMask(NamedTuple):
    """The `dropout` of one call of a core: the rate, the seed, and the global numbers of this rank's first row, head and token."""

    p: float
    seed: Tensor | int
    first_row: int = 0
    first_head: int = 0
    first_token: int = 0

    def keep(self, batch: int, heads: int, queries: Tensor, keys: Tensor) -> Tensor:
        """bool `[B, H, Tq, Tk]` for positions `[Tq]` and `[Tk]`."""
        rows, heads = (torch.arange(first, first + count, device=keys.device)
                       for first, count in ((self.first_row, batch), (self.first_head, heads)))
        return keep(self.p, self.seed, rows, heads, queries + self.first_token, keys + self.first_token)

    def factors(self, like: Tensor, positions: Positions) -> Tensor:
        """M' = M / (1-p) for the probabilities `like` `[B, H, Tq, Tk]` at these positions."""
        return self.keep(*like.shape[:2], *positions(like.device)).to(like.dtype).div_(1 - self.p)

    def __call__(self, probabilities: Tensor) -> Tensor:
        """Of a whole sequence in its natural order, `[B, H, T, T]`: what `layers.drop` does with a rate."""
        return probabilities * self.factors(probabilities, in_order(probabilities.size(-2), probabilities.size(-1)))


def in_order(queries: int, keys: int) -> Positions:
    """Of so many tokens, from the first on."""
    return lambda device: (torch.arange(queries, device=device), torch.arange(keys, device=device))


# ---- blocks ----------------------------------------------------------------------------------------------------------

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
        raise ValueError(f"{what}: dropout={dropout} is a rate without a seed, and each rank would draw its own mask; give a DropMask, or "
                         "wrap the core in dropout.seeded, as parallelize does")
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
