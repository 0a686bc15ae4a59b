"""One run of an answer: read what to run from the line, run it, send back what came of it.

    the answer's namespace    given cells, then the answer; its `minitrain` has the collectives listed for it
    the driver's namespace    given cells once more, the names the task asks for, and the code that calls them

Nothing else of an answer's namespace is ever used, so what it defines or replaces there stays there. What
comes back is data: no verdict is made here, so there is none to forge.
"""

import contextlib
import linecache
import os
import signal
import sys
import traceback
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import torch

from . import confine, wire
from .frames import Line, NotData, pack, unpack

CELL = "<your answer>"


def live(line: Line, statm: int | None) -> None:
    line.send({"is": "ready"})
    start, pickled = line.receive()
    arguments, packed = line.receive()
    group = [wire.join(line, start["rank"], start["ranks"])] if start["network"] else []
    torch.default_generator.manual_seed(0)  # torch.manual_seed also formats tracebacks, 3 ms
    with_collectives(start.pop("collectives"))
    if start["no_autograd"]:
        without_autograd()
    for name, text in start["sources"].items():
        remember(name, text)
    signal.signal(signal.SIGPROF, tell_where)
    signal.signal(signal.SIGALRM, tell_where)
    for timer, seconds in zip((signal.ITIMER_PROF, signal.ITIMER_REAL), start["told_s"]):
        signal.setitimer(timer, seconds)
    try:
        fn = cloudpickle.loads(pickled) if pickled else defined(start)
        calls = unpack(arguments["value"], packed)
        if start["budget_bytes"] is not None:
            confine.limit({"DATA": start["budget_bytes"]}, statm)
        results = [fn(*call, *group) if callable(fn) else fn for call in calls]
        tree, payload = pack(results)
        frame = {"is": "return", "value": tree}
    except BaseException as error:  # SystemExit too: its author must hear what ended the answer
        frame, payload = described(error, start["rank"]), b""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    line.send(frame, payload)
    os._exit(0)


def tell_where(*_) -> None:
    """Print where each thread is, before time is over; faulthandler reads frames that run, and may crash."""
    for frame in sys._current_frames().values():
        theirs = [line for line in traceback.extract_stack(frame) if line.filename != __file__]
        print("".join(traceback.format_list(theirs)), file=sys.stderr)


class NotListed(AttributeError):
    """The answer called something this task asks it to write, or to do without."""


def with_collectives(source: str) -> None:
    """A `minitrain` that has these collectives (their text, from kit.py) and nothing else."""
    package, ranks = ModuleType("minitrain"), ModuleType("minitrain.ranks")
    collectives = ModuleType("minitrain.ranks.collectives")
    exec(source, collectives.__dict__)
    package.collectives = ranks.collectives = collectives

    def not_listed(name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotListed(f"calls {name}")

    collectives.__getattr__ = not_listed
    sys.modules |= {module.__name__: module for module in (package, ranks, collectives)}
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder)]
    sys.path[:] = [path for path in sys.path if not os.path.exists(os.path.join(path, "minitrain"))]


def defined(start: dict) -> Any:
    """What the judge wants to call: a name of the answer, or a driver around such names."""
    answer = run_cells([*start["given"], start["answer"]]) if start["names"] else {}
    if lost := [name for name in start["names"] if name not in answer]:
        raise NameError(f"the answer cell defines no {lost[0]}")
    names = {name: answer[name] for name in start["names"]}
    if start["call"] in names:
        return names[start["call"]]
    return run_cells(start["given"] + start["drivers"], names)[start["call"]]


def run_cells(cells: list[str], names: dict | None = None) -> dict:
    """Execute cells in one namespace, an answer last; `names` are there from the start and at the end."""
    namespace = {"__name__": "exercise", **(names or {})}
    for number, source in enumerate(cells):
        name = CELL if names is None and number == len(cells) - 1 else f"<given cell {number + 1}>"
        remember(name, source)
        exec(compile(source, name, "exec"), namespace)
    namespace.update(names or {})
    return namespace


def without_autograd() -> None:
    """Every way that torch has to a derivative says that this task is to do without."""

    def refuse(*args, **kwargs):
        raise NotListed("calls autograd")

    torch.autograd.Variable._execution_engine = SimpleNamespace(run_backward=refuse)
    # one object for each: torch keeps a table of its functions, where none may stand twice
    torch.autograd.forward_ad.enter_dual_level = partial(refuse)
    torch._C._enter_dual_level = partial(refuse)
    torch._C._functorch._grad_increment_nesting = partial(refuse)
    torch._C._functorch._jvp_increment_nesting = partial(refuse)


def remember(filename: str, source: str) -> None:
    """Let tracebacks show lines of a file that does not exist here."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)


def described(error: BaseException, rank: int) -> dict:
    """An exception as the parts of a `Failure`: the rule it breaks, how and where, without frames of ours."""
    trace = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in trace.stack if frame.filename not in {__file__, wire.__file__}]
    trace.stack = traceback.StackSummary.from_list(frames)
    own = [frame for frame in frames if frame.filename == CELL or "ipykernel" in frame.filename]
    line, code = (own[-1].lineno, own[-1].line) if own else (None, "")
    if isinstance(error, SyntaxError) and error.filename == CELL:
        line, code = error.lineno, error.text
    place = f" (line {line}: {(code or '').strip()[:200]})" if line else ""
    message, who = str(error), f"rank {rank}"
    if isinstance(error, NotData):
        told = "data", f"{who} returned {message}; return tensors, numbers, text, or lists of them"
    elif isinstance(error, NotListed) or isinstance(error, ImportError) and "minitrain" in str(error.name):
        did = message if isinstance(error, NotListed) else f"imports {error.name}"
        told = "own work", f"this task asks you to write it yourself: it {did}{place}"
    elif isinstance(error, NotImplementedError) and frames[-1:] == own[-1:]:
        return {"is": "raise", "property": "not attempted yet", "message": "", "trace": ""}
    elif isinstance(error, MemoryError) or "can't allocate memory" in message:
        told = "memory limit", f"{who} asked for more memory than it may have{place}"
    else:
        told = "no error", f"{who} raised {type(error).__name__}: {message[:200]}{place}"
    return {"is": "raise", "property": told[0], "message": told[1], "trace": "".join(trace.format())[-8000:]}
