"""Ulysses: heads attend independently, so an all-to-all trades slices of tokens for slices of heads.

    rank i holds      Q[B, H, T/n, K]   all heads of its tokens      K, V[B, H_kv, T/n, K]
    all-to-all   ->   Q[B, H/n, T, K]   all tokens of its heads      K, V[B, H_kv/n, T, K]      in one message
    core         ->   O[B, H/n, T, K]   any attention of one device, which need not know
    all-to-all   ->   O[B, H, T/n, K]

The adjoint of an all-to-all is the all-to-all back; autograd finds backward by itself. With N = B·T, h = H·K:

    forward   (n-1)/n · (2H + 2H_kv) · B·T/n·K elements     backward  the same     per layer, H_kv = H:
    Ulysses   4 (P-1)/P · N·h/P                              Megatron's sequence parallelism   4 (P-1)/P · N·h

n divides H. K/V heads that n does not divide are copied n/gcd(n, H_kv) times each before they travel. The
core gets tokens in their natural order, whatever the layout; of a sequence in slices (`sliced`) the last
queries and all keys so far. Memory: q, k, v twice more, as they travel and arrive. Jacobs et al. 2023,
DeepSpeed-Ulysses, arXiv:2309.14509, section 3. Differs: one message for their three; K/V heads; layouts.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.attention.kernel import FUSED
from minitrain.attention.placed import Alibi, placed
from minitrain.context.layout import Layout, contiguous, last, part, positions_of, sliced, zigzag
from minitrain.context.ring import (
    Rings,
    Tensors,
    check_core,
    check_crossing,
    double_ring_attention,
    ring_attention,
)
from minitrain.ranks import collectives
from minitrain.ranks.checks import require_ints


def ulysses_attention(q, k, v, *, group: ProcessGroup, core: Callable, layout=contiguous, **places) -> Tensor:
    """q `[B, H, T/n, K]`, k, v `[B, H_kv, T/n, K]`, this rank's tokens -> `[B, H, T/n, K]`; core(q, k, v) on
    `[B, H/n, T, K]`. `places`: bias, dropout, documents (placed.py); the core is given those of its heads."""
    rank, ranks, heads = group.rank(), group.size(), q.size(1)
    check_core("ulysses_attention", q, k, v, fewer=True, **places)
    bias, dropout, documents = (places.get(name) for name in ("bias", "dropout", "documents"))
    if heads % ranks:
        fits = " or ".join(str(n) for n in range(1, min(heads, ranks) + 1) if heads % n == 0)
        what = f"Ulysses: {heads} heads cannot be dealt to the {ranks} ranks of {collectives.axis_of(group)}"
        raise ValueError(f"{what}, each takes whole ones; take {fits} ranks, and a ring over the others")
    held = [layout(other, ranks, k.size(2) * ranks) for other in range(ranks)]
    asking = [last(runs, q.size(2)) for runs in held]
    if min(run[0] for runs in asking for run in runs) != (k.size(2) - q.size(2)) * ranks:
        what = f"Ulysses: the last {q.size(2)} of {k.size(2)} tokens of each rank are not the last ones"
        cure = "lay slices out one after the other, sliced(layout, slices)"
        raise ValueError(f"{what} of the sequence; {cure}")
    if bias:
        places = torch.arange(k.size(2) * ranks, device=q.device)
        core = partial(core, bias=Alibi(bias.slopes.chunk(ranks)[rank], places))
    if documents:
        core = partial(core, documents=documents)
    if dropout:
        core = partial(core, dropout=dropout._replace(first_head=dropout.first_head + heads // ranks * rank))
    q, k, v = to_heads((q, copied(k, group), copied(v, group)), group)
    if layout is contiguous:
        return switch(core(q, k, v), group, cut=2, join=1)
    queries, keys = (positions_of(sum(runs, []), q.device).argsort() for runs in (asking, held))
    out = core(q.index_select(2, queries), *(x.index_select(2, keys) for x in (k, v)))
    return switch(out.index_select(2, queries.argsort()), group, cut=2, join=1)


def to_heads(tensors: Tensors, group: ProcessGroup) -> Tensors:
    """Each `[B, H, T/n, K]` -> `[B, H/n, T, K]`, of its own heads and width; one message for all."""
    parts = [x.unflatten(1, (group.size(), -1)).movedim(1, 0) for x in tensors]  # [n, B, H/n, T/n, K]
    arrived = collectives.all_to_all(torch.cat([part.flatten(1) for part in parts], 1), group)
    pieces = arrived.split([part[0].numel() for part in parts], 1)
    arrived = (piece.reshape(part.shape) for piece, part in zip(pieces, parts))
    return tuple(piece.movedim(0, 2).flatten(2, 3) for piece in arrived)


def switch(x: Tensor, group: ProcessGroup, *, cut: int, join: int) -> Tensor:
    """`[.., N, .., M/n, ..]` -> `[.., N/n, .., M, ..]`: dim `cut` was whole, dim `join` was cut."""
    require_ints(-x.dim(), x.dim() - 1, cut=cut, join=join)
    cut, join, shape, ranks = cut % x.dim(), join % x.dim(), list(x.shape), group.size()
    if cut == join:
        raise ValueError(f"switch: cut and join are both dim {cut} of x {shape}; give two dims")
    if x.size(cut) % ranks:
        what = f"switch: x {shape} has {x.size(cut)} along dim {cut}, not a multiple of the {ranks} ranks"
        raise ValueError(f"{what} of {collectives.axis_of(group)}; pad it or cut another dim")
    parts = x.unflatten(cut, (ranks, -1)).movedim(cut, 0)
    return collectives.all_to_all(parts, group).movedim(0, join).flatten(join, join + 1)


def copied(x: Tensor, group: ProcessGroup) -> Tensor:
    """k or v `[B, H_kv, T/n, K]` with as few copies of each head as make their number a multiple of n."""
    copies = group.size() // math.gcd(group.size(), x.size(1))
    return x if copies == 1 else x.repeat_interleave(copies, dim=1)


# ---- heads and rings together ------------------------------------------------------------------------------
#
# More ranks than heads need a ring, too: n = u · r ranks, Mesh(ring=r, ulysses=u), u divides the heads. The
# core is a ring, or LoongTrain's double ring, and bytes are the sum of both, H'_kv with the copies for u:
#     over ulysses    (u-1)/u · (2H + 2H'_kv) · B·T/n·K    backward the same
#     over ring       (r-1) · 2 · H'_kv/u · B·T/r·K        backward twice that
# The tokens of a ring rank are laid out first and then dealt in u pieces, `dealt(zigzag, u)`, for ranks of
# mesh.group("ring", "ulysses"):
#     r=2, u=2, T=8  ring rank 0: 0 1 6 7  1: 2 3 4 5     rank (0,0): 0 1  (0,1): 6 7  (1,0): 2 3  (1,1): 4 5
# Neighbours in the order of axes share a node: head-first, Mesh(ring=, ulysses=), keeps the all-to-alls
# inside and hides what crosses; context-first, Mesh(ulysses=, ring=), keeps the ring inside. Fang and Zhao
# 2024, USP, arXiv:2405.07719; Gu et al. 2024, LoongTrain, arXiv:2406.18485. Differs: any layout in the ring.


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
