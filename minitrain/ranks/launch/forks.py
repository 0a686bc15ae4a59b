"""The helper process: forks the ranks of each launch, reaps them, and leaves nothing of it when it ends.

`launch.run` starts `serve` once per calling process. The helper imports torch, stays single-threaded, never
touches CUDA, and forks. (The *caller* cannot be forked: a notebook kernel has threads, sockets and perhaps a
CUDA context, and none of them survives a fork.) A launch is announced before its directory is made, so that
whoever dies, and whenever, somebody is left who removes it; then its order comes on the lifeline.

    caller closes the lifeline, or dies     the helper kills and reaps the ranks and all that they started, in
                                            sessions of their own too (Linux), and says "- reaped"
    caller dies, a copy of its end lives    the helper looks for its parent twice a second, and does the same
    helper dies                             each rank gets SIGKILL from the kernel (PR_SET_PDEATHSIG, Linux)
    caller dies, helper stopped or slow     a thread in each rank sleeps on the lifeline and exits the process
    a rank dies                             nobody else: the caller decides, after it has heard who was first
"""

import ctypes
import gc
import glob
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

import torch

from minitrain.ranks.launch.ranks import LINUX, Rank, say, seed_all

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h: who loses its parent becomes our child, not that of init
ROUNDS = 100  # of killing what is left: it may fork meanwhile


def serve(requests_fd: int, caller_pid: int) -> None:
    """Fork ranks for every request (a directory and two descriptors) until the caller is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if LINUX:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    requests = socket.socket(fileno=requests_fd)
    preload([])
    wakeup = os.pipe()  # written to by the kernel when a rank ends
    for end in wakeup:
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakeup[1], warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written
    launches: list[RankGroup] = []
    while True:
        lifelines = [launch.lifeline for launch in launches]
        ready, _, _ = select.select([requests, wakeup[0], *lifelines], [], [], 0.5)
        if wakeup[0] in ready:
            os.read(wakeup[0], 4096)
        reap(launches)
        for launch in launches:
            if launch.lifeline in ready:
                launch.listen(alone=len(launches) == 1)
        launches = [launch for launch in launches if not launch.ended]
        if requests in ready:
            _, fds, _, _ = socket.recv_fds(requests, 1, 2)
            if not fds:
                break
            launches.append(RankGroup(*fds))
        elif os.getppid() != caller_pid:
            break
    for launch in launches:
        launch.end(alone=True)


def preload(names: list[str]) -> None:
    for name in names:
        with suppress(Exception):  # a rank that needs the module will say what is wrong with it
            importlib.import_module(name)
    seed_all()  # the first time costs 15 ms: torch notes where it was called from, for a GPU that may come
    assert not torch.cuda.is_initialized(), "a process that holds a CUDA context cannot be forked"
    gc.collect()
    gc.freeze()  # what is here now stays shared: the collector of a rank will not write into these pages


def reap(launches: list["RankGroup"]) -> None:
    """Take note of every child that has ended: ranks, and what ranks had left to us."""
    with suppress(ChildProcessError):  # there is no child any more
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            for launch in launches:
                launch.note_the_end(*ended)


class RankGroup:
    """The ranks of one launch, as the helper sees them: process ids to reap and to kill."""

    def __init__(self, events: int, lifeline: int):
        self.events, self.lifeline, self.ended = events, socket.socket(fileno=lifeline), False
        self.gone, self.gone_writer = os.pipe()
        self.pids: dict[int, int] = {}
        self.directory = self.line()

    def line(self) -> str:
        """One line of the lifeline and nothing that follows it; "" if the caller is gone."""
        line = b""
        while not line.endswith(b"\n"):
            byte = self.lifeline.recv(1)
            if not byte:
                return ""
            line += byte
        return os.fsdecode(line[:-1])

    def listen(self, alone: bool) -> None:
        """The order to start, or the end."""
        order = "" if self.pids else self.line()
        if order:
            self.start(json.loads(order))
        else:
            self.end(alone)

    def start(self, order: dict) -> None:
        if missing := [name for name in order["modules"] if name not in sys.modules]:
            preload(missing)
        for rank in range(order["ranks"]):
            try:
                pid = os.fork()
            except OSError as error:
                say(self.events, rank, "unborn", error.errno)
                break
            if pid == 0:
                try:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    its_own = {0, 1, 2, self.events, self.lifeline.fileno(), self.gone}
                    for fd in {int(fd) for fd in os.listdir("/dev/fd")} - its_own:
                        with suppress(OSError):  # it was that of the list itself
                            os.close(fd)
                    more = self.directory, self.events, self.lifeline, self.gone
                    Rank(rank, order["ranks"], *more).live()
                finally:
                    os._exit(70)  # never fall back into the helper's loop
            self.pids[pid] = rank

    def note_the_end(self, pid: int, status: int) -> None:
        """Of one of the ranks: what it started ends with it; the caller and the other ranks hear of it."""
        if pid in self.pids:
            kill(os.killpg, pid)
            say(self.events, self.pids.pop(pid), "exit", os.waitstatus_to_exitcode(status))
            self.tell_the_others()

    def tell_the_others(self) -> None:
        if self.gone_writer is not None:
            os.close(self.gone_writer)
            self.gone_writer = None

    def end(self, alone: bool) -> None:
        """`alone`: no other launch is under way, so whatever else is a child of this process was a rank's."""
        family = [pid for rank in self.pids for pid in descendants(rank)]
        for pid in self.pids:
            kill(os.killpg, pid)
            kill(os.kill, pid)  # in case it had not reached setpgid
        for pid in family:
            kill(os.kill, pid)
        for pid in self.pids:
            os.waitpid(pid, 0)
        for _ in range(ROUNDS):
            left = children(os.getpid()) if alone else []
            for pid in left:
                kill(os.kill, pid)
                os.waitpid(pid, 0)
            if not left:
                break
        shutil.rmtree(self.directory, ignore_errors=True)  # here, for the caller may be dead
        say(self.events, "-", "reaped")
        self.tell_the_others()
        os.close(self.gone)
        os.close(self.events)
        self.lifeline.close()
        self.ended = True


def kill(how: Callable, pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # gone (macOS says the second of a group of zombies)
        how(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """None where there is no /proc."""
    pids = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        with suppress(OSError), open(path) as file:  # the thread may have ended
            pids += map(int, file.read().split())
    return pids


def descendants(pid: int) -> list[int]:
    return [one for child in children(pid) for one in (child, *descendants(child))]
