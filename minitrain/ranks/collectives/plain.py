"""The collectives in a few lines each, over torch.distributed alone, as `minitrain lift` writes them.

Names, arguments and results are those of functions.py. Left out is what makes that longer: algorithms that
send what the papers say (gloo's reduce-scatter sends an all-reduce), calls that are counted, logged and
compared, errors in one line, sums with the same bits on all ranks, one queue at a time under NCCL.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor


class Handle:
    """What an asynchronous call returns: `wait()` gives the result."""

    def __init__(self, works, finish, *buffers: Tensor):
        self.works, self.finish, self.buffers = works, finish, buffers  # buffers live until they are sent
        self.waited, self.result = False, None

    def wait(self):
        if not self.waited:
            for work in self.works:
                work.wait()
            self.waited, self.result, self.buffers = True, self.finish(), ()
        return self.result


def world():
    return dist.group.WORLD


def members(group) -> list[int]:
    return dist.get_process_group_ranks(group)


def axis_of(group) -> str:
    return group.group_desc.removeprefix("mesh_")


def queues_messages(group, device) -> bool:
    return group.size() > 1 and device.type == "cuda"


def device() -> torch.device:
    gpus = torch.cuda.device_count()
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % gpus) if gpus else torch.device("cpu")


def all_reduce(x, group, *, op="sum", out=None, name=None, async_op=False):
    y = x.detach().clone() if out is None else out.detach()
    if out is not None and out is not x:
        y.copy_(x.detach())
    kind = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
    handle = Handle([dist.all_reduce(y, kind, group=group, async_op=True)], lambda: y if out is None else out)
    return handle if async_op else handle.wait()


def all_gather(x, group, dim=0, *, out=None, name=None, async_op=False):
    src = x.detach().movedim(dim, 0).contiguous()
    y = src.new_empty(group.size() * len(src), *src.shape[1:]) if out is None or dim else out
    work = dist.all_gather(list(y.detach().chunk(group.size())), src, group=group, async_op=True)
    return _along(work, y, dim, out, async_op, src)


def reduce_scatter(x, group, dim=0, *, out=None, name=None, async_op=False):
    src = x.detach().movedim(dim, 0).contiguous()
    y = src.new_empty(len(src) // group.size(), *src.shape[1:])
    work = dist.reduce_scatter(y, list(src.chunk(group.size())), group=group, async_op=True)
    return _along(work, y, dim, out, async_op, src)


def all_to_all(
    x, group, dim=0, *, send_sizes=None, receive_sizes=None, name=None, async_op=False, meanwhile=None
):
    if x.requires_grad and torch.is_grad_enabled() and not async_op:

        def along(sends, receives):
            sizes = dict(send_sizes=sends, receive_sizes=receives)
            return lambda x: all_to_all(x, group, dim, meanwhile=meanwhile, **sizes)

        return _Linear.apply(x, along(send_sizes, receive_sizes), along(receive_sizes, send_sizes))
    src = x.detach().movedim(dim, 0).contiguous()
    y = src.new_empty(len(src) if receive_sizes is None else sum(receive_sizes), *src.shape[1:])
    work = dist.all_to_all_single(y, src, receive_sizes, send_sizes, group=group, async_op=True)
    if meanwhile is not None and not async_op:
        meanwhile()
    return _along(work, y, dim, None, async_op, src)


def _along(work, y, dim, out, async_op, src):
    def finish():
        whole = y.movedim(0, dim).contiguous()
        return whole if out is None else out if out is y else out.copy_(whole)

    handle = Handle([work], finish, src)
    return handle if async_op else handle.wait()


def broadcast(x, source, group, *, name=None, async_op=False):
    y = x.detach().clone(memory_format=torch.contiguous_format)
    handle = Handle([dist.broadcast(y, group=group, group_src=source, async_op=True)], lambda: y)
    return handle if async_op else handle.wait()


def barrier(group, *, name=None) -> None:
    all_reduce(torch.zeros(1, device=device() if dist.get_backend(group) == "nccl" else "cpu"), group)


def send(x, to, group, *, async_op=False):
    x = x.detach().contiguous()
    handle = Handle([dist.isend(x, group=group, group_dst=to)], lambda: None, x)
    return handle if async_op else handle.wait()


def receive(like, source, group, *, shape=None, dtype=None, device="cpu", async_op=False):
    y = torch.empty(shape, dtype=dtype, device=device) if like is None else like.new_empty(like.shape)
    handle = Handle([dist.irecv(y, group=group, group_src=source)], lambda: y)
    return handle if async_op else handle.wait()


def exchange(x, to, source, group, *, like=None, async_op=False):
    return _both([x], [(x if like is None else like)], to, source, group, lambda ys: ys[0], async_op)


def rotate(xs, group, shift=1, *, async_op=False):
    tensors, pack = ([xs], lambda ys: ys[0]) if isinstance(xs, Tensor) else (list(xs), tuple)
    to, source = (group.rank() + shift) % group.size(), (group.rank() - shift) % group.size()
    return _both(tensors, tensors, to, source, group, pack, async_op)


def _both(xs, likes, to, source, group, pack, async_op):
    xs = [x.detach().contiguous() for x in xs]
    ys, works = [like.new_empty(like.shape) for like in likes], []
    if to == group.rank():  # a ring of one
        ys = [x.clone() for x in xs]
    else:
        ops = [dist.P2POp(dist.isend, x, group=group, group_peer=to) for x in xs]
        ops += [dist.P2POp(dist.irecv, y, group=group, group_peer=source) for y in ys]
        works = dist.batch_isend_irecv(ops)
    handle = Handle(works, lambda: pack(ys), *xs)
    return handle if async_op else handle.wait()


class _Linear(torch.autograd.Function):
    """y = there(x), dx = back(dy)."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.back(dy), None, None


def copy_to(x, group):
    return _Linear.apply(x, lambda x: x.view_as(x), lambda dy: all_reduce(dy, group))


def reduce_from(x, group):
    return _Linear.apply(x, lambda x: all_reduce(x, group), lambda dy: dy)


def gather_from(x, group, dim=0):
    return _Linear.apply(x, lambda x: all_gather(x, group, dim), lambda dy: _slice(dy, group, dim))


def scatter_to(x, group, dim=0):
    return _Linear.apply(x, lambda x: _slice(x, group, dim), lambda dy: all_gather(dy, group, dim))


def reduce_scatter_to(x, group, dim=0):
    return _Linear.apply(x, lambda x: reduce_scatter(x, group, dim), lambda dy: all_gather(dy, group, dim))


def gather_to(x, group, dim=0):
    return _Linear.apply(x, lambda x: all_gather(x, group, dim), lambda dy: reduce_scatter(dy, group, dim))


def _slice(x, group, dim):
    return x.detach().chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format)
