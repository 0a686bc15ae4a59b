"""Ring attention: every rank keeps its queries, and blocks of keys and values go round.

    step s, rank r     has K, V of rank r - s     O, lse merged with them     while those of rank r - s - 1 arrive

n ranks hold T/n tokens each and after n steps every query has met every key, though nobody ever held more than two blocks of keys.
K and V of a block travel side by side, of the few heads that there are (GQA), and hide behind the products with the block before.
Backward goes round again: P is computed anew from the final lse, dQ stays, and dK, dV of a block travel one step behind it, gathering
every rank's share until they are home; the owner's own share never leaves. That last hop home is the one nothing hides.

`flat_ring` is the idea in 30 lines. `ring_pass` is this ring for any tensors and any work, `nested_ring_pass` rings within rings (burst.py, hybrid.py). `layout` (layout.py) says
which tokens a rank holds. Under a causal mask contiguous runs leave the first rank idle in all steps but one; zig-zag halves and
stripes give all ranks the same work in every step (work.py counts it).

    forward     (n-1) · 2 · B·H_kv·T/n·K elements          backward     twice that: K, V once more, and dK, dV

A step takes 4·B·H·c²·K FLOPs while 4·B·H·c·K bytes of bf16 arrive (c = T/n, H_kv = H): hidden from c = FLOP/s over bytes/s on, which
is 1.0K tokens for an A100's NVLink and 25K for 100 Gb/s InfiniBand; with an eighth of the K/V heads, an eighth.

Sums are made in at least float32 (O, lse, dQ, and the shares of dK, dV), and a travelling sum is rounded to k's dtype for each hop.
Memory beside q, k, v, O, lse: two blocks of K, V (what is here and what arrives); in backward also the gradients of the block before on
their way out, of this one's on their way in, and of the block at home; in both what `kernel` needs for one tile. None of it grows
with n: nine tensors of q's size forward, 19 in backward, for H_kv = H in float32.
Raises ValueError in one line, before any rank waits, for shapes that do not fit each other, ALiBi and dropout that say nothing of other
ranks' keys (placed.py), and for what the layout refuses.

Li et al. 2021, arXiv:2105.13120 (ring_self_attention.py has its two passes); Liu et al. 2023 (Ring Attention), arXiv:2310.01889, section
3; Brandon et al. 2023 (Striped Attention), arXiv:2311.09431. Differs: one text for all layouts; the block at home sends no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain import collectives
from minitrain.attention.alibi import Alibi
from minitrain.attention.dropout import DropMask
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

# ---- first the ring alone: contiguous tokens, causal -----------------------------------------------------------------


def flat_ring(q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """out and lse, as `ring_forward` finds them. Each rank's block of keys comes by once; later ones are hidden from these queries."""
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


def flat_ring_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, group: ProcessGroup
) -> tuple[Tensor, ...]:
    """dq, dk, dv. The block goes round once more, and the sums for its keys go with it; n hops bring them home."""
    rank, ranks = group.rank(), group.size()
    dq, sums = torch.zeros_like(q), (torch.zeros_like(k), torch.zeros_like(v))
    for step in range(ranks):
        owner = (rank - step) % ranks
        if owner <= rank:
            more, *shares = FUSED.backward(dout, q, k, v, out, lse, owner == rank)
            dq, sums = dq + more, added(sums, shares)
        k, v, *sums = collectives.rotate((k, v, *sums), group)
    return dq, *sums


# ---- then any layout, any mask, and nothing waited for that could be hidden ------------------------------------------


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup,
    layout: Layout = contiguous,
    causal: bool = True,
    kernel: Kernel = FUSED,
    bias: Alibi | None = None,
    dropout: DropMask | float = 0.0,
) -> Tensor:
    """q `[B, H, T/n, K]`, k, v `[B, H_kv, T/n, K]`, this rank's tokens -> `[B, H, T/n, K]`. A core for the model's attention.
    Fewer queries than keys are the last of each rank's (sliced.py)."""
    check_core("ring_attention", q, k, v, bias, dropout, fewer=True)
    return recomputed(
        ring_forward, ring_backward, q, k, v, group, layout, causal, placed(kernel, bias, dropout)
    )


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, layout: Layout, causal: bool, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """-> out `[B, H, T/n, K]` in q's dtype, and lse `[B, H, T/n]`."""
    plan, found = tiles_by_step(group, layout, q, k, causal), OnlineSoftmax(q)
    ring_pass((k, v), group, lambda step, k, v: found.add_tiles(plan[step], k, v, kernel))
    return found.result()


def ring_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    group: ProcessGroup,
    layout: Layout,
    causal: bool,
    kernel: Kernel,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv of this rank's tokens."""
    plan, dq = tiles_by_step(group, layout, q, k, causal), GradSum(q)

    def visit(step: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        dk, dv = GradSum(k), GradSum(v)
        add_tiles_backward(plan[step], dout, q, k, v, out, lse, dq, dk, dv, kernel)
        return dk.by_token, dv.by_token

    dk, dv = ring_pass((k, v), group, visit)
    return dq.total.to(q.dtype), *(dx.to(k.dtype).transpose(1, 2) for dx in (dk, dv))


def tiles_by_step(
    group: ProcessGroup, layout: Layout, q: Tensor, k: Tensor, causal: bool
) -> list[list[Tile]]:
    """For each step of the ring what this rank's queries see of the keys that are here then."""
    rank, ranks = group.rank(), group.size()
    held = [layout((rank - step) % ranks, ranks, k.size(-2) * ranks) for step in range(ranks)]
    return [tiles(last(held[0], q.size(-2)), keys, causal) for keys in held]


# ---- the ring --------------------------------------------------------------------------------------------------------


def ring_pass(
    x: tuple[Tensor, ...], group: ProcessGroup, visit: Callable[..., tuple[Tensor, ...] | None]
) -> tuple[Tensor, ...] | None:
    """visit(step, *x of rank - step), step = 0..n-1, while the next x arrives.

    What `visit` returns is this rank's share of sums that belong to the x's owner: they travel one step behind x, in the dtype of its
    first tensor, hide as x does, and the own x's sums are returned.
    """
    size, dtype = group.size(), x[0].dtype
    home = travelling = None
    for step in range(size):
        last = step == size - 1
        arriving = None if last else collectives.rotate(x, group, async_op=True)
        before = None if travelling is None else collectives.rotate(travelling, group, async_op=True)
        shares = visit(step, *x)
        if step == 0:
            home = shares
        elif shares is not None:
            travelling = tuple(
                share.to(dtype) for share in added(shares, () if before is None else before.wait())
            )
        x = x if last else arriving.wait()
    return home if travelling is None else added(home, collectives.rotate(travelling, group))


def nested_ring_pass(
    x: tuple[Tensor, ...],
    rings: Sequence[ProcessGroup],
    visit: Callable[..., tuple[Tensor, ...] | None],
    steps: tuple[int, ...] = (),
) -> tuple[Tensor, ...] | None:
    """`ring_pass` in rings within rings, the first outermost: visit(the steps x has come in each ring, *x). The next x of an outer ring
    arrives behind all that is inside."""
    if not rings:
        return visit(steps, *x)
    return ring_pass(x, rings[0], lambda step, *x: nested_ring_pass(x, rings[1:], visit, (*steps, step)))


def added(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Ours, with theirs added in place if there are any."""
    for a, b in zip(ours, theirs):
        a.add_(b)
    return ours


# ---- what is refused -------------------------------------------------------------------------------------------------


def check_core(
    what: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Alibi | None = None,
    dropout: DropMask | float = 0.0,
    fewer: bool = False,
) -> None:
    """What a core over ranks can be given; before anything is sent. `fewer`: it takes fewer queries than keys."""
    check_shapes(what, q, k, v, fewer)
    check_places(what, q, bias, dropout)


def check_shapes(what: str, q: Tensor, k: Tensor, v: Tensor, fewer: bool) -> None:
    if (
        q.dim() != 4
        or k.shape[:3] != v.shape[:3]
        or (q.size(0), q.size(3)) != (k.size(0), k.size(3))
        or q.size(2) > k.size(2)
    ):
        raise ValueError(
            f"{what}: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; expected [B, H, T/n, K] and [B, H_kv, T/n, K] "
            "twice, the second of any width"
        )
    if q.size(2) < k.size(2) and not fewer:
        raise ValueError(
            f"{what}: {q.size(2)} queries for {k.size(2)} keys: it takes whole sequences, not slices; use a ring, Ulysses or both"
        )
    if q.size(1) % k.size(1):
        raise ValueError(f"{what}: {q.size(1)} query heads are not a multiple of {k.size(1)} K/V heads")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"{what}: q {q.dtype}, k {k.dtype}, v {v.dtype}; they must be of one dtype")
