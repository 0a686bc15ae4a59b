"""Behind the caller: the helper process, which forks ranks, and what a rank does from fork to kill.

The helper imports torch, stays single-threaded, never touches CUDA, and forks. (The *caller* cannot: its
threads, sockets and CUDA context do not survive a fork.) A launch is announced before its directory is made,
so that whoever dies, and whenever, somebody is left who removes it; then its order comes on the lifeline.

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
from minitrain.ranks.launch.team import MOST, Finished, Roll, Team
from minitrain.ranks.process import PROCESS
from minitrain.ranks.torch_private import COMPILER, autograd_functions

LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
NOT_INITIALIZED = 3  # cuda.h: the driver has not been asked for anything yet
PR_SET_CHILD_SUBREAPER = 36  # who loses its parent becomes our child, not that of init
ROUNDS = 100  # of killing what is left: it may fork meanwhile
# Imported by the helper once the caller or a rank has: a torch.optim optimizer pulls in the first, which
# takes as long as torch itself (so it is imported for a call that speaks of torch.optim, too); autograd that
# is given a gradient pulls in the second, and sympy with it: 0.6 s in each rank.
HEAVY = (COMPILER, "torch.fx.experimental.symbolic_shapes", "pytest", "hypothesis")
# torch.autograd.function.once_differentiable makes a reader's function refer to this module, which cannot be
# imported: listed here, it travels by its name, and cloudpickle does not take it to pieces.
sys.modules.setdefault(autograd_functions.__name__, autograd_functions)


def say(events: int, *words) -> None:
    """One line on the events pipe; POSIX promises that lines under 512 bytes never mix."""
    with suppress(BrokenPipeError):  # the caller is gone; the lifeline says so too
        os.write(events, (" ".join(map(str, words)) + "\n").encode())


def serve(requests_fd: int, caller_pid: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if LINUX:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    requests = socket.socket(fileno=requests_fd)
    preload([])
    ended, wakeup = os.pipe()  # written to by the kernel when a rank ends
    for end in (ended, wakeup):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written
    while True:
        if select.select([requests], [], [], 0.5)[0]:
            _, fds, _, _ = socket.recv_fds(requests, 1, 2)
            if not fds:
                break
            RankGroup(*fds).run(ended, caller_pid)
        elif os.getppid() != caller_pid:  # and no request is left, of which a directory may be there
            break


def preload(names: list[str]) -> None:
    for name in names:
        with suppress(Exception):  # a rank that needs the module will say what is wrong with it
            importlib.import_module(name)
        if cuda_has_begun():
            what = f"importing {name} calls the CUDA driver, which no process that is forked later could use"
            sys.exit(f"{what}; let it ask nothing of CUDA when it is imported")
    seed_all()  # the first time costs 15 ms: torch notes where it was called from, for a GPU that may come
    gc.collect()
    gc.freeze()  # what is here now stays shared: the collector of a rank will not write into these pages


def cuda_has_begun() -> bool:
    """In this process, whoever asked: for `torch.cuda.is_available()` torch may, where NVML fails."""
    with suppress(OSError, AttributeError):  # the driver is not loaded; there is no such flag
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != NOT_INITIALIZED
    return False


class RankGroup:  # the ranks of one launch, as the helper sees them
    def __init__(self, events: int, lifeline: int):
        self.events, self.lifeline = events, socket.socket(fileno=lifeline)
        self.gone, gone_writer = os.pipe()
        self.gone_writer = open(gone_writer, "wb")
        self.pids: dict[int, int] = {}
        self.directory = self.line()
        self.roll, self.replace_s, self.due = None, None, []  # of a launch that survives: when newcomers come

    def line(self) -> str:
        """One line of the lifeline and nothing that follows it; "" if the caller is gone."""
        with self.lifeline.makefile("rb", buffering=0) as lines:  # which asks for a byte at a time
            line = lines.readline()
        return os.fsdecode(line[:-1]) if line.endswith(b"\n") else ""

    def run(self, ended: int, caller_pid: int) -> None:
        while os.getppid() == caller_pid:
            wait_s = max(0.0, min([0.5, *(at - time.monotonic() for at in self.due)]))
            ready, _, _ = select.select([self.lifeline, ended], [], [], wait_s)
            if ended in ready:
                os.read(ended, 4096)
                self.reap()
            if self.lifeline in ready:
                if not (order := self.line()):
                    break
                self.start(**json.loads(order))
            while self.due and time.monotonic() >= self.due[0] and self.members < MOST:
                del self.due[0]
                self.fork(1)
        self.end()

    def start(self, ranks: int, modules: list[str], survive: bool, replace_s: float | None) -> None:
        if missing := [name for name in modules if name not in sys.modules]:
            preload(missing)
        self.roll, self.replace_s = Roll(f"{self.directory}/roll") if survive else None, replace_s
        self.ranks, self.members = ranks, 0
        self.fork(ranks)

    def fork(self, count: int) -> None:
        new = range(self.members, self.members + count)
        self.members += count
        if self.roll:
            self.roll.change(new, True)
        for rank in new:
            pid = os.fork()
            if pid == 0:
                try:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    self.gone_writer.close()
                    Rank(rank, self.ranks, self).live()
                finally:
                    os._exit(70)  # never fall back into the helper's loop
            self.pids[pid] = rank

    def reap(self) -> None:
        """What a dead rank had started ends with it; the caller and the other ranks hear of it."""
        with suppress(ChildProcessError):  # there is no child any more
            while (child := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                pid, status = child
                if pid in self.pids:
                    kill(os.killpg, pid)
                    rank = self.pids.pop(pid)
                    if self.roll:
                        self.roll.change([rank], False)
                    if self.replace_s is not None:
                        self.due.append(time.monotonic() + self.replace_s)
                    say(self.events, rank, "exit", os.waitstatus_to_exitcode(status))
                    self.gone_writer.close()

    def end(self) -> None:
        for pid in self.pids:
            kill(os.killpg, pid)
            kill(os.kill, pid)  # in case it had not reached setpgid
        for pid in self.pids:
            os.waitpid(pid, 0)
        for _ in range(ROUNDS):
            for pid in (left := children()):  # what ranks had started, ours by now
                kill(os.kill, pid)
                os.waitpid(pid, 0)
            if not left:
                break
        shutil.rmtree(self.directory, ignore_errors=True)  # here, for the caller may be dead
        say(self.events, "-", "reaped")
        self.gone_writer.close()
        os.close(self.gone)
        os.close(self.events)
        self.lifeline.close()


def kill(how: Callable, pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # gone (macOS says the second of a group of zombies)
        how(pid, signal.SIGKILL)


def children() -> list[int]:
    """Of this process, which has one thread; none where there is no /proc."""
    with suppress(FileNotFoundError), open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]
    return []


class Rank:
    """From fork to kill. It never leaves by itself: see `wait_for_the_end`. Of its launch it has

    directory   private: the rendezvous file, the request; its result, error, prints, stacks, calls
    events      a pipe, many writers and one reader: "3 ready", "3 done", "3 error", "3 exit -11"
    lifeline    a socket whose other end only the caller holds: end of file means "stop now"
    gone        a pipe that nobody writes to: it ends, for all ranks at once, when one of them dies; with
                grace a wait lasts `grace_s / 3` from then on (ranks/collectives/channel.py)"""

    def __init__(self, rank: int, ranks: int, launch: RankGroup):
        self.rank, self.ranks, self.launch = rank, ranks, launch

    def path(self, kind: str) -> str:  # of what this rank writes
        return f"{self.launch.directory}/{self.rank}.{kind}"

    def say(self, *words) -> None:
        say(self.launch.events, self.rank, *words)

    def live(self) -> None:
        self.say("pid", os.getpid())
        try:
            self.tie_to_caller()
            self.redirect_output()
            with open(f"{self.launch.directory}/request", "rb") as file:
                request = pickle.load(file)
            fn, args = self.settle(request)
            self.say("there")
            self.join(request)
            self.say("ready")
            result = fn(*args)
            collectives.settle()
            data = pickled.result(result)
            with open(self.path("result"), "wb") as file:
                file.write(data)
            if PROCESS.team:
                PROCESS.team.finish()
        except Finished:  # it has come too late
            self.wait_for_the_end("done")
        except BaseException as error:  # SystemExit included: who leaves early fails the launch
            with open(self.path("error"), "w", encoding="utf-8") as file:
                json.dump(report.record(error), file)
            self.wait_for_the_end("error")
        self.wait_for_the_end("done")

    def tie_to_caller(self) -> None:
        def exit_with_it() -> None:
            self.launch.lifeline.recv(1)
            os._exit(0)

        helper = os.getppid()
        if LINUX:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != helper:
            os._exit(0)
        os.setpgid(0, 0)
        threading.Thread(target=exit_with_it, daemon=True).start()

    def watch_others(self) -> None:
        os.read(self.launch.gone, 1)
        PROCESS.lost_since = time.monotonic()

    def redirect_output(self) -> None:
        """Prints go to files that the caller shows; what C writes to descriptor 2, only after a failure."""
        for fd, kind in ((1, "stdout"), (2, "noise")):
            file = os.open(self.path(kind), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            os.dup2(file, fd)
            os.close(file)
        how = dict(mode="w", buffering=1, encoding="utf-8", errors="backslashreplace")
        sys.stdout, sys.stderr = open(1, closefd=False, **how), open(self.path("stderr"), **how)
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
        with open(f"{self.launch.directory}/call", "rb") as file:
            fn, args = cloudpickle.load(file)
        if getattr(fn, "__module__", "") == "__main__":  # plain pickle finds a notebook's classes there
            vars(sys.modules["__main__"]).update(getattr(fn, "__globals__", {}))
        return fn, args

    def join(self, request: dict) -> None:
        # beside a GPU the host has an optimizer to run; without one the ranks share the cores
        torch.set_num_threads(max(1, os.cpu_count() // self.ranks) if torch.cuda.device_count() else 1)
        seed_all()
        PROCESS.on_open = shared_cores.calm
        path = os.fsencode(f"{self.launch.directory}/rendezvous")  # a name that the locale cannot write, too
        patience = datetime.timedelta(seconds=request["patience_s"])
        if request["survive"]:
            PROCESS.team = Team(self.launch.directory, self.rank, self.ranks, patience)
            PROCESS.team.regroup()
        else:
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
        self.say(event, *(name for name in HEAVY if name in sys.modules))
        while True:
            signal.pause()


def seed_all() -> None:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def device() -> torch.device:
    """Where this rank puts its tensors: a GPU of its own, or one that ranks share if there are fewer GPUs
    than ranks, else the CPU. Outside of a launch: the first GPU, or the CPU."""
    gpus = torch.cuda.device_count()
    local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0))
    return torch.device("cuda", int(local) % gpus) if gpus else torch.device("cpu")


def where() -> str:
    """For a person: which devices there are, and what carries messages."""
    if not (gpus := torch.cuda.device_count()):
        return "no GPU: tensors are on the CPU, and ranks send them over gloo"
    models = "models are there and send over NCCL, or gloo where ranks share a GPU"
    return f"{gpus} x {torch.cuda.get_device_name(0)}: {models}; tensors made on the CPU go over gloo"


def init_group(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
    """The default process group: gloo for tensors of the host and, where every rank has a GPU of its own,
    NCCL for those on it; else gloo for both. No `device_id`: NCCL gives then each pair of ranks in a group a
    queue of its own for single messages; with it all messages and collectives of a group would share one."""
    here = device()
    if here.type == "cuda":
        torch.cuda.set_device(here)
    backend = "cpu:gloo,cuda:nccl" if each_has_a_gpu(here, store, rank, size) else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def each_has_a_gpu(here: torch.device, store: dist.Store, rank: int, size: int) -> bool:
    """Has every rank of the job a GPU that no other has? They say which, so it does not matter who sees how
    many (Slurm may show each task one). One machine without a GPU asks nobody."""
    if here.type == "cpu" and size == int(os.environ.get("LOCAL_WORLD_SIZE", 0)):
        return False
    mine = "" if here.type == "cpu" else str(torch.cuda.get_device_properties(here).uuid)
    store.set(f"gpu/{rank}", mine)
    uuids = store.multi_get([f"gpu/{other}" for other in range(size)])
    return b"" not in uuids and len(set(uuids)) == size
