"""BurstAttention: a ring of devices inside a ring of nodes, and backward that sends the queries' side instead of the keys'.

    outer step o    this node has the blocks of node a - o          while those of node a - o - 1 arrive over the slow network
    inner step i    this device that of device d - i among them     while that of device d - i - 1 arrives over the fast one

A flat ring of N nodes with M devices takes N·M - 1 steps, and in each some link between nodes must carry a block: every step is as
slow as the network. Here a block crosses nodes N-1 times in all and has a whole turn of the inner ring to do so: M steps' products.
Each rank sends as much as before, (N-1) blocks of it `across`, N·(M-1) `inside`. `ring_pass` (ring.py) inside `ring_pass` is all of it.

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

from functools import partial

from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.attention.alibi import Alibi
from minitrain.attention.dropout import DropMask
from minitrain.attention.kernel import (
    FUSED,
    GradSum,
    Kernel,
    OnlineSoftmax,
    add_tiles_backward,
    recomputed,
    row_sums,
    stand_in,
)
from minitrain.attention.placed import placed
from minitrain.context.layout import Layout, Tile, contiguous, last, tiles
from minitrain.context.ring import check_core, nested_ring_pass

SIDES = "queries", "keys"


def burst_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    inside: ProcessGroup,
    across: ProcessGroup,
    layout: Layout = contiguous,
    causal: bool = True,
    backward_sends: str = "queries",
    kernel: Kernel = FUSED,
    bias: Alibi | None = None,
    dropout: DropMask | float = 0.0,
) -> Tensor:
    """`inside`: the M devices of this node; `across`: the N devices with this one's number. A core for the model's attention."""
    check_core("burst_attention", q, k, v, bias, dropout, fewer=True)
    if backward_sends not in SIDES:
        raise ValueError(
            f"burst_attention: backward_sends={backward_sends!r}; choose from {', '.join(SIDES)}"
        )
    return recomputed(
        burst_forward,
        partial(burst_backward, sends=backward_sends),
        q,
        k,
        v,
        (across, inside),
        layout,
        causal,
        placed(kernel, bias, dropout),
    )


def burst_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: tuple[ProcessGroup, ProcessGroup],
    layout: Layout,
    causal: bool,
    kernel: Kernel,
) -> tuple[Tensor, Tensor]:
    """-> out `[B, H, T/n, K]` in q's dtype, and lse `[B, H, T/n]`."""
    plan, found = tiles_by_steps(groups, layout, q, k, causal), OnlineSoftmax(q)
    nested_ring_pass((k, v), groups, lambda steps, k, v: found.add_tiles(plan[steps][0], k, v, kernel))
    return found.result()


def burst_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    groups: tuple[ProcessGroup, ProcessGroup],
    layout: Layout,
    causal: bool,
    kernel: Kernel,
    *,
    sends: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv of this rank's tokens."""
    plan = tiles_by_steps(groups, layout, q, k, causal)
    own = [GradSum(x) for x in (q, k, v)]

    def with_keys(steps: tuple[int, int], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        dk, dv = GradSum(k), GradSum(v)
        add_tiles_backward(plan[steps][0], dout, q, k, v, out, lse, own[0], dk, dv, kernel)
        return dk.by_token, dv.by_token

    def with_queries(
        steps: tuple[int, int], q: Tensor, dout: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor]:
        dq = GradSum(q)
        add_tiles_backward(plan[steps][1], dout, q, k, v, stand_in(dout, delta), lse, dq, *own[1:], kernel)
        return (dq.by_token,)

    if sends == "keys":
        dkv = nested_ring_pass((k, v), groups, with_keys)
        found = own[0].by_token, *dkv
    else:
        dq = nested_ring_pass((q, dout, lse, row_sums(dout, out)), groups, with_queries)
        found = *dq, *(total.by_token for total in own[1:])
    return tuple(dx.to(q.dtype).transpose(1, 2) for dx in found)


def tiles_by_steps(
    groups: tuple[ProcessGroup, ProcessGroup], layout: Layout, q: Tensor, k: Tensor, causal: bool
) -> dict[tuple[int, int], tuple[list[Tile], list[Tile]]]:
    """[o, i]: what this rank's queries see of the visitor's keys, and what the visitor's queries see of this rank's."""
    (nodes, devices), (node, device) = (group.size() for group in groups), (group.rank() for group in groups)

    def held(node: int, device: int) -> list[range]:
        return layout(
            node % nodes * devices + device % devices, nodes * devices, k.size(-2) * nodes * devices
        )

    own, visitors = (
        held(node, device),
        {(o, i): held(node - o, device - i) for o in range(nodes) for i in range(devices)},
    )
    return {
        steps: (tiles(last(own, q.size(-2)), other, causal), tiles(last(other, q.size(-2)), own, causal))
        for steps, other in visitors.items()
    }
