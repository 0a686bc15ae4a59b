"""A parameter knows how it is cut: `param.shards` lists the cuts, and whoever needs the whole undoes them.

    shard(W[F, D], dim=0, group) -> W[F/n, D] on each of the n ranks, with .shards = (Shard(0, group),)

`shard` copies this rank's slice and sends nothing. `full_tensor` all-gathers cut by cut, the last one first, and each
gather sends (n-1)/n of what it puts together. A tensor may be cut several times, along one dim (tp, then dp inside the
slice) or along two. The tuple is read by clipping (the norm of a sharded parameter must be summed over its groups), by
checkpoints, by resharding and by tests.

Raises ValueError for a dim that does not exist or does not divide, and for a group whose ranks hold different slices
already (cutting those again could not be undone).
torch's DTensor keeps the same facts inside the tensor, as placements. Differs: what a rank holds stays an ordinary
tensor, so that the collectives around it are calls one can see.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minitrain import collectives


@dataclass(frozen=True, slots=True)
class Shard:
    """One cut: along `dim`, one equal slice per rank of `group`, in group-rank order."""

    dim: int
    group: dist.ProcessGroup


def shard(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice along `dim`, a copy; an nn.Parameter if `tensor` is one. `.shards` grows by this cut."""
    axis, ranks, shape = collectives.axis_of(group), group.size(), list(tensor.shape)
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"shard: dim={dim}, but the tensor {shape} has {tensor.dim()} dims")
    dim %= tensor.dim()
    for earlier in getattr(tensor, "shards", ()):
        both = set(dist.get_process_group_ranks(group)) & set(dist.get_process_group_ranks(earlier.group))
        if both != {dist.get_rank()}:
            raise ValueError(f"shard: ranks of {axis} hold different slices already, cut over "
                             f"{collectives.axis_of(earlier.group)}; cut over an axis whose ranks hold the same")
    if shape[dim] % ranks:
        raise ValueError(f"shard: {shape[dim]} along dim {dim} of {shape} is not a multiple of the {ranks} ranks of "
                         f"{axis}; pad the tensor or change the size of the axis")
    size = shape[dim] // ranks
    local = tensor.detach().narrow(dim, group.rank() * size, size).clone(memory_format=torch.contiguous_format)
    if isinstance(tensor, nn.Parameter):
        local = nn.Parameter(local, requires_grad=tensor.requires_grad)
    local.shards = (*getattr(tensor, "shards", ()), Shard(dim, group))
    return local


def full_tensor(tensor: Tensor, shards: tuple[Shard, ...] | None = None) -> Tensor:
    """The whole of `tensor` on every rank, outside autograd.

    What does not carry its cuts itself, a gradient say, is told: full_tensor(param.grad, param.shards).
    """
    whole = tensor.detach()
    for cut in reversed(getattr(tensor, "shards", ()) if shards is None else shards):
        whole = collectives.all_gather(whole, cut.group, cut.dim)
    return whole
