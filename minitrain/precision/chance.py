"""Rounding by chance whose random numbers are a function of the place: alike in every layout, stored nowhere.

    bits of element i of `name` in step t = hashed(seed / t / name, i)        64, as in attention/placed.py
    weight, mean, mean of squares             21 of them each, a number k · 2^-21 in [0, 1)

A float32 has 16 bits more than the bfloat16 that it becomes, so 21 are enough for E[rounded] = x to the bit.
Ranks with the same element draw the same number, and one with a slice the numbers of its slice: equal
gradients give equal weights in every layout. `step` counts the updates of the parameter and is saved with its
moments. To the nearest an update below 1/512 of the weight is lost every time; by chance nothing is on
average. Memory while a tensor is updated: 24 bytes per element to hash, of which 8 stay, then 21 more. Gupta
et al. 2015, arXiv:1502.02551, section 3; Zamirai et al. 2020, arXiv:2010.06192, section 4. Differs: by place
instead of one stream of numbers per device; moments in bfloat16 are rounded by chance too.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from minitrain.attention.placed import Places, hashed, shifted
from minitrain.precision.formats import BF16
from minitrain.precision.rounding import round_to

FIELD = 21  # bits of a number, three in a hash


class Chance:
    """`pieces` of what is updated, in its order: the global name of a parameter, and a function that gives
    the numbers, in the whole of it, of the elements that are here (sharding.numbers), on any `device`."""

    def __init__(self, pieces: Iterable[tuple[str, Callable[..., Tensor]]], seed: int = 0):
        self.pieces, self.places = list(pieces), Places(seed)

    def bits(self, step: int, like: Tensor) -> Tensor:
        """int64, one for each element; of padding, which comes last, 0."""
        self.places.at(step, 0)
        here = dict(device=like.device)  # the host's, if it updates
        found = [hashed(self.places.seed_of(f"{name} rounded"), index(**here)) for name, index in self.pieces]
        padding = like.numel() - sum(len(bits) for bits in found)
        return torch.cat([*found, torch.zeros(padding, dtype=torch.int64, device=like.device)])


def draws(bits: Tensor, number: int) -> Tensor:
    """float32 in [0, 1): of the weight 0, of its moments 1 and 2."""
    field = shifted(bits, number * FIELD).bitwise_and_(2**FIELD - 1)
    return field.float().mul_(2.0**-FIELD)


def keep_by_chance(stored: Tensor, exact: Tensor, bits: Tensor, number: int) -> None:
    """`stored`, in bfloat16, becomes one of the two neighbours of each number of `exact`."""
    stored.copy_(round_to(exact, BF16, "stochastic", generator=draws(bits, number).view(exact.shape)))
