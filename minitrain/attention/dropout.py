"""Dropout whose mask is a function of the position: the same on any rank, in any order, without a state.

    M[b, h, i, j] = keep(seed; row b, head h, query i, key j)     y = x M / (1-p)     activations: channel j

A generator gives its n-th number after n-1 others: two ranks that compute one score, or one that does so
again in recomputation, would draw different ones. A counter-based generator hashes a counter: here the place
in the whole batch and model, with a seed of the run's seed, the step and the layer's name. So every layout,
schedule and recomputation drops what one process drops; no mask is kept or sent. The hash is splitmix64's,
once for each coordinate: s = mix(s + γ (c + 1)), uniform over 64 bits; M = [s >= p 2^64]. Sends nothing.
Memory: 16 bytes per element while a mask is made.
Salmon et al. 2011 (Random123), SC'11, section 2; Steele et al. 2014, OOPSLA (splitmix64). Differs: their
counter is a place in the kernel's grid on one device, ours in the model. Megatron-LM keeps random streams.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

GAMMA = 0x9E3779B97F4A7C15 - 2**64  # 2^64 over the golden ratio, as a signed number
ROUNDS = (30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)
Positions = Callable[[torch.device], tuple[Tensor, Tensor]]  # of queries and of keys, on that device


def mix(z: Tensor) -> Tensor:
    """int64 -> int64, in place: a permutation; each bit of the result depends on all bits. Products wrap."""
    for shift, factor in ROUNDS:
        z.bitwise_xor_(shifted(z, shift)).mul_(factor)
    return z.bitwise_xor_(shifted(z, 31))


def shifted(z: Tensor, places: int) -> Tensor:
    """To the right, zeros in front; torch's >> of signed numbers copies the sign."""
    return (z >> places).bitwise_and_(2 ** (64 - places) - 1)


def keep(p: float, seed: Tensor | int, rows: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """int64 `[B]`, `[H]`, `[Tq]`, `[Tk]`, global numbers -> bool `[B, H, Tq, Tk]`: True at a rate 1-p."""
    state = hashed(seed, rows[:, None, None, None], heads[:, None, None], queries[:, None], keys)
    return state >= round(p * 2**64) - 2**63


def uniform(seed: Tensor | int, rows: Tensor, positions: Tensor) -> Tensor:
    """int64 `[B]` and `[B, T]` -> float64 `[B, T]`, 53 bits in [0, 1)."""
    return shifted(hashed(seed, rows[:, None], positions), 11).double() * 2.0**-53


def hashed(seed: Tensor | int, *places: Tensor) -> Tensor:
    """64 bits for every combination of these coordinates, which fit each other's shapes."""
    state = mix(torch.as_tensor(seed, dtype=torch.int64, device=places[-1].device).clone())
    for place in places:
        state = mix(state + (place + 1) * GAMMA)
    return state


class DropMask(NamedTuple):
    """The `dropout` of a call of a core: rate, seed, global numbers of its first row, head and token."""

    p: float
    seed: Tensor | int
    first_row: int = 0
    first_head: int = 0
    first_token: int = 0

    def keep(self, batch: int, heads: int, queries: Tensor, keys: Tensor) -> Tensor:
        """bool `[B, H, Tq, Tk]` for positions `[Tq]` and `[Tk]`."""
        rows = torch.arange(self.first_row, self.first_row + batch, device=keys.device)
        heads = torch.arange(self.first_head, self.first_head + heads, device=keys.device)
        return keep(self.p, self.seed, rows, heads, queries + self.first_token, keys + self.first_token)

    def factors(self, like: Tensor, positions: Positions) -> Tensor:
        """M / (1-p) for the probabilities `like` `[B, H, Tq, Tk]` at these positions."""
        return self.keep(*like.shape[:2], *positions(like.device)).to(like.dtype).div_(1 - self.p)

    def __call__(self, probabilities: Tensor) -> Tensor:
        """Dropped probabilities of a whole sequence in its natural order, `[B, H, T, T]`."""
        batch, heads, *tokens = probabilities.shape
        kept = self.keep(batch, heads, *in_order(*tokens)(probabilities.device))
        return torch.where(kept, probabilities / (1 - self.p), 0.0)  # autograd keeps a byte a score, no more


def in_order(queries: int, keys: int) -> Positions:
    """Of so many tokens, from the first on."""
    return lambda device: (torch.arange(queries, device=device), torch.arange(keys, device=device))


class Places:
    """Step and first row of the global batch: set by who cuts a batch, read by all dropouts of a rank."""

    def __init__(self, seed: int = 0):
        self.seed, self.step, self.first_row = seed, 0, 0

    def at(self, step: int, first_row: int) -> None:
        self.step, self.first_row = step, first_row

    def again(self) -> Callable[[], AbstractContextManager]:
        """Of what is computed again later: inside of it(), step and rows are those of now."""
        return partial(self.during, self.step, self.first_row)

    @contextmanager
    def during(self, step: int, first_row: int) -> Iterator[None]:
        outside = self.step, self.first_row
        self.at(step, first_row)
        try:
            yield
        finally:
            self.at(*outside)

    def seed_of(self, site: str) -> int:
        """63 bits: another mask in each step and at each site."""
        text = f"{self.seed}/{self.step}/{site}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def all_of(positions: Tensor) -> Tensor:
    return positions


class DropRows(nn.Module):
    """`layers.Dropout` by position; `local_positions` picks those of x `[B, T, D]` where tokens are cut."""

    def __init__(self, p: float, places: Places, site: str, local_positions: Callable = all_of):
        super().__init__()
        self.p, self.places, self.site, self.local_positions = p, places, site, local_positions

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if not (self.p and self.training):
            return x
        mask = DropMask(self.p, self.places.seed_of(self.site), self.places.first_row)
        channels = torch.arange(x.size(-1), device=x.device)
        kept = mask.keep(x.size(0), 1, self.local_positions(positions), channels).squeeze(1)
        return torch.where(kept, x / (1 - self.p), 0.0)


def drop_scores(core: Callable, places: Places, site: str, part: int = 0) -> Callable:
    """core(q, k, v, .., dropout=p) with the mask of this site; this rank has part `part` of the heads."""

    def run(q: Tensor, *others: Tensor, dropout: float = 0.0, **more) -> Tensor:
        if dropout:
            more["dropout"] = DropMask(dropout, places.seed_of(site), places.first_row, part * q.size(1))
        return core(q, *others, **more)

    return run


def draws_by_place(places: Places, site: str) -> Callable[[Tensor], Tensor]:
    """positions `[B, T]` -> a number in [0, 1) for each, whichever rank draws it (a router's)."""

    def draws(positions: Tensor) -> Tensor:
        rows = torch.arange(places.first_row, places.first_row + len(positions), device=positions.device)
        return uniform(places.seed_of(site), rows, positions)

    return draws


def drop_by_place(
    layers: Iterable[nn.Module], places: Places, part: int = 0, local_positions: Callable = all_of
) -> None:
    """Every dropout of these layers, in place: of activations, of scores, and what routers draw."""
    for layer in layers:
        for name, module in list(layer.named_children()):
            if isinstance(module, nn.Dropout):
                setattr(layer, name, DropRows(module.p, places, f"{layer.name}.{name}", local_positions))
        if hasattr(layer, "mlp") and hasattr(layer.mlp, "router"):
            layer.mlp.router.draws = draws_by_place(places, f"{layer.name}.router")
        if hasattr(layer, "attention"):
            layer.attention.core = drop_scores(layer.attention.core, places, f"{layer.name}.scores", part)
