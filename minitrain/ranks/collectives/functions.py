"""Collectives and messages that are counted, logged and, in checked mode, compared across ranks.

`group` is always an argument, `world()` for everyone; a `source` or `to` is a rank in the group. With n ranks
and S the bytes of the full tensor a rank sends

    all_reduce      [..]           -> [..] the sum, or the maximum        2(n-1)/n S
    all_gather      [.., d, ..]    -> [.., n·d, ..] in rank order          (n-1)/n S
    reduce_scatter  [.., n·d, ..]  -> [.., d, ..] of the sum               (n-1)/n S
    all_to_all      [.., n·d, ..]  -> [.., n·d, ..] piece j to rank j      (n-1)/n S
    broadcast       [..]           -> [..] of the source                   S to each child in a binomial tree
    send, exchange, rotate                                                 S

and holds, besides the result, a receive buffer of (n-1)/n S where it adds, and copies where pieces along
`dim` are not consecutive memory. Sums are taken in rank order, with the same bits on all ranks. A result is
new, contiguous and outside autograd, or written to `out=`. Until an asynchronous call is waited for, x must
not change. Messages between two ranks arrive in the order they were sent.
"""

import math
import weakref
from typing import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GroupMember, ProcessGroup

from minitrain.ranks.collectives import call_log, channel, transport
from minitrain.ranks.collectives.channel import Channel, Handle, Sizes, contiguous, new_call
from minitrain.ranks.collectives.transport import Job, doors_of
from minitrain.ranks.process import PROCESS

Given = Tensor | None
Name = str | None  # of a call, to tell it apart from others of its line
Posted = list[tuple[Tensor, int]]  # tensors and ranks
OUTSIDE = "there are no ranks here, and no group of them; call this inside launch.run(fn, ranks=4), in fn"


def world() -> ProcessGroup:
    """The group of all ranks; ValueError outside a launch."""
    if not dist.is_initialized():
        raise ValueError(OUTSIDE)
    return dist.group.WORLD


def members(group: ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def axis_of(group: ProcessGroup) -> str:
    """The mesh axis a group belongs to: "tp", "dp_cp", or "world"."""
    return channel_of(group).axis


def queues_messages(group: ProcessGroup, device: torch.device) -> bool:
    """Do two ranks of the group have one queue for messages both ways, of tensors on `device` (NCCL)?"""
    return group.size() > 1 and channel_of(group).door("send", torch.empty(0, device=device)).in_queues


def channel_of(group: ProcessGroup) -> Channel:
    """The one channel of a process group; ValueError if this rank cannot talk in it."""
    channels = PROCESS.channels
    if id(group) in channels:
        return channels[id(group)]
    if not dist.is_initialized():
        raise ValueError(OUTSIDE)
    if group == GroupMember.NON_GROUP_MEMBER:  # what torch's new_group gives to the others
        raise ValueError("this rank is not a member of the group; only members may call its collectives")
    if not isinstance(group, ProcessGroup):
        raise ValueError(f"group is {group!r}; pass a process group: mesh.group('dp'), collectives.world()")
    channels[id(group)] = Channel(group, doors_of(group))
    weakref.finalize(group, channels.pop, id(group), None)
    return channels[id(group)]


def open_channel(group: ProcessGroup, op: str, x: Tensor) -> Channel:
    ch = channel_of(group)
    if not isinstance(x, Tensor):
        raise ValueError(f"{op}: x is a {type(x).__name__}; pass a tensor, torch.tensor(x)")
    ch.door(op, x)
    if x.layout is not torch.strided:
        raise ValueError(f"{op}: x is {x.layout}; use x.to_dense()")
    return ch


# ---- collectives -----------------------------------------------------------------------------------------


def all_reduce(
    x: Tensor, group: ProcessGroup, *, op="sum", out: Given = None, name: Name = None, async_op=False
) -> Tensor | Handle:
    """The sum over the group, or with `op="max"` the maximum of each element: a NaN of any rank, as for
    torch.maximum (over NCCL, what NCCL makes of it). `out=x` works in place."""
    ch = open_channel(group, "all_reduce", x)
    channel.check_can_reduce("all_reduce", op, x)
    out = channel.result("all_reduce", x, x.shape, out)
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
    dim = channel.checked_dim("all_gather", x, dim)
    call = new_call(ch, "all_gather", x, name, dim, payload=ch.size)
    return _along(ch, call, x, ch.size * x.shape[dim], out, async_op)


def reduce_scatter(
    x: Tensor, group: ProcessGroup, dim: int = 0, *, out: Given = None, name: Name = None, async_op=False
) -> Tensor | Handle:
    """This rank's piece [.., d, ..] along `dim` of the sum of everyone's x [.., n·d, ..]."""
    ch = open_channel(group, "reduce_scatter", x)
    channel.check_can_reduce("reduce_scatter", "sum", x)
    dim = channel.checked_dim("reduce_scatter", x, dim, divisor=ch)
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
    """Piece j of x along `dim` goes to rank j; the pieces received are concatenated in rank order. They are
    equal unless both `send_sizes` (which add up to x.shape[dim]) and `receive_sizes` (what each rank sends to
    this one) are given. Differentiable if blocking: backward is the all_to_all that brings every piece home.
    A blocking call runs `meanwhile()` while the pieces are under way, and so does backward."""
    ch = open_channel(group, "all_to_all", x)
    if x.requires_grad and torch.is_grad_enabled() and not async_op:

        def along(sends, receives) -> Callable:
            settings = dict(send_sizes=sends, receive_sizes=receives, name=name, meanwhile=meanwhile)
            return lambda x: all_to_all(x, group, dim, **settings)

        return _Linear.apply(x, along(send_sizes, receive_sizes), along(receive_sizes, send_sizes))
    uneven = send_sizes is not None or receive_sizes is not None
    dim = channel.checked_dim("all_to_all", x, dim, divisor=None if uneven else ch)
    if uneven:
        channel.check_sizes(ch, x, dim, send_sizes, receive_sizes)
    call = new_call(ch, "all_to_all", x, name, dim, uneven=uneven)
    rows = sum(receive_sizes) if uneven else x.shape[dim]
    y = _along(ch, call, x, rows, None, async_op or meanwhile is not None, send_sizes, receive_sizes)
    if meanwhile is None or async_op:
        return y
    meanwhile()
    return y.wait()


def broadcast(
    x: Tensor, source: int, group: ProcessGroup, *, name: Name = None, async_op=False
) -> Tensor | Handle:
    """The source's x, on every rank; elsewhere x only says shape and dtype."""
    ch = open_channel(group, "broadcast", x)
    channel.check_rank(ch, "broadcast from", source)
    out = channel.result("broadcast", x, x.shape, None)
    src = contiguous(x) if ch.rank == source else out
    job = Job(new_call(ch, "broadcast", x, name, source=source), src.view(-1), out.view(-1), source=source)
    return _perform(ch, job, lambda: out, async_op)


def barrier(group: ProcessGroup, *, name: str | None = None) -> None:
    ch = channel_of(group)
    nothing = torch.empty(
        0, device="cpu" if "cpu" in ch.doors else "cuda"
    )  # a barrier of hosts, if it can be
    _perform(ch, Job(new_call(ch, "barrier", nothing, name), nothing, nothing), lambda: None, False)


# ---- from a call to bytes in motion ----------------------------------------------------------------------


def _along(ch: Channel, call, x: Tensor, length: int, out: Given, async_op, sends=None, receives=None):
    """The result is like x but `length` long in call.dim; unless that is 0, by way of turned copies."""
    dim = call.dim
    src = contiguous(x.movedim(dim, 0))
    out = channel.result(call.op, x, (*x.shape[:dim], length, *x.shape[dim + 1 :]), out)
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
    call, target = job.call, job.dst
    backend = ch.door(call.op, target)
    if backend.on_host and target.is_cuda:
        job.src = call_log.announce("buffer", job.src.cpu())
        job.dst = call_log.announce("buffer", torch.empty_like(target, device="cpu"))
    if backend.adds and call.op in ("all_reduce", "reduce_scatter"):
        own = transport.chunk_size(job.src.numel(), ch.size, ch.rank)
        scratch = ch.lane(call).scratch if async_op else channel.new_scratch
        job.received = scratch(job.src, (ch.size - 1) * own, job.src.dtype)
        if job.src.dtype in (torch.bfloat16, torch.float16) and call.reduction == "sum":
            job.wide = scratch(job.src, own, torch.float32)  # a sum has more digits than its terms
    if not backend.counts:
        call.sent_bytes, call.planned = transport.planned_bytes(ch, job), True

    def start():
        call_log.issued(call)
        return backend.start(ch, job, async_op)

    settle = PROCESS.begin(ch, job, start)

    def end():
        job.src = job.received = job.wide = None  # what only the algorithm needed is free from here
        call_log.announce("wait", call)
        if job.dst is not target:
            target.copy_(job.dst)
        return finish()

    if async_op:
        return Handle(settle, end)
    settle()
    return end()


# ---- messages --------------------------------------------------------------------------------------------


def send(x: Tensor, to: int, group: ProcessGroup, *, async_op: bool = False) -> Handle | None:
    """Give x to rank `to` of the group."""
    ch = open_channel(group, "send", x)
    channel.check_rank(ch, "send to", to, other=True)
    return _transfer(ch, [(x, to)], [], lambda received: None, async_op)


def receive(
    like: Given, source: int, group: ProcessGroup, *, shape=None, dtype=None, device="cpu", async_op=False
) -> Tensor | Handle:
    """What rank `source` sends: shaped as `like`, which is not written to, or as the keywords say."""
    if like is None and (shape is None or dtype is None):
        raise ValueError("receive needs a tensor to take shape and dtype from, or shape= and dtype=")
    room = torch.empty(shape, dtype=dtype, device=device) if like is None else _room_for(like)
    ch = open_channel(group, "receive", room if like is None else like)
    channel.check_rank(ch, "receive from", source, other=True)
    return _transfer(ch, [], [(room, source)], lambda received: received[0], async_op)


def exchange(
    x: Tensor, to: int, source: int, group: ProcessGroup, *, like: Given = None, async_op: bool = False
) -> Tensor | Handle:
    """Send x to rank `to` while receiving a tensor shaped as `like` (as x if None) from rank `source`."""
    ch = open_channel(group, "exchange", x)
    channel.check_rank(ch, "exchange: send to", to)
    channel.check_rank(ch, "exchange: receive from", source)
    if (to == ch.rank) != (source == ch.rank):
        raise ValueError(f"exchange: {to=} and {source=}, one of them this rank; make it both or neither")
    room = _room_for(x if like is None else like)
    return _transfer(ch, [(x, to)], [(room, source)], lambda received: received[0], async_op)


def rotate(
    xs: Tensor | tuple[Tensor, ...], group: ProcessGroup, shift: int = 1, *, async_op: bool = False
) -> Tensor | tuple[Tensor, ...] | Handle:
    """xs goes to rank + shift, what comes is rank - shift's: as many tensors, of the same shapes."""
    tensors = (xs,) if isinstance(xs, Tensor) else tuple(xs)
    if not tensors:
        raise ValueError("rotate: an empty tuple; give at least one tensor")
    ch = [open_channel(group, "rotate", x) for x in tensors][0]
    to, source = (ch.rank + shift) % ch.size, (ch.rank - shift) % ch.size
    pack = (lambda received: received[0]) if isinstance(xs, Tensor) else tuple
    receives = [(_room_for(x), source) for x in tensors]
    return _transfer(ch, [(x, to) for x in tensors], receives, pack, async_op)


def _room_for(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _transfer(ch: Channel, sends: Posted, receives: Posted, pack: Callable, async_op: bool):
    if sends and sends[0][1] == ch.rank:  # to itself, as in a ring of one: nothing travels
        copies = [x.detach().clone(memory_format=torch.contiguous_format) for x, _ in sends]
        handle = Handle(lambda: None, lambda: pack(copies))
        return handle if async_op else handle.wait()
    first = (sends + receives)[0][0]
    backend = ch.door("send" if sends else "receive", first)
    there = torch.device("cpu") if backend.on_host else first.device
    outgoing = [(new_call(ch, "send", x, peer=peer), contiguous(x.to(there)), peer) for x, peer in sends]
    room = [(x if x.device == there else torch.empty_like(x, device=there), peer) for x, peer in receives]
    incoming = [(new_call(ch, "receive", x, peer=peer), x, peer) for x, peer in room]
    calls = [call for call, _, _ in outgoing + incoming]

    def start():
        for call in calls:
            if not backend.counts:
                call.planned, call.sent_bytes = True, call.payload_bytes if call.op == "send" else 0
            call_log.issued(call)
        return backend.post(ch, outgoing, incoming)

    wait = PROCESS.begin(ch, (outgoing, incoming), start)

    def finish():
        ch.unwaited.discard(handle)
        outgoing.clear()
        for call in calls:
            call_log.announce("wait", call)
        return pack([x.to(first.device) for _, x, _ in incoming])

    handle = Handle(wait, finish)
    ch.unwaited.add(handle)  # if its owner drops it, the buffers must live until the network is done
    return handle if async_op else handle.wait()


# ---- differentiable: a linear map and its adjoint --------------------------------------------------------
#
# forward    copy_to     reduce_from  gather_from  scatter_to  reduce_scatter_to  gather_to       all_to_all
# backward   all_reduce  identity     slice        all_gather  all_gather         reduce_scatter  all_to_all
#
# Megatron-LM's f and g and, for the sequence, Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
# Differs: any group, any dim.


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
    dim = channel.checked_dim(op, x, dim, divisor=ch)
    return x.detach().chunk(ch.size, dim)[ch.rank].clone(memory_format=torch.contiguous_format)
