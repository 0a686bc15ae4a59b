"""What a rank does from fork to kill. (`forks.py` is its parent, the helper process.)

Of its launch it has three things:

    directory   private: the rendezvous file, the request; of each rank result, error, prints, stacks, calls
    events      a pipe, many writers and one reader: "3 ready", "3 done", "3 error", "3 exit -11"
    lifeline    a socket whose other end only the caller holds: end of file means "stop now"

and where the caller gives grace, a fourth: `gone`, a pipe that nobody writes to. It ends, for all ranks at
once, when one of them dies; from then on a wait lasts `grace_s / 3` at most (ranks/collectives/channel.py).
"""

import ctypes
import datetime
import faulthandler
import json
import linecache
import os
import pickle
import random
import signal
import sys
import threading
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
PR_SET_PDEATHSIG = 1
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


class Rank:
    """One rank from fork to kill. It never leaves by itself: see `wait_for_the_end`."""

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
        collectives.another_rank_is_gone()

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
            collectives.wait_at_most(request["grace_s"] / 3)
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
