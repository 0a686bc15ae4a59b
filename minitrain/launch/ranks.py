"""The far side of a launch: the helper that ranks are forked from, and what a rank does from fork to kill.

`launch.run` starts `serve` once per calling process. The helper imports torch, stays single-threaded, never
touches CUDA, and forks. (The *caller* cannot be forked: a notebook kernel has threads, sockets and perhaps a
CUDA context, and none of them survives a fork.) A launch is three things handed to the helper:

    directory   private: the rendezvous file, the request; of each rank result, error, prints, stacks, calls
    events      a pipe, many writers and one reader: "3 ready", "3 done", "3 error", "3 exit -11"
    lifeline    a socket whose other end only the caller holds: end of file means "stop now"

What kills what:

    caller closes the lifeline, or dies     the helper kills and reaps each rank's process group: "- reaped"
    caller dies, a copy of its end lives    the helper looks for its parent twice a second, and does the same
    helper dies                             each rank gets SIGKILL from the kernel (PR_SET_PDEATHSIG, Linux)
    caller dies, helper stopped or slow     a thread in each rank sleeps on the lifeline and exits the process
    a rank dies                             nobody else: the caller decides, after it has heard who was first
"""

import ctypes
import datetime
import faulthandler
import gc
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
from collections.abc import Callable
from contextlib import suppress

import cloudpickle
import numpy.random  # by name: else numpy loads it in each rank that seeds it, 15 ms
import torch
import torch.distributed as dist

from minitrain import collectives
from minitrain.collectives.backends import ON_OPEN
from minitrain.launch import pickled, report, shared_cores
from minitrain.torch_private import COMPILER, autograd_functions

LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
# Imported by the helper once the caller or a rank has: building a torch.optim optimizer pulls in the first,
# which takes as long as torch itself, and four ranks doing so at once on two cores would take 4 s in every
# launch.
HEAVY = (COMPILER, "sympy", "pytest", "hypothesis")
# torch.autograd.function.once_differentiable makes a reader's function refer to this module. It cannot be
# imported, so cloudpickle would take it to pieces that do not fit together again; listed here, it travels by
# its name.
sys.modules.setdefault(autograd_functions.__name__, autograd_functions)


def serve(requests_fd: int, caller_pid: int) -> None:
    """Fork ranks for every request (a byte and two descriptors) until the caller is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = socket.socket(fileno=requests_fd)
    preload([])
    wakeup = os.pipe()  # written to by the kernel when a rank ends
    for end in wakeup:
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakeup[1], warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written
    launches: list[RankGroup] = []
    while os.getppid() == caller_pid:
        lifelines = [launch.lifeline for launch in launches]
        ready, _, _ = select.select([requests, wakeup[0], *lifelines], [], [], 0.5)
        if wakeup[0] in ready:
            os.read(wakeup[0], 4096)
        for launch in launches:
            launch.reap()
            if launch.lifeline in ready:
                launch.end()
        launches = [launch for launch in launches if not launch.ended]
        if requests in ready:
            byte, fds, _, _ = socket.recv_fds(requests, 1, 2)
            if not byte:
                break
            not_for_ranks = [requests.fileno(), *wakeup, *(launch.lifeline.fileno() for launch in launches)]
            launches.append(RankGroup(*fds, not_for_ranks))
    for launch in launches:
        launch.end()


def preload(names: list[str]) -> None:
    for name in names:
        with suppress(Exception):  # a rank that needs the module will say what is wrong with it
            importlib.import_module(name)
    seed_all()  # the first time costs 15 ms: torch notes where it was called from, for a GPU that may come
    assert not torch.cuda.is_initialized(), "a process that holds a CUDA context cannot be forked"
    gc.collect()
    gc.freeze()  # what is here now stays shared: the collector of a rank will not write into these pages


class RankGroup:
    """The ranks of one launch, as the helper sees them: process ids to reap and to kill."""

    def __init__(self, events: int, lifeline: int, not_for_ranks: list[int]):
        self.events, self.lifeline, self.ended = events, socket.socket(fileno=lifeline), False
        request = json.loads(self.lifeline.makefile("r").readline())
        self.directory = request["directory"]
        if missing := [name for name in request["modules"] if name not in sys.modules]:
            preload(missing)
        self.pids: dict[int, int] = {}
        for rank in range(request["ranks"]):
            pid = os.fork()
            if pid == 0:
                try:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for fd in not_for_ranks:
                        os.close(fd)
                    Rank(rank, request["ranks"], self.directory, self.events, self.lifeline).live()
                finally:
                    os._exit(70)  # never fall back into the helper's loop
            self.pids[pid] = rank

    def reap(self) -> None:
        for pid, rank in list(self.pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.pids[pid]
                kill(os.killpg, pid)  # what a rank started ends with it
                say(self.events, rank, "exit", os.waitstatus_to_exitcode(status))

    def end(self) -> None:
        for pid in self.pids:
            kill(os.killpg, pid)
            kill(os.kill, pid)  # in case it had not reached setpgid
        for pid in self.pids:
            os.waitpid(pid, 0)
        shutil.rmtree(self.directory, ignore_errors=True)  # here, for the caller may be dead
        say(self.events, "-", "reaped")
        os.close(self.events)
        self.lifeline.close()
        self.ended = True


def kill(how: Callable, pid: int) -> None:
    try:
        how(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # gone (macOS says the second of a group of zombies)
        pass


def say(events: int, *words) -> None:
    """One line on the events pipe. Under 512 bytes, so POSIX promises that lines of different writers never
    mix.
    """
    try:
        os.write(events, (" ".join(map(str, words)) + "\n").encode())
    except BrokenPipeError:
        pass  # the caller is gone; the lifeline says so too


def keep_freed_memory() -> None:
    """A step frees and allocates the same tensors over and over. glibc would hand large ones back to the
    kernel each time and pay for clean pages again (1 to 2 % of a small step); a rank keeps them, as torch's
    allocator for GPUs does.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if LINUX else None
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, 2**30)
        mallopt(M_MMAP_THRESHOLD, 2**25)  # the largest that glibc takes


class Rank:
    """One rank from fork to kill. It never leaves by itself: see `wait_for_the_end`."""

    def __init__(self, rank: int, ranks: int, directory: str, events: int, lifeline: socket.socket):
        self.rank, self.ranks, self.directory, self.events, self.lifeline = (
            rank,
            ranks,
            directory,
            events,
            lifeline,
        )

    def in_directory(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def path(self, kind: str) -> str:
        return self.in_directory(f"{self.rank}.{kind}")

    def live(self) -> None:
        self.tie_to_caller()
        say(self.events, self.rank, "pid", os.getpid())
        self.redirect_output()
        try:
            with open(self.in_directory("request"), "rb") as file:
                request = pickle.load(file)
            fn, args = self.settle(request)
            self.join(request)
            say(self.events, self.rank, "ready")
            result = fn(*args)
            self.keep(result)
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

    def redirect_output(self) -> None:
        """Prints go to files that the caller shows; what C writes to descriptor 2 is shown only after a
        failure.
        """
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
        """Become a process like the caller (environment, folder, import path), then read function and
        arguments.
        """
        os.environ.clear()
        os.environ.update(request["environ"], RANK=str(self.rank), LOCAL_RANK=str(self.rank))
        os.chdir(request["folder"])
        sys.path[:], sys.argv[:] = request["path"], request["argv"]
        linecache.cache.update(request["sources"])
        for file in request["cells"]:
            collectives.name_file(file, "cell")
        with open(self.in_directory("call"), "rb") as file:
            fn, args = cloudpickle.load(file)
        if getattr(fn, "__module__", "") == "__main__":  # plain pickle finds a notebook's classes there
            vars(sys.modules["__main__"]).update(getattr(fn, "__globals__", {}))
        return fn, args

    def join(self, request: dict) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        seed_all()
        ON_OPEN.append(shared_cores.calm)
        store = dist.FileStore(self.in_directory("rendezvous"), self.ranks)
        init_group(store, self.rank, self.ranks, datetime.timedelta(seconds=request["patience_s"]))
        collectives.set_checked(request["checked"])
        collectives.log_to(self.path("calls"))

    def keep(self, result) -> None:
        pickled = pickled_result(result)
        with open(self.path("result"), "wb") as file:
            file.write(pickled)

    def wait_for_the_end(self, event: str) -> None:
        """Tell the caller, then keep every socket open until it has decided: a peer that saw ours close would
        report an error of its own ("Connection closed by peer") and the wrong rank would be blamed.
        """
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


def pickled_result(result) -> bytes:
    try:
        return pickled.dumps(result)
    except Exception as error:
        raise TypeError(
            f"fn returned a {type(result).__name__}, which cannot be sent back ({error}); return tensors, "
            "numbers, text, or lists and dicts of them"
        ) from None


def init_group(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
    """The default process group: NCCL if every rank of this machine has a GPU of its own, else gloo."""
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        backend, more = "nccl", {"device_id": device}
    else:
        backend, more = "gloo", {}
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, **more)
