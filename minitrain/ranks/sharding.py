"""Where a parameter is: one record, `param.placement`, written by who cuts or copies it, read by all who ask.

    shards        how it is cut                     W[F, D] -> W[F/n, D]: (Shard(0, group),), in order
    summed_over   over whom its gradient is a sum   ranks with other tokens: (dp × cp,), or (intra, inter)
    copies        who else holds it                 ranks of a pipeline with the same tied table or stage
    inside        of a flat buffer of parameters: the groups that had cut these before it was cut

`shard` copies this rank's slice and sends nothing. `full_tensor` undoes the cuts, the last one first: each
gather sends (n-1)/n of its result. A tensor may be cut several times, along one dim (tp, then dp inside the
slice) or along two, but not over ranks that hold different slices already: that could not be undone. Where
the ranks do not divide a dim, `pad=True` gives all of them the next larger slice; the last ones end in zeros.

torch's DTensor keeps the same facts inside the tensor. Differs: what a rank holds stays an ordinary tensor,
so that the collectives around it are calls one can see; sums and copies are recorded too.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.ranks import collectives
from minitrain.ranks.torch_private import outside_modes

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Shard:
    """One cut along `dim`: equal slices for the ranks of `group`; `size` of the whole, if it is padded."""

    dim: int
    group: dist.ProcessGroup
    size: int | None = None


@dataclass(frozen=True, slots=True)
class Placement:  # the fields are explained above
    shards: tuple[Shard, ...] = ()
    summed_over: tuple[dist.ProcessGroup, ...] = ()
    copies: dist.ProcessGroup | None = None
    inside: tuple[dist.ProcessGroup, ...] = ()

    # the groups whose ranks together hold it once
    cut_over = property(lambda self: (*self.inside, *(cut.group for cut in self.shards)))


def placement(tensor: Tensor) -> Placement:
    """Of any tensor: one that nobody placed is whole, and its gradient is its own."""
    return getattr(tensor, "placement", WHOLE)


def place(tensor: Tensor, **changes) -> Tensor:
    """The tensor, with these fields of its placement written."""
    tensor.placement = replace(placement(tensor), **changes)
    return tensor


def whole_shape(tensor: Tensor) -> list[int]:
    """The shape of the whole of which this rank has a part."""
    shape = list(tensor.shape)
    for cut in reversed(placement(tensor).shards):
        shape[cut.dim] = cut.size or shape[cut.dim] * cut.group.size()
    return shape


def shard(tensor: Tensor, dim: int, group: dist.ProcessGroup, pad: bool = False) -> Tensor:
    """This rank's slice along `dim`, a copy (a Parameter if `tensor` is one); its placement has the cut."""
    axis, ranks, shape = collectives.axis_of(group), group.size(), list(tensor.shape)
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"shard: dim={dim}, but the tensor {shape} has {tensor.dim()} dims")
    dim %= tensor.dim()
    for earlier in placement(tensor).shards:
        both = set(collectives.members(group)) & set(collectives.members(earlier.group))
        if both != {dist.get_rank()}:
            cut = f"cut over {collectives.axis_of(earlier.group)}"
            cure = "cut over an axis whose ranks hold the same"
            raise ValueError(f"shard: ranks of {axis} hold different slices already, {cut}; {cure}")
    if shape[dim] % ranks and not pad:
        size = f"{shape[dim]} along dim {dim} of {shape} is not a multiple of the {ranks} ranks of {axis}"
        raise ValueError(f"shard: {size}; pad the tensor or change the size of the axis")
    cut = Shard(dim, group, shape[dim] if shape[dim] % ranks else None)
    local = _slice(tensor.detach(), cut).clone(memory_format=torch.contiguous_format)
    if isinstance(tensor, nn.Parameter):
        local = nn.Parameter(local, requires_grad=tensor.requires_grad)
    local.placement = replace(placement(tensor), shards=(*placement(tensor).shards, cut))
    return local


def _slice(tensor: Tensor, cut: Shard) -> Tensor:
    """This rank's part of a tensor that is whole along `cut.dim`; zeros where it is shorter than others'."""
    length = tensor.size(cut.dim)
    size = math.ceil(length / cut.group.size())
    first = min(cut.group.rank() * size, length)
    part = tensor.narrow(cut.dim, first, min(size, length - first))
    missing = size - part.size(cut.dim)
    return F.pad(part, [0, 0] * (tensor.dim() - 1 - cut.dim) + [0, missing]) if missing else part


def local_shard(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, cut as `like` is."""
    for cut in placement(like).shards:
        whole = _slice(whole, cut)
    return whole


def region_of(tensor: Tensor) -> tuple[list[int], list[int]]:
    """Where in the whole this rank's part of it begins and, without padding, ends."""
    lengths, limit, corner = whole_shape(tensor), whole_shape(tensor), [0] * tensor.dim()
    for dim, group in ((cut.dim, cut.group) for cut in placement(tensor).shards):
        lengths[dim] = math.ceil(lengths[dim] / group.size())
        corner[dim] += group.rank() * lengths[dim]
        limit[dim] = min(limit[dim], corner[dim] + lengths[dim])
    return corner, limit


def numbers(tensor: Tensor, first: int, last: int, device: torch.device | None = None) -> Tensor:
    """int64: which elements of the whole, counted along its rows, elements first .. last of this part are."""
    index = torch.arange(first, last, device=device or tensor.device)
    if not placement(tensor).shards:
        return index
    corner, _ = region_of(tensor)
    in_whole = torch.zeros_like(index)
    for dim in reversed(range(tensor.dim())):
        stride = math.prod(whole_shape(tensor)[dim + 1 :])
        in_whole += (index % tensor.size(dim) + corner[dim]) * stride
        index = index // tensor.size(dim)
    return in_whole


def full_tensor(tensor: Tensor, shards: tuple[Shard, ...] | None = None) -> Tensor:
    """The whole of `tensor` on every rank, outside autograd. What does not carry its cuts itself is told of
    them: full_tensor(param.grad, param.placement.shards)."""
    whole = tensor.detach()
    for cut in reversed(placement(tensor).shards if shards is None else shards):
        whole = collectives.all_gather(whole, cut.group, cut.dim)
        if cut.size:
            whole = whole.narrow(cut.dim, 0, cut.size).contiguous()
    return whole


WHOLE = Placement()


# ---- optimizers of parts ---------------------------------------------------------------------------------


def build_optimizer(make_optimizer: MakeOptimizer | None, names: Mapping[nn.Parameter, str]) -> tuple:
    """(the optimizer, its groups emptied; states it made already; the group of each trainable parameter)."""
    if isinstance(make_optimizer, torch.optim.Optimizer):
        built = f"{type(make_optimizer).__name__} was built before sharding, over whole parameters"
        raise ValueError(f"{built}; give a function that builds it: lambda params: AdamW(params, lr=...)")
    stand_ins = {}
    for param, name in names.items():
        if param.requires_grad:
            stand_in = nn.Parameter(param.new_empty(()).expand(whole_shape(param)))
            stand_in.global_name = name
            stand_ins[stand_in] = param
    if make_optimizer is None or not stand_ins:
        return None, {}, {}
    optimizer = make_optimizer(list(stand_ins))
    group_of = {x: number for number, group in enumerate(optimizer.param_groups) for x in group["params"]}
    if group_of.keys() != stand_ins.keys():
        left = ", ".join([x.global_name for x in stand_ins if x not in group_of][:3]) or "none"
        raise ValueError(f"make_optimizer left out {left} of the tensors it was given; use just these")
    first_states = {stand_ins[x]: state for x, state in optimizer.state.items()}
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = []
    return optimizer, first_states, {stand_ins[x]: number for x, number in group_of.items()}


def check_parts(optimizer, number: int, param: nn.Parameter, first_states: dict) -> None:
    """ValueError unless the parts of a matrix, each in an optimizer of its own as on another rank, end as the
    whole does: norms of matrices and factored moments do not. Tried on copies, two steps of this group."""
    group = optimizer.param_groups[number]

    def update(part_of) -> Tensor:
        start = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
        tried, x = copy.deepcopy(optimizer), nn.Parameter(part_of(start).clone())
        # a warm-up begins at 0
        tried.param_groups[:] = [copy.deepcopy(group) | dict(params=[x], lr=group.get("lr") or 0.01)]
        for key, value in first_states.get(param, {}).items():
            of_elements = isinstance(value, Tensor) and (value.dim() or not param.dim() and key != "step")
            value = torch.full_like(x, value.flatten()[0]) if of_elements else copy.deepcopy(value)
            tried.state[x][key] = value
        for grad in (start.exp(), start.square()):
            x.grad = part_of(grad).clone()
            tried.step()
        return (x.detach() - part_of(start)).flatten()

    with outside_modes(), torch.device("cpu"):  # whatever torch's default device is, or a dry run's
        try:
            whole, first = update(lambda x: x), update(lambda x: x.flatten()[:5])
            parts = torch.cat([first, update(lambda x: x.flatten()[5:])])
            alike = bool((whole - parts).abs().max() <= 1e-3 * whole.abs().max())
        except (RuntimeError, ValueError, TypeError):  # it does not take a part, or wants a closure
            alike = False
    if not alike:
        what = f"{type(optimizer).__name__} updates a part of {param.global_name} otherwise than the whole"
        raise ValueError(f"{what}: use zero=0 without tp and ep, where it is whole, or an elementwise one")
