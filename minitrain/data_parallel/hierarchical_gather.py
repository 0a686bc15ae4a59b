"""MiCS's hierarchical all-gather: a partition group that spans nodes meets across them first, with the least bytes.

    p ranks on p/k nodes, rank = node·k + place      inter: the p/k ranks of one place      intra: the k of one node
    shard      [d, ..]          rank r holds piece r of the whole [p·d, ..]
    1 across   [p/k, d, ..]     all_gather(shard, inter): pieces of this place from every node, in node order
    2 inside   [k, p/k, d, ..]  all_gather(that, intra): every piece is here, but place by place
    3 reorder  [p/k, k, d, ..]  the two leading dims change places: rank order

The adjoint goes back: turn the dims, reduce-scatter inside the node, then across with 1/k of the bytes. With M the
bytes of the whole each rank sends, in either direction,

    across     (p/k - 1)/p M = (1/k - 1/p) M            inside     (k - 1)/k M            together  (p-1)/p M

and the k ranks of a node together send across (p-k)/p M, each piece once to every other node. In one flat group,

    flat ring in rank order       (p-1)/p M       all on the link out of the node, that of its last rank
    flat direct exchange        k·(p-k)/p M       every rank sends its piece to each of the p-k others

so a node's link carries a (p-1)/(p-k)-th part less than the ring puts on it, 15/8 for 2 nodes of 8; and k cards share
it. Memory: besides the result, the M/k of step 1 and the M of step 2 until they are in order; the adjoint holds the
turned copy of M, M/k and the receive buffers of the collectives.

Swapping `intra` and `inter` is not seen: the result is in the wrong order, as it is without step 3. Outside autograd.
Raises ValueError for a shard without dims, a length which the ranks do not divide, one group given twice, and an `out`
that does not fit.
Zhang et al. 2022 (MiCS), arXiv:2205.00119, section 3.3. Differs: one gather inside the node and then a copy into order,
where MiCS orders the chunks first and gathers them inside in a batch; the adjoint (MiCS reduces in one flat group).
"""

import torch
from einops import rearrange
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.collectives import all_gather, reduce_scatter


def hierarchical_all_gather(
    shard: Tensor, intra: ProcessGroup, inter: ProcessGroup, out: Tensor | None = None
) -> Tensor:
    """Everyone's shard [d, ..], in the order of rank = inter.rank()·k + intra.rank(): [p·d, ..]."""
    places, nodes = _sizes("hierarchical_all_gather", shard, intra, inter)
    rows, rest = shard.shape[0], shard.shape[1:]
    whole = (nodes * places * rows, *rest)
    if out is None:
        out = torch.empty(whole, dtype=shard.dtype, device=shard.device)
    elif (
        out.shape != whole
        or out.dtype != shard.dtype
        or out.device != shard.device
        or not out.is_contiguous()
    ):
        raise ValueError(
            f"hierarchical_all_gather: out is {list(out.shape)} {out.dtype} on {out.device}; it must be "
            f"{list(whole)} {shard.dtype} on {shard.device}, contiguous"
        )
    of_this_place = all_gather(shard, inter)
    place_by_place = all_gather(of_this_place, intra)
    out.detach().view(nodes, places, rows, *rest).copy_(
        rearrange(place_by_place, "(place node row) ... -> node place row ...", place=places, node=nodes)
    )
    return out


def hierarchical_reduce_scatter(flat: Tensor, intra: ProcessGroup, inter: ProcessGroup) -> Tensor:
    """Piece inter.rank()·k + intra.rank() of the sum of everyone's flat [p·d, ..]: [d, ..]."""
    places, nodes = _sizes("hierarchical_reduce_scatter", flat, intra, inter)
    if flat.shape[0] % (nodes * places):
        raise ValueError(
            f"hierarchical_reduce_scatter: {flat.shape[0]} along dim 0 is not a multiple of the "
            f"{nodes} x {places} ranks of {nodes} nodes; pad it"
        )
    place_by_place = rearrange(
        flat.detach(), "(node place row) ... -> (place node row) ...", place=places, node=nodes
    )
    of_this_place = reduce_scatter(place_by_place, intra)
    return reduce_scatter(of_this_place, inter)


def _sizes(what: str, tensor: Tensor, intra: ProcessGroup, inter: ProcessGroup) -> tuple[int, int]:
    """Ranks a node (k) and nodes (p/k)."""
    if tensor.dim() == 0:
        raise ValueError(f"{what}: a tensor without dims has no pieces; use x.reshape(1)")
    if intra is inter:
        raise ValueError(
            f"{what}: intra and inter are the same group; give the ranks of this node, then those of "
            f"this place on every node"
        )
    return intra.size(), inter.size()
