"""Rings within rings: keys and values go round inside a node while the blocks of the next node arrive.

    outer step o   node a has blocks of node a - o       those of node a - o - 1 arrive over the slow network
    inner step i   device d of it, that of device d - i  that of device d - i - 1 arrives over the fast one

A ring over N nodes of M devices crosses between nodes in each step, on one of a node's M network cards. Here
a block crosses N - 1 times, on every card, behind M steps' products. Ranks send N·M - 1 either way.

                             steps across    of a node's blocks   of a busy rank's   2 nodes of 8 H100*
    one ring of N·M ranks    N·M - 1         N·M - 1              N·M - 1            4.1 ms    40.0 ms
    outer N, inner M         N - 1           M (N - 1)            N - 1              1.62 ms   40.1 ms
    * forward and backward, replayed, T=16K and T=128K: H=32, H_kv=8, K=128, bf16, zig-zag

BurstAttention's backward may send "queries": K, V, dK, dV stay; Q, dO, lse, D = rowsum(dO · O), dQ go round:
    keys       (n-1) · 4 · B·H_kv·T/n·K                 less wherever H_kv <= 3/4 H
    queries    (n-1) · (3 · B·H·T/n·K + 2 · B·H·T/n)    a quarter less for H_kv = H; lse, D at least float32
Memory: as ring.py, and for each ring further out two more blocks of K and V, five in backward. Gu et al. 2024
(LoongTrain), arXiv:2406.18485; Sun et al. 2024 (BurstAttention), arXiv:2403.09347, section 3; Sun et al. 2025
(BurstEngine), arXiv:2509.19836. Differs: any layout; rings nest to any depth.
"""

from itertools import combinations

from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.attention.kernel import GradSum, Kernel, add_tiles_backward, recomputed, row_sums, stand_in
from minitrain.context.layout import contiguous, zigzag
from minitrain.context.ring import Rings, Tensors, check_core, nested_ring_pass, ring_backward, ring_forward
from minitrain.ranks import collectives

SIDES = "queries", "keys"


def double_ring_attention(q, k, v, *, outer, inner, layout=zigzag, causal=True, **how) -> Tensor:
    """q `[B, H, T/n, K]`, k, v `[B, H_kv, T/n, K]`, tokens by `layout` over the ranks outer · M + inner of
    mesh.group("outer", "inner") -> `[B, H, T/n, K]`. `how`: kernel, bias, dropout (ring.check_core)."""
    kernel = check_core("double_ring_attention", q, k, v, fewer=True, **how)
    check_crossing(outer=outer, inner=inner)
    rings = Rings((outer, inner), layout, causal)
    return recomputed(ring_forward, ring_backward, q, k, v, rings, kernel)


def burst_attention(
    q, k, v, *, inside, across, layout=contiguous, causal=True, backward_sends="queries", **how
) -> Tensor:
    """The same; groups `inside`: the M devices of this node, `across`: the N with this one's number."""
    kernel = check_core("burst_attention", q, k, v, fewer=True, **how)
    if backward_sends not in SIDES:
        raise ValueError(f"burst_attention: {backward_sends=}; choose from {', '.join(SIDES)}")
    backward = ring_backward if backward_sends == "keys" else queries_backward
    return recomputed(ring_forward, backward, q, k, v, Rings((across, inside), layout, causal), kernel)


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
        ours, theirs = (list(collectives.channel_of(g).members) for g in (group, other_group))
        if len(shared := sorted(set(ours) & set(theirs))) != 1:
            what = f"{axis} group {ours} and {other} group {theirs} share ranks {shared}"
            names = f"on Mesh({axis}=, {other}=) they are group({axis!r}) and group({other!r})"
            raise ValueError(f"{what}, but must cross in this rank only; {names}")
