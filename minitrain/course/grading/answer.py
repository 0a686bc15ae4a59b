"""The answer's side: a server that has torch loaded, and the ranks it forks, which run an answer.

    judge  ── control ──  server    forks ranks and ends them; runs, reads and holds nothing of an answer
    judge  ── line ─────  rank      runs one call

A rank gives up its privileges, reads what it needs from its line (cells, inputs), and sends back one frame:
what the answer returned or how it failed. That frame is data: no verdict is made here, so there is none to
forge. A rank that ends without its frame (exit, kill, out of memory) has returned nothing.
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import linecache
import os
import signal
import socket
import sys
import traceback
from functools import partial
from pathlib import Path

import cloudpickle
import psutil
import torch

from minitrain import collectives
from minitrain.course.grading import confine, wire
from minitrain.course.grading.frames import Line, NotData, pack, unpack

CELL = "<your answer>"
MOST_DESCRIPTORS = 4096  # of the server, which opens a few dozen


class Forbidden(RuntimeError):
    """The answer called something this task asks it to write."""


def refused(name: str, *args, **kwargs):
    raise Forbidden(name)


# ---- the server ------------------------------------------------------------------------------------------


def serve(control: socket.socket, package: str, hidden: str, walls: bool) -> None:
    """Fork ranks when told to, until the judge is gone. Requests: {"spawn": ranks, ...}, {"sweep": true}."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    low = os.dup(control.detach())  # a low number, so that ranks can close all they inherit
    control = socket.socket(fileno=low)
    warm_up()
    proc = confine.open_proc()
    confine.adopt_orphans()
    processes = None
    if walls:
        confine.separate_mounts()
        reply(control, "separate")  # the judge gives the new user namespace its users, which only it may
        control.recv(1)
        processes = confine.separate_processes()
        confine.build_walls(Path(package), Path(hidden))
    reply(control, "ready")
    ranks, tried = [], set()
    while True:
        text, fds, _, _ = socket.recv_fds(control, 65536, 64)
        request = json.loads(text or "{}")
        if "spawn" in request:
            for name in set(request["modules"]) - tried:
                with contextlib.suppress(ImportError):  # the name of a function; if not, a rank will tell
                    importlib.import_module(name)
            tried |= set(request["modules"])
            limits = confine.Limits(**request["limits"])
            ranks = [fork_rank(*ends, proc, limits, processes) for ends in zip(fds[::2], fds[1::2])]
            for fd in fds:
                os.close(fd)
        else:
            sweep(ranks)
            ranks = []
        if not text:
            break
        reply(control, "done")


def warm_up() -> None:
    """Let torch set itself up once, for all ranks: some of it reads /proc, which they do not have.

    A backward that starts from a given gradient imports sympy, half a second that each rank would pay.
    """
    torch.set_num_threads(1)
    x = torch.ones(4, 4, requires_grad=True)
    (x @ x).backward(x.detach())
    gc.collect()
    gc.freeze()  # the collector of a rank will not write into what is shared now


def reply(control: socket.socket, word: str) -> None:
    control.sendall(word.encode().ljust(8))


def fork_rank(line: int, out: int, proc: int | None, limits: confine.Limits, processes: int | None) -> int:
    """A rank that has these two descriptors; behind walls, the first process of a namespace of its own."""
    walls = processes is not None
    if walls:
        confine.call("unshare", confine.NEWPID)
    rank = os.fork()
    if rank == 0:
        try:
            memory = confine.OwnMemory(proc)
            become_rank(line, out, memory, limits, walls)
            live(Line(socket.socket(fileno=line)), memory)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    if walls:
        confine.call("setns", processes, confine.NEWPID)  # children are born in our namespace again
    return rank


def sweep(ranks: list[int]) -> None:
    """End the ranks of a run and everything they have started; when this returns, none is left.

    Behind walls a rank is the first process of its namespace: the kernel ends the others with it.
    """
    for rank in ranks:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(rank, signal.SIGKILL)
    for rank in ranks:
        os.waitpid(rank, 0)
    while os.path.exists("/proc/self"):
        rest = psutil.Process().children(recursive=True)
        for act in ("suspend", "kill"):  # all are stopped before one is killed, so that none forks meanwhile
            for process in rest:
                with contextlib.suppress(psutil.Error):
                    getattr(process, act)()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not rest:
            return


# ---- one rank, from fork to freedom from every privilege -------------------------------------------------


def become_rank(line: int, out: int, memory: confine.OwnMemory, limits: confine.Limits, walls: bool) -> None:
    """Keep the line and a place to print; lose every other descriptor, and every privilege."""
    confine.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    nothing = os.open("/dev/null", os.O_RDONLY)
    for source, target in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    kept = sorted({0, 1, 2, line} | {memory.statm} - {None})
    for low, high in zip(kept, [*kept[1:], MOST_DESCRIPTORS]):
        os.closerange(low + 1, high)
    os.setsid()
    confine.confine_rank(limits, memory, walls)
    text = {"encoding": "utf-8", "errors": "backslashreplace", "buffering": 1}
    sys.stdout = sys.stderr = open(1, "w", **text, closefd=False)


# ---- one rank, from the inside ---------------------------------------------------------------------------


def live(line: Line, memory: confine.OwnMemory) -> None:
    """Read what to run, run it, send what came of it."""
    line.send({"is": "ready"})
    start, pickled = line.receive()
    _, packed = line.receive()
    group = wire.join(line, start["rank"], start["ranks"]) if start["network"] else None
    torch.manual_seed(0)
    for name in start["forbid"]:
        setattr(collectives, name, partial(refused, name))
    for name, text in start["sources"].items():
        remember(name, text)
    faulthandler.dump_traceback_later(start["time_limit_s"], file=2)
    try:
        fn = cloudpickle.loads(pickled) if pickled else run_cells(start["cells"])[start["call"]]
        arguments = unpack(start["arguments"], packed)
        if start["budget_bytes"] is not None:
            confine.limit("DATA", memory.bytes()[1] + start["budget_bytes"])
        result = fn(*arguments, *([group] if group is not None else [])) if callable(fn) else fn
        tree, payload = pack(result)
        frame = {"is": "return", "value": tree}
    except BaseException as error:  # SystemExit too: its author must hear what ended the answer
        frame, payload = described(error), b""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    line.send(frame, payload)
    os._exit(0)


def run_cells(cells: list[str]) -> dict:
    """Execute cells one after the other in one namespace, the last one being the answer."""
    namespace = {"__name__": "exercise"}
    for number, source in enumerate(cells):
        name = CELL if number == len(cells) - 1 else f"<given cell {number + 1}>"
        remember(name, source)
        exec(compile(source, name, "exec"), namespace)
    return namespace


def remember(filename: str, source: str) -> None:
    """Let tracebacks show lines of a file that does not exist here."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)


def described(error: BaseException) -> dict:
    """An exception as data: its type, message and line of the answer, without the frames that are ours."""
    trace = traceback.TracebackException.from_exception(error)
    ours = {__file__, wire.__file__}
    frames = [frame for frame in trace.stack if frame.filename not in ours]
    trace.stack = traceback.StackSummary.from_list(frames)
    own = [frame for frame in frames if frame.filename == CELL or "ipykernel" in frame.filename]
    where, code = (own[-1].lineno, own[-1].line) if own else (None, "")
    if isinstance(error, SyntaxError) and error.filename == CELL:
        where, code = error.lineno, error.text
    raised_here = isinstance(error, NotImplementedError) and frames[-1:] == own[-1:]
    no_memory = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
    kinds = {"not data": isinstance(error, NotData), "forbidden": isinstance(error, Forbidden)}
    kinds |= {"stub": raised_here, "memory": no_memory, "error": True}
    return {
        "is": "raise",
        "kind": next(kind for kind, so in kinds.items() if so),
        "type": type(error).__name__,
        "message": str(error)[:500],
        "line": where,
        "code": (code or "").strip()[:200],
        "traceback": "".join(trace.format())[-8000:],
    }


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], sys.argv[3], sys.argv[4] == "walls")
