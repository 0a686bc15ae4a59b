"""Heads and rings together: Ulysses over one axis of a mesh, ring attention over the other, and rings within rings.

    n = u · r ranks, Mesh(ring=r, ulysses=u)          USP, or the 2D-attention of LoongTrain
    Q[B, H, T/n, K]   -all-to-all->   Q[B, H/u, T/r, K]   -ring attention->   O[B, H/u, T/r, K]   -all-to-all->   O[B, H, T/n, K]

u must divide the heads, r may be anything, so that more ranks than heads can be used. What is sent is the sum of the two:

    all-to-all over ulysses   (u-1)/u · (2H + 2H'_kv) · B·T/n·K           backward the same          H'_kv: with the copies that u asks for
    ring over ring            (r-1) · 2 · H'_kv/u · B·T/r·K               backward twice that

The layout. The ring wants zig-zag halves of T/r tokens on each of *its* ranks, after the all-to-all. So ring rank j's tokens are laid
out first, and then dealt in u pieces, in order: `dealt(zigzag, u)` is that layout for the n ranks of mesh.group("ring", "ulysses").

    r=2, u=2, 8 tokens      ring rank 0: 0 1 6 7     ring rank 1: 2 3 4 5         ranks (0,0) 0 1   (0,1) 6 7   (1,0) 2 3   (1,1) 4 5

Placement is the order of the axes, for neighbours share a node: head-first, Mesh(ring=, ulysses=), keeps the all-to-alls inside and
the ring crosses, behind the products; context-first, Mesh(ulysses=, ring=), keeps the ring inside. The bytes of each axis are the same.

Rings within rings. A ring over m nodes of w ranks crosses a border in every step, and of a node's w network cards one sends. Let
the ring turn inside the node, on w blocks of keys, while the next w, one for each card, come from the node before:

                              steps across    KV blocks across, of a node     of its busiest rank
    one ring of m·w ranks     m·w - 1         m·w - 1                         m·w - 1
    outer m, inner w          m - 1           w (m - 1)                       m - 1                 one block: 2·B·H_kv·T/(mw)·K

In backward gradients travel as keys do, twice the blocks in both cases. So the bytes of a node hardly change, (mw-1)/(mw-w), but all
cards carry them, and a step across has w inner steps to hide behind. A rank sends (m·w - 1) blocks in either case. Replayed on two
nodes of 8 H100 (forward and backward, H=32, H_kv=8, K=128, bf16, zig-zag):     T=16K     T=128K
                                                            one ring of 16    4.1 ms    40.0 ms
                                                       outer 2, inner of 8    1.62 ms   40.1 ms
Memory: as ring.py, and two more blocks of K and V, one leaving and one arriving, for each ring further out; five in backward.

Raises ValueError in one line, before any rank waits, for heads that u does not divide, for groups that do not cross in this rank
only, and for lengths that the layout does not divide.
Fang and Zhao 2024, USP, arXiv:2405.07719, on unified sequence parallelism; Gu et al. 2024, LoongTrain, arXiv:2406.18485, on
2D-Attention, Double-Ring-Attention and device placement. Differs: any layout in the ring, from one function; rings_forward and
rings_backward nest rings to any depth; K/V heads are copied only as far as u asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain import collectives
from minitrain.attention.alibi import Alibi
from minitrain.attention.dropout import DropMask
from minitrain.attention.kernel import FUSED, GradSum, Kernel, OnlineSoftmax, add_tiles_backward, recomputed
from minitrain.attention.placed import placed
from minitrain.context.layout import Layout, Tile, contiguous, last, part, tiles, zigzag
from minitrain.context.ring import check_core, nested_ring_pass, ring_attention
from minitrain.context.sliced import sliced
from minitrain.context.ulysses import ulysses_attention


def usp_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ulysses: ProcessGroup,
    ring: ProcessGroup,
    layout: Layout = zigzag,
    slices: Sequence[int] = (),
    causal: bool = True,
    kernel: Kernel = FUSED,
    bias: Alibi | None = None,
    dropout: DropMask | float = 0.0,
) -> Tensor:
    """q `[B, H, T/n, K]`, k, v `[B, H_kv, T/n, K]`, tokens as `dealt(layout, u)` says -> `[B, H, T/n, K]`. `layout`: that of the ring.
    `slices`: the tokens of each slice so far, of which the queries are the last (sliced.py); each slice is dealt by itself."""
    check_crossing(ulysses=ulysses, ring=ring)
    layout, through = in_slices(layout, slices, ring.size())
    layout(
        ring.rank(), ring.size(), k.size(2) * ulysses.size() * ring.size()
    )  # refused here, before the all-to-all
    placed(kernel, bias, dropout)  # and this
    core = partial(ring_attention, group=ring, layout=layout, causal=causal, kernel=kernel)
    return ulysses_attention(q, k, v, group=ulysses, core=core, layout=through, bias=bias, dropout=dropout)


def loongtrain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ulysses: ProcessGroup,
    outer: ProcessGroup,
    inner: ProcessGroup,
    layout: Layout = zigzag,
    slices: Sequence[int] = (),
    causal: bool = True,
    kernel: Kernel = FUSED,
    bias: Alibi | None = None,
    dropout: DropMask | float = 0.0,
) -> Tensor:
    """The same with a double ring; its ranks are numbered outer · w + inner, as in mesh.group("outer", "inner")."""
    check_crossing(ulysses=ulysses, outer=outer, inner=inner)
    ranks = outer.size() * inner.size()
    layout, through = in_slices(layout, slices, ranks)
    layout(number_in((outer, inner), (0, 0)), ranks, k.size(2) * ulysses.size() * ranks)
    placed(kernel, bias, dropout)
    core = partial(
        double_ring_attention, outer=outer, inner=inner, layout=layout, causal=causal, kernel=kernel
    )
    return ulysses_attention(q, k, v, group=ulysses, core=core, layout=through, bias=bias, dropout=dropout)


def in_slices(layout: Layout, slices: Sequence[int], ring: int) -> tuple[Layout, Layout]:
    """The layout of the tokens over the ring, and that of a ring rank's over the ranks of ulysses, which puts slice after slice."""
    return (
        (sliced(layout, slices), sliced(contiguous, [size // ring for size in slices]))
        if slices
        else (layout, contiguous)
    )


def dealt(layout: Layout, ulysses: int, *, ulysses_inner: bool = True) -> Layout:
    """The layout of n = r · u ranks in mesh order: the tokens of a ring rank, in `layout`, dealt to u ranks in equal pieces.

    `ulysses_inner` says how the ranks are numbered: j · u + i (head-first), else i · r + j (context-first), j being the ring rank.
    """

    def both(rank: int, ranks: int, length: int) -> list[range]:
        if ranks % ulysses or length % ranks or not length:
            raise ValueError(
                f"dealt: T={length} over {ranks} ranks, {ulysses} of them to a ring rank; ranks are to be a multiple of "
                f"{ulysses} and T of {ranks}"
            )
        ring = ranks // ulysses
        j, i = divmod(rank, ulysses) if ulysses_inner else reversed(divmod(rank, ring))
        return part(layout(j, ring, length), i * (length // ranks), length // ranks)

    return both


# ---- rings within rings ----------------------------------------------------------------------------------------------


def double_ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    outer: ProcessGroup,
    inner: ProcessGroup,
    layout: Layout = zigzag,
    causal: bool = True,
    kernel: Kernel = FUSED,
    bias: Alibi | None = None,
    dropout: DropMask | float = 0.0,
) -> Tensor:
    """q `[B, H, T/n, K]`, k, v `[B, H_kv, T/n, K]`, tokens by `layout` over the n = m · w ranks outer · w + inner -> `[B, H, T/n, K]`."""
    check_core("double_ring_attention", q, k, v, bias, dropout, fewer=True)
    check_crossing(outer=outer, inner=inner)
    seen((outer, inner), (0, 0), layout, q, k, causal)  # refused here, before anything is sent
    return recomputed(
        rings_forward, rings_backward, q, k, v, (outer, inner), layout, causal, placed(kernel, bias, dropout)
    )


def rings_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rings: Sequence[ProcessGroup],
    layout: Layout,
    causal: bool,
    kernel: Kernel,
) -> tuple[Tensor, Tensor]:
    """-> out `[B, H, T/n, K]` in q's dtype, and lse `[B, H, T/n]`. The first ring is the outermost."""
    found = OnlineSoftmax(q)
    nested_ring_pass(
        (k, v),
        rings,
        lambda steps, k, v: found.add_tiles(seen(rings, steps, layout, q, k, causal), k, v, kernel),
    )
    return found.result()


def rings_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rings: Sequence[ProcessGroup],
    layout: Layout,
    causal: bool,
    kernel: Kernel,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv of this rank's tokens."""
    dq = GradSum(q)

    def visit(steps: tuple[int, ...], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        dk, dv = GradSum(k), GradSum(v)
        add_tiles_backward(
            seen(rings, steps, layout, q, k, causal), dout, q, k, v, out, lse, dq, dk, dv, kernel
        )
        return dk.by_token, dv.by_token

    dk, dv = nested_ring_pass((k, v), rings, visit)
    return dq.total.to(q.dtype), *(dx.to(k.dtype).transpose(1, 2) for dx in (dk, dv))


def seen(
    rings: Sequence[ProcessGroup], steps: tuple[int, ...], layout: Layout, q: Tensor, k: Tensor, causal: bool
) -> list[Tile]:
    """What this rank's queries see of the keys that have come so many steps in each ring."""
    ranks = 1
    for ring in rings:
        ranks *= ring.size()
    here, there = (
        layout(number_in(rings, back), ranks, k.size(-2) * ranks) for back in ((0,) * len(rings), steps)
    )
    return tiles(last(here, q.size(-2)), there, causal)


def number_in(rings: Sequence[ProcessGroup], steps: Sequence[int]) -> int:
    """The number, the last ring being innermost, of the rank so many steps behind this one."""
    number = 0
    for ring, step in zip(rings, steps):
        number = number * ring.size() + (ring.rank() - step) % ring.size()
    return number


def check_crossing(**groups: ProcessGroup) -> None:
    """Axes of a grid have this rank in common, and no other."""
    for axis, group in groups.items():
        for other, other_group in groups.items():
            ours, theirs = (collectives.channel_of(g).members for g in (group, other_group))
            if axis < other and len(shared := sorted(set(ours) & set(theirs))) != 1:
                raise ValueError(
                    f"{axis} group {list(ours)} and {other} group {list(theirs)} share ranks {shared}, but must cross in this "
                    f"rank only; on Mesh({axis}=, {other}=) they are group({axis!r}) and group({other!r})"
                )
