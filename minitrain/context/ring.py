"""Ring attention: every rank keeps its queries, and blocks of keys and values go round.

    step s, rank r   has K, V of rank r - s   O, lse merged with them   while those of rank r - s - 1 arrive

n ranks hold T/n tokens each. After n steps every query has seen every key, and no rank ever held more than
two blocks of keys. K and V travel with the few heads that there are (GQA), hidden behind the products with
the block before. Backward goes round again: P is computed anew from lse, dQ stays, and dK, dV of a block
travel one step behind it and collect every rank's share; the owner's share never leaves. The last hop is not
hidden.

    forward     (n-1) · 2 · B·H_kv·T/n·K elements          backward     twice that: K, V once more, and dK, dV

A step takes 4·B·H·c²·K FLOPs while 4·B·H·c·K bytes of bf16 arrive (c = T/n, H_kv = H): hidden from c = FLOP/s
over bytes/s on, 1.0K tokens for an A100's NVLink, 25K for 100 Gb/s InfiniBand; an eighth for H_kv = H/8. Sums
are made in at least float32, and rounded to k's dtype for each hop. Memory, whatever n is: nine tensors of
q's size forward, 19 in backward (H_kv = H, float32), among them two blocks of K and V, three of their
gradients. Li et al. 2021, arXiv:2105.13120; Liu et al. 2023 (Ring Attention), arXiv:2310.01889, section 3;
Brandon et al. 2023 (Striped Attention), arXiv:2311.09431. Differs: one function for all layouts (layout.py)
and for rings within rings (double_ring.py); the own block sends no gradient.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

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
)
from minitrain.attention.placed import check_places, placed
from minitrain.context.layout import Layout, Tile, contiguous, last, tiles
from minitrain.ranks import collectives

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
    kernel = check_core("ring_attention", q, k, v, fewer=True, **how)
    rings = Rings((group,), layout, causal)
    return recomputed(ring_forward, ring_backward, q, k, v, rings, kernel)


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
    share of sums that belong to x's owner. They travel one step behind x, in the dtype of its first tensor,
    hide as x does, and the sums for this rank's own x are returned. With `skip` x goes that far first, and no
    share stays at home."""
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
        what = f"last_attention: {q.size(-2)} queries end where {length} keys do"
        raise ValueError(f"{what}, so the first ones see nothing; give them their keys")
    slices = lambda rank, ranks, length: [range(before), range(before, length)] if before else [range(length)]
    alone = Rings((), slices, causal=True)  # a ring without ranks
    return recomputed(ring_forward, ring_backward, q, k, v, alone, placed(kernel, **places))


def check_core(what: str, q, k, v, *, fewer=False, kernel: Kernel = FUSED, bias=None, dropout=0.0) -> Kernel:
    """What a core over ranks can be given, before anything is sent -> the kernel with its bias and dropout
    (placed.py). `fewer`: the core takes fewer queries than keys."""
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
    check_places(what, q, bias, dropout)
    return placed(kernel, bias, dropout)
