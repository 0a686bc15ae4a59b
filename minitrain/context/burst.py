"""BurstAttention: a ring of devices inside a ring of nodes, and backward that sends the queries' side instead of the keys'.

    outer step o    this node has the blocks of node a - o          while those of node a - o - 1 arrive over the slow network
    inner step i    this device that of device d - i among them     while that of device d - i - 1 arrives over the fast one

A flat ring of N nodes with M devices takes N·M - 1 steps, and in each some link between nodes must carry a block: every step is as
slow as the network. Here a block crosses nodes N-1 times in all and has a whole turn of the inner ring to do so: M steps' products.
Each rank sends as much as before, (N-1) blocks of it `across`, N·(M-1) `inside`. `carry` (ring.py) inside `carry` is all of it.

Backward may send one side or the other. "keys" is the ring's: K, V go round, dK, dV behind them. "queries" keeps K, V, dK, dV where
they are and sends Q, dO with the two numbers a row that backward needs of forward, lse and D = rowsum(dO · O), and dQ behind them:

    keys       (n-1) · 4 · B·H_kv·T/n·K                         less wherever K/V heads are shared: H_kv <= 3/4 H
    queries    (n-1) · (3 · B·H·T/n·K + 2 · B·H·T/n)            a quarter less for H_kv = H; lse and D in at least float32

Memory: one more block than the ring, that which arrives from the next node (double buffer), and one more sum on its way.
q `[B, H, T/n, K]`, k, v `[B, H_kv, T/n, K]`; rank = node · M + device in the layout. Raises ValueError in one line as ring.py does, and
for a side that is neither.
Sun et al. 2024 (BurstAttention), arXiv:2403.09347, section 3: the queries' side in backward, double buffer; Sun et al. 2025 (BurstEngine),
arXiv:2509.19836: rings that follow the topology. Differs: inside a device PyTorch's flash kernels tile; either side in backward.
"""
from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.context.blocks import FUSED, Blocks, nothing_yet, row_sums, stand_in
from minitrain.context.dropout import DropMask, dropping
from minitrain.context.layout import Layout, Tile, contiguous, tiles
from minitrain.context.ring import attend, attend_backward, carry, check_core, zeros

SIDES = "queries", "keys"


def burst_attention(q: Tensor, k: Tensor, v: Tensor, *, inside: ProcessGroup, across: ProcessGroup, layout: Layout = contiguous,
                    causal: bool = True, backward_sends: str = "queries", blocks: Blocks = FUSED, bias: None = None,
                    dropout: DropMask | float = 0.0) -> Tensor:
    """`inside`: the M devices of this node; `across`: the N devices with this one's number. A core for the model's attention."""
    check_core("burst_attention", q, k, v, bias, dropout)
    if backward_sends not in SIDES:
        raise ValueError(f"burst_attention: backward_sends={backward_sends!r}; choose from {', '.join(SIDES)}")
    return _Burst.apply(q, k, v, (across, inside), layout, causal, backward_sends, dropping(blocks, dropout))


def carry_far(x: Tensor | tuple[Tensor, ...], groups: tuple[ProcessGroup, ProcessGroup], visit) -> Tensor | None:
    """`carry` over both rings: visit(o, i, x of node - o and device - i)."""
    across, inside = groups
    return carry(x, across, lambda o, x: carry(x, inside, lambda i, x: visit(o, i, x)))


def burst_forward(q: Tensor, k: Tensor, v: Tensor, groups: tuple[ProcessGroup, ProcessGroup], layout: Layout, causal: bool,
                  blocks: Blocks) -> tuple[Tensor, Tensor]:
    """-> out `[B, H, T/n, K]` in q's dtype, and lse `[B, H, T/n]`."""
    plan = tiles_by_steps(groups, layout, q.size(-2), causal)
    out, lse = nothing_yet(q)
    carry_far(torch.stack((k, v)), groups, lambda o, i, kv: attend(plan[o][i][0], q, kv, out, lse, blocks))
    return out.to(q.dtype), lse


def burst_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, groups: tuple[ProcessGroup, ProcessGroup],
                   layout: Layout, causal: bool, sends: str, blocks: Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv of this rank's tokens."""
    plan = tiles_by_steps(groups, layout, q.size(-2), causal)
    kv = torch.stack((k, v))

    def with_keys(o: int, i: int, kv: Tensor) -> Tensor:
        return attend_backward(plan[o][i][0], dout, q, kv, out, lse, dq, zeros(kv), blocks)

    def with_queries(o: int, i: int, visitor: tuple[Tensor, Tensor]) -> Tensor:
        (q, dout), (lse, delta) = visitor
        dq = zeros(q)
        attend_backward(plan[o][i][1], dout, q, kv, stand_in(dout, delta), lse, dq, dkv, blocks)
        return dq

    if sends == "keys":
        dq = zeros(q)
        dkv = carry_far(kv, groups, with_keys)
    else:
        dkv = zeros(kv)
        dq = carry_far((torch.stack((q, dout)), torch.stack((lse, row_sums(dout, out)))), groups, with_queries)
    return dq.to(q.dtype), *dkv.to(k.dtype)


def tiles_by_steps(groups: tuple[ProcessGroup, ProcessGroup], layout: Layout, tokens: int, causal: bool) -> list[list[tuple[list[Tile], list[Tile]]]]:
    """[o][i]: what this rank's queries see of the visitor's keys, and what the visitor's queries see of this rank's."""
    (nodes, devices), (node, device) = (group.size() for group in groups), (group.rank() for group in groups)

    def held(node: int, device: int) -> list[range]:
        return layout(node % nodes * devices + device % devices, nodes * devices, tokens * nodes * devices)

    own, visitors = held(node, device), [[held(node - o, device - i) for i in range(devices)] for o in range(nodes)]
    return [[(tiles(own, other, causal), tiles(other, own, causal)) for other in row] for row in visitors]


class _Burst(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, groups, layout: Layout, causal: bool, sends: str, blocks: Blocks) -> Tensor:
        out, lse = burst_forward(q, k, v, groups, layout, causal, blocks)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.way = groups, layout, causal, sends, blocks
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout: Tensor):
        return *burst_backward(dout, *ctx.saved_tensors, *ctx.way), None, None, None, None, None
