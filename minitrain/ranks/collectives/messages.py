"""Messages between two ranks: send, receive, and two patterns that cannot deadlock, exchange and rotate.

    send(x, to), receive(like, source)    blocking: both return when the data has changed hands
    exchange(x, to, source)               send one and receive one at the same time
    rotate((k, v), shift=1)               everyone's tensors one step up the ring, as ring attention does

Ranks are ranks in the group. Messages between two ranks arrive in the order they were sent. Each sends S, the
bytes of x, and holds the result and nothing else; x must not change until the call, or the handle's `wait`,
returns. In checked mode CollectiveMismatch when what comes is not what the receiver expects (gloo would
reinterpret the bytes, or abort the process).
"""

from typing import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.ranks.collectives import call_log
from minitrain.ranks.collectives.arguments import check_rank, contiguous, new_call, open_channel
from minitrain.ranks.collectives.channel import Channel, Handle

Sends = list[tuple[Tensor, int]]  # tensors and ranks


def send(x: Tensor, to: int, group: ProcessGroup, *, async_op: bool = False) -> Handle | None:
    """Give x to rank `to` of the group."""
    ch = open_channel(group, "send", x)
    check_rank(ch, "send to", to, other=True)
    return _transfer(ch, [(x, to)], [], lambda received: None, async_op)


def receive(
    like: Tensor | None,
    source: int,
    group: ProcessGroup,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    async_op: bool = False,
) -> Tensor | Handle:
    """What rank `source` sends: shaped as `like`, which is not written to, or as the keywords say."""
    if like is None and (shape is None or dtype is None):
        raise ValueError("receive needs a tensor to take shape and dtype from, or shape= and dtype=")
    room = torch.empty(shape, dtype=dtype, device=device) if like is None else _room_for(like)
    ch = open_channel(group, "receive", room if like is None else like)
    check_rank(ch, "receive from", source, other=True)
    return _transfer(ch, [], [(room, source)], lambda received: received[0], async_op)


def exchange(
    x: Tensor,
    to: int,
    source: int,
    group: ProcessGroup,
    *,
    like: Tensor | None = None,
    async_op: bool = False,
) -> Tensor | Handle:
    """Send x to rank `to` while receiving a tensor shaped as `like` (as x if None) from rank `source`."""
    ch = open_channel(group, "exchange", x)
    check_rank(ch, "exchange: send to", to)
    check_rank(ch, "exchange: receive from", source)
    if (to == ch.rank) != (source == ch.rank):
        raise ValueError(
            f"exchange: to={to} and source={source}, one of them this rank itself; make it both or neither"
        )
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
    """Memory for a message of this shape, contiguous."""
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _transfer(ch: Channel, sends: Sends, receives: Sends, pack: Callable, async_op: bool):
    """Post all sends, and receives into the tensors given; the result is pack(the tensors received)."""
    if sends and sends[0][1] == ch.rank:  # to itself, as in a ring of one: nothing travels
        copies = [x.detach().clone(memory_format=torch.contiguous_format) for x, _ in sends]
        handle = Handle(lambda: None, lambda: pack(copies))
        return handle if async_op else handle.wait()
    backend, first = ch.backend, (sends + receives)[0][0]
    there = backend.device(first)
    outgoing = [(new_call(ch, "send", x, peer=peer), contiguous(x.to(there)), peer) for x, peer in sends]
    room = [(x if x.device == there else torch.empty_like(x, device=there), peer) for x, peer in receives]
    incoming = [(new_call(ch, "receive", x, peer=peer), x, peer) for x, peer in room]
    calls = [call for call, _, _ in outgoing + incoming]
    for call in calls:
        if not backend.counts:
            call.planned, call.sent_bytes = True, call.payload_bytes if call.op == "send" else 0
        call_log.issued(call)
    wait = backend.post(ch, outgoing, incoming)

    def settle() -> None:
        wait()
        for call in calls:
            call_log.finished(call)

    def finish():
        ch.unwaited.discard(handle)
        outgoing.clear()
        for call in calls:
            call_log.announce("wait", call)
        return pack([x.to(first.device) for _, x, _ in incoming])

    handle = Handle(settle, finish)
    ch.unwaited.add(handle)  # if its owner drops it, the buffers must live until the network is done
    return handle if async_op else handle.wait()
