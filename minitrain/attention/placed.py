"""What depends on the positions of a score: ALiBi's bias, the mask of dropout, and documents, also by tiles.

    S = Q Kᵀ / sqrt(K) + A          A[b, h, i, j] = - slope_h (i - j)       slopes: a geometric sequence
    O = (P ∘ M') V                  M' = M / (1-p)         M[b, h, i, j] = keep(seed; b, h, i, j)

A generator gives its n-th number after n-1 others: ranks that compute one score, or recomputation, would draw
different ones. Here a number is the hash of a counter: of the place in the whole batch and model (row b, head
h, query i, key j; of activations channel j), with a seed of the run's seed, the step and the layer's name. So
every layout, schedule and recomputation drops what one process drops; no mask is kept or sent. The hash is
splitmix64's, once for each coordinate: s = mix(s + γ (c + 1)), uniform over 64 bits; M = [s >= p 2^64].

Rows may be packed: documents laid end to end, of which none sees another. Of each tile and row only what is
within a document is computed, so scores that count are Σ l (l+1)/2, not T (T+1)/2.
A core that has the whole sequence takes the positions that came with its tokens (`full`); one that computes
tiles, over ranks or slice after slice, knows those of queries and keys of every tile (`between`).
Sends nothing. Memory: 16 bytes per score for M, H scores of a tile for A, a tile of scores with dropout or on
CUDA. Press et al. 2021 (ALiBi), arXiv:2108.12409, section 3; Dao et al. 2022, arXiv:2205.14135, appendix B;
Salmon et al. 2011 (Random123), SC'11, section 2; Steele et al. 2014, OOPSLA (splitmix64). Differs: distances
come from positions; counters are places in the model, theirs in the grid of a kernel on one device.
"""

import hashlib
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import accumulate, pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minitrain.attention.kernel import FUSED, PLAIN, Kernel, empty_result, merge
from minitrain.ranks.checks import require_fractions, require_positive_ints

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
        places = (torch.arange(size, device=probabilities.device) for size in tokens)
        kept = self.keep(batch, heads, *places)
        return torch.where(kept, probabilities / (1 - self.p), 0.0)  # autograd keeps a byte a score, no more


class Documents(NamedTuple):
    """The `documents` of a call of a core: the lengths of those in each row `[B]`, on all ranks together."""

    lengths: Sequence[Sequence[int]]

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """(row, start, end) of each."""
        for row, lengths in enumerate(self.lengths):
            for start, end in pairwise(accumulate(lengths, initial=0)):
                yield row, start, end

    def starts(self, positions: Tensor) -> Tensor:
        """Positions `[T]` in the rows -> `[B, T]`: where the document of each begins."""
        starts = [[] for _ in self.lengths]
        for row, start, end in self.spans():
            starts[row] += [start] * (end - start)
        return torch.tensor(starts, device=positions.device).index_select(1, positions)

    def cut(
        self, queries: list[range], keys: list[range], causal: bool
    ) -> Iterator[tuple[int, slice, slice]]:
        """(row, queries, keys) by their places in a tile that holds these positions: what they see of their
        own documents. `causal`: it is a triangle, whose last query sees the last key."""
        last = max(queries[-1][-1], keys[-1][-1])
        if any(sum(lengths) <= last for lengths in self.lengths):
            raise ValueError(f"position {last} is in no document: their lengths must add up to the row's")
        for (q_at, q), (k_at, k) in product(ascending(queries), ascending(keys)):
            shift = sum(map(len, k)) - sum(map(len, q))
            for row, start, end in self.spans():
                q0, q1, k0, k1 = (before(runs, place) for runs in (q, k) for place in (start, end))
                if causal:
                    q0, k1 = max(q0, k0 - shift), min(k1, q1 + shift)
                if q0 < q1 and k0 < k1:
                    yield row, slice(q_at + q0, q_at + q1), slice(k_at + k0, k_at + k1)


def ascending(runs: list[range]) -> list[tuple[int, list[range]]]:
    """(place of the first, runs), as long as positions grow."""
    parts, at = [], 0
    for run in runs:
        if not parts or run[0] < parts[-1][1][-1][-1]:
            parts.append((at, []))
        parts[-1][1].append(run)
        at += len(run)
    return parts


def before(runs: list[range], position: int) -> int:
    """How many of them stand before it."""
    return sum(bisect_left(run, position) for run in runs)


class Places:
    """Step, first row and documents of a rank's rows: set by who cuts a batch, read by dropout, attention."""

    def __init__(self, seed: int = 0):
        self.seed, self.step, self.first_row, self.documents = seed, 0, 0, None

    def at(self, step: int | None, first_row: int, documents: Sequence[Sequence[int]] | None = None) -> None:
        self.step, self.first_row = step, first_row
        self.documents = None if documents is None else Documents(documents)

    def again(self) -> Callable[[], AbstractContextManager]:
        """Of what is computed again later: inside of it(), all is as it is now."""
        return partial(self.during, self.step, self.first_row, self.documents and self.documents.lengths)

    def in_document(self, positions: Tensor) -> Tensor:
        """Positions in the rows -> those in their documents, `[B, T]` (as they are, where there are none)."""
        return positions - self.documents.starts(positions) if self.documents else positions

    @contextmanager
    def during(self, step: int | None, first_row: int, documents=None) -> Iterator[None]:
        outside = self.step, self.first_row, self.documents and self.documents.lengths
        self.at(step, first_row, documents)
        try:
            yield
        finally:
            self.at(*outside)

    def seed_of(self, site: str) -> int:
        """63 bits: another mask in each step and at each site."""
        if self.step is None:
            raise ValueError(f"{site} drops, and the batch does not say of which step and rows: give them")
        text = f"{self.seed}/{self.step}/{site}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


class DropRows(nn.Module):
    """`layers.Dropout` by position; `local_positions` picks those of x `[B, T, D]` where tokens are cut."""

    def __init__(self, p: float, places: Places, site: str, local_positions: Callable | None = None):
        super().__init__()
        self.p, self.places, self.site, self.local_positions = p, places, site, local_positions

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if not (self.p and self.training):
            return x
        mask = DropMask(self.p, self.places.seed_of(self.site), self.places.first_row)
        channels = torch.arange(x.size(-1), device=x.device)
        if self.local_positions:
            positions = self.local_positions(positions)
        kept = mask.keep(x.size(0), 1, positions, channels).squeeze(1)
        return torch.where(kept, x / (1 - self.p), 0.0)


def drop_scores(core: Callable, places: Places, site: str, part: int = 0) -> Callable:
    """core(q, k, v, .., dropout=p) with this site's mask and the rows' documents; `part`: which heads."""

    def run(q: Tensor, *others: Tensor, dropout: float = 0.0, **more) -> Tensor:
        if places.documents:
            more["documents"] = places.documents
        if dropout:
            more["dropout"] = DropMask(dropout, places.seed_of(site), places.first_row, part * q.size(1))
        return core(q, *others, **more)

    return run


def draws_by_place(places: Places, site: str, positions: Tensor) -> Tensor:
    """positions `[B, T]` -> a number in [0, 1) for each, whichever rank draws it (a router's)."""
    rows = torch.arange(places.first_row, places.first_row + len(positions), device=positions.device)
    return uniform(places.seed_of(site), rows, positions)


def drop_by_place(
    layers: Iterable[nn.Module], places: Places, part: int = 0, local_positions: Callable | None = None
) -> None:
    """Every dropout of these layers, in place: of activations, of scores, and what routers draw."""
    for layer in layers:
        for name, module in list(layer.named_children()):
            if isinstance(module, nn.Dropout) and module.p:
                setattr(layer, name, DropRows(module.p, places, f"{layer.name}.{name}", local_positions))
        if hasattr(layer, "mlp") and hasattr(layer.mlp, "router"):
            layer.mlp.router.draws = partial(draws_by_place, places, f"{layer.name}.router")
        if hasattr(layer, "attention"):
            layer.attention.core = drop_scores(layer.attention.core, places, f"{layer.name}.scores", part)


# ---- a bias, and tiles with both ---------------------------------------------------------------------------
#
# A is in all scores and hence in lse; backward adds it again. The softmax is over *all* scores, dropped or
# not, so lse and P are those without dropout, results merge by lse, and a ring sends what it sent:
#     O = Σ_blocks e^(lse_b - lse) O_b        O_b = (P_b ∘ M'_b) V_b        dV = (P ∘ M')ᵀ dO
#     dP = M' ∘ (dO Vᵀ)        dS = P ∘ (dP - D)        D = Σ_j P_j dP_j = rowsum(dO · O), still
# A and M are made again in backward. torch's flash kernel for CPUs takes A as a mask, for CUDA none, neither
# takes M: such tiles compute scores as `plain_*` does. Slopes are not trained, and cut as heads.


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
    documents: Documents | None = None

    def on(self, tile) -> Kernel:
        """`tile.places` are the positions of its queries and of its keys (layout.Tile)."""
        return self.between(*tile.places)

    def between(self, queries: list[range], keys: list[range]) -> Kernel:
        if self.documents:
            return self.by_document(queries, keys)
        return self.at(lambda device: (positions_of(queries, device), positions_of(keys, device)))

    def by_document(self, queries: list[range], keys: list[range]) -> Kernel:
        """What queries at these positions see of keys at these within their documents, each by itself."""

        def pieces(causal: bool) -> Iterator[tuple[Kernel, tuple, tuple]]:
            for row, *at in self.documents.cut(queries, keys, causal):
                mask = self.mask and self.mask._replace(first_row=self.mask.first_row + row)
                both = list(zip((queries, keys), at))
                where = lambda device, both=both: tuple(positions_of(r, device)[part] for r, part in both)
                yield self._replace(mask=mask).at(where), *((slice(row, row + 1), slice(None), x) for x in at)

        def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
            out, lse = empty_result(q, v.size(-1))
            for kernel, mine, theirs in pieces(causal):
                merge(out[mine], lse[mine], *kernel.forward(q[mine], k[theirs], v[theirs], causal))
            return out.to(q.dtype), lse

        def backward(dout, q, k, v, out, lse, causal: bool) -> tuple[Tensor, ...]:
            exact = [torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v)]
            for kernel, mine, theirs in pieces(causal):
                saved = q[mine], k[theirs], v[theirs], out[mine], lse[mine]
                parts = kernel.backward(dout[mine], *saved, causal)
                for total, at, part in zip(exact, (mine, theirs, theirs), parts):
                    total[at] += part
            return tuple(total.to(x.dtype) for total, x in zip(exact, (q, k, v)))

        return Kernel(forward, backward)

    def at(self, positions: Positions) -> Kernel:
        more = {}
        if self.bias:
            more["bias"] = partial(self.tile_bias, positions)
        if self.mask:
            more["factors"] = partial(self.mask.factors, positions=positions)
        return Kernel(*(partial(pass_, **more) for pass_ in (PLAIN if self.mask else self.kernel)))

    def tile_bias(self, positions: Positions, device: torch.device, *parts: slice) -> Tensor:
        """`[(B,) H, Tq, Tk]`; or of `parts`, a run of its queries and one of its keys."""
        places = zip(positions(device), parts or (slice(None), slice(None)))
        return self.bias.between(*(x[..., part] for x, part in places))


def positions_of(runs: list[range], device: torch.device | None = None) -> Tensor:
    """`[T/n]` positions of all tokens of these runs, in their order."""
    return torch.cat([torch.arange(run.start, run.stop, run.step, device=device) for run in runs])


def placed(kernel: Kernel = FUSED, bias: Alibi | None = None, dropout=0.0, documents=None) -> Kernel | Placed:
    """The kernel; with ALiBi, a DropMask or Documents one that adds, multiplies by, or stays within them."""
    if isinstance(dropout, int | float):
        require_fractions(dropout=dropout)
    if bias is None and not dropout and documents is None:
        return kernel
    if (bias or dropout) and kernel not in (FUSED, PLAIN):
        what = "dropout" if dropout else "ALiBi"
        raise ValueError(f"{what} needs a kernel that makes scores; use FUSED or PLAIN of kernel.py")
    return Placed(kernel, bias, dropout or None, documents)


def check_places(what: str, q: Tensor, bias: Alibi | None = None, dropout=0.0, documents=None) -> None:
    """What a core by tiles can be given; before anything is sent."""
    wrong = ""
    if bias is not None and not isinstance(bias, Alibi):
        wrong = f"a bias {list(bias.shape)} is about the keys that are here; give an Alibi(slopes, positions)"
    elif bias is not None and bias.positions.dim() != 1:
        wrong = f"ALiBi with positions {list(bias.positions.shape)}, other ones in each row; give [T]"
    elif bias is not None and len(bias.slopes) != q.size(1):
        wrong = f"ALiBi has {len(bias.slopes)} slopes for {q.size(1)} heads; cut both alike"
    elif dropout and not isinstance(dropout, DropMask):
        wrong = f"dropout={dropout} is a rate without a seed; give a DropMask, as drop_scores does"
    elif dropout and not 0 <= dropout.p < 1:
        wrong = f"dropout p={dropout.p}; must be in [0, 1)"
    elif documents and len(documents.lengths) != len(q):
        wrong = f"documents of {len(documents.lengths)} rows for {len(q)}; give the lengths in each row"
    if wrong:
        raise ValueError(f"{what}: {wrong}")
