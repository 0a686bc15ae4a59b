"""A process group as the collectives see it: members, the number of the next call, workers in the background.

gloo moves data by itself, on an event loop, but an algorithm has to be driven: something must add up what has
arrived and send the sum on. So a group has two lanes, each a worker thread that starts with its first
asynchronous collective; odd and even calls are driven in the order of issue, which is the same on all
members. torch lets go of the interpreter lock in every send, wait and addition, so that the caller computes
meanwhile; while one lane waits, the other moves.
"""

import queue
import threading
import time
import weakref
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
        self.axis = axis_name(group)
        self.name = "" if self.axis != "world" or group.group_desc == "default_pg" else group.group_name
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


def axis_name(group: ProcessGroup) -> str:
    """The mesh axis in a group's description; the default group is "world"."""
    description = group.group_desc
    return "world" if description in ("default_pg", "undefined", "") else description.removeprefix("mesh_")


class Lane:
    """A worker thread, started when needed, and scratch memory for the calls that run on it in turn."""

    def __init__(self, axis: str):
        self._name = f"collectives on {axis}"
        self._tasks: queue.SimpleQueue | None = None
        self._scratch: weakref.WeakValueDictionary[tuple, Tensor] = weakref.WeakValueDictionary()
        self.unsettled: dict[Task, None] = {}  # neither done nor, if they failed, waited for: in order

    def submit(self, run: Callable[[], None]) -> "Task":
        """Run `run()` after what was submitted before."""
        if self._tasks is None:
            self._tasks = queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._tasks,), name=self._name, daemon=True).start()
        task = Task(run, self.unsettled)
        self._tasks.put(task)
        return task

    def scratch(self, like: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Room for `numel` elements or more, shared by all calls in flight here."""
        kind = (dtype, like.device)
        room = self._scratch.get(kind)
        if room is None or room.numel() < numel:
            room = self._scratch[kind] = new_scratch(like, numel, dtype)
        return room


def new_scratch(like: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    return call_log.announce("buffer", like.new_empty(numel, dtype=dtype))


class Task:
    """Something the worker thread does; `wait` returns, or raises what it raised, when it is done."""

    def __init__(self, run: Callable[[], None], unsettled: dict):
        self.run, self.error, self.running, self.unsettled = run, None, threading.Lock(), unsettled
        self.unsettled[self] = None
        self.running.acquire()

    def wait(self) -> None:
        started = time.monotonic()
        while not self.running.acquire(timeout=-1 if PROCESS.patience_s is None else LOOK_S):
            check_patience(started)
        self.running.release()
        if self.error is not None:
            self.unsettled.pop(self, None)
            raise self.error


def _work(tasks: queue.SimpleQueue) -> None:
    while True:
        task = tasks.get()
        try:
            task.run()
        except BaseException as error:
            task.error = error
        if task.error is None:
            task.unsettled.pop(task, None)
        task.run = None  # the buffers it holds live no longer than needed
        task.running.release()
        del task


# ---- a rank that is gone -------------------------------------------------------------------------------


def check_patience(started: float) -> None:
    """RuntimeError if a rank is gone and a wait that began at `started` has lasted too long."""
    since = PROCESS.lost_since
    if since is not None and time.monotonic() > max(started, since) + PROCESS.patience_s:
        PROCESS.patience_s = 0.0  # nothing that is waited for from now on will come either
        raise RuntimeError("another rank is gone, and gloo does not end this wait")


def wait_at_most(seconds: float) -> None:
    """From now on no call here waits longer once `another_rank_is_gone`.

    gloo forgets a message of which a part has been written, or read, when its peer dies: its wait never ends,
    and nothing ends it from outside. So calls wait on a thread of their own, `apart`, and who called them
    waits for that thread. (Not a call of torch.distributed.)
    """
    PROCESS.patience_s = seconds


def another_rank_is_gone() -> None:
    PROCESS.lost_since = time.monotonic()


def apart(work: Callable[[], None]) -> None:
    """work(), which waits in gloo."""
    if PROCESS.patience_s is None:
        return work()
    if not hasattr(PROCESS.thread, "lane"):
        PROCESS.thread.lane = Lane("waits")
    PROCESS.thread.lane.submit(work).wait()


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
