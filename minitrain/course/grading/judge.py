"""The judge: starts the server of answers, gives each rank its inputs, and takes back data.

    with Judge() as judge:
        outcome = judge.run(Code(cells=[...], call="total"), ranks=4, inputs=[(x0,), (x1,), (x2,), (x3,)])
        outcome.results, outcome.sent_bytes, outcome.messages, outcome.steps

The judge plays the network between the ranks (trial.py), so what an `Outcome` says beside the results was
measured out of the answer's reach. A broken rule is a `Failure` that names it. Behind walls (confine.py) this
is a grade: ranks meet on the judge's network alone and cannot see the checks. Where the system has none,
`Judge.missing` says why and it is a self-check. Not covered: accomplices who signal by timing, locks or tags.
"""

import ast
import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from minitrain.course.grading import confine
from minitrain.course.grading.frames import pack, tensor_bytes
from minitrain.course.grading.network import Network
from minitrain.course.grading.trial import Broken, Failure, Outcome, Trial

PACKAGE = Path(__file__).resolve().parents[2]
EXERCISES = PACKAGE.parent / "exercises"
MOST_RANKS = 16


@dataclass(frozen=True)
class Code:
    """What ranks execute: cells in order and a name they define, or a pickled function (and its text)."""

    cells: Sequence[str] = ()
    call: str = ""
    pickled: bytes = b""
    sources: dict[str, str] = field(default_factory=dict)


class Judge:
    """Holds the server of answers. `walls=False` leaves the namespaces out, as on a system that has none."""

    def __init__(self, walls: bool = True) -> None:
        self.wanted, self.missing, self.server = walls, "", None

    def __enter__(self) -> "Judge":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def start(self) -> None:
        """Start the server if it does not run; `run` does so by itself. Takes as long as importing torch."""
        if self.server is not None and self.server.poll() is None:
            return
        self.missing = "" if self.wanted else "it was told to do without"
        for walls in (True, False) if self.wanted else (False,):
            self.close()
            try:
                return self._start(walls)
            except OSError as error:
                self.missing = f"this system refuses them ({error})"
                failure = error
        self.close()
        raise Broken(f"answers cannot be run: {failure}")

    def _start(self, walls: bool) -> None:
        self.control, theirs = socket.socketpair()
        home = confine.PRIVATE if walls else "/tmp"
        environ = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}
        environ |= {"PATH": "/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8"}
        environ |= {"PYTHONPATH": str(PACKAGE.parent), "PYTHONDONTWRITEBYTECODE": "1"}
        environ |= {"CUDA_VISIBLE_DEVICES": ""}
        program = [sys.executable, "-P", "-s", "-m", "minitrain.course.grading.answer", str(theirs.fileno())]
        command = [*program, str(PACKAGE), str(EXERCISES), "walls" if walls else "limits"]
        alone = {"env": environ, "cwd": "/", "start_new_session": True, "stdin": subprocess.DEVNULL}
        fds = [theirs.fileno()]
        self.server = subprocess.Popen(command, pass_fds=fds, stderr=subprocess.PIPE, **alone)
        theirs.close()
        root = os.geteuid() == 0
        stranger = 61184 + os.getpid() % 4000 if root else None  # an id nobody owns, another for each judge
        if walls:
            self._hear("separate")
            give_users(self.server.pid, stranger)
            self.control.sendall(b".")
        self._hear("ready")
        self.uid = (confine.NOBODY if walls else stranger) if root else None
        self.processes = 128 + (0 if walls or root else threads_of(os.getuid()))

    def _hear(self, word: str) -> None:
        """The server's next word. Raises OSError with what it says instead."""
        if self.control.recv(8, socket.MSG_WAITALL).rstrip() != word.encode():
            said = self.server.stderr.read().decode(errors="replace").strip().splitlines()
            last = said[-1] if said else "the server of answers has ended"
            raise OSError(last.partition("] ")[2] or last)

    def close(self) -> None:
        """The server ends with its control line, after it has ended everything below it."""
        if self.server is not None:
            self.control.close()
            try:
                self.server.wait(20)
            except subprocess.TimeoutExpired:
                self.server.kill()
                self.server.wait()
            self.server.stderr.close()
            self.server = None

    def run(
        self,
        code: Code,
        ranks: int,
        inputs: Sequence[tuple],
        *,
        network: bool = True,
        forbid: Sequence[str] = (),
        secrets: Sequence[dict] | None = None,
        time_limit_s: float = 20.0,
        memory_limit_bytes: int = 1 << 29,
        budget_bytes: int | None = None,
    ) -> Outcome:
        """Run `code` on `ranks` processes, rank r with inputs[r] and, if there is a `network`, the group.

        `forbid` names functions of minitrain.collectives that raise; `secrets[r]` are tensors rank r fetches
        by name; `budget_bytes` is what a rank may allocate beyond its inputs, held by the kernel. Raises
        Failure.
        """
        if not 1 <= ranks <= MOST_RANKS or len(inputs) != ranks:
            raise ValueError(f"{ranks} ranks, {len(inputs)} inputs; 1 to {MOST_RANKS} ranks get a tuple each")
        order = {"is": "start", "cells": list(code.cells), "call": code.call, "sources": code.sources}
        order |= {"ranks": ranks, "network": network, "forbid": list(forbid), "budget_bytes": budget_bytes}
        order["time_limit_s"] = max(0.1, time_limit_s - 0.3)
        hidden = [{name: tensor_bytes(x) for name, x in own.items()} for own in secrets or [{}] * ranks]
        self.start()
        limits = confine.Limits(memory_limit_bytes, int(time_limit_s) + 2, self.processes, self.uid)
        try:
            with Trial(Network(ranks, hidden), self.server.pid, time_limit_s, memory_limit_bytes) as trial:
                modules = sorted(frozenset().union(*map(imported_by, code.cells[:-1])))
                self._request({"spawn": ranks, "limits": asdict(limits), "modules": modules}, trial.ends)
                trial.wait_until_ready()
                for rank in range(ranks):
                    tree, packed = pack(inputs[rank])
                    trial.tell(rank, {**order, "rank": rank, "arguments": tree}, code.pickled)
                    trial.tell(rank, {"is": "inputs"}, packed)
                outcome = trial.play()
        except Failure:
            self._request({"sweep": True})
            raise
        except BaseException:  # an interrupt, or something is wrong with us: begin afresh
            self.close()
            raise
        self._request({"sweep": True})
        return outcome

    def _request(self, request: dict, ends: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self.control, [json.dumps(request).encode()], ends)
            self._hear("done")
        except OSError as error:
            self.close()
            raise Broken(f"the server of answers has failed: {error}") from None


@functools.cache
def imported_by(source: str) -> frozenset[str]:
    """The modules that a given cell imports: the server loads them once, instead of every rank."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def give_users(pid: int, stranger: int | None) -> None:
    """Give a user namespace its users, which only we outside may. Root gets a second, an id nobody owns."""
    for kind, mine in (("uid", os.geteuid()), ("gid", os.getegid())):
        if stranger is None and kind == "gid":
            Path(f"/proc/{pid}/setgroups").write_text("deny")
        users = [(confine.NOBODY, mine)] if stranger is None else [(0, mine), (confine.NOBODY, stranger)]
        text = "\n".join(f"{inside} {outside} 1" for inside, outside in users)
        Path(f"/proc/{pid}/{kind}_map").write_text(text)


def threads_of(uid: int) -> int:
    """How many threads a user has: where processes are limited per user, those count too."""
    all_ = (process.info for process in psutil.process_iter(["uids", "num_threads"]))
    return sum(info["num_threads"] or 0 for info in all_ if info["uids"] and info["uids"].real == uid)
