"""The caller's hold on the process that forks ranks: one per calling process, started at the first launch.

A rank has whatever the helper has imported, at the price of a fork. So the helper imports what the caller
uses of minitrain: 0.1 to 0.3 s of processor time, which every rank of every launch would spend instead. When
one of those files has been edited the next launch starts another helper: ranks run what files say by now.
"""

import atexit
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading

from minitrain.ranks.launch import ranks as launch_ranks
from minitrain.ranks.launch import report
from minitrain.ranks.launch.report import RankError
from minitrain.ranks.process import PROCESS

ROOT = os.path.dirname(report.PACKAGE.rstrip(os.sep))  # where minitrain is found
# Ranks neither draw nor talk to a notebook or a terminal, and what these rooms import takes as long as torch.
NOT_FOR_RANKS = ("minitrain.course", "minitrain.cli")
# Read when numpy and torch are loaded: a process with threads cannot be forked safely, and the ranks share
# the cores.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# In a pickled function: `torch.optim`, `from torch.optim import SGD`. Its optimizers import torch's compiler.
OPTIMIZERS = re.compile(rb"\x8c\x05optim\x94|torch\.optim")
# Read when a process starts: large tensors get pages of 2 MB, 300 times fewer faults for the same memory.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class Helper:
    """The process, the socket that requests go through, and what it was asked to import."""

    @classmethod
    def find(cls) -> "Helper":
        with PROCESS.lock:
            helper = PROCESS.helper
            if helper is None or not helper.usable():
                PROCESS.helper = cls()
                if helper is not None and not helper.launches:
                    helper.close()
            return PROCESS.helper

    def __init__(self):
        self.owner, self.lock, self.log = os.getpid(), threading.Lock(), tempfile.TemporaryFile()
        self.heavy: set[str] = set()  # modules that ranks had to import themselves: next time it has them
        self.launches: set = set()  # that run on it: a helper takes its ranks with it when it is closed
        self.files: dict[str, int] = {}  # of minitrain's modules that it has: when each was last changed
        self.requests, theirs = socket.socketpair()
        code = "import sys; sys.path[:] = sys.argv[3:]; from minitrain.ranks.launch.forks import serve; "
        code += "serve(int(sys.argv[1]), int(sys.argv[2]))"
        command = [sys.executable, "-P", "-c", code, str(theirs.fileno()), str(self.owner), *sys.path, ROOT]
        with theirs:
            try:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=self.log,
                    stderr=self.log,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # an interrupt typed at the terminal is for the caller alone
                    env=HUGE_PAGES | os.environ | ONE_THREAD,
                )
            except OSError as error:
                self.requests.close()
                self.log.close()
                raise RankError(report.unborn("the helper process that forks ranks", error.errno)) from None
        atexit.register(self.close)

    def usable(self) -> bool:
        """It runs, its files are as it read them, and it is ours: not a parent's, of which we are a fork."""
        if self.owner != os.getpid() or self.process.poll() is not None:
            return False
        # a copy: another thread that launches may add files meanwhile
        return all(changed_at(file) == time for file, time in self.files.copy().items())

    def modules(self, call: bytes) -> list[str]:
        """What it should import before it forks ranks for `call`: heavy ones, which the caller has or ranks
        had to import, or will; and those of minitrain in use here."""
        if OPTIMIZERS.search(call):
            self.heavy.add(launch_ranks.COMPILER)
        heavy = [name for name in launch_ranks.HEAVY if name in sys.modules or name in self.heavy]
        ours = {
            name: module.__file__
            for name, module in sys.modules.copy().items()
            if name.startswith("minitrain.") and not name.startswith(NOT_FOR_RANKS)
        }
        for file in ours.values():
            self.files.setdefault(file, changed_at(file))
        return heavy + list(ours)

    def close(self) -> None:
        self.requests.close()
        self.log.close()
        if self.owner == os.getpid():
            try:
                self.process.wait(2)
            except subprocess.TimeoutExpired:  # busy importing
                self.process.kill()
                self.process.wait()

    def last_words(self) -> str:
        self.log.seek(0)
        return self.log.read()[-4000:].decode(errors="replace").strip()


def changed_at(file: str) -> int:
    """In nanoseconds; 0 if the file is gone."""
    try:
        return os.stat(file).st_mtime_ns
    except FileNotFoundError:
        return 0
