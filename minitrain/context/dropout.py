"""Dropout over ranks that draw: seeds that all agree on, and activations dropped by their place (minitrain/dropout.py has the mask)."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minitrain.dropout import DropMask


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
