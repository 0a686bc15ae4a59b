"""MiCS's hierarchical all-gather: a group that spans nodes gathers across them first, with the least bytes.

    p ranks on p/k nodes, rank = node·k + place   inter: the p/k ranks of one place   intra: the k of one node
    shard      [d, ..]          rank r holds piece r of the whole [p·d, ..]
    1 across   [p/k, d, ..]     all_gather(shard, inter): pieces of this place from every node, in node order
    2 inside   [k, p/k, d, ..]  all_gather(that, intra): every piece is here, but place by place
    3 reorder  [p/k, k, d, ..]  the two leading dims change places: rank order

The adjoint goes back. With M the bytes of the whole each rank sends, in either direction, (1/k - 1/p) M
across and (k-1)/k M inside. A node sends (p-k)/p M across, a flat ring (p-1)/p M. Outside autograd.
Memory: besides the result, the M/k of step 1 and the M of step 2; the adjoint: the reordered copy of M, M/k
and the receive buffers. Swapped `intra` and `inter` go unnoticed: the result is in the wrong order.
Zhang et al. 2022 (MiCS), arXiv:2205.00119, section 3.3. Differs: one gather inside the node, then a copy into
order, where MiCS orders the chunks first; the adjoint (MiCS reduces in one flat group).
"""

import torch
from einops import rearrange
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.ranks.collectives import all_gather, reduce_scatter


def hierarchical_all_gather(shard: Tensor, intra: ProcessGroup, inter: ProcessGroup, out=None) -> Tensor:
    """Everyone's shard [d, ..], in the order of rank = inter.rank()·k + intra.rank(): [p·d, ..]."""
    what, dtype, device = "hierarchical_all_gather", shard.dtype, shard.device
    shape = (_num_ranks(what, shard, intra, inter) * shard.shape[0], *shard.shape[1:])
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=device)
    elif (out.shape, out.dtype, out.device) != (shape, dtype, device) or not out.is_contiguous():
        found = f"{list(out.shape)} {out.dtype} on {out.device}"
        raise ValueError(f"{what}: out is {found}; it must be {list(shape)} {dtype} on {device}, contiguous")
    return gather_inside(all_gather(shard, inter), intra, inter, out)


def gather_inside(of_this_place: Tensor, intra: ProcessGroup, inter: ProcessGroup, out: Tensor) -> Tensor:
    """Steps 2 and 3: [p/k·d, ..], the pieces of this place, into out [p·d, ..], all in rank order."""
    place_by_place, sizes = all_gather(of_this_place, intra), {"place": intra.size(), "node": inter.size()}
    in_order = rearrange(place_by_place, "(place node row) ... -> node place row ...", **sizes)
    out.detach().view(in_order.shape).copy_(in_order)
    return out


def hierarchical_reduce_scatter(flat: Tensor, intra: ProcessGroup, inter: ProcessGroup) -> Tensor:
    """Piece inter.rank()·k + intra.rank() of the sum of everyone's flat [p·d, ..]: [d, ..]."""
    what, sizes = "hierarchical_reduce_scatter", {"place": intra.size(), "node": inter.size()}
    ranks = _num_ranks(what, flat, intra, inter)
    if flat.shape[0] % ranks:
        rows = f"{flat.shape[0]} along dim 0"
        raise ValueError(f"{what}: {rows} is not a multiple of the {ranks} ranks; pad it")
    place_by_place = rearrange(flat.detach(), "(node place row) ... -> (place node row) ...", **sizes)
    return reduce_scatter(reduce_scatter(place_by_place, intra), inter)


def _num_ranks(what: str, tensor: Tensor, intra: ProcessGroup, inter: ProcessGroup) -> int:
    if tensor.dim() == 0:
        raise ValueError(f"{what}: a tensor without dims has no pieces; use x.reshape(1)")
    if intra is inter:
        raise ValueError(f"{what}: intra and inter are the same group; inter is this place on every node")
    return intra.size() * inter.size()
