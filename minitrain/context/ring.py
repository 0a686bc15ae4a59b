"""Ring attention: every rank keeps its queries, and blocks of keys and values go round.

    step s, rank r   has K, V of rank r - s   O, lse merged with them   while those of rank r - s - 1 arrive

After n steps every query has seen every key, and no rank ever held more than two blocks of T/n keys. K and V
travel with the few heads that there are (GQA), hidden behind the products with the block before. Backward
goes round again: P is computed anew from lse, dQ stays, and dK, dV of a block travel one step behind it and
collect every rank's share but the owner's, which never leaves. The last hop is not hidden.
    forward     (n-1) · 2 · B·H_kv·T/n·K elements          backward     twice that: K, V once more, and dK, dV

A step takes 4·B·H·c²·K FLOPs while 4·B·H·c·K bytes of bf16 arrive (c = T/n, H_kv = H): hidden from c = FLOP/s
over bytes/s on, 1.0K tokens for an A100's NVLink, 25K for 100 Gb/s InfiniBand; an eighth for H_kv = H/8. Sums
are made in at least float32, and rounded to k's dtype for each hop. Memory, whatever n is: nine tensors of
q's size forward, 19 in backward (H_kv = H, float32), among them two blocks of K and V, three of their
gradients. Li et al. 2021, arXiv:2105.13120; Liu et al. 2023 (Ring Attention), arXiv:2310.01889, section 3;
Brandon et al. 2023 (Striped Attention), arXiv:2311.09431. Differs: one function for all layouts (layout.py)
and any depth of rings; the own block sends no gradient.
"""

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.attention.kernel import (
    FUSED,
    GradSum,
    Kernel,
    OnlineSoftmax,
    add_tiles_backward,
    empty_result,
    merge,
    recomputed,
    row_sums,
    stand_in,
)
from minitrain.attention.placed import check_places, placed
from minitrain.context.layout import Layout, Tile, contiguous, last, positions_of, tiles, zigzag
from minitrain.ranks import collectives
from minitrain.ranks.autograd import custom_vjp

Tensors = tuple[Tensor, ...]

# ---- first the ring alone: contiguous tokens, causal ------------------------------------------------------


def flat_ring(q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """out and lse, as `ring_forward` finds them. Keys of later ranks are hidden from these queries."""
    rank, ranks = group.rank(), group.size()
    out, lse = empty_result(q)
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        owner = (rank - step) % ranks
        if owner <= rank:
            merge(out, lse, *FUSED.forward(q, k, v, owner == rank))
        if arriving:
            k, v = arriving.wait()
    return out.to(q.dtype), lse


# ---- then any layout, any mask, and nothing waited for that could be hidden ------------------------------


def ring_attention(q, k, v, *, group: ProcessGroup, layout=contiguous, causal=True, **how) -> Tensor:
    """q `[B, H, T/n, K]`, k, v `[B, H_kv, T/n, K]`, this rank's tokens -> `[B, H, T/n, K]`. Fewer queries
    than keys are each rank's last (layout.sliced). `how`: kernel, bias, dropout (`check_core`)."""
    check_core("ring_attention", q, k, v, fewer=True, **how)
    rings = Rings((group,), layout, causal)
    return recomputed(ring_forward, ring_backward, q, k, v, rings, placed(**how))


class Rings(NamedTuple):
    """One ring, or rings within rings, the first outermost; `layout`: of the tokens over all their ranks."""

    groups: Sequence[ProcessGroup]
    layout: Layout
    causal: bool

    def runs(self, steps: Sequence[int], tokens: int) -> list[range]:
        """What the rank so many steps behind this one holds. Ranks are numbered, the last ring innermost."""
        number, ranks = 0, 1
        for group, step in zip(self.groups, steps):
            number = number * group.size() + (group.rank() - step) % group.size()
            ranks *= group.size()
        return self.layout(number, ranks, tokens * ranks)

    def plan(self, q: Tensor, k: Tensor, queries_travel: bool = False) -> dict[tuple[int, ...], list[Tile]]:
        """For every number of steps in each ring, what this rank's queries see of the keys that are here
        then; or what the queries that are here then see of this rank's keys."""
        own, seen = self.runs([0] * len(self.groups), k.size(-2)), {}
        for steps in product(*(range(group.size()) for group in self.groups)):
            here = self.runs(steps, k.size(-2))
            queries, keys = (here, own) if queries_travel else (own, here)
            seen[steps] = tiles(last(queries, q.size(-2)), keys, self.causal)
        return seen


def ring_forward(q: Tensor, k: Tensor, v: Tensor, rings: Rings, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """-> out `[B, H, T/n, K]` in q's dtype, and lse `[B, H, T/n]`."""
    plan, softmax = rings.plan(q, k), OnlineSoftmax(q)
    nested_ring_pass((k, v), rings.groups, lambda steps, k, v: softmax.add_tiles(plan[steps], k, v, kernel))
    return softmax.result()


def ring_backward(dout, q, k, v, out, lse, rings: Rings, kernel: Kernel) -> Tensors:
    """-> dq, dk, dv of this rank's tokens."""
    plan, dq = rings.plan(q, k), GradSum(q)

    def add_block(steps: tuple[int, ...], k: Tensor, v: Tensor) -> Tensors:
        dk, dv = GradSum(k), GradSum(v)
        add_tiles_backward(plan[steps], dout, q, k, v, out, lse, dq, dk, dv, kernel)
        return dk.by_token, dv.by_token

    dk, dv = nested_ring_pass((k, v), rings.groups, add_block)
    return dq.total.to(q.dtype), *(dx.to(k.dtype).transpose(1, 2) for dx in (dk, dv))


# ---- the ring --------------------------------------------------------------------------------------------


def ring_pass(x: Tensors, group: ProcessGroup, work: Callable, skip=None, steps=None) -> Tensors | None:
    """work(step, *x of rank - step), step = 0..n-1, while the next x arrives. What it returns is this rank's
    share of sums that belong to x's owner: they travel one step behind x, in its dtype, hidden too; those
    for this rank's own x are returned. With `skip` x goes that far first, and no share stays at home."""
    dtype, own, travelling, steps = x[0].dtype, None, None, steps or group.size()
    if skip is not None:
        x = collectives.rotate(x, group, shift=skip)
    for step in range(steps):
        at_end = step == steps - 1
        arriving = None if at_end else collectives.rotate(x, group, async_op=True)
        before = None if travelling is None else collectives.rotate(travelling, group, async_op=True)
        shares = work(step, *x)
        if step == 0 and skip is None:
            own = shares
        elif shares is not None:
            travelling = tuple(share.to(dtype) for share in added(shares, before.wait() if before else ()))
        x = x if at_end else arriving.wait()
    if travelling is None:
        return own
    sums = collectives.rotate(travelling, group, shift=-((skip or 0) + steps - 1))
    return sums if own is None else added(own, sums)


def nested_ring_pass(x: Tensors, groups: Sequence[ProcessGroup], work: Callable, steps=()) -> Tensors | None:
    """`ring_pass` in rings within rings, the first outermost: work(the steps x has come in each ring, *x).
    The next x of an outer ring arrives behind all the steps of the rings inside."""
    if not groups:
        return work(steps, *x)
    return ring_pass(x, groups[0], lambda step, *x: nested_ring_pass(x, groups[1:], work, (*steps, step)))


def added(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Ours, with theirs added in place if there are any."""
    for a, b in zip(ours, theirs):
        a.add_(b)
    return ours


def last_attention(q: Tensor, k: Tensor, v: Tensor, *, kernel: Kernel = FUSED, **places) -> Tensor:
    """q `[B, H, t, K]`, the last t of T tokens, k, v `[B, H_kv, T, K]` -> `[B, H, t, K]`, causal."""
    check_places("last_attention", q, **places)
    before, length = k.size(-2) - q.size(-2), k.size(-2)
    if before < 0:
        raise ValueError(f"last_attention: {q.size(-2)} queries end where {length} keys do; give more keys")
    slices = lambda rank, ranks, length: [range(before), range(before, length)] if before else [range(length)]
    alone = Rings((), slices, causal=True)  # a ring without ranks
    return recomputed(ring_forward, ring_backward, q, k, v, alone, placed(kernel, **places))


def check_core(what: str, q, k, v, *, fewer=False, kernel: Kernel = FUSED, **places) -> None:
    """What a core over ranks can be given, before anything is sent. `fewer`: fewer queries than keys, too."""
    alike = k.shape[:3] == v.shape[:3] and q.shape[::3] == k.shape[::3]
    if q.dim() != 4 or not alike or q.size(2) > k.size(2):
        what = f"{what}: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        raise ValueError(f"{what}; expected [B, H, T/n, K] and twice [B, H_kv, T/n, K], v of any width")
    if q.size(2) < k.size(2) and not fewer:
        what = f"{what}: {q.size(2)} queries for {k.size(2)} keys"
        raise ValueError(f"{what}: it takes whole sequences, not slices; use a ring, Ulysses or both")
    if q.size(1) % k.size(1):
        raise ValueError(f"{what}: {q.size(1)} query heads are not a multiple of {k.size(1)} K/V heads")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"{what}: q {q.dtype}, k {k.dtype}, v {v.dtype}; they must be of one dtype")
    check_places(what, q, **places)


# ---- rings within rings ------------------------------------------------------------------------------------
#
# N nodes of M devices: blocks go round inside a node while those of the next node arrive. One ring crosses
# between nodes in each step, on one of a node's M network cards; here a block crosses N - 1 times, on every
# card, behind M steps' products. Ranks send N·M - 1 blocks either way.
#
#                              steps across    of a node's blocks   of a busy rank's   2 nodes of 8 H100*
#     one ring of N·M ranks    N·M - 1         N·M - 1              N·M - 1            4.1 ms    40.0 ms
#     outer N, inner M         N - 1           M (N - 1)            N - 1              1.62 ms   40.1 ms
#     * forward and backward, replayed, T=16K and T=128K: H=32, H_kv=8, K=128, bf16, zig-zag
#
# BurstAttention's backward may send "queries": K, V, dK, dV stay; Q, dO, lse, D = rowsum(dO · O), dQ go
# round:
#     keys       (n-1) · 4 · B·H_kv·T/n·K                 less wherever H_kv <= 3/4 H
#     queries    (n-1) · (3 · B·H·T/n·K + 2 · B·H·T/n)    a quarter less for H_kv = H; lse, D at least float32
# Memory: for each ring further out two more blocks of K and V, five in backward. Gu et al. 2024 (LoongTrain),
# arXiv:2406.18485; Sun et al. 2024 (BurstAttention), arXiv:2403.09347, section 3; 2025, arXiv:2509.19836.


SIDES = "queries", "keys"


def double_ring_attention(q, k, v, *, outer, inner, layout=zigzag, causal=True, **how) -> Tensor:
    """q `[B, H, T/n, K]`, k, v `[B, H_kv, T/n, K]`, tokens by `layout` over the ranks outer · M + inner of
    mesh.group("outer", "inner") -> `[B, H, T/n, K]`. `how`: kernel, bias, dropout (ring.check_core)."""
    check_core("double_ring_attention", q, k, v, fewer=True, **how)
    check_crossing(outer=outer, inner=inner)
    rings = Rings((outer, inner), layout, causal)
    return recomputed(ring_forward, ring_backward, q, k, v, rings, placed(**how))


def burst_attention(
    q, k, v, *, inside, across, layout=contiguous, causal=True, backward_sends="queries", **how
) -> Tensor:
    """The same; groups `inside`: the M devices of this node, `across`: the N with this one's number."""
    check_core("burst_attention", q, k, v, fewer=True, **how)
    if backward_sends not in SIDES:
        raise ValueError(f"burst_attention: {backward_sends=}; choose from {', '.join(SIDES)}")
    backward = ring_backward if backward_sends == "keys" else queries_backward
    rings = Rings((across, inside), layout, causal)
    return recomputed(ring_forward, backward, q, k, v, rings, placed(**how))


def queries_backward(dout, q, k, v, out, lse, rings: Rings, kernel: Kernel) -> Tensors:
    """`ring_backward`, but the queries' side goes round -> dq, dk, dv of this rank's tokens."""
    plan, dk, dv = rings.plan(q, k, queries_travel=True), GradSum(k), GradSum(v)

    def add_block(steps: tuple[int, ...], q: Tensor, dout: Tensor, lse: Tensor, delta: Tensor) -> Tensors:
        dq = GradSum(q)
        add_tiles_backward(plan[steps], dout, q, k, v, stand_in(dout, delta), lse, dq, dk, dv, kernel)
        return (dq.by_token,)

    (dq,) = nested_ring_pass((q, dout, lse, row_sums(dout, out)), rings.groups, add_block)
    return tuple(dx.to(q.dtype).transpose(1, 2) for dx in (dq, dk.by_token, dv.by_token))


def check_crossing(**groups: ProcessGroup) -> None:
    """Axes of a grid have this rank in common, and no other."""
    for (axis, group), (other, other_group) in combinations(sorted(groups.items()), 2):
        ours, theirs = (collectives.members(g) for g in (group, other_group))
        if len(shared := sorted(set(ours) & set(theirs))) != 1:
            what = f"{axis} group {ours} and {other} group {theirs} share ranks {shared}"
            names = f"on Mesh({axis}=, {other}=) they are group({axis!r}) and group({other!r})"
            raise ValueError(f"{what}, but must cross in this rank only; {names}")


# ---- all keys gathered -------------------------------------------------------------------------------------
#
# K, V[B, T, H_kv, 2K] of all ranks come in one all-gather, backward reduce-scatters dK, dV: a ring's bytes
# forward, half of them backward (`keep=False` gathers again: a ring's). Nothing is hidden and K, V of all
# tokens are held, twice while they are put in order (8 bytes per token for that), and dK, dV in at least
# float32; in return attention is as on one device, in fewer and larger tiles: all keys before a run of
# queries are one tile, whosever they are. Zig-zag is even here, too. Dubey et al. 2024 (Llama 3),
# arXiv:2407.21783, section 3.3.2. Differs: any layout, ALiBi, dropout.


def gathered_attention(q, k, v, *, group, layout=contiguous, causal=True, keep=True, **how) -> Tensor:
    """q `[B, H, T/n, K]`, k, v `[B, H_kv, T/n, K]`, this rank's tokens -> `[B, H, T/n, K]`. Fewer queries
    than keys are each rank's last. `how`: kernel, bias, dropout (ring.check_core)."""
    check_core("gathered_attention", q, k, v, fewer=True, **how)
    kernel = placed(**how)
    seen, order = seen_and_order(q, k, group, layout, causal)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensors]:
        keys_values, softmax = gather(k, v, group, order), OnlineSoftmax(q)
        softmax.add_tiles(seen, *keys_values, kernel)
        out, lse = softmax.result()
        return out, (q, *(keys_values if keep else (k, v)), out, lse)

    def backward(dys: Tensors, saved: Tensors, _) -> Tensors:
        q, k, v, out, lse = saved
        k, v = (k, v) if keep else gather(k, v, group, order)
        dq, dk, dv = GradSum(q), GradSum(k), GradSum(v)
        add_tiles_backward(seen, *dys, q, k, v, out, lse, dq, dk, dv, kernel)
        return dq.total.to(q.dtype), *scatter(dk, dv, group, order, k.dtype)

    return custom_vjp(forward, backward, q, k, v)


def seen_and_order(q, k, group, layout: Layout, causal: bool) -> tuple[list[Tile], Tensor | None]:
    """What this rank's queries see of all keys in order, and the place of each by rank (None: the same)."""
    ranks, length = group.size(), group.size() * k.size(-2)
    runs = [layout(rank, ranks, length) for rank in range(ranks)]
    by_rank = sum(runs, [])
    keys = sorted(by_rank, key=lambda run: run.start)
    order = positions_of(by_rank, q.device).argsort()[positions_of(keys, q.device)]
    seen = tiles(last(runs[group.rank()], q.size(-2)), keys, causal)
    return seen, None if by_rank == keys else order


def gather(k: Tensor, v: Tensor, group: ProcessGroup, order: Tensor | None) -> tuple[Tensor, Tensor]:
    """K and V `[B, H_kv, T, K]` of all ranks, in one message."""
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(1, 2), group, dim=1)  # [B, T, H_kv, 2K]
    both = (both if order is None else both.index_select(1, order)).transpose(1, 2)
    return both[..., : k.size(-1)], both[..., k.size(-1) :]


def scatter(dk: GradSum, dv: GradSum, group, order: Tensor | None, dtype) -> tuple[Tensor, Tensor]:
    """This rank's tokens of the sums over ranks, `[B, H_kv, T/n, K]`."""
    both = torch.cat((dk.by_token, dv.by_token), -1).to(dtype)
    if order is not None:
        both = both.index_select(1, order.argsort())
    own = collectives.reduce_scatter(both, group, dim=1).transpose(1, 2)
    return own[..., : dk.x.size(-1)], own[..., dk.x.size(-1) :]
