"""How much memory a run needs, found by taking it away: the smallest limit under which it still ends well.

    with LimitedRuns(warm_up=tiny_step) as runs:
        runs.run(train, "plain", limit_bytes=40 << 20)      its result, or MemoryError in one line
        runs.smallest_limit(train, "plain", most_bytes=1 << 30)          by bisection

A helper process has loaded torch and done `warm_up`. It forks a child for every run, some 10 ms; a limit is
what a child may map beyond what it begins with (RLIMIT_AS: all that malloc or mmap hands out). The helper's
malloc gives back blocks of 64 KiB and more, so it is the peak of live tensors and what libraries need. What
fails, or hangs, under a limit and not without has failed for want of memory. setrlimit(2), malloc(3). Linux.
"""

import contextlib
import ctypes
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
from bisect import bisect_left
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

from minitrain.ranks.checks import require_ints

SETTINGS = dict(MALLOC_ARENA_MAX="1", MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")
SETTINGS |= dict(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
START = "import sys; sys.path[:0] = {path!r}; from minitrain.systems.memory.limits import serve; serve({fd})"


class LimitedRuns(contextlib.AbstractContextManager):
    """Runs functions in forked children of a helper process; closed, it leaves no process behind."""

    def __init__(self, warm_up: Callable[[], object] = lambda: None):
        self._line, theirs = Pipe()
        start = START.format(path=[folder for folder in sys.path if folder], fd=theirs.fileno())
        files = dict(stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self._helper = subprocess.Popen([sys.executable, "-c", start], env=os.environ | SETTINGS, **files)
        theirs.close()
        _send(self._line, warm_up)
        if (error := self._line.recv()) is not None:
            self.close()
            raise ValueError(f"the warm-up failed: {error}; it must run without a limit")

    def __exit__(self, *error) -> None:
        self.close()

    def close(self) -> None:
        self._line.close()
        self._helper.kill()
        self._helper.wait()

    def run(self, function: Callable, *args, limit_bytes: int | None = None, timeout_s: float = 60) -> Any:
        """What `function(*args)` returns in a child that may map `limit_bytes` more than it begins with, or
        MemoryError; without a limit RuntimeError if it fails."""
        if limit_bytes is not None:
            require_ints(0, 1 << 60, limit_bytes=limit_bytes)
        _send(self._line, (function, args, limit_bytes, timeout_s))
        done, result = self._line.recv()
        if done:
            return result
        name = getattr(function, "__name__", "the run")
        if limit_bytes is None:
            raise RuntimeError(f"{name}: {result}")
        raise MemoryError(f"{name} does not fit in {limit_bytes:,} bytes: {result}; offload, or give it more")

    def smallest_limit(self, function, *args, most_bytes=1 << 30, step_bytes=1 << 16, timeout_s=60) -> int:
        """The smallest multiple of `step_bytes` that will do, by bisection: log2(most / step) runs."""
        self.run(function, *args, timeout_s=timeout_s)  # from here on only memory can be missing
        fits = -(-most_bytes // step_bytes)

        def will_do(steps: int) -> bool:
            try:
                self.run(function, *args, limit_bytes=steps * step_bytes, timeout_s=timeout_s)
                return True
            except MemoryError:
                return False

        if not will_do(fits):
            raise ValueError(f"most_bytes={most_bytes:,} will not do either: try {2 * most_bytes:,}")
        return step_bytes * bisect_left(range(fits), True, lo=1, key=will_do)


def serve(fd: int) -> None:
    line = Connection(fd)
    os.dup2(2, 1)  # what runs print is not mixed with what their caller prints
    threading.stack_size(256 << 10)  # instead of 8 MiB of room that nobody uses
    try:
        line.recv()()
        gc.collect()  # what the warm-up left would be room for every run
        error = None
    except Exception as raised:
        error = _said(raised)
    with contextlib.suppress(EOFError, OSError):  # the caller is gone
        _send(line, error)
        while True:
            _send(line, _in_a_child(line, *line.recv()))


def _in_a_child(line, function: Callable, args: tuple, limit_bytes: int | None, timeout_s: float) -> tuple:
    answer, write = Pipe(duplex=False)
    child = os.fork()
    if not child:
        getattr(ctypes.CDLL(None), "prctl", max)(1, signal.SIGKILL)  # on Linux: ends with its parent
        _send(write, _limited(function, args, limit_bytes))
        os._exit(0)
    write.close()
    found = False, f"no answer in {timeout_s} s"
    try:
        if answer in wait([answer, line], timeout_s):  # or our caller is gone
            found = answer.recv()
    except EOFError:
        found = False, "its process ended without an answer"
    os.kill(child, signal.SIGKILL)
    answer.close()
    os.waitpid(child, 0)
    return found


def _limited(function: Callable, args: tuple, limit_bytes: int | None) -> tuple[bool, Any]:
    """(True, result) or (False, why not)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if limit_bytes is not None:
        mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + limit_bytes, hard))
    try:
        found = True, function(*args)
    except BaseException as raised:
        found = False, raised
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))  # there is room to say it
    return found if found[0] else (False, _said(found[1]))


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _send(line: Connection, thing) -> None:
    line.send_bytes(cloudpickle.dumps(thing))
