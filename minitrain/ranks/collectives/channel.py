"""A process group as the collectives see it: members, the number of the next call, workers in the background.

gloo moves data by itself, on an event loop, but an algorithm has to be driven: something must add up what has
arrived and send the sum on. So a group has two lanes, each a worker thread that starts with its first
asynchronous collective; odd and even calls are driven in the order of issue, which is the same on all
members. torch lets go of the interpreter lock in every send, wait and addition, so that the caller computes
meanwhile; while one lane waits, the other moves.
"""

import time
import weakref
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_process_group_ranks

from minitrain.ranks.collectives import call_log
from minitrain.ranks.collectives.call_log import Call
from minitrain.ranks.process import PROCESS

LOOK_S = 0.1  # how often a wait looks whether a rank is gone


class Channel:
    """What we know of one process group. `backend` (backends.py) moves its data."""

    def __init__(self, group: ProcessGroup, backend):
        self._group = weakref.ref(group)  # a channel must not keep a destroyed group alive
        self.backend = backend
        self.members = tuple(get_process_group_ranks(group))
        self.who = call_log.span(self.members)
        self.rank, self.size = group.rank(), group.size()
        self.after = [(self.rank + s) % self.size for s in range(1, self.size)]  # the others, by rounds
        self.before = [(self.rank - s) % self.size for s in range(1, self.size)]
        what = group.group_desc
        self.axis = "world" if what in ("default_pg", "undefined", "") else what.removeprefix("mesh_")
        self.name = "" if self.axis != "world" or what == "default_pg" else group.group_name
        self.unwaited: set[Handle] = set()  # messages nobody has waited for: their buffers must stay alive
        self._next: dict[object, int] = {}
        self.lanes = (Lane(self.axis), Lane(self.axis))
        if backend.counts:  # gloo's event loop is there by now
            PROCESS.on_open()

    @property
    def group(self) -> ProcessGroup:
        return self._group()

    def number(self, sequence: object) -> int:
        """The next number of a sequence of calls: None for collectives, (op, peer) for messages."""
        number = self._next.get(sequence, 0)
        self._next[sequence] = number + 1
        return number

    def lane(self, call: Call) -> "Lane":
        """Where an asynchronous call is driven."""
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
        """Room for `numel` elements or more, shared by all calls in flight here."""
        kind = (dtype, like.device)
        room = self._scratch.get(kind)
        if room is None or room.numel() < numel:
            room = self._scratch[kind] = new_scratch(like, numel, dtype)
        return room


def new_scratch(like: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    return call_log.announce("buffer", like.new_empty(numel, dtype=dtype))


# ---- a rank that is gone -------------------------------------------------------------------------------


def check_patience(started: float) -> None:
    """RuntimeError if a rank is gone and a wait that began at `started` has lasted too long."""
    since = PROCESS.lost_since
    if since is not None and time.monotonic() > max(started, since) + PROCESS.patience_s:
        PROCESS.patience_s = 0.0  # nothing that is waited for from now on will come either
        raise RuntimeError("another rank is gone, and gloo does not end this wait")


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
