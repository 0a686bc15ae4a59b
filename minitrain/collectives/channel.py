"""A process group as the collectives see it: who is in it, which call is next, who works on it in the background.

`channel_of(group)` is the one `Channel` of a process group. It numbers the calls (members agree on a collective by its
number, the two ends of a message by theirs) and owns the thread that carries asynchronous collectives to their end.
Here too is what every call checks before any rank waits for another, and the `Handle` of an asynchronous call.

gloo moves data by itself, on an event loop, but an algorithm has to be driven: something must add up what has arrived
and send the sum on. So a group has two lanes, each a worker thread that starts with its first asynchronous collective;
odd and even calls are driven in the order of issue, which is the same on all members. torch lets go of the interpreter
lock in every send, wait and addition, so that the caller computes meanwhile; while one lane waits, the other moves.
"""

import queue
import threading
import weakref
from typing import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from minitrain.collectives import call_log
from minitrain.collectives.call_log import Call

ON_OPEN: list[
    Callable[[], None]
] = []  # what a rank does when it first uses a group on gloo, its event loops there by then


class Channel:
    """What we know of one process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = weakref.proxy(group)  # the registry below must not keep a destroyed group alive
        self.members = tuple(dist.get_process_group_ranks(group))
        self.who = call_log.span(self.members)
        self.rank, self.size = group.rank(), group.size()
        self.after = [
            (self.rank + s) % self.size for s in range(1, self.size)
        ]  # the others, in order of the rounds
        self.before = [(self.rank - s) % self.size for s in range(1, self.size)]
        self.axis = axis_name(group)
        self.backend = backend_name(group)
        self.unwaited: set[Handle] = set()  # messages nobody has waited for: their buffers must stay alive
        self._next: dict[object, int] = {}
        self.lanes = (Lane(self.axis), Lane(self.axis))
        if self.backend == "gloo":
            for prepare in ON_OPEN:
                prepare()

    def number(self, sequence: object) -> int:
        """The next number of a sequence of calls: None for collectives, (op, peer) for messages."""
        number = self._next.get(sequence, 0)
        self._next[sequence] = number + 1
        return number

    def lane(self, call: Call) -> "Lane":
        """Where an asynchronous call is driven."""
        return self.lanes[call.seq % len(self.lanes)]


class Lane:
    """A worker thread, started when needed, and scratch memory for the calls that run on it one after the other."""

    def __init__(self, axis: str) -> None:
        self._name = f"collectives on {axis}"
        self._tasks: queue.SimpleQueue | None = None
        self._scratch: weakref.WeakValueDictionary[tuple, Tensor] = weakref.WeakValueDictionary()

    def submit(self, run: Callable[[], None]) -> "Task":
        """Run `run()` after what was submitted before."""
        if self._tasks is None:
            self._tasks = queue.SimpleQueue()
            threading.Thread(target=work, args=(self._tasks,), name=self._name, daemon=True).start()
        task = Task(run)
        self._tasks.put(task)
        return task

    def scratch(self, like: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Room for `numel` elements or more: shared by all calls in flight here, free when the last was waited for."""
        kind = (dtype, like.device)
        room = self._scratch.get(kind)
        if room is None or room.numel() < numel:
            room = self._scratch[kind] = new_scratch(like, numel, dtype)
        return room


def new_scratch(like: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    return call_log.announce_buffer(like.new_empty(numel, dtype=dtype))


class Task:
    """Something the worker thread does; `wait` returns, or raises what it raised, when it is done."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run, self.error, self.running = run, None, threading.Lock()
        self.running.acquire()

    def wait(self) -> None:
        with self.running:
            if self.error is not None:
                raise self.error

    def done(self) -> bool:
        return not self.running.locked()


def work(tasks: queue.SimpleQueue) -> None:
    while True:
        task = tasks.get()
        try:
            task.run()
        except BaseException as error:
            task.error = error
        task.run = None  # the buffers it holds live no longer than needed
        task.running.release()
        del task


class Handle:
    """What an asynchronous call returns: `wait()` gives the result, as often as asked, and must be called once."""

    def __init__(self, settle: Callable[[], None], finish: Callable, poll: Callable[[], bool]) -> None:
        self._settle, self._finish, self._poll = settle, finish, poll
        self._waited, self._result = False, None

    def wait(self):
        if not self._waited:
            self._settle()
            self._result, self._waited = self._finish(), True
            self._settle = self._finish = self._poll = None  # let the buffers go
        return self._result

    @property
    def done(self) -> bool:
        """Has all data arrived? (A message over gloo knows only after `wait()`.)"""
        return self._waited or self._poll()


# ---- process groups --------------------------------------------------------------------------------------------------

_channels: dict[int, Channel] = {}  # by the group's id, as long as the group lives


def channel_of(group: dist.ProcessGroup) -> Channel:
    """The channel of a process group; ValueError if this rank cannot talk in it."""
    known = _channels.get(id(group))
    return _new_channel(group) if known is None else known


def _new_channel(group: dist.ProcessGroup) -> Channel:
    if not isinstance(group, dist.ProcessGroup):
        if group == dist.GroupMember.NON_GROUP_MEMBER:  # what torch's new_group gives to the others
            raise ValueError("this rank is not a member of the group; only members may call its collectives")
        raise ValueError(
            f"group is {group!r}; pass a process group: mesh.group('dp'), or collectives.world() for all"
        )
    made = _channels[id(group)] = Channel(group)
    weakref.finalize(group, _channels.pop, id(group))
    return made


def axis_name(group: dist.ProcessGroup) -> str:
    """The mesh axis in a group's description; the default group is "world"."""
    description = group.group_desc
    return "world" if description in ("default_pg", "undefined", "") else description.removeprefix("mesh_")


def backend_name(group: dist.ProcessGroup) -> str:
    name = dist.get_backend(group)
    for known in ("nccl", "gloo", "fake"):
        if known in name:
            return known
    raise ValueError(
        f"backend {name!r}; minitrain's collectives run on gloo and nccl, and on fake in a dry run"
    )


# ---- what every call checks and records ------------------------------------------------------------------------------


def open_channel(group: dist.ProcessGroup, op: str, x: Tensor) -> Channel:
    """The channel for a call that hands over x, if it can."""
    ch = channel_of(group)
    if not isinstance(x, Tensor):
        raise ValueError(f"{op}: x is a {type(x).__name__}; pass a tensor, torch.tensor(x)")
    if not x.is_cuda and ch.backend == "nccl":
        raise ValueError(
            f"{op}: x is on {x.device}, but NCCL moves GPU memory only; use x.cuda(), or a group on gloo"
        )
    if not x.is_cpu and not x.is_cuda and ch.backend == "gloo":
        raise ValueError(
            f"{op}: x is on {x.device}, but gloo moves memory of the CPU and of CUDA only; use x.cpu()"
        )
    if x.layout is not torch.strided:
        raise ValueError(f"{op}: x is {x.layout}; use x.to_dense()")
    return ch


def new_call(
    ch: Channel,
    op: str,
    x: Tensor,
    name: str | None = None,
    dim: int = 0,
    *,
    payload: int = 1,
    peer: int | None = None,
    source: int | None = None,
    uneven: bool = False,
) -> Call:
    """The record of a call on x, numbered; `payload` times x is the size S of the formulas."""
    number = ch.number(None if peer is None else (op, peer))
    size_bytes = payload * x.numel() * x.element_size()
    return Call(
        number,
        op,
        ch.axis,
        ch.members,
        ch.who,
        size_bytes,
        tuple(x.shape),
        x.dtype,
        call_log.call_site(),
        None if peer is None else ch.members[peer],
        name,
        dim,
        source,
        uneven,
    )


def check_rank(ch: Channel, what: str, rank: int, other: bool = False) -> None:
    if not 0 <= rank < ch.size:
        raise ValueError(f"{what} rank {rank}; the ranks of this group ({ch.axis}) are 0..{ch.size - 1}")
    if other and rank == ch.rank:
        raise ValueError(f"{what} rank {rank}, which is this rank itself; it would wait for ever")


def contiguous(x: Tensor) -> Tensor:
    """x outside autograd and contiguous; the copy, if one is needed, is communication memory."""
    x = x.detach()
    return x if x.is_contiguous() else call_log.announce_buffer(x.contiguous())


def sketch(x: Tensor) -> str:
    return f"{call_log.signature(x.shape, x.dtype)} on {x.device}"
