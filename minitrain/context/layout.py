"""Who holds which tokens: a sequence is laid out over ranks once, and its positions travel with it.

    contiguous   0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3      one run of T/n tokens
    zigzag       0 0 1 1 2 2 3 3 3 3 2 2 1 1 0 0      pieces r and 2n-1-r of 2n: an early one and a late one
    striped      0 1 2 3 0 1 2 3 0 1 2 3 0 1 2 3      every n-th token

A layout is a function `(rank, ranks, length) -> runs`, a run being a range of positions, all with one stride.
Everything else follows: `split` cuts a batch by it, `positions` are what RoPE and learned positions need, and
`tiles` says which rectangles of the score matrix two ranks have between them: under a causal mask one is
computed in full, or as a triangle ("causal"), or not at all, without a mask of numbers. `sliced` lays out
each slice of a pipeline over slices by itself; its queries see the keys of all slices so far.

Sends nothing (`join` gathers (n-1)/n of the whole). Memory: `split` copies. Zig-zag: Megatron-LM's context
parallelism, and Llama 3 (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2). Striped: Brandon et al. 2023,
arXiv:2311.09431, section 3. Slices: Li et al. 2021 (TeraPipe), arXiv:2102.07988, section 3.1; Sun et al. 2024
(Seq1F1B), arXiv:2406.03488, section 3. Differs: one description for masks, work and tests.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.attention.placed import positions_of
from minitrain.context.core_names import slice_lengths
from minitrain.ranks import collectives
from minitrain.ranks.checks import require_fractions, require_ints, require_positive_ints

Layout = Callable[[int, int, int], list[range]]


def contiguous(rank: int, ranks: int, length: int) -> list[range]:
    size = _piece("contiguous", rank, ranks, length, ranks)
    return [range(rank * size, (rank + 1) * size)]


def zigzag(rank: int, ranks: int, length: int) -> list[range]:
    size = _piece("zigzag", rank, ranks, length, 2 * ranks)
    return [range(piece * size, (piece + 1) * size) for piece in (rank, 2 * ranks - 1 - rank)]


def striped(rank: int, ranks: int, length: int) -> list[range]:
    _piece("striped", rank, ranks, length, ranks)
    return [range(rank, length, ranks)]


def _piece(name: str, rank: int, ranks: int, length: int, pieces: int) -> int:
    require_positive_ints(ranks=ranks)
    require_ints(rank=rank, length=length)
    if rank >= ranks:
        raise ValueError(f"{name}: rank={rank}; with {ranks} ranks use 0 to {ranks - 1}")
    if length % pieces or not length:
        fits = -(-max(length, 1) // pieces) * pieces
        raise ValueError(f"{name}: T={length} is no multiple of {pieces} pieces; pad the sequence to {fits}")
    return length // pieces


def positions(layout: Layout, group: ProcessGroup, length: int, device: torch.device | None = None) -> Tensor:
    """`[T/n]` positions of this rank's tokens, in the order in which it holds them."""
    return positions_of(layout(group.rank(), group.size(), length), device)


def split(x: Tensor, layout: Layout, group: ProcessGroup, dim: int = 1) -> Tensor:
    """This rank's part along `dim` of an x that all ranks have: `[B, T, ..]` -> `[B, T/n, ..]`."""
    return x.index_select(dim, positions(layout, group, x.size(dim), x.device))


def join(x: Tensor, layout: Layout, group: ProcessGroup, dim: int = 1) -> Tensor:
    """The whole in its natural order, on all ranks, outside autograd: `[B, T/n, ..]` -> `[B, T, ..]`."""
    ranks, length = group.size(), x.size(dim) * group.size()
    order = positions_of(sum((layout(rank, ranks, length) for rank in range(ranks)), []), x.device)
    return collectives.all_gather(x.detach(), group, dim).index_select(dim, order.argsort())


@dataclass(frozen=True)
class Tile:
    """Scores of queries and keys, by places on two ranks, which hold `runs`; `causal`: i sees keys 0..i."""

    queries: slice
    keys: slice
    causal: bool = False
    runs: tuple[list[range], list[range]] = field(default=(), compare=False, repr=False)

    @property
    def entries(self) -> int:
        """Scores that count."""
        q, k = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        return q * (q + 1) // 2 if self.causal else q * k

    @property
    def places(self) -> tuple[list[range], ...]:
        """Positions in the sequence, of its queries and of its keys."""
        both = zip(self.runs, (self.queries, self.keys))
        return tuple(part(runs, tokens.start, tokens.stop - tokens.start) for runs, tokens in both)


def sliced(layout: Layout, slices: int | Sequence[int]) -> Layout:
    """`slices`: how many, as even as each rank can cut its tokens, or the tokens of each on all ranks.

    slices of 8, zigzag, 2 ranks   rank 0: 0 1 6 7 | 8 9 14 15 | ..  rank 1: 2 3 4 5 | 10 11 12 13 | ..
    slice 1 on rank 0              Q of 8 9 14 15          K, V of 0 1 6 7 8 9 14 15"""

    def whole(rank: int, ranks: int, length: int) -> list[range]:
        lengths, runs = slice_lengths(length, slices, ranks), []
        for number, (start, size) in enumerate(zip(accumulate(lengths, initial=0), lengths)):
            try:
                here = layout(rank, ranks, size)
            except ValueError as error:
                what = f"slice {number} of {len(lengths)}, T={length}: {str(error).split(';')[0]}"
                raise ValueError(f"{what}; cut other slices, or pad the sequence") from None
            runs += [range(run.start + start, run.stop + start, run.step) for run in here]
        return runs

    return whole


def last(runs: list[range], count: int) -> list[range]:
    """The last `count` tokens of these runs: the queries, where fewer come than keys (`sliced`)."""
    return part(runs, sum(map(len, runs)) - count, count)


def part(runs: list[range], start: int, size: int) -> list[range]:
    """`size` tokens of these runs, from the start-th on."""
    parts = []
    for run in runs:
        parts.append(run[max(start, 0) : max(start + size, 0)])
        start -= len(run)
    return [run for run in parts if run]


def tiles(queries: list[range], keys: list[range], causal: bool) -> list[Tile]:
    """What one rank's queries see of another rank's keys (or its own), as few tiles as possible."""
    return [replace(tile, runs=(queries, keys)) for tile in _tiles(queries, keys, causal)]


def _tiles(queries: list[range], keys: list[range], causal: bool) -> list[Tile]:
    everything = slice(0, sum(map(len, queries)))
    if not causal:
        return [Tile(everything, slice(0, sum(map(len, keys))))]
    if queries == keys and all(a[-1] < b[0] for a, b in zip(queries, queries[1:])):
        return [Tile(everything, slice(0, sum(map(len, keys))), causal=True)]
    before, first = 0, min(run[0] for run in queries)
    while keys and keys[0][-1] <= first:  # earlier slices: all queries see all of them
        before, keys = before + len(keys[0]), keys[1:]
    if before:
        moved = lambda keys: slice(keys.start + before, keys.stop + before)
        later = _tiles(queries, keys, causal) if keys else []
        return [Tile(everything, slice(0, before)), *(replace(tile, keys=moved(tile.keys)) for tile in later)]
    pairs = [(q, here, k, there) for q, here in _places(queries) for k, there in _places(keys)]
    return _joined([tile for pair in pairs for tile in _between(*pair)])


def _between(q: range, here: slice, k: range, there: slice) -> Iterator[Tile]:
    """Two runs: all, nothing, or a triangle where they interleave."""
    if q[0] >= k[-1]:
        yield Tile(here, there)
    elif q[-1] >= k[0]:
        if q.step != k.step or len(q) != len(k) or abs(q.start - k.start) >= q.step:
            raise ValueError(f"the mask between {q} and {k} is no triangle; lay queries and keys out alike")
        shift = int(q.start < k.start)  # striped, and the keys come one place later: query i sees keys 0..i-1
        if len(q) > shift:
            later, earlier = slice(here.start + shift, here.stop), slice(there.start, there.stop - shift)
            yield Tile(later, earlier, causal=True)


def _joined(tiles: list[Tile]) -> list[Tile]:
    """Full tiles that touch become one: first along the queries, then along the keys."""

    def touch(a: Tile, b: Tile) -> Tile | None:
        if a.causal or b.causal:
            return None
        if a.keys == b.keys and a.queries.stop == b.queries.start:
            return Tile(slice(a.queries.start, b.queries.stop), a.keys)
        if a.queries == b.queries and a.keys.stop == b.keys.start:
            return Tile(a.queries, slice(a.keys.start, b.keys.stop))

    for i, a in enumerate(tiles):
        for j, b in enumerate(tiles):
            if i != j and (both := touch(a, b)):
                return _joined([tile for n, tile in enumerate(tiles) if n not in (i, j)] + [both])
    return tiles


def _places(runs: list[range]) -> Iterator[tuple[range, slice]]:
    """Each run with the places of its tokens on the rank."""
    start = 0
    for run in runs:
        yield run, slice(start, start + len(run))
        start += len(run)


# ---- how even the work of a ring is ------------------------------------------------------------------------


def entries(layout: Layout, ranks: int, length: int, *, diagonal=1) -> list[list[Fraction]]:
    """[step][rank]: scores that a causal ring computes and that count: between the queries of the rank and
    the keys of the rank so many steps before, a token's score with itself as `diagonal` (papers: 1/2).

    With c = T/n tokens per rank:  diagonal=1/2      diagonal=1                 large c, n = 2, 4, 8
        contiguous                 n / (2n-1)        (nc+1) / ((2n-1)c+1)       2/3, 4/7, 8/15
        striped                    nc / (nc+n-1)     (nc+1) / (nc+n)            1
        zigzag                     1, and c²/2 in every step on every rank"""
    require_fractions(diagonal=diagonal)
    require_positive_ints(ranks=ranks, length=length)
    runs = [layout(rank, ranks, length) for rank in range(ranks)]
    # in step 0 every token's score with itself is one of them
    less = length // ranks * (1 - Fraction(diagonal))

    def count(step: int, rank: int) -> Fraction:
        seen = tiles(runs[rank], runs[(rank - step) % ranks], causal=True)
        return sum(tile.entries for tile in seen) - (less if step == 0 else 0)

    return [[count(step, rank) for rank in range(ranks)] for step in range(ranks)]


def efficiency(layout: Layout, ranks: int, length: int, *, diagonal=1) -> Fraction:
    """Work / (ranks x time), if each step takes as long as its fullest rank."""
    table = entries(layout, ranks, length, diagonal=diagonal)
    return Fraction(sum(map(sum, table)), ranks * sum(map(max, table)))
