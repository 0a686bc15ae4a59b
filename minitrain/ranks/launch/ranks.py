"""Behind the caller: the helper process, which forks ranks, and what a rank does from fork to kill.

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
import datetime
import faulthandler
import gc
import glob
import importlib
import json
import linecache
import os
import pickle
import random
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import cloudpickle
import numpy.random  # by name: else numpy loads it in each rank that seeds it, 15 ms
import torch
import torch.distributed as dist

from minitrain.ranks import collectives
from minitrain.ranks.launch import pickled, report, shared_cores
from minitrain.ranks.process import PROCESS
from minitrain.ranks.torch_private import COMPILER, autograd_functions

LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36  # who loses its parent becomes our child, not that of init
ROUNDS = 100  # of killing what is left: it may fork meanwhile
# Imported by the helper once the caller or a rank has: a torch.optim optimizer pulls in the first, which
# takes as long as torch itself, and four ranks doing so at once on two cores take 4 s.
HEAVY = (COMPILER, "sympy", "pytest", "hypothesis")
# torch.autograd.function.once_differentiable makes a reader's function refer to this module, which cannot be
# imported: listed here, it travels by its name, and cloudpickle does not take it to pieces.
sys.modules.setdefault(autograd_functions.__name__, autograd_functions)


def say(events: int, *words) -> None:
    """One line on the events pipe; POSIX promises that lines under 512 bytes never mix."""
    with suppress(BrokenPipeError):  # the caller is gone; the lifeline says so too
        os.write(events, (" ".join(map(str, words)) + "\n").encode())


# ---- the helper ------------------------------------------------------------------------------------------


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


# ---- a rank ----------------------------------------------------------------------------------------------


class Rank:
    """One rank from fork to kill. It never leaves by itself: see `wait_for_the_end`. Of its launch it has

    directory   private: the rendezvous file, the request; its result, error, prints, stacks, calls
    events      a pipe, many writers and one reader: "3 ready", "3 done", "3 error", "3 exit -11"
    lifeline    a socket whose other end only the caller holds: end of file means "stop now"
    gone        a pipe that nobody writes to: it ends, for all ranks at once, when one of them dies; if the
                caller gives grace, a wait lasts `grace_s / 3` from then on (ranks/collectives/channel.py)
    """

    def __init__(self, rank: int, ranks: int, directory: str, events: int, lifeline, gone: int):
        self.rank, self.ranks, self.directory = rank, ranks, directory
        self.events, self.lifeline, self.gone = events, lifeline, gone

    def path(self, kind: str) -> str:
        """Of what this rank writes."""
        return f"{self.directory}/{self.rank}.{kind}"

    def live(self) -> None:
        say(self.events, self.rank, "pid", os.getpid())
        try:
            self.tie_to_caller()
            self.redirect_output()
            with open(f"{self.directory}/request", "rb") as file:
                request = pickle.load(file)
            fn, args = self.settle(request)
            say(self.events, self.rank, "there")
            self.join(request)
            say(self.events, self.rank, "ready")
            result = fn(*args)
            collectives.settle()
            data = pickled.result(result)
            with open(self.path("result"), "wb") as file:
                file.write(data)
        except BaseException as error:  # SystemExit included: who leaves early fails the launch
            with open(self.path("error"), "w", encoding="utf-8") as file:
                json.dump(report.record(error), file)
            self.wait_for_the_end("error")
        self.wait_for_the_end("done")

    def tie_to_caller(self) -> None:
        helper = os.getppid()
        if LINUX:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != helper:
            os._exit(0)
        os.setpgid(0, 0)
        threading.Thread(target=self.watch_lifeline, daemon=True).start()

    def watch_lifeline(self) -> None:
        self.lifeline.recv(1)
        os._exit(0)

    def watch_others(self) -> None:
        os.read(self.gone, 1)
        PROCESS.lost_since = time.monotonic()

    def redirect_output(self) -> None:
        """Prints go to files that the caller shows; what C writes to descriptor 2, only after a failure."""
        for fd, kind in ((1, "stdout"), (2, "noise")):
            file = os.open(self.path(kind), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            os.dup2(file, fd)
            os.close(file)
        sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        sys.stderr = open(self.path("stderr"), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
        self.stack = open(self.path("stack"), "w")
        faulthandler.enable(self.stack)
        faulthandler.register(signal.SIGUSR1, self.stack, all_threads=True)

    def settle(self, request: dict) -> tuple:
        """Become a process like the caller (environment, folder, path); then read function and arguments."""
        os.environ.clear()
        os.environ.update(request["environ"], RANK=str(self.rank), LOCAL_RANK=str(self.rank))
        os.chdir(request["folder"])
        sys.path[:], sys.argv[:] = request["path"], request["argv"]
        linecache.cache.update(request["sources"])
        for file in request["cells"]:
            collectives.name_file(file, "cell")
        with open(f"{self.directory}/call", "rb") as file:
            fn, args = cloudpickle.load(file)
        if getattr(fn, "__module__", "") == "__main__":  # plain pickle finds a notebook's classes there
            vars(sys.modules["__main__"]).update(getattr(fn, "__globals__", {}))
        return fn, args

    def join(self, request: dict) -> None:
        torch.set_num_threads(1)
        seed_all()
        PROCESS.on_open = shared_cores.calm
        path = os.fsencode(f"{self.directory}/rendezvous")  # a name that the locale cannot write, too
        patience = datetime.timedelta(seconds=request["patience_s"])
        init_group(dist.FileStore(path, self.ranks), self.rank, self.ranks, patience)
        collectives.set_checked(request["checked"])
        if request["grace_s"] is not None:
            PROCESS.patience_s = request["grace_s"] / 3
            threading.Thread(target=self.watch_others, daemon=True).start()
        collectives.log_to(self.path("calls"))

    def wait_for_the_end(self, event: str) -> None:
        """Tell the caller, and keep every socket open until it has decided: a peer that saw ours close would
        report an error of its own ("Connection closed by peer"), and the wrong rank would be blamed."""
        sys.stdout.flush()
        sys.stderr.flush()
        say(self.events, self.rank, event, *(name for name in HEAVY if name in sys.modules))
        while True:
            signal.pause()


def seed_all() -> None:
    """As torch.manual_seed, which would format a traceback for each kind of device it does not find: 3 ms."""
    torch.default_generator.manual_seed(0)
    if torch.cuda.device_count():
        torch.cuda.manual_seed_all(0)
    random.seed(0)
    numpy.random.seed(0)


def init_group(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
    """The default process group: NCCL if every rank of this machine has a GPU of its own, else gloo."""
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        backend, more = "nccl", {"device_id": device}
    else:
        backend, more = "gloo", {}
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, **more)
