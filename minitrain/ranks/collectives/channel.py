"""A process group as the collectives see it: members, the number of the next call, workers in the background.

gloo moves data by itself, but something must add up what has arrived and send the sum on. So a group has two
lanes, worker threads that start with their first asynchronous collective, for odd and even calls in the order
of issue. torch lets go of the interpreter lock: the caller computes, and one lane moves while one waits.
"""

import time
import weakref
from collections import defaultdict
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_process_group_ranks

from minitrain.ranks.collectives import call_log
from minitrain.ranks.collectives.call_log import Call, signature
from minitrain.ranks.process import PROCESS

LOOK_S = 0.1  # how often a wait looks whether a rank is gone
FLOAT8 = {dtype for name, dtype in vars(torch).items() if name.startswith("float8_")}
REFUSED = {
    "sum": (FLOAT8 | {torch.bool}, "added; convert first, x.int() or x.float()"),
    "max": (FLOAT8 | {torch.complex64, torch.complex128}, "compared; convert first, x.float() or x.abs()"),
}
Sizes = list[int] | None


class Channel:  # of one process group; `doors`: what moves tensors of a kind of device (transport.py)
    def __init__(self, group: ProcessGroup, doors: dict):
        self._group = weakref.ref(group)  # a channel must not keep a destroyed group alive
        self.doors = doors
        self.members = tuple(get_process_group_ranks(group))
        self.who = call_log.span(self.members)
        self.rank, self.size = group.rank(), group.size()
        self.after = [(self.rank + s) % self.size for s in range(1, self.size)]  # the others, by rounds
        self.before = [(self.rank - s) % self.size for s in range(1, self.size)]
        what = group.group_desc
        self.axis = "world" if what in ("default_pg", "undefined", "") else what.removeprefix("mesh_")
        self.name = "" if self.axis != "world" or what == "default_pg" else group.group_name
        self.unwaited: set[Handle] = set()  # messages nobody has waited for: their buffers must stay alive
        # the numbers of the next calls: of collectives under None, of messages under (op, peer)
        self.numbers: defaultdict[object, count] = defaultdict(count)
        self.lanes = (Lane(self.axis), Lane(self.axis))
        if all(door.counts for door in doors.values()):  # of gloo alone; its event loop is there by now
            PROCESS.on_open()

    group = property(lambda self: self._group())

    def door(self, op: str, x: Tensor):
        """What moves x: the device that it is on decides."""
        door = self.doors.get(x.device.type) or self.doors.get("any")
        if door is None:
            moved = " and ".join(self.doors)
            raise ValueError(f"{op}: x is on {x.device}, and this group moves tensors of {moved}; move x")
        return door

    def lane(self, call: Call) -> "Lane":
        return self.lanes[call.seq % len(self.lanes)]


class Lane:
    """A worker thread, started when needed, and scratch memory for the calls that run on it in turn."""

    def __init__(self, axis: str):
        self._name = f"collectives on {axis}"
        self._worker: ThreadPoolExecutor | None = None
        self._scratch: weakref.WeakValueDictionary[tuple, Tensor] = weakref.WeakValueDictionary()
        self.unsettled: dict[Future, None] = {}  # neither done nor, if they failed, waited for: in order

    def submit(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run `run()` after what was submitted before; returns what waits for it, or raises its error."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, self._name)
        future = self._worker.submit(run)
        self.unsettled[future] = None
        future.add_done_callback(lambda done: done.exception() or self.unsettled.pop(done, None))
        return partial(self.wait, future)

    def wait(self, future: Future) -> None:
        started = time.monotonic()
        while not futures.wait([future], None if PROCESS.patience_s is None else LOOK_S).done:
            check_patience(started)
        self.unsettled.pop(future, None)
        future.result()

    def scratch(self, like: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        kind = (dtype, like.device)
        room = self._scratch.get(kind)
        if room is None or room.numel() < numel:
            room = self._scratch[kind] = new_scratch(like, numel, dtype)
        return room


def new_scratch(like: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    return call_log.announce("buffer", like.new_empty(numel, dtype=dtype))


def check_patience(started: float) -> None:
    """RuntimeError if a rank is gone and a wait that began at `started` has lasted too long."""
    since = PROCESS.lost_since
    if since is not None and time.monotonic() > max(started, since) + PROCESS.patience_s:
        PROCESS.patience_s = 0.0  # nothing that is waited for from now on will come either
        raise RuntimeError("another rank is gone, and nothing ends this wait")


def apart(work: Callable[[], None]) -> None:
    """work(), which waits in gloo. That forgets a message of which a part has been written, or read, when its
    peer dies, and nothing ends the wait from outside: where there is patience, a thread of its own waits."""
    if PROCESS.patience_s is None:
        return work()
    if not hasattr(PROCESS.thread, "lane"):
        PROCESS.thread.lane = Lane("waits")
    PROCESS.thread.lane.submit(work)()


class Handle:
    """What an asynchronous call returns: `wait()` gives the result, and must be called at least once."""

    def __init__(self, settle: Callable[[], None], finish: Callable):
        self._settle, self._finish = settle, finish
        self._waited, self._result = False, None

    def wait(self):
        if not self._waited:
            self._settle()
            self._result, self._waited = self._finish(), True
            self._settle = self._finish = None  # let the buffers go
        return self._result


def settle() -> None:
    """Wait for what runs in the background; raise the first error that nobody has waited for."""
    for ch in list(PROCESS.channels.values()):
        for lane, future in [(lane, future) for lane in ch.lanes for future in list(lane.unsettled)]:
            try:
                lane.wait(future)
            except RuntimeError as error:
                raise type(error)(f"{error}; nobody waited for this asynchronous call") from None


# ---- what every call checks before any rank waits for another, and its record ----------------------------


def new_call(ch: Channel, op: str, x: Tensor, name=None, dim=0, *, payload=1, peer=None, **more) -> Call:
    # numbered; `payload` times x is the size S of the formulas
    number = next(ch.numbers[None if peer is None else (op, peer)])
    size, peer = payload * x.numel() * x.element_size(), None if peer is None else ch.members[peer]
    what = tuple(x.shape), x.dtype, call_log.call_site()
    return Call(number, op, ch.axis, ch.members, ch.who, size, *what, peer, name, dim, group=ch.name, **more)


def contiguous(x: Tensor) -> Tensor:
    x = x.detach()
    return x if x.is_contiguous() else call_log.announce("buffer", x.contiguous())


def result(op: str, x: Tensor, shape: tuple[int, ...], out: Tensor | None) -> Tensor:
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
        size = f"{op}: x {list(x.shape)} has {x.shape[dim]} along dim {dim}"
        ranks = f"{divisor.size} ranks ({divisor.axis}); pad it, or use all_to_all with sizes"
        raise ValueError(f"{size}, not a multiple of the group's {ranks}")
    return dim % x.dim()


def check_sizes(ch: Channel, x: Tensor, dim: int, sends: Sizes, receives: Sizes) -> None:
    for what, sizes in (("send_sizes", sends), ("receive_sizes", receives)):
        if sizes is None or len(sizes) != ch.size or min(sizes) < 0:
            raise ValueError(f"all_to_all: {what}={sizes}; give both, {ch.size} sizes >= 0 each")
    if (total := sum(sends)) != (size := x.shape[dim]):
        raise ValueError(f"all_to_all: send_sizes {sends} add up to {total}, but x has {size} along {dim=}")
    if sends[ch.rank] != receives[ch.rank]:
        own, expected = sends[ch.rank], receives[ch.rank]
        raise ValueError(f"all_to_all: this rank sends {own} to itself, but receive_sizes expects {expected}")
