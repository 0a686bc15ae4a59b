"""Messages from one rank to another: send, receive, and two patterns that cannot deadlock, exchange and rotate.

    send(x, to), receive(like, source)    blocking: both return when the data has changed hands
    exchange(x, to, source)               send one and receive one at the same time
    rotate((k, v), shift=1)               everyone's tensors one step up the ring, as ring attention does

Ranks are ranks in the group. Messages between two ranks arrive in the order they were sent. Each sends S, the bytes of
x, and holds the result and nothing else; x must not change until the call, or the handle's `wait`, returns.
Raises ValueError for a rank outside the group and for this rank itself; in checked mode CollectiveMismatch when what
comes is not what the receiver expects (gloo would reinterpret the bytes, or abort the process).
"""

from typing import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from minitrain.collectives import call_log, transport
from minitrain.collectives.channel import Channel, Handle, check_rank, contiguous, new_call, open_channel


def send(x: Tensor, to: int, group: dist.ProcessGroup, *, async_op: bool = False) -> Handle | None:
    """Give x to rank `to` of the group."""
    ch = open_channel(group, "send", x)
    check_rank(ch, "send to", to, other=True)
    return _transfer(ch, group, [(x, to)], [], lambda received: None, async_op)


def receive(
    like: Tensor | None,
    source: int,
    group: dist.ProcessGroup,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    async_op: bool = False,
) -> Tensor | Handle:
    """What rank `source` of the group sends: shaped as `like`, which is not written to, or as the keywords say."""
    if like is None and (shape is None or dtype is None):
        raise ValueError("receive needs a tensor to take shape and dtype from, or shape= and dtype=")
    place = torch.empty(shape, dtype=dtype, device=device) if like is None else _place_for(like)
    ch = open_channel(group, "receive", place if like is None else like)
    check_rank(ch, "receive from", source, other=True)
    return _transfer(ch, group, [], [(place, source)], lambda received: received[0], async_op)


def exchange(
    x: Tensor,
    to: int,
    source: int,
    group: dist.ProcessGroup,
    *,
    like: Tensor | None = None,
    async_op: bool = False,
) -> Tensor | Handle:
    """Send x to rank `to` while receiving a tensor of the shape of `like` (of x if None) from rank `source`."""
    ch = open_channel(group, "exchange", x)
    check_rank(ch, "exchange: send to", to)
    check_rank(ch, "exchange: receive from", source)
    if (to == ch.rank) != (source == ch.rank):
        raise ValueError(
            f"exchange: to={to} and source={source}, and one of them is this rank itself; make it both or "
            "neither"
        )
    like = x if like is None else like
    return _transfer(
        ch, group, [(x, to)], [(_place_for(like), source)], lambda received: received[0], async_op
    )


def rotate(
    xs: Tensor | tuple[Tensor, ...], group: dist.ProcessGroup, shift: int = 1, *, async_op: bool = False
) -> Tensor | tuple[Tensor, ...] | Handle:
    """xs goes to rank + shift, what comes is rank - shift's: the same number of tensors, of the same shapes."""
    tensors = (xs,) if isinstance(xs, Tensor) else tuple(xs)
    if not tensors:
        raise ValueError("rotate: an empty tuple; give at least one tensor")
    ch = [open_channel(group, "rotate", x) for x in tensors][0]
    to, source = (ch.rank + shift) % ch.size, (ch.rank - shift) % ch.size
    pack = (lambda received: received[0]) if isinstance(xs, Tensor) else tuple
    return _transfer(
        ch, group, [(x, to) for x in tensors], [(_place_for(x), source) for x in tensors], pack, async_op
    )


def _place_for(like: Tensor) -> Tensor:
    """Memory for a message of this shape."""
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _transfer(
    ch: Channel,
    group: dist.ProcessGroup,
    sends: list[tuple[Tensor, int]],
    receives: list[tuple[Tensor, int]],
    pack: Callable[[list[Tensor]], object],
    async_op: bool,
):
    """Post all sends, and receives into the tensors given; the result is pack(the tensors received)."""
    if sends and sends[0][1] == ch.rank:  # to itself, as in a ring of one: nothing travels
        copies = [x.detach().clone(memory_format=torch.contiguous_format) for x, _ in sends]
        handle = Handle(lambda: None, lambda: pack(copies), lambda: True)
        return handle if async_op else handle.wait()
    device = (sends + receives)[0][0].device
    network = torch.device("cpu") if ch.backend == "gloo" else device  # gloo reads and writes host memory
    there = device == network
    outgoing = [
        (new_call(ch, "send", x, peer=peer), contiguous(x if there else x.to(network)), peer)
        for x, peer in sends
    ]
    incoming = [
        (new_call(ch, "receive", x, peer=peer), x if there else torch.empty_like(x, device=network), peer)
        for x, peer in receives
    ]
    calls = [call for call, _, _ in outgoing + incoming]
    if ch.backend != "gloo":
        for call in calls:
            call.planned, call.sent_bytes = True, call.payload_bytes if call.op == "send" else 0
    for call in calls:
        call_log.issued(call)
    settle = transport.post_messages(ch, group, outgoing, incoming)

    def finish():
        ch.unwaited.discard(handle)
        outgoing.clear()
        for call in calls:
            call_log.waited(call)
        return pack([x if there else x.to(device) for _, x, _ in incoming])

    handle = Handle(settle, finish, lambda: ch.backend == "fake")
    ch.unwaited.add(
        handle
    )  # if its owner drops it, the buffers must live until the network is done with them
    return handle if async_op else handle.wait()
