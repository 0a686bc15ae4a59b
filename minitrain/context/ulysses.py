"""Ulysses: heads attend independently, so an all-to-all trades slices of tokens for slices of heads.

    rank i holds      Q[B, H, T/n, K]   all heads of its tokens      K, V[B, H_kv, T/n, K]
    all-to-all   ->   Q[B, H/n, T, K]   all tokens of its heads      K, V[B, H_kv/n, T, K]      in one message
    core         ->   O[B, H/n, T, K]   any attention of one device, which need not know
    all-to-all   ->   O[B, H, T/n, K]

The adjoint of an all-to-all is the all-to-all back; autograd finds backward by itself. With N = B·T, h = H·K:

    forward   (n-1)/n · (2H + 2H_kv) · B·T/n·K elements     backward  the same     per layer, H_kv = H:
    Ulysses   4 (P-1)/P · N·h/P                              Megatron's sequence parallelism   4 (P-1)/P · N·h

n divides H; more ranks than heads need a ring, too (ulysses_ring.py). K/V heads that n does not divide are
copied n/gcd(n, H_kv) times each before they travel. The core gets tokens in their natural order, whatever the
layout; of a sequence in slices (`sliced`) the last queries and all keys so far. Contiguous runs are as even
as any layout. Memory: q, k, v a second time as they travel and a third as they arrive, all O(T/n). Jacobs et
al. 2023, DeepSpeed-Ulysses, arXiv:2309.14509, section 3. Differs: one message where they send three; grouped
K/V heads; layouts; heads come before tokens in the shapes.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from einops import rearrange
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.attention.placed import Alibi
from minitrain.context.layout import contiguous, last, positions_of
from minitrain.context.ring import Tensors, check_core
from minitrain.ranks import collectives
from minitrain.ranks.checks import require_ints


def ulysses_attention(q, k, v, *, group: ProcessGroup, core: Callable, layout=contiguous, **places) -> Tensor:
    """q `[B, H, T/n, K]`, k, v `[B, H_kv, T/n, K]`, this rank's tokens -> `[B, H, T/n, K]`; core(q, k, v) on
    `[B, H/n, T, K]`. `places`: bias and dropout (placed.py); the core is given those of this rank's heads."""
    rank, ranks, heads = group.rank(), group.size(), q.size(1)
    check_core("ulysses_attention", q, k, v, fewer=True, **places)
    bias, dropout = places.get("bias"), places.get("dropout")
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
    parts = [rearrange(x, "b (n h) t k -> n b h t k", n=group.size()) for x in tensors]
    arrived = collectives.all_to_all(torch.cat([part.flatten(1) for part in parts], 1), group)
    pieces = arrived.split([part[0].numel() for part in parts], 1)
    arrived = (piece.reshape(part.shape) for piece, part in zip(pieces, parts))
    return tuple(rearrange(piece, "n b h t k -> b h (n t) k") for piece in arrived)


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
