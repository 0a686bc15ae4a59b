"""Slices of a sequence on ranks that share it: every slice is laid out by itself, its queries meet the keys of all slices so far.

    3 slices of 8 tokens, zigzag, 2 ranks      rank 0: 0 1 6 7 | 8 9 14 15 | 16 17 22 23      rank 1: 2 3 4 5 | 10 11 12 13 | 18 19 20 21
    slice 1 on rank 0                          Q of 8 9 14 15          K, V of 0 1 6 7 8 9 14 15

A pipeline over slices (TeraPipe, Seq1F1B) computes them one after the other; `sliced` is the layout of the whole sequence for it, which
cuts batches and says where a token is. A core that is given fewer queries than keys takes them for the last ones that each rank holds
(layout.last): with sliced(layout, the slices so far) these are the slice's. Earlier slices are seen in full, the own one as without
slices, so zig-zag and striped slices are as even as sequences. `last_attention` is that core of one device, which Ulysses needs inside.

A ring carries K and V of all slices so far round for each slice: (k+1)/2 times the bytes of a whole sequence, for k equal ones, forward
and backward; an all-to-all likewise, of K and V. Memory: as the core, for a slice's queries. Sends nothing itself.
Raises ValueError in one line for slices that do not add up, and for one that the layout does not divide, which it names.
Li et al. 2021 (TeraPipe), arXiv:2102.07988, section 3.1, and Sun et al. 2024 (Seq1F1B), arXiv:2406.03488, section 3, have the slices.
Differs: there a sequence is cut over stages in time only, here over ranks as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from minitrain.attention.alibi import Alibi
from minitrain.attention.dropout import DropMask
from minitrain.attention.kernel import FUSED, GradSum, Kernel, OnlineSoftmax, add_tiles_backward, recomputed
from minitrain.attention.placed import check_places, placed
from minitrain.context.layout import Layout, Tile, tiles
from minitrain.context.names import even_slices


def sliced(layout: Layout, slices: int | Sequence[int]) -> Layout:
    """`slices`: how many, as even as each rank can cut its tokens, or the tokens of each, on all ranks together."""

    def whole(rank: int, ranks: int, length: int) -> list[range]:
        lengths = even_slices(length, slices, ranks) if isinstance(slices, int) else list(slices)
        if sum(lengths) != length:
            raise ValueError(
                f"slices of {lengths} tokens are {sum(lengths)}, the sequence has {length}; make them add up"
            )
        return [
            range(run.start + start, run.stop + start, run.step)
            for number, (start, size) in enumerate(zip(accumulate(lengths, initial=0), lengths))
            for run in _runs(layout, rank, ranks, size, f"slice {number} of {len(lengths)}, T={length}")
        ]

    return whole


def _runs(layout: Layout, rank: int, ranks: int, size: int, what: str) -> list[range]:
    try:
        return layout(rank, ranks, size)
    except ValueError as error:
        raise ValueError(
            f"{what}: {str(error).split(';')[0]}; cut other slices, or pad the sequence"
        ) from None


# ---- on one device ---------------------------------------------------------------------------------------------------


def last_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kernel: Kernel = FUSED,
    bias: Alibi | None = None,
    dropout: DropMask | float = 0.0,
) -> Tensor:
    """q `[B, H, t, K]`, the last t of T tokens, k, v `[B, H_kv, T, K]` -> `[B, H, t, K]`, causal. A core for the model's attention."""
    check_places("last_attention", q, bias, dropout)
    if q.size(-2) > k.size(-2):
        raise ValueError(
            f"last_attention: {q.size(-2)} queries end where {k.size(-2)} keys do, so the first ones see nothing; give them "
            "their keys"
        )
    before, length = k.size(-2) - q.size(-2), k.size(-2)
    keys = [range(before), range(before, length)] if before else [range(length)]
    return recomputed(
        _forward, _backward, q, k, v, tiles(keys[-1:], keys, causal=True), placed(kernel, bias, dropout)
    )


def _forward(q: Tensor, k: Tensor, v: Tensor, seen: list[Tile], kernel: Kernel) -> tuple[Tensor, Tensor]:
    found = OnlineSoftmax(q)
    found.add_tiles(seen, k, v, kernel)
    return found.result()


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: list[Tile], kernel: Kernel
) -> tuple[Tensor, ...]:
    dq, dk, dv = sums = [GradSum(x) for x in (q, k, v)]
    add_tiles_backward(seen, dout, q, k, v, out, lse, dq, dk, dv, kernel)
    return tuple(dx.total.to(q.dtype) for dx in sums)
