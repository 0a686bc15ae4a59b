"""Collectives that are counted, logged and, in checked mode, compared across ranks.

`group` is always an argument, `world()` for everyone; a `source` or `to` is a rank in the group. With n ranks
and S the bytes of the full tensor a rank sends

    all_reduce      [..]           -> [..] the sum, or the maximum        2(n-1)/n S
    all_gather      [.., d, ..]    -> [.., n·d, ..] in rank order          (n-1)/n S
    reduce_scatter  [.., n·d, ..]  -> [.., d, ..] of the sum               (n-1)/n S
    all_to_all      [.., n·d, ..]  -> [.., n·d, ..] piece j to rank j      (n-1)/n S
    broadcast       [..]           -> [..] of the source                   S to each child in a binomial tree

and holds, besides the result, a receive buffer of (n-1)/n S where it adds, and copies where pieces along
`dim` are not consecutive memory. Sums are taken in rank order, with the same bits on all ranks. A result is
new, contiguous and outside autograd, or written to `out=`. Until an asynchronous call is waited for, x must
not change. Gradients flow through pairs of linear maps and their adjoints (Megatron-LM's f and g and, for the
sequence, Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2; differs: any group, any dim):

    forward    copy_to     reduce_from  gather_from  scatter_to  reduce_scatter_to  gather_to       all_to_all
    backward   all_reduce  identity     slice        all_gather  all_gather         reduce_scatter  all_to_all
"""

import math
from typing import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.ranks.collectives import call_log, transport
from minitrain.ranks.collectives.arguments import (
    OUTSIDE,
    Sizes,
    channel_of,
    check_can_reduce,
    check_rank,
    check_sizes,
    checked_dim,
    contiguous,
    new_call,
    open_channel,
    result,
)
from minitrain.ranks.collectives.channel import Channel, Handle, new_scratch
from minitrain.ranks.collectives.transport import Job

Given = Tensor | None
Name = str | None  # of a call, to tell it apart from others of its line


def world() -> ProcessGroup:
    """The group of all ranks; ValueError outside a launch."""
    if not dist.is_initialized():
        raise ValueError(OUTSIDE)
    return dist.group.WORLD


def members(group: ProcessGroup) -> list[int]:
    """Global ranks of a group, in its order."""
    return dist.get_process_group_ranks(group)


def axis_of(group: ProcessGroup) -> str:
    """The mesh axis a group belongs to: "tp", "dp_cp", or "world"."""
    return channel_of(group).axis


# ---- collectives -----------------------------------------------------------------------------------------


def all_reduce(
    x: Tensor, group: ProcessGroup, *, op="sum", out: Given = None, name: Name = None, async_op=False
) -> Tensor | Handle:
    """The sum over the group, or with `op="max"` the maximum of each element. `out=x` works in place.

    Both cost the same bytes. A NaN of any rank is the maximum, as for torch.maximum (over NCCL, what NCCL
    makes of it).
    """
    ch = open_channel(group, "all_reduce", x)
    check_can_reduce("all_reduce", op, x)
    out = result("all_reduce", x, x.shape, out)
    src = contiguous(x).view(-1)
    job = Job(new_call(ch, "all_reduce", x, name, reduction=op), src, src)
    if out is not x:
        job.dst = out.detach().view(-1)
    return _perform(ch, job, lambda: out, async_op)


def all_gather(
    x: Tensor, group: ProcessGroup, dim: int = 0, *, out: Given = None, name: Name = None, async_op=False
) -> Tensor | Handle:
    """Everyone's x [.., d, ..], concatenated along `dim` in group-rank order: [.., n·d, ..]."""
    ch = open_channel(group, "all_gather", x)
    dim = checked_dim("all_gather", x, dim)
    call = new_call(ch, "all_gather", x, name, dim, payload=ch.size)
    return _along(ch, call, x, ch.size * x.shape[dim], out, async_op)


def reduce_scatter(
    x: Tensor, group: ProcessGroup, dim: int = 0, *, out: Given = None, name: Name = None, async_op=False
) -> Tensor | Handle:
    """This rank's piece [.., d, ..] along `dim` of the sum of everyone's x [.., n·d, ..]."""
    ch = open_channel(group, "reduce_scatter", x)
    check_can_reduce("reduce_scatter", "sum", x)
    dim = checked_dim("reduce_scatter", x, dim, divisor=ch)
    call = new_call(ch, "reduce_scatter", x, name, dim)
    return _along(ch, call, x, x.shape[dim] // ch.size, out, async_op)


def all_to_all(
    x: Tensor,
    group: ProcessGroup,
    dim: int = 0,
    *,
    send_sizes: Sizes = None,
    receive_sizes: Sizes = None,
    name: Name = None,
    async_op: bool = False,
    meanwhile: Callable[[], None] | None = None,
) -> Tensor | Handle:
    """Piece j of x along `dim` goes to rank j; the pieces received are concatenated in rank order.

    Pieces are equal unless both `send_sizes` (which add up to x.shape[dim]) and `receive_sizes` (what each
    rank sends to this one) are given. Differentiable if blocking: backward is the all_to_all that brings
    every piece home. A blocking call runs `meanwhile()` while the pieces are under way, and so does backward.
    """
    ch = open_channel(group, "all_to_all", x)
    if x.requires_grad and torch.is_grad_enabled() and not async_op:

        def along(sends, receives) -> Callable:
            settings = dict(send_sizes=sends, receive_sizes=receives, name=name, meanwhile=meanwhile)
            return lambda x: all_to_all(x, group, dim, **settings)

        return _Linear.apply(x, along(send_sizes, receive_sizes), along(receive_sizes, send_sizes))
    uneven = send_sizes is not None or receive_sizes is not None
    dim = checked_dim("all_to_all", x, dim, divisor=None if uneven else ch)
    if uneven:
        check_sizes(ch, x, dim, send_sizes, receive_sizes)
    call = new_call(ch, "all_to_all", x, name, dim, uneven=uneven)
    rows = sum(receive_sizes) if uneven else x.shape[dim]
    under_way = async_op or meanwhile is not None
    y = _along(ch, call, x, rows, None, under_way, send_sizes, receive_sizes)
    if meanwhile is None or async_op:
        return y
    meanwhile()
    return y.wait()


def broadcast(
    x: Tensor, source: int, group: ProcessGroup, *, name: Name = None, async_op=False
) -> Tensor | Handle:
    """The source's x, on every rank; elsewhere x only says shape and dtype."""
    ch = open_channel(group, "broadcast", x)
    check_rank(ch, "broadcast from", source)
    out = result("broadcast", x, x.shape, None)
    src = contiguous(x) if ch.rank == source else out
    job = Job(new_call(ch, "broadcast", x, name, source=source), src.view(-1), out.view(-1), source=source)
    return _perform(ch, job, lambda: out, async_op)


def barrier(group: ProcessGroup, *, name: str | None = None) -> None:
    """Return when every member has called it."""
    ch = channel_of(group)
    nothing = torch.empty(0)
    _perform(ch, Job(new_call(ch, "barrier", nothing, name), nothing, nothing), lambda: None, False)


# ---- from a call to bytes in motion ----------------------------------------------------------------------


def _along(ch: Channel, call, x: Tensor, length: int, out: Given, async_op, sends=None, receives=None):
    """Perform `call`, whose result is like x but `length` long in call.dim; unless 0, on turned copies."""
    dim = call.dim
    src = contiguous(x.movedim(dim, 0))
    out = result(call.op, x, (*x.shape[:dim], length, *x.shape[dim + 1 :]), out)
    dst = out.detach() if dim == 0 else call_log.announce("buffer", src.new_empty((length, *src.shape[1:])))
    row = math.prod(src.shape[1:])
    sends, receives = (sizes and [row * size for size in sizes] for sizes in (sends, receives))

    def finish() -> Tensor:
        if dim != 0:
            out.detach().copy_(dst.movedim(0, dim))
        return out

    job = Job(call, src.view(-1), dst.view(-1), send_sizes=sends, receive_sizes=receives)
    return _perform(ch, job, finish, async_op)


def _perform(ch: Channel, job: Job, finish: Callable, async_op: bool):
    """Allocate what the algorithm needs, log the call, move the data now or in the background."""
    backend, call = ch.backend, job.call
    bring_back = backend.stage(job)
    if backend.adds and call.op in ("all_reduce", "reduce_scatter"):
        own = transport.chunk_size(job.src.numel(), ch.size, ch.rank)
        scratch = ch.lane(call).scratch if async_op else new_scratch
        job.received = scratch(job.src, (ch.size - 1) * own, job.src.dtype)
        if job.src.dtype in (torch.bfloat16, torch.float16) and call.reduction == "sum":
            job.wide = scratch(job.src, own, torch.float32)  # a sum has more digits than its terms
    if not backend.counts:
        call.sent_bytes, call.planned = transport.planned_bytes(ch, job), True
    call_log.issued(call)
    settle = backend.start(ch, job, async_op)

    def end():
        job.src = job.received = job.wide = None  # what only the algorithm needed is free from here
        call_log.announce("wait", call)
        if bring_back:
            bring_back()
        return finish()

    if async_op:
        return Handle(settle, end)
    settle()
    return end()


# ---- differentiable: a linear map and its adjoint --------------------------------------------------------


class _Linear(torch.autograd.Function):
    """y = there(x), dx = back(dy). The backward call is logged at the line of the forward one."""

    @staticmethod
    def forward(ctx, x: Tensor, there: Callable, back: Callable) -> Tensor:
        ctx.back, ctx.site = back, f"{call_log.call_site()} backward"
        return there(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):
        with call_log.standing_at(ctx.site):
            return ctx.back(dy), None, None


def copy_to(x: Tensor, group: ProcessGroup) -> Tensor:
    """Megatron's f: x, alike on all ranks, enters work that differs by rank; backward adds gradients."""
    return _Linear.apply(x, lambda x: x.view_as(x), lambda dy: all_reduce(dy, group))


def reduce_from(x: Tensor, group: ProcessGroup) -> Tensor:
    """Megatron's g: the sum of the ranks' x, used alike by all from here on; backward is the identity."""
    return _Linear.apply(x, lambda x: all_reduce(x, group), lambda dy: dy)


def gather_from(x: Tensor, group: ProcessGroup, dim: int = 0) -> Tensor:
    """Shards -> the whole, used alike by all ranks from here on; backward takes this rank's slice."""
    back = lambda dy: _slice("gather_from", dy, group, dim)
    return _Linear.apply(x, lambda x: all_gather(x, group, dim), back)


def scatter_to(x: Tensor, group: ProcessGroup, dim: int = 0) -> Tensor:
    """x, the same on all ranks -> this rank's slice; backward gathers the slices' gradients."""
    there = lambda x: _slice("scatter_to", x, group, dim)
    return _Linear.apply(x, there, lambda dy: all_gather(dy, group, dim))


def reduce_scatter_to(x: Tensor, group: ProcessGroup, dim: int = 0) -> Tensor:
    """The ranks' x -> this rank's slice of their sum; backward gathers the slices' gradients."""
    return _Linear.apply(x, lambda x: reduce_scatter(x, group, dim), lambda dy: all_gather(dy, group, dim))


def gather_to(x: Tensor, group: ProcessGroup, dim: int = 0) -> Tensor:
    """Shards -> the whole, entering work that differs by rank; backward is this rank's slice of the sum."""
    return _Linear.apply(x, lambda x: all_gather(x, group, dim), lambda dy: reduce_scatter(dy, group, dim))


def _slice(op: str, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    ch = open_channel(group, op, x)
    dim = checked_dim(op, x, dim, divisor=ch)
    return x.detach().chunk(ch.size, dim)[ch.rank].clone(memory_format=torch.contiguous_format)
