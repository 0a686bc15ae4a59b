"""The caller's side of a launch: start the helper, hand it a request, listen, show prints, name the culprit.

What crosses over lies in a private directory: `request` and `call` (the pickled function and its arguments)
go there, and of rank r come back `r.result` or `r.error`, `r.stdout`, `r.stderr`, `r.noise` (what native code
wrote), `r.stack` and `r.calls`. Through the pipe come only events of one line: what a rank said is whole,
whenever it dies. The helper imports what the caller uses of minitrain, 0.1 to 0.3 s that every rank would
spend instead. After an edit of those files the next launch starts another: ranks run what files say by now.
"""

import atexit
import json
import linecache
import os
import pickle
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import wait as wait_for

from minitrain.ranks import collectives
from minitrain.ranks.launch import ranks as launch_ranks
from minitrain.ranks.launch import report
from minitrain.ranks.launch.report import RETURNED, LaunchTimeout, RankError
from minitrain.ranks.launch.team import Hung, status
from minitrain.ranks.process import PROCESS

GRACE_S = 0.3  # after the first error, for equal ones of other ranks
LOST_GRACE_S = 5.0  # after it, for the end of a rank whose neighbours are all that was heard of
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
ROOT = os.path.dirname(report.PACKAGE.rstrip(os.sep))  # where minitrain is found
# Ranks neither draw nor talk to a notebook or a terminal, and what these rooms import takes as long as torch.
NOT_FOR_RANKS = ("minitrain.course", "minitrain.cli")
# Read when numpy and torch are loaded: a process with threads cannot be forked safely, and the ranks share
# the cores.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# Read when a process starts: large tensors get pages of 2 MB, 300 times fewer faults for the same memory; and
# torch asks NVML, not the driver, whether there is a GPU: the driver, once asked, does not survive a fork.
BEFORE_FORKS = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def run_local(call: bytes, ranks, timeout_s, start_timeout_s, checked: bool, echo: bool, *faults) -> list:
    launch = Launch(ranks, echo, *faults)
    try:
        # the ranks' own time-outs are far longer: the caller speaks, with the stacks of all in hand
        launch.start(call, checked=checked, patience_s=start_timeout_s + timeout_s + 86_400)
        launch.wait(timeout_s, start_timeout_s)
        done = {rank: state == "done" for rank, state in launch.states.items()}
        return [pickle.loads(launch.read(rank, "result")) if it else None for rank, it in done.items()]
    finally:
        launch.stop()


class Launch:  # the ranks of one `run`
    def __init__(
        self, ranks: int, echo: bool, grace_s=None, survive=False, replace_s=None, hung_s=None, life=0
    ):
        self.survive, self.replace_s, self.hung_s, self.life = survive, replace_s, hung_s, life
        self.ranks, self.echo, self.cells, self.grace_s = ranks, echo, notebook_cells(), grace_s
        self.states = dict.fromkeys(range(ranks), "start")  # -> "there" -> "ready" -> "done" or "error"
        self.pids: dict[int, int] = {}
        self.exits: dict[int, int] = {}  # of ranks that are gone although nobody asked
        self.shown: dict[tuple, int] = {}  # (rank, "stdout") -> bytes echoed
        self.helper, self.reaped, self.unread = Helper.find(), False, b""
        self.directory = os.path.join(tempfile.gettempdir(), f"minitrain-{secrets.token_hex(6)}")
        self.events, their_events = os.pipe()
        self.lifeline, their_lifeline = socket.socketpair()
        self.theirs = open(their_events, "wb"), their_lifeline

    def start(self, call: bytes, **settings) -> None:
        # the helper knows of the directory before it is there, and removes it if this process is killed
        self.lifeline.sendall(os.fsencode(self.directory) + b"\n")
        with suppress(OSError):
            socket.send_fds(self.helper.requests, [b"L"], [end.fileno() for end in self.theirs])
        for end in self.theirs:
            end.close()
        os.mkdir(self.directory, 0o700)  # for its owner only
        environ = os.environ | ONE_THREAD | {"MINITRAIN_INSIDE": "1"}
        environ |= {"TORCHELASTIC_RESTART_COUNT": str(self.life)}
        environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self.ranks))
        environ |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), LOOPBACK)
        # lines of code that no file holds, so that a rank can quote them
        lines = linecache.cache.items()
        sources = {file: entry for file, entry in lines if len(entry) == 4 and entry[1] is None}
        request = dict(environ=environ, path=sys.path, folder=os.getcwd(), argv=sys.argv, **settings)
        request |= dict(sources=sources, cells=self.cells, grace_s=self.grace_s, survive=self.survive)
        for name, content in (("request", pickle.dumps(request)), ("call", call)):
            with open(self.path(name), "wb") as file:
                file.write(content)
        if b"torch.optim" in call or b"\x05optim" in call:  # a class by reference, or an attribute of torch
            self.helper.heavy.add(launch_ranks.COMPILER)
        order = dict(ranks=self.ranks, modules=self.helper.modules())
        order |= dict(survive=self.survive, replace_s=self.replace_s)
        with suppress(OSError):  # if the helper is dead, the events end, and `listen` says so
            self.lifeline.sendall(json.dumps(order).encode() + b"\n")

    def wait(self, timeout_s: float, start_timeout_s: float) -> None:
        if not self.wait_until({"ready", "done"}, start_timeout_s):
            # Who is there waits for all to come; whoever is still reading its arguments holds them up.
            states = [state for state in ("start", "there") if state in self.states.values()]
            late = [rank for rank, state in self.states.items() if state == states[0]]
            there = f"{self.ranks - len(late)} of {self.ranks} ranks arrived after {start_timeout_s:g} s"
            cure = "if the machine is busy, raise start_timeout_s"
            raise LaunchTimeout(f"{there}; missing: {report.name(late)}; {cure}", tuple(late))
        if not self.wait_until({"done"}, timeout_s):
            raise self.hang(timeout_s)
        self.show(ended=True)

    def wait_until(self, wanted: set[str], seconds: float) -> bool:
        """False if no rank has computed or received for so long, or one has as much processor time behind it.
        Raises as soon as a rank fails."""
        clock, hung = Clock(seconds), self.hung_s and Hung(self.path("roll"), self.hung_s)
        while not (there := self.there()) or not {self.states[rank] for rank in there} <= wanted:
            if clock.ended((self.helper.process.pid, *self.pids.values())):
                self.show(ended=True)
                return False
            self.listen(0.1)
            if hung and (rank := hung.behind(self.pids)) is not None:  # a hang is a death
                print(f"rank {rank} has not got on for {self.hung_s:g} s: killed", file=sys.stderr)
                launch_ranks.kill(os.kill, self.pids[rank])
            self.show(ended=False)
            if self.failed():
                self.let_others_end()
                self.show(ended=True)
                raise self.failure()
        return True

    def let_others_end(self) -> None:
        """For `grace_s`, until all have. A rank that has raised keeps its sockets open: it is killed, having
        said why, so that those that wait for it see their collective fail, and the news goes round."""
        started, let_go = time.monotonic(), set()
        while time.monotonic() < started + self.patience_s() and self.busy():
            for rank in self.failed() if self.grace_s else ():
                if rank not in let_go and rank not in self.exits:
                    os.kill(self.pids[rank], signal.SIGKILL)
                let_go.add(rank)
            self.listen(0.05)

    def patience_s(self) -> float:
        """If all that is known is that connections were lost, somebody has died: the news is under way."""
        if self.grace_s is not None:
            return self.grace_s
        errors = (json.loads(self.read(rank, "error")) for rank in self.failed() if rank not in self.exits)
        only_lost = not self.exits and all(map(report.lost_a_connection, errors))
        return LOST_GRACE_S if only_lost else GRACE_S

    def there(self) -> list[int]:
        """Those whose end this launch waits for: of one that survives all but the dead."""
        dead = [rank for rank in self.exits if self.states[rank] != "done"] if self.survive else ()
        return [rank for rank in self.states if rank not in dead]

    def failed(self) -> list[int]:
        others_go_on = self.survive and (self.there() or self.replace_s is not None)
        exits = () if others_go_on else self.exits
        return [rank for rank, state in self.states.items() if state == "error" or rank in exits]

    def busy(self) -> list[int]:
        failed = self.failed()
        return [rank for rank in self.there() if self.states[rank] != "done" and rank not in failed]

    def listen(self, timeout_s: float) -> None:
        heard = wait_for([self.events], timeout_s)
        if not heard and self.helper.process.poll() is None:
            return
        data = os.read(self.events, 65536) if heard else b""
        if not data:
            self.helper.log.seek(0)
            last_words = self.helper.log.read()[-4000:].decode(errors="replace").strip()
            gone = "the helper process that forks ranks is gone (killed, or out of memory?)"
            raise RankError(f"{gone}; run again to start another", (), last_words)
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            who, event, *values = line.decode().split()
            if event == "reaped":
                self.reaped = True
            elif event in ("pid", "exit"):
                {"pid": self.pids, "exit": self.exits}[event][int(who)] = int(values[0])
                self.states.setdefault(int(who), "start")  # a newcomer
            else:
                self.states[int(who)] = event
                self.helper.heavy.update(values)

    def stop(self) -> None:
        """Close the lifeline: the helper kills and reaps every rank, and nothing of this launch is left."""
        try:
            # shutdown, not close: it counts even if a process forked meanwhile holds a copy of this socket
            self.lifeline.shutdown(socket.SHUT_RDWR)
            for end in self.theirs:  # if the start was interrupted
                end.close()
            deadline = time.monotonic() + 10
            while self.pids and not self.reaped and time.monotonic() < deadline:  # no pids: it imports torch
                self.listen(0.5)
        except RankError:
            pass  # the helper is gone, and the kernel has killed its ranks
        finally:
            self.lifeline.close()
            os.close(self.events)
            shutil.rmtree(self.directory, ignore_errors=True)

    def path(self, *parts) -> str:
        return os.path.join(self.directory, ".".join(map(str, parts)))

    def read(self, rank: int, kind: str, start: int = 0) -> bytes:
        with suppress(FileNotFoundError), open(self.path(rank, kind), "rb") as file:
            file.seek(start)
            return file.read()
        return b""

    def text(self, rank: int, kind: str) -> str:
        return self.read(rank, kind).decode(errors="replace")

    def calls(self, rank: int) -> list:
        return collectives.read_log(path) if os.path.exists(path := self.path(rank, "calls")) else []

    def failure(self) -> RankError:
        records = {}
        for rank in self.failed():
            if self.states[rank] == "error":
                records[rank] = json.loads(self.read(rank, "error"))
            else:
                stack, calls = self.text(rank, "stack"), self.calls(rank)
                records[rank] = report.crash_record(self.exits[rank], stack, calls, self.cells)
        return report.failure(records, self.cells, {rank: self.text(rank, "noise") for rank in records})

    def hang(self, timeout_s: float) -> LaunchTimeout:
        """Ask every rank for its stack (faulthandler answers even inside gloo), read its log of calls."""
        busy = self.busy()
        for rank in busy:
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR1)
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline and not all("in live" in self.text(rank, "stack") for rank in busy):
            time.sleep(0.02)
        dumps = {rank: self.text(rank, "stack") for rank in busy}
        where = dict.fromkeys(self.there(), RETURNED)
        where |= {rank: report.stuck(dump, self.calls(rank), self.cells) for rank, dump in dumps.items()}
        return report.hang(timeout_s, where, dumps, self.cells)

    def show(self, ended: bool) -> None:
        """Print what rank 0 has completed since the last time; what all have said, once they have `ended`."""
        streams = {"stdout": sys.stdout} | ({"stderr": sys.stderr} if ended else {})
        for kind, stream in streams.items() if self.echo else ():
            for rank in self.states if ended else [0]:
                before = self.shown.get((rank, kind), 0)
                text = self.read(rank, kind, before)
                text = text if ended else text[: text.rfind(b"\n") + 1]
                self.shown[rank, kind] = before + len(text)
                for line in text.decode(errors="replace").removesuffix("\n").split("\n") if text else ():
                    last_state = line.rpartition("\r")[2]  # of a progress bar
                    print(f"[rank {rank}] {last_state}", file=stream)


class Clock:
    """Of what has no end in sight: still for so long, or so long at work. A machine that is busy with other
    things only makes ranks slow, even if they get no processor: who waits for one, or a disk, is not still.
    Where Linux does not say what a process has used, all of the time counts."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.since, self.used, self.first = seconds, time.monotonic(), {}, {}

    def ended(self, pids: Iterable[int]) -> bool:
        now, used = time.monotonic(), {pid: processor_s(pid) for pid in pids}
        self.first = {pid: self.first.get(pid, spent) for pid, spent in used.items()}
        some = (now - self.since) / 50  # threads that wait take less
        at_work = any(spent - self.used.get(pid, spent) > some for pid, spent in used.items())
        if at_work or (now - self.since > self.seconds and any(map(ready, used))):
            self.since, self.used = now, used
        self.used = used | self.used
        longest = max(spent - self.first[pid] for pid, spent in used.items())
        return max(now - self.since, longest) > self.seconds


def ready(pid: int) -> bool:
    """Whether a thread of a process, other than who asks, runs or waits for a processor or a disk."""
    with suppress(OSError):
        threads = {*os.listdir(f"/proc/{pid}/task")} - {str(threading.get_native_id())}
        return any(status(f"{pid}/task/{thread}")[:1] in (["R"], ["D"]) for thread in threads)
    return False


def processor_s(pid: int) -> float:
    """Of all threads of a process so far."""
    return sum(map(int, status(pid)[11:13])) / os.sysconf("SC_CLK_TCK")


def notebook_cells() -> dict[str, str]:
    """{file name of a compiled cell: "Cell In[6]"} if this is a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    names = {file: shell.compile.format_code_name(file) for file in linecache.cache} if shell else {}
    return {file: " ".join(name) for file, name in names.items() if name}


class Helper:  # the process, the socket that requests go through, and what it was asked to import
    @classmethod
    def find(cls) -> "Helper":
        if PROCESS.helper is not None and not PROCESS.helper.usable():
            PROCESS.helper.close()
            PROCESS.helper = None
        PROCESS.helper = PROCESS.helper or cls()
        return PROCESS.helper

    def __init__(self):
        self.owner, self.log = os.getpid(), tempfile.TemporaryFile()
        self.heavy: set[str] = set()  # modules that ranks had to import themselves: next time it has them
        self.files: dict[str, int] = {}  # of minitrain's modules that it has: when each was last changed
        self.requests, theirs = socket.socketpair()
        code = "import sys; sys.path[:] = sys.argv[3:]; from minitrain.ranks.launch.ranks import serve; "
        code += "serve(int(sys.argv[1]), int(sys.argv[2]))"
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", code, str(theirs.fileno()), str(self.owner), *sys.path, ROOT],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # an interrupt typed at the terminal is for the caller alone
                env=BEFORE_FORKS | os.environ | ONE_THREAD,
            )
        atexit.register(self.close)

    def usable(self) -> bool:
        """It runs, its files are as it read them, and it is ours: not a parent's, of which we are a fork."""
        if self.owner != os.getpid() or self.process.poll() is not None:
            return False
        return all(changed_at(file) == time for file, time in self.files.items())

    def modules(self) -> list[str]:
        """To import before it forks: heavy ones, which the caller has or ranks had to; ours in use here."""
        heavy = [name for name in launch_ranks.HEAVY if name in sys.modules or name in self.heavy]
        ours = [name for name in sys.modules.copy() if name.startswith("minitrain.")]
        ours = [name for name in ours if not name.startswith(NOT_FOR_RANKS)]
        for file in (sys.modules[name].__file__ for name in ours):
            self.files.setdefault(file, changed_at(file))
        return heavy + ours

    def close(self) -> None:
        self.requests.close()
        self.log.close()
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()


def changed_at(file: str) -> int:
    """In nanoseconds; 0 if the file is gone."""
    return os.stat(file).st_mtime_ns if os.path.exists(file) else 0
