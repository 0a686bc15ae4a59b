"""Ulysses: attention is independent for each head, so an all-to-all trades a slice of the tokens for a slice of the heads.

    rank i holds      Q[B, H, T/n, K]   all heads of its tokens      K, V[B, H_kv, T/n, K]
    all-to-all   ->   Q[B, H/n, T, K]   all tokens of its heads      K, V[B, H_kv/n, T, K]      in one message
    core         ->   O[B, H/n, T, K]   any attention of one device, which need not know
    all-to-all   ->   O[B, H, T/n, K]

An all-to-all only moves numbers: its adjoint is the all-to-all that moves them back, and autograd finds backward by itself.

    forward   (n-1)/n · (2H + 2H_kv) · B·T/n·K elements          backward   the same          with N = B·T, h = H·K and no groups:
    Ulysses   4 (P-1)/P · N·h/P  a layer, the MLP has its tokens          Megatron's sequence parallelism   4 (P-1)/P · N·h  a layer

so P times less, and per rank it falls as ranks are added. But there must be heads to cut: n divides H. K/V heads that n does not
divide are copied before they travel, n/gcd(n, H_kv) times each: H_kv = 2 on n = 8 ranks is sent as 8 heads, 4 times the bytes, and
the copies' gradients are summed at home. More ranks than heads need a ring beside (hybrid.py).

The core is given the tokens in their natural order, whatever the layout (layout.py) in which the ranks hold them: they are put in
order after the first all-to-all and back before the second. Every core sees the whole triangle, so contiguous runs do as well as
any; of a sequence in slices (sliced.py) it is given the last queries and all keys so far. Memory: q, k, v a second time as they
travel and a third as they arrive, all O(T/n); no rank holds more than 1/n of anything.

`switch` is the step by itself, for one tensor and any two dims. Raises ValueError in one line, before any rank waits, for fewer
heads than ranks, heads that n does not divide, shapes or dtypes that do not fit each other, what placed.py refuses, and what the
layout refuses.
Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv:2309.14509, section 3. Differs: one message where they send three;
grouped K/V heads; layouts; heads come before tokens in the shapes, as in the rest of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from einops import rearrange
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain import collectives
from minitrain.attention.alibi import Alibi
from minitrain.attention.dropout import DropMask
from minitrain.attention.placed import check_places
from minitrain.context.layout import Layout, contiguous, last, positions_of


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup,
    core: Callable,
    layout: Layout = contiguous,
    bias: Alibi | None = None,
    dropout: DropMask | float = 0.0,
) -> Tensor:
    """q `[B, H, T/n, K]`, k, v `[B, H_kv, T/n, K]`, this rank's tokens -> `[B, H, T/n, K]`; core(q, k, v) on `[B, H/n, T, K]`.

    ALiBi and dropout are the core's: it is given the slopes of this rank's heads, and the mask, whose heads begin where this rank's do.
    """
    check_heads(q, k, v, group)
    check_places("ulysses_attention", q, bias, dropout)
    length = k.size(2) * group.size()
    held = [layout(rank, group.size(), length) for rank in range(group.size())]
    asking = [last(runs, q.size(2)) for runs in held]
    if min(run[0] for runs in asking for run in runs) != length - q.size(2) * group.size():
        raise ValueError(
            f"Ulysses: the last {q.size(2)} of {k.size(2)} tokens of each rank are not the last ones of the sequence; lay slices out "
            "one after the other, sliced(layout, slices)"
        )
    if bias:
        core = partial(
            core,
            bias=Alibi(bias.slopes.chunk(group.size())[group.rank()], torch.arange(length, device=q.device)),
        )
    if dropout:
        core = partial(
            core,
            dropout=dropout._replace(
                first_head=dropout.first_head + q.size(1) // group.size() * group.rank()
            ),
        )
    q, k, v = to_heads((q, copied(k, group), copied(v, group)), group)
    if layout is contiguous:
        return switch(core(q, k, v), group, cut=2, join=1)
    queries, keys = (
        positions_of([run for runs in ranks for run in runs], q.device).argsort() for ranks in (asking, held)
    )
    out = core(q.index_select(2, queries), *(x.index_select(2, keys) for x in (k, v)))
    return switch(out.index_select(2, queries.argsort()), group, cut=2, join=1)


def to_heads(tensors: tuple[Tensor, ...], group: ProcessGroup) -> tuple[Tensor, ...]:
    """Each `[B, H, T/n, K]` -> `[B, H/n, T, K]`, of as many heads and as wide as it is; one message for all."""
    parts = [rearrange(x, "b (n h) t k -> n b h t k", n=group.size()) for x in tensors]
    arrived = collectives.all_to_all(torch.cat([part.flatten(1) for part in parts], 1), group)
    pieces = arrived.split([part[0].numel() for part in parts], 1)
    return tuple(
        rearrange(piece.reshape(part.shape), "n b h t k -> b h (n t) k") for piece, part in zip(pieces, parts)
    )


def switch(x: Tensor, group: ProcessGroup, *, cut: int, join: int) -> Tensor:
    """`[.., N, .., M/n, ..]` -> `[.., N/n, .., M, ..]`: dim `cut` was whole and is cut, dim `join` was cut and is whole."""
    cut, join = cut % x.dim(), join % x.dim()
    if cut == join:
        raise ValueError(
            f"switch: cut and join are both dim {cut} of x {list(x.shape)}; give the dim to cut and the one to make whole"
        )
    if x.size(cut) % group.size():
        raise ValueError(
            f"switch: x {list(x.shape)} has {x.size(cut)} along dim {cut}, not a multiple of the {group.size()} ranks of "
            f"{collectives.axis_of(group)}; pad it or cut another dim"
        )
    parts = x.unflatten(cut, (group.size(), -1)).movedim(cut, 0)
    return collectives.all_to_all(parts, group).movedim(0, join).flatten(join, join + 1)


def copied(x: Tensor, group: ProcessGroup) -> Tensor:
    """k or v `[B, H_kv, T/n, K]` with as few copies of each head as make their number a multiple of n."""
    copies = group.size() // math.gcd(group.size(), x.size(1))
    return x if copies == 1 else x.repeat_interleave(copies, dim=1)


def check_heads(q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup) -> None:
    if (
        q.dim() != 4
        or k.shape[:3] != v.shape[:3]
        or q.shape[::3] != k.shape[::3]
        or q.size(2) > k.size(2)
        or q.size(1) % k.size(1)
    ):
        raise ValueError(
            f"Ulysses: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; expected [B, H, T/n, K] and twice "
            "[B, H_kv, T/n, K], H a multiple of H_kv"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"Ulysses: q, k, v are {q.dtype}, {k.dtype}, {v.dtype}, but travel in one message; convert them to one dtype"
        )
    heads, ranks = q.size(1), group.size()
    if heads % ranks:
        fits = " or ".join(str(n) for n in range(1, min(heads, ranks) + 1) if heads % n == 0)
        raise ValueError(
            f"Ulysses: {heads} heads cannot be dealt to the {ranks} ranks of {collectives.axis_of(group)}, each takes whole "
            f"ones; take {fits} ranks, and a ring over the others (hybrid.py)"
        )
