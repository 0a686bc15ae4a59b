"""The server of answers: it has torch loaded, forks ranks and ends them; it runs, reads and holds no answer.

judge  ── control ──  server    {"spawn": [user, ..], "limits": {..}} with two descriptors a rank; {}
judge  ── line ─────  rank      runs one call (rank.py)
"""

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import sys
import traceback

import einops  # noqa: F401  (what an answer may import is loaded once, for all ranks)
import numpy  # noqa: F401
import psutil
import torch

from . import confine, frames, rank

MADV_COLLAPSE, HUGE = 25, 1 << 21
MOST_DESCRIPTORS = 4096  # of the server, which opens a few dozen


def serve(control: int, hidden: list[str], walls: bool) -> None:
    """Answer the judge's requests until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inherited, control = control, socket.socket(fileno=os.dup(control))
    os.close(inherited)  # the other has a low number, so that ranks can close all they inherit
    warm_up()
    confine.prctl(confine.SET_CHILD_SUBREAPER, 1)  # orphans become our children: we find them, and end them
    walls = confine.Walls(walls, hidden)
    ranks = []
    while True:
        text, fds, _, _ = socket.recv_fds(control, 65536, 64)
        request = json.loads(text or "{}")
        if "spawn" in request:
            own = request["limits"], walls
            ranks = [fork_rank(*one, *own) for one in zip(request["spawn"], fds[::2], fds[1::2])]
            for fd in fds:
                os.close(fd)
        else:
            sweep(ranks, walls)
            ranks = []
        if not text:
            break
        control.sendall(json.dumps({"missing": walls.missing, "ranks": ranks}).encode() + b"\n")


def warm_up() -> None:
    """Let torch set itself up once, for all ranks: some of it reads /proc, which they do not have."""
    torch.set_num_threads(1)
    x = torch.ones(4, 4, requires_grad=True)
    (x @ x).backward(x.detach())  # given a gradient, it imports sympy: half a second that each rank would pay
    gc.collect()
    gc.freeze()  # the collector of a rank will not write into what is shared now
    into_huge_pages()


def into_huge_pages() -> None:
    """Copy what is in memory now to huge pages: a fork copies 512 times fewer entries (8 ms become 3)."""
    regions = open("/proc/self/maps").read().splitlines() if confine.LINUX else []
    for region in regions:
        where, rights, _, _, file, *_ = region.split()
        if rights.startswith("rw") and file == "0":
            first, end = (int(part, 16) for part in where.split("-"))
            first, end = -(-first // HUGE) * HUGE, end // HUGE * HUGE
            if first < end:  # a kernel that cannot leaves everything as it is
                confine.libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_COLLAPSE)


def fork_rank(uid: int | None, line: int, out: int, limits: dict[str, int], walls: confine.Walls) -> int:
    """Start a process that keeps its line and a place to print; it loses all other descriptors and rights."""
    if child := os.fork():
        return child
    try:
        confine.prctl(confine.SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for source, target in ((os.open("/dev/null", os.O_RDONLY), 0), (out, 1), (out, 2)):
            os.dup2(source, target)
        statm = os.open("/proc/self/statm", os.O_RDONLY) if os.path.exists("/proc/self/statm") else None
        kept = sorted({0, 1, 2, line} | {statm, walls.files} - {None})
        for low, high in zip(kept, [*kept[1:], MOST_DESCRIPTORS]):
            os.closerange(low + 1, high)
        os.setsid()
        os.chdir("/")
        to_the_judge = frames.Line(socket.socket(fileno=line))
        confine.confine_rank(limits, uid, walls, statm)
        text = {"encoding": "utf-8", "errors": "backslashreplace", "buffering": 1}
        sys.stdout = sys.stderr = open(1, "w", **text, closefd=False)
        rank.live(to_the_judge, statm)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def sweep(ranks: list[int], walls: confine.Walls) -> None:
    """End the ranks of a run. Behind walls they are all there is; without, so is what they have started."""
    for child in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    while walls.calls is None and (rest := psutil.Process().children(recursive=True)):
        for act in ("suspend", "kill"):  # all are stopped before one is killed, so that none forks meanwhile
            for process in rest:
                with contextlib.suppress(psutil.Error):
                    getattr(process, act)()
        psutil.wait_procs(rest, timeout=1)
