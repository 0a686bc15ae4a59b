"""Slices of a sequence over ranks: each is laid out by itself, and its queries see the keys of all so far.

    slices of 8 tokens, zigzag, 2 ranks   rank 0: 0 1 6 7 | 8 9 14 15 | ..  rank 1: 2 3 4 5 | 10 11 12 13 | ..
    slice 1 on rank 0                     Q of 8 9 14 15          K, V of 0 1 6 7 8 9 14 15

A pipeline over slices (TeraPipe, Seq1F1B) computes them one after the other; `sliced` is the layout of the
whole sequence. A core that is given fewer queries than keys takes them for the last that each rank holds
(layout.last): with sliced(layout, the slices so far) these are the slice's. Earlier slices are seen in full,
the own one as without slices, so work is as even as for a sequence. `last_attention` is that core for
Ulysses.

A ring carries K and V of all slices so far for each slice, (k+1)/2 times a whole sequence's bytes for k equal
ones, forward and backward; so does an all-to-all, of K and V. Memory: as the core, for a slice's queries. Li
et al. 2021 (TeraPipe), arXiv:2102.07988, section 3.1; Sun et al. 2024 (Seq1F1B), arXiv:2406.03488, section 3.
Differs: there a sequence is cut over stages in time only, here over ranks as well.
"""

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from minitrain.attention.kernel import FUSED, Kernel, recomputed
from minitrain.attention.placed import check_places, placed
from minitrain.context.core_names import slice_lengths
from minitrain.context.layout import Layout, moved
from minitrain.context.ring import Rings, ring_backward, ring_forward


def sliced(layout: Layout, slices: int | Sequence[int]) -> Layout:
    """`slices`: how many, as even as each rank can cut its tokens, or the tokens of each on all ranks."""

    def whole(rank: int, ranks: int, length: int) -> list[range]:
        lengths, runs = slice_lengths(length, slices, ranks), []
        for number, (start, size) in enumerate(zip(accumulate(lengths, initial=0), lengths)):
            try:
                runs += moved(layout(rank, ranks, size), start)
            except ValueError as error:
                what = f"slice {number} of {len(lengths)}, T={length}: {str(error).split(';')[0]}"
                raise ValueError(f"{what}; cut other slices, or pad the sequence") from None
        return runs

    return whole


def last_attention(q: Tensor, k: Tensor, v: Tensor, *, kernel: Kernel = FUSED, **places) -> Tensor:
    """q `[B, H, t, K]`, the last t of T tokens, k, v `[B, H_kv, T, K]` -> `[B, H, t, K]`, causal."""
    check_places("last_attention", q, **places)
    before, length = k.size(-2) - q.size(-2), k.size(-2)
    if before < 0:
        what = f"last_attention: {q.size(-2)} queries end where {length} keys do"
        raise ValueError(f"{what}, so the first ones see nothing; give them their keys")
    slices = lambda rank, ranks, length: [range(before), range(before, length)] if before else [range(length)]
    alone = Rings((), slices, causal=True)  # a ring without ranks
    return recomputed(ring_forward, ring_backward, q, k, v, alone, placed(kernel, **places))
