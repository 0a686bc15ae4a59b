"""How much memory a run needs, found by taking it away: the smallest limit under which it still ends well.

    with LimitedRuns(warm_up=tiny_step) as runs:
        runs.run(train, "plain", limit_bytes=40 << 20)      its result, or MemoryError in one line
        runs.smallest_limit(train, "plain", most_bytes=1 << 30)          by bisection

A helper process has loaded torch and done `warm_up`. It forks a child for every run, so all begin with the
same memory; a limit is what a child may map beyond that (RLIMIT_AS: every byte that malloc or mmap hands out,
used or not). The helper's malloc has one arena and gives back blocks of 64 KiB and more, so a limit is the
peak of live tensors, some pages each, and what libraries need for themselves. Pages of files are not in it,
mapped memory is. What fails, or hangs, under a limit and not without has failed for want of memory, whatever
it said: torch raises RuntimeError, Python MemoryError, some libraries die.
Sends nothing; a run takes a fork, some 10 ms, and its own time. Linux only.
setrlimit(2), malloc(3). Differs from `ulimit -v`: beyond a baseline, so that the interpreter is not counted.
"""

import contextlib
import ctypes
import gc
import os
import pickle
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle

MALLOC = dict(MALLOC_ARENA_MAX="1", MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")
ONE_THREAD = dict(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
STACK_BYTES = 256 << 10  # of a thread, instead of 8 MiB of room that nobody uses
PR_SET_PDEATHSIG = 1  # of prctl(2): a child ends with its parent
PAGE = os.sysconf("SC_PAGE_SIZE")
START = "import sys; sys.path[:0] = {path!r}; from minitrain.memory.limits import serve; serve()"


class LimitedRuns:
    """Runs functions in forked children of a helper process; closed, it leaves no process behind."""

    def __init__(self, warm_up: Callable[[], object] = lambda: None):
        command = [sys.executable, "-c", START.format(path=[path for path in sys.path if path])]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._helper = subprocess.Popen(command, env=os.environ | MALLOC | ONE_THREAD, **pipes)
        _send(self._helper.stdin, warm_up)
        if (error := _receive(self._helper.stdout)) is not None:
            self.close()
            raise ValueError(f"the warm-up failed: {error}; it must run without a limit")

    def __enter__(self) -> "LimitedRuns":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def close(self) -> None:
        """End the helper, and with it what it runs."""
        with contextlib.suppress(BrokenPipeError):
            self._helper.stdin.close()
        try:
            self._helper.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self._helper.kill()
            self._helper.wait()
        self._helper.stdout.close()

    def run(self, function: Callable, *args, limit_bytes: int | None = None, timeout_s: float = 60) -> Any:
        """What `function(*args)` returns in a child that may map `limit_bytes` more than it begins with.

        MemoryError: it fails under this limit. RuntimeError: it fails without any."""
        if limit_bytes is not None and limit_bytes < 0:
            raise ValueError(f"limit_bytes={limit_bytes}: use 0 or more, or None for no limit")
        _send(self._helper.stdin, (function, args, limit_bytes, timeout_s))
        answer = _receive(self._helper.stdout)
        if answer is None:
            raise RuntimeError("the helper process is gone; make a new LimitedRuns")
        done, result = answer
        if done:
            return result
        name = getattr(function, "__name__", "the run")
        if limit_bytes is None:
            raise RuntimeError(f"{name}: {result}")
        cure = "recompute, offload, or give it more"
        raise MemoryError(f"{name} does not fit in {limit_bytes:,} bytes: {result}; {cure}")

    def smallest_limit(
        self, function: Callable, *args, most_bytes=1 << 30, step_bytes=1 << 16, timeout_s: float = 60
    ) -> int:
        """The smallest multiple of `step_bytes` that will do, by bisection: log2(most / step) runs.

        ValueError: `most_bytes` will not do."""
        self.run(
            function, *args, timeout_s=timeout_s
        )  # without a limit, so that from here on only memory can be missing
        fails, fits = 0, -(-most_bytes // step_bytes)
        if not self._fits(function, args, fits * step_bytes, timeout_s):
            raise ValueError(f"most_bytes={most_bytes:,} will not do either: try {2 * most_bytes:,}")
        while fits - fails > 1:
            middle = (fails + fits) // 2
            if self._fits(function, args, middle * step_bytes, timeout_s):
                fits = middle
            else:
                fails = middle
        return fits * step_bytes

    def _fits(self, function: Callable, args: tuple, limit_bytes: int, timeout_s: float) -> bool:
        try:
            self.run(function, *args, limit_bytes=limit_bytes, timeout_s=timeout_s)
        except MemoryError:
            return False
        return True


# ---- the helper process ----------------------------------------------------------------------------------


def serve() -> None:
    """Answer requests of standard input until it ends."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what runs print is no answer
    threading.stack_size(STACK_BYTES)
    try:
        _receive(requests)()
        gc.collect()  # what the warm-up left would be room for every run
        ctypes.CDLL(None).malloc_trim(0)
        error = None
    except Exception as raised:
        error = _said(raised)
    _send(answers, error)
    with contextlib.suppress(BrokenPipeError):
        while (request := _receive(requests)) is not None:
            _send(answers, _in_a_child(*request))


def _in_a_child(function: Callable, args: tuple, limit_bytes: int | None, timeout_s: float) -> tuple:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        with os.fdopen(write, "wb") as answer:
            _send(answer, _limited(function, args, limit_bytes))
        os._exit(0)
    os.close(write)
    wait = select.poll()
    wait.register(read, select.POLLIN)
    wait.register(0, 0)  # only whether our caller is gone
    ready = [file for file, _ in wait.poll(timeout_s * 1000)]
    if read not in ready:
        os.kill(child, signal.SIGKILL)
    with os.fdopen(read, "rb") as answer:
        found = _receive(answer)
    _, status = os.waitpid(child, 0)
    if found is not None:
        return found
    if not ready:
        return False, f"no answer in {timeout_s} s"
    ended = os.waitstatus_to_exitcode(status)
    how = f"killed by {signal.Signals(-ended).name}" if ended < 0 else f"ended with status {ended}"
    return False, f"its process was {how}" if ended < 0 else f"its process {how}"


def _limited(function: Callable, args: tuple, limit_bytes: int | None) -> tuple[bool, Any]:
    """(True, result) or (False, why not)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes() + limit_bytes, hard))
    try:
        found = True, function(*args)
    except BaseException as raised:
        found = False, raised
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))  # there is room to say it
    return found if found[0] else (False, _said(found[1]))


def mapped_bytes() -> int:
    """Of this process's address space: what RLIMIT_AS counts."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * PAGE


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _send(file, thing) -> None:
    data = cloudpickle.dumps(thing)
    file.write(struct.pack("<q", len(data)) + data)
    file.flush()


def _receive(file) -> Any:
    """The next thing; None where the other side is gone."""
    head = file.read(8)
    if len(head) < 8:
        return None
    data = file.read(struct.unpack("<q", head)[0])
    return pickle.loads(data)
