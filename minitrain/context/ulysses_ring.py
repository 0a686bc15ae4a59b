"""Heads and rings together: Ulysses over one axis of a mesh, ring attention over the other, or over two more.

    n = u · r ranks, Mesh(ring=r, ulysses=u)          USP, or the 2D-attention of LoongTrain
    Q[B, H, T/n, K] -all-to-all-> Q[B, H/u, T/r, K] -ring-> O[B, H/u, T/r, K] -all-to-all-> O[B, H, T/n, K]

u divides the heads and r may be anything, so there may be more ranks than heads. Bytes are the sum of both:
    over ulysses    (u-1)/u · (2H + 2H'_kv) · B·T/n·K    backward the same     H'_kv: with copies for u
    over ring       (r-1) · 2 · H'_kv/u · B·T/r·K        backward twice that

The ring wants its layout on each of *its* ranks, after the all-to-all. So the tokens of a ring rank are laid
out first and then dealt in u pieces: `dealt(zigzag, u)`, for the ranks of mesh.group("ring", "ulysses").

    r=2, u=2, T=8  ring rank 0: 0 1 6 7  1: 2 3 4 5     rank (0,0): 0 1  (0,1): 6 7  (1,0): 2 3  (1,1): 4 5

Neighbours in the order of axes share a node: head-first, Mesh(ring=, ulysses=), keeps the all-to-alls inside
and hides what crosses; context-first, Mesh(ulysses=, ring=), keeps the ring inside. Bytes per axis are the
same. Fang and Zhao 2024, USP, arXiv:2405.07719; Gu et al. 2024, LoongTrain, arXiv:2406.18485. Differs: any
layout in the ring, from one function; K/V heads are copied only as far as u asks for it.
"""

import math
from functools import partial

from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.attention.kernel import FUSED
from minitrain.attention.placed import placed
from minitrain.context.double_ring import check_crossing, double_ring_attention
from minitrain.context.layout import Layout, contiguous, part, sliced, zigzag
from minitrain.context.ring import Rings, ring_attention
from minitrain.context.ulysses import ulysses_attention


def usp_attention(q, k, v, *, ulysses: ProcessGroup, ring: ProcessGroup, **settings) -> Tensor:
    """q `[B, H, T/n, K]`, k, v `[B, H_kv, T/n, K]`, tokens as `dealt(layout, u)` says -> `[B, H, T/n, K]`.
    `settings`: layout (of the ring), slices, causal, kernel, bias, dropout (`heads_and_rings`)."""
    core = partial(ring_attention, group=ring)
    return heads_and_rings(q, k, v, ulysses, dict(ring=ring), core, **settings)


def loongtrain_attention(q, k, v, *, ulysses, outer, inner, **settings) -> Tensor:
    """The same with a double ring; its ranks are numbered as in mesh.group("outer", "inner")."""
    core = partial(double_ring_attention, outer=outer, inner=inner)
    return heads_and_rings(q, k, v, ulysses, dict(outer=outer, inner=inner), core, **settings)


def heads_and_rings(
    q, k, v, ulysses, rings, core, layout=zigzag, slices=(), causal=True, kernel=FUSED, **places
) -> Tensor:
    """`rings`: their groups by name, `layout`: of the tokens over them. `slices`: the tokens of each slice so
    far, of which the queries are the last; each is dealt by itself. `places`: bias, dropout (placed.py)."""
    check_crossing(ulysses=ulysses, **rings)
    through = contiguous
    if slices:
        ranks = math.prod(group.size() for group in rings.values())
        layout, through = sliced(layout, slices), sliced(contiguous, [size // ranks for size in slices])
    # what the rings would refuse is refused here, before the all-to-all
    Rings(tuple(rings.values()), layout, causal).runs([0] * len(rings), k.size(2) * ulysses.size())
    placed(kernel, **places)
    core = partial(core, layout=layout, causal=causal, kernel=kernel)
    return ulysses_attention(q, k, v, group=ulysses, core=core, layout=through, **places)


def dealt(layout: Layout, ulysses: int, *, ulysses_inner: bool = True) -> Layout:
    """The layout of n = r · u ranks in mesh order: the tokens of a ring rank j, in `layout`, dealt to u ranks
    in equal pieces. Ranks are numbered j · u + i (`ulysses_inner`, head-first), else i · r + j."""

    def both(rank: int, ranks: int, length: int) -> list[range]:
        if ranks % ulysses or length % ranks or not length:
            what = f"dealt: T={length} over {ranks} ranks, {ulysses} of them to a ring rank"
            raise ValueError(f"{what}; ranks must be a multiple of {ulysses} and T of {ranks}")
        ring = ranks // ulysses
        j, i = divmod(rank, ulysses) if ulysses_inner else reversed(divmod(rank, ring))
        return part(layout(j, ring, length), i * (length // ranks), length // ranks)

    return both
