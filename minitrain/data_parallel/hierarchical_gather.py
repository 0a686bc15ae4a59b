"""MiCS's hierarchical all-gather: a partition group that spans nodes gathers across them first, with the least bytes.

    p ranks on p/k nodes, rank = node·k + place      inter: the p/k ranks of one place      intra: the k of one node
    shard      [d, ..]          rank r holds piece r of the whole [p·d, ..]
    1 across   [p/k, d, ..]     all_gather(shard, inter): pieces of this place from every node, in node order
    2 inside   [k, p/k, d, ..]  all_gather(that, intra): every piece is here, but place by place
    3 reorder  [p/k, k, d, ..]  the two leading dims change places: rank order

The adjoint goes back: reorder, reduce-scatter inside the node, then across with 1/k of the bytes. With M the
bytes of the whole each rank sends, in either direction, (1/k - 1/p) M across and (k-1)/k M inside. The k
ranks of a node send across (p-k)/p M, where one flat ring in rank order sends (p-1)/p M, all from the node's
last rank.
Memory: besides the result, the M/k of step 1 and the M of step 2 until they are in order; the adjoint holds
the reordered copy of M, M/k and the receive buffers of the collectives. Outside autograd.

Swapping `intra` and `inter` is not seen: the result is in the wrong order, as it is without step 3.
Zhang et al. 2022 (MiCS), arXiv:2205.00119, section 3.3. Differs: one gather inside the node and then a copy
into order, where MiCS orders the chunks first and gathers them inside in a batch; the adjoint (MiCS reduces
in one flat group).
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
    ranks = _num_ranks("hierarchical_all_gather", shard, intra, inter)
    shape, dtype, device = (ranks * shard.shape[0], *shard.shape[1:]), shard.dtype, shard.device
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=device)
    elif (out.shape, out.dtype, out.device) != (shape, dtype, device) or not out.is_contiguous():
        raise ValueError(
            f"hierarchical_all_gather: out is {list(out.shape)} {out.dtype} on {out.device}; it must be "
            f"{list(shape)} {dtype} on {device}, contiguous"
        )
    gather_inside(all_gather(shard, inter), intra, inter, out)
    return out


def gather_inside(of_this_place: Tensor, intra: ProcessGroup, inter: ProcessGroup, out: Tensor) -> None:
    """Steps 2 and 3: [p/k·d, ..], the pieces of this place, into out [p·d, ..], all in rank order."""
    place_by_place = all_gather(of_this_place, intra)
    nodes = {"place": intra.size(), "node": inter.size()}
    in_order = rearrange(place_by_place, "(place node row) ... -> node place row ...", **nodes)
    out.detach().view(in_order.shape).copy_(in_order)


def hierarchical_reduce_scatter(flat: Tensor, intra: ProcessGroup, inter: ProcessGroup) -> Tensor:
    """Piece inter.rank()·k + intra.rank() of the sum of everyone's flat [p·d, ..]: [d, ..]."""
    ranks, places, nodes = (
        _num_ranks("hierarchical_reduce_scatter", flat, intra, inter),
        intra.size(),
        inter.size(),
    )
    if flat.shape[0] % ranks:
        raise ValueError(
            f"hierarchical_reduce_scatter: {flat.shape[0]} along dim 0 is not a multiple of the {nodes} x {places} ranks "
            f"of {nodes} nodes; pad it"
        )
    turned = "(node place row) ... -> (place node row) ..."
    place_by_place = rearrange(flat.detach(), turned, place=places, node=nodes)
    return reduce_scatter(reduce_scatter(place_by_place, intra), inter)


def _num_ranks(what: str, tensor: Tensor, intra: ProcessGroup, inter: ProcessGroup) -> int:
    if tensor.dim() == 0:
        raise ValueError(f"{what}: a tensor without dims has no pieces; use x.reshape(1)")
    if intra is inter:
        raise ValueError(
            f"{what}: intra and inter are the same group; give the ranks of this node, then those of this place on "
            "every node"
        )
    return intra.size() * inter.size()
