"""What every call checks before any rank waits for another, and the numbered record it makes of itself."""

import weakref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GroupMember, ProcessGroup

from minitrain.ranks.collectives import call_log
from minitrain.ranks.collectives.backends import backend_of
from minitrain.ranks.collectives.call_log import Call, signature
from minitrain.ranks.collectives.channel import Channel
from minitrain.ranks.process import PROCESS

FLOAT8 = {dtype for name, dtype in vars(torch).items() if name.startswith("float8_")}
REFUSED = {
    "sum": (FLOAT8 | {torch.bool}, "added; convert first, x.int() or x.float()"),
    "max": (FLOAT8 | {torch.complex64, torch.complex128}, "compared; convert first, x.float() or x.abs()"),
}
Sizes = list[int] | None
OUTSIDE = "there are no ranks here, and no group of them; call this inside launch.run(fn, ranks=4), in fn"


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
        raise ValueError(
            f"group is {group!r}; pass a process group: mesh.group('dp'), or collectives.world()"
        )
    channels[id(group)] = Channel(group, backend_of(group))
    weakref.finalize(group, channels.pop, id(group))
    return channels[id(group)]


def open_channel(group: ProcessGroup, op: str, x: Tensor) -> Channel:
    """The channel for a call that hands over x, if it can."""
    ch = channel_of(group)
    if not isinstance(x, Tensor):
        raise ValueError(f"{op}: x is a {type(x).__name__}; pass a tensor, torch.tensor(x)")
    ch.backend.check(op, x)
    if x.layout is not torch.strided:
        raise ValueError(f"{op}: x is {x.layout}; use x.to_dense()")
    return ch


def settle() -> None:
    """Wait for what runs in the background; raise the first error that nobody has waited for."""
    for ch in list(PROCESS.channels.values()):
        for lane, future in [(lane, future) for lane in ch.lanes for future in list(lane.unsettled)]:
            try:
                lane.wait(future)
            except RuntimeError as error:
                raise type(error)(f"{error}; nobody waited for this asynchronous call") from None


def new_call(ch: Channel, op: str, x: Tensor, name=None, dim=0, *, payload=1, peer=None, **more) -> Call:
    """The record of a call on x, numbered; `payload` times x is the size S of the formulas."""
    number = ch.number(None if peer is None else (op, peer))
    size, peer = payload * x.numel() * x.element_size(), None if peer is None else ch.members[peer]
    what = tuple(x.shape), x.dtype, call_log.call_site()
    return Call(number, op, ch.axis, ch.members, ch.who, size, *what, peer, name, dim, group=ch.name, **more)


def contiguous(x: Tensor) -> Tensor:
    """x outside autograd and contiguous; the copy, if one is needed, is communication memory."""
    x = x.detach()
    return x if x.is_contiguous() else call_log.announce("buffer", x.contiguous())


def result(op: str, x: Tensor, shape: tuple[int, ...], out: Tensor | None) -> Tensor:
    """Where the result goes: `out` if it fits, else new memory."""
    if out is None:
        return x.new_empty(shape)
    given, needed = (out.shape, out.dtype, out.device), (tuple(shape), x.dtype, x.device)
    if given != needed or not out.is_contiguous():
        told = [f"{signature(*what)} on {device}" for *what, device in (given, needed)]
        raise ValueError(f"{op}: out is {told[0]}; it must be {told[1]}, contiguous")
    return out


def check_rank(ch: Channel, what: str, rank: int, other: bool = False) -> None:
    if not 0 <= rank < ch.size:
        raise ValueError(f"{what} rank {rank}; the ranks of this group ({ch.axis}) are 0..{ch.size - 1}")
    if other and rank == ch.rank:
        raise ValueError(f"{what} rank {rank}, which is this rank itself; it would wait for ever")


def check_can_reduce(what: str, op: str, x: Tensor) -> None:
    if op not in REFUSED:
        raise ValueError(f"{what}: op={op!r}; it is 'sum' or 'max' (the mean is the sum / group.size())")
    dtypes, reason = REFUSED[op]
    if x.dtype in dtypes:
        raise ValueError(f"{what}: {x.dtype} cannot be {reason}")


def checked_dim(op: str, x: Tensor, dim: int, divisor: Channel | None = None) -> int:
    """`dim` counted from the front; x must have it, divisible by the ranks of `divisor` if that is given."""
    if not -x.dim() <= dim < x.dim():
        what = "has no dims; use x.reshape(1)" if x.dim() == 0 else f"has dims {-x.dim()} to {x.dim() - 1}"
        raise ValueError(f"{op}: dim={dim}, but x {list(x.shape)} {what}")
    if divisor is not None and x.shape[dim] % divisor.size:
        raise ValueError(
            f"{op}: x {list(x.shape)} has {x.shape[dim]} along dim {dim}, not a multiple of the group's "
            f"{divisor.size} ranks ({divisor.axis}); pad it, or use all_to_all with sizes"
        )
    return dim % x.dim()


def check_sizes(ch: Channel, x: Tensor, dim: int, sends: Sizes, receives: Sizes) -> None:
    for what, sizes in (("send_sizes", sends), ("receive_sizes", receives)):
        if sizes is None or len(sizes) != ch.size or min(sizes) < 0:
            raise ValueError(
                f"all_to_all: {what}={sizes}; give both, {ch.size} sizes >= 0 each, one per rank"
            )
    if sum(sends) != x.shape[dim]:
        raise ValueError(
            f"all_to_all: send_sizes {sends} add up to {sum(sends)}, but x has {x.shape[dim]} along dim {dim}"
        )
    if sends[ch.rank] != receives[ch.rank]:
        raise ValueError(
            f"all_to_all: this rank sends {sends[ch.rank]} to itself, but receive_sizes expects "
            f"{receives[ch.rank]} from it; make them equal"
        )
