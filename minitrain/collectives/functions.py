"""The only door to torch.distributed: collectives that are counted, logged and, in checked mode, compared across ranks.

`group` is always an argument, `world()` for everyone; a `source` or `to` is a rank in the group. With n ranks and S the
bytes of the full tensor a rank sends

    all_reduce      [..]           -> [..] the sum, or the maximum        2(n-1)/n S
    all_gather      [.., d, ..]    -> [.., n·d, ..] in rank order          (n-1)/n S
    reduce_scatter  [.., n·d, ..]  -> [.., d, ..] of the sum               (n-1)/n S
    all_to_all      [.., n·d, ..]  -> [.., n·d, ..] piece j to rank j      (n-1)/n S
    broadcast       [..]           -> [..] of the source                   S to each child in a binomial tree
    send, receive, exchange, rotate                                        S

and holds, besides the result, one receive buffer of (n-1)/n S where it adds (all_reduce, reduce_scatter), and copies
where pieces along `dim` are not consecutive memory. Sums are taken in rank order, with the same bits on all ranks. The
algorithms, NCCL and dry runs are in transport.py, messages in messages.py, the record of calls in call_log.py.

A result is a new, contiguous tensor outside autograd that shares no memory with x; with `out=` it is written there, to
a buffer the caller owns. Until an asynchronous call has been waited for, x must not change. Gradients flow through the
pairs further down only: each is a linear map whose backward is its adjoint.

    forward    copy_to     reduce_from  gather_from  scatter_to  reduce_scatter_to  gather_to       all_to_all
    backward   all_reduce  identity     slice        all_gather  all_gather         reduce_scatter  all_to_all

In checked mode the members of a group first compare what they are about to call: checked.py has the rule.
Raises ValueError, before any rank waits for another, for a group without this rank, ranks outside the group, sizes that
do not divide or add up, dtypes that cannot be added or compared, another reduction than "sum" and "max", tensors where
the backend cannot reach them; CollectiveMismatch in checked mode.
copy_to and reduce_from are f and g of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3), gather_to and
reduce_scatter_to the pair for the sequence of Korthikanti et al. 2022 (arXiv:2205.05198, section 4.2.2).
Differs: any group, any dim.
"""

import math
from typing import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from minitrain.collectives import call_log, transport
from minitrain.collectives.channel import (
    Channel,
    Handle,
    channel_of,
    check_rank,
    contiguous,
    new_call,
    new_scratch,
    open_channel,
    sketch,
)
from minitrain.collectives.transport import Job

FLOAT8 = {dtype for name, dtype in vars(torch).items() if name.startswith("float8_")}
REFUSED = {
    "sum": (FLOAT8 | {torch.bool}, "added; convert first, x.int() or x.float()"),
    "max": (FLOAT8 | {torch.complex64, torch.complex128}, "compared; convert first, x.float() or x.abs()"),
}


def world() -> dist.ProcessGroup:
    """The group of all ranks."""
    return dist.group.WORLD


def axis_of(group: dist.ProcessGroup) -> str:
    """The mesh axis a group belongs to: "tp", "dp_cp", or "world"."""
    return channel_of(group).axis


# ---- collectives -----------------------------------------------------------------------------------------------------


def all_reduce(
    x: Tensor,
    group: dist.ProcessGroup,
    *,
    op: str = "sum",
    out: Tensor | None = None,
    name: str | None = None,
    async_op: bool = False,
) -> Tensor | Handle:
    """The sum over the group, or with `op="max"` the maximum of each element. `out=x` works in place.

    Both cost the same bytes. A NaN of any rank is the maximum, as for torch.maximum (over NCCL, what NCCL makes of it).
    """
    ch = open_channel(group, "all_reduce", x)
    _check_can_reduce("all_reduce", op, x)
    out = _result("all_reduce", x, x.shape, out)
    src = contiguous(x).view(-1)
    call = new_call(ch, "all_reduce", x, name)
    call.reduction = op
    job = Job(call, src, src if out is x else out.detach().view(-1))
    return _perform(ch, group, job, lambda: out, async_op)


def all_gather(
    x: Tensor,
    group: dist.ProcessGroup,
    dim: int = 0,
    *,
    out: Tensor | None = None,
    name: str | None = None,
    async_op: bool = False,
) -> Tensor | Handle:
    """Everyone's x [.., d, ..], concatenated along `dim` in group-rank order: [.., n·d, ..]."""
    ch = open_channel(group, "all_gather", x)
    dim = _checked_dim("all_gather", x, dim)
    call = new_call(ch, "all_gather", x, name, dim, payload=ch.size)
    return _along(ch, group, call, x, dim, ch.size * x.shape[dim], out, async_op)


def reduce_scatter(
    x: Tensor,
    group: dist.ProcessGroup,
    dim: int = 0,
    *,
    out: Tensor | None = None,
    name: str | None = None,
    async_op: bool = False,
) -> Tensor | Handle:
    """This rank's piece [.., d, ..] along `dim` of the sum of everyone's x [.., n·d, ..]."""
    ch = open_channel(group, "reduce_scatter", x)
    _check_can_reduce("reduce_scatter", "sum", x)
    dim = _checked_dim("reduce_scatter", x, dim, divisor=ch)
    call = new_call(ch, "reduce_scatter", x, name, dim)
    return _along(ch, group, call, x, dim, x.shape[dim] // ch.size, out, async_op)


def all_to_all(
    x: Tensor,
    group: dist.ProcessGroup,
    dim: int = 0,
    *,
    send_sizes: list[int] | None = None,
    receive_sizes: list[int] | None = None,
    name: str | None = None,
    async_op: bool = False,
) -> Tensor | Handle:
    """Piece j of x along `dim` goes to rank j; the pieces received are concatenated in rank order.

    Pieces are equal unless both `send_sizes` (which add up to x.shape[dim]) and `receive_sizes` (what each rank sends
    to this one) are given. Differentiable if blocking: backward is the all_to_all that brings every piece home.
    """
    ch = open_channel(group, "all_to_all", x)
    if x.requires_grad and torch.is_grad_enabled() and not async_op:
        return _Linear.apply(
            x,
            lambda x: all_to_all(
                x, group, dim, send_sizes=send_sizes, receive_sizes=receive_sizes, name=name
            ),
            lambda dy: all_to_all(
                dy, group, dim, send_sizes=receive_sizes, receive_sizes=send_sizes, name=name
            ),
        )
    uneven = send_sizes is not None or receive_sizes is not None
    dim = _checked_dim("all_to_all", x, dim, divisor=None if uneven else ch)
    if uneven:
        _check_sizes(ch, x, dim, send_sizes, receive_sizes)
    call = new_call(ch, "all_to_all", x, name, dim, uneven=uneven)
    rows = sum(receive_sizes) if uneven else x.shape[dim]
    return _along(ch, group, call, x, dim, rows, None, async_op, send_sizes, receive_sizes)


def broadcast(
    x: Tensor, source: int, group: dist.ProcessGroup, *, name: str | None = None, async_op: bool = False
) -> Tensor | Handle:
    """The source's x, on every rank; elsewhere x only says shape and dtype."""
    ch = open_channel(group, "broadcast", x)
    check_rank(ch, "broadcast from", source)
    out = _result("broadcast", x, x.shape, None)
    src = contiguous(x) if ch.rank == source else out
    job = Job(new_call(ch, "broadcast", x, name, source=source), src.view(-1), out.view(-1), source=source)
    return _perform(ch, group, job, lambda: out, async_op)


def barrier(group: dist.ProcessGroup, *, name: str | None = None) -> None:
    """Return when every member has called it."""
    ch = channel_of(group)
    nothing = torch.empty(0)
    _perform(ch, group, Job(new_call(ch, "barrier", nothing, name), nothing, nothing), lambda: None, False)


# ---- from a call to bytes in motion ----------------------------------------------------------------------------------


def _along(
    ch: Channel,
    group: dist.ProcessGroup,
    call: call_log.Call,
    x: Tensor,
    dim: int,
    length: int,
    out: Tensor | None,
    async_op: bool,
    send_sizes: list[int] | None = None,
    receive_sizes: list[int] | None = None,
) -> Tensor | Handle:
    """Perform `call`, whose result is like x but `length` long in `dim`; if that is not dim 0, on turned copies."""
    src = contiguous(x.movedim(dim, 0))
    out = _result(call.op, x, (*x.shape[:dim], length, *x.shape[dim + 1 :]), out)
    dst = out.detach() if dim == 0 else call_log.announce_buffer(src.new_empty((length, *src.shape[1:])))
    row = math.prod(src.shape[1:])
    sends, receives = (sizes and [row * size for size in sizes] for sizes in (send_sizes, receive_sizes))
    job = Job(call, src.view(-1), dst.view(-1), send_sizes=sends, receive_sizes=receives)

    def finish() -> Tensor:
        if dim != 0:
            out.detach().copy_(dst.movedim(0, dim))
        return out

    return _perform(ch, group, job, finish, async_op)


def _perform(ch: Channel, group: dist.ProcessGroup, job: Job, finish: Callable, async_op: bool):
    """Allocate what the algorithm needs, log the call, move the data now or in the background."""
    if ch.backend == "gloo" and job.dst.is_cuda:
        finish = _stage_in_host_memory(job, finish)
    if ch.backend != "nccl" and job.call.op in ("all_reduce", "reduce_scatter"):
        own = transport.chunk_size(job.src.numel(), ch.size, ch.rank)
        scratch = ch.lane(job.call).scratch if async_op else new_scratch
        job.received = scratch(job.src, (ch.size - 1) * own, job.src.dtype)
        if job.src.dtype in (torch.bfloat16, torch.float16) and job.call.reduction == "sum":
            job.wide = scratch(job.src, own, torch.float32)  # a sum has more digits than its terms
    if ch.backend != "gloo":
        job.call.sent_bytes, job.call.planned = transport.planned_bytes(ch, job), True
    call_log.issued(job.call)
    settle, poll = transport.start(ch, group, job, in_background=async_op)

    def result():
        job.src = job.received = job.wide = (
            None  # what only the algorithm needed is free from here, on every backend
        )
        call_log.waited(job.call)
        return finish()

    if async_op:
        return Handle(settle, result, poll)
    settle()
    return result()


def _stage_in_host_memory(job: Job, finish: Callable) -> Callable:
    """gloo uses host memory: put the job on copies there, and return a finish that first brings the result back."""
    target = job.dst
    job.src = call_log.announce_buffer(job.src.cpu())
    job.dst = call_log.announce_buffer(torch.empty_like(target, device="cpu"))

    def bring_back():
        target.copy_(job.dst)
        return finish()

    return bring_back


# ---- differentiable: a linear map and its adjoint --------------------------------------------------------------------


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


def copy_to(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x, the same on all ranks, enters work that differs by rank; backward adds the ranks' gradients (Megatron's f)."""
    return _Linear.apply(x, lambda x: x.view_as(x), lambda dy: all_reduce(dy, group))


def reduce_from(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the ranks' x, used alike by all from here on; backward passes the gradient through (Megatron's g)."""
    return _Linear.apply(x, lambda x: all_reduce(x, group), lambda dy: dy)


def gather_from(x: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """Shards -> the whole, used alike by all ranks from here on; backward takes this rank's slice."""
    return _Linear.apply(
        x, lambda x: all_gather(x, group, dim), lambda dy: _own_slice("gather_from", dy, group, dim)
    )


def scatter_to(x: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """x, the same on all ranks -> this rank's slice; backward gathers the slices' gradients."""
    return _Linear.apply(
        x, lambda x: _own_slice("scatter_to", x, group, dim), lambda dy: all_gather(dy, group, dim)
    )


def reduce_scatter_to(x: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """The ranks' x -> this rank's slice of their sum; backward gathers the slices' gradients."""
    return _Linear.apply(x, lambda x: reduce_scatter(x, group, dim), lambda dy: all_gather(dy, group, dim))


def gather_to(x: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """Shards -> the whole, entering work that differs by rank; backward adds the gradients and keeps the own slice."""
    return _Linear.apply(x, lambda x: all_gather(x, group, dim), lambda dy: reduce_scatter(dy, group, dim))


def _own_slice(op: str, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    ch = open_channel(group, op, x)
    dim = _checked_dim(op, x, dim, divisor=ch)
    return x.detach().chunk(ch.size, dim)[ch.rank].clone(memory_format=torch.contiguous_format)


# ---- what is refused -------------------------------------------------------------------------------------------------


def _result(op: str, x: Tensor, shape: tuple[int, ...], out: Tensor | None) -> Tensor:
    """Where the result goes: `out` if it fits, else new memory."""
    if out is None:
        return x.new_empty(shape)
    if out.shape != tuple(shape) or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
        needed = f"{call_log.signature(shape, x.dtype)} on {x.device}"
        raise ValueError(f"{op}: out is {sketch(out)}; it must be {needed}, contiguous")
    return out


def _check_can_reduce(what: str, op: str, x: Tensor) -> None:
    if op not in tuple(REFUSED):
        raise ValueError(f"{what}: op={op!r}; it is 'sum' or 'max' (the mean is the sum / group.size())")
    dtypes, reason = REFUSED[op]
    if x.dtype in dtypes:
        raise ValueError(f"{what}: {x.dtype} cannot be {reason}")


def _checked_dim(op: str, x: Tensor, dim: int, divisor: Channel | None = None) -> int:
    """`dim` counted from the front; x must have it, and divisible by the ranks of `divisor` if that is given."""
    if not -x.dim() <= dim < x.dim():
        what = "has no dims; use x.reshape(1)" if x.dim() == 0 else f"has dims {-x.dim()} to {x.dim() - 1}"
        raise ValueError(f"{op}: dim={dim}, but x {list(x.shape)} {what}")
    if divisor is not None and x.shape[dim] % divisor.size:
        raise ValueError(
            f"{op}: x {list(x.shape)} has {x.shape[dim]} along dim {dim}, not a multiple of the group's "
            f"{divisor.size} ranks ({divisor.axis}); pad it, or use all_to_all with sizes"
        )
    return dim % x.dim()


def _check_sizes(
    ch: Channel, x: Tensor, dim: int, send_sizes: list[int] | None, receive_sizes: list[int] | None
) -> None:
    for what, sizes in (("send_sizes", send_sizes), ("receive_sizes", receive_sizes)):
        if sizes is None or len(sizes) != ch.size or min(sizes) < 0:
            raise ValueError(
                f"all_to_all: {what}={sizes}; give both, {ch.size} sizes >= 0 each, one per rank"
            )
    if sum(send_sizes) != x.shape[dim]:
        raise ValueError(
            f"all_to_all: send_sizes {send_sizes} add up to {sum(send_sizes)}, but x has {x.shape[dim]} "
            f"along dim {dim}"
        )
    if send_sizes[ch.rank] != receive_sizes[ch.rank]:
        raise ValueError(
            f"all_to_all: this rank sends {send_sizes[ch.rank]} to itself, but receive_sizes expects "
            f"{receive_sizes[ch.rank]} from it; make them equal"
        )
