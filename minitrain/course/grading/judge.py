"""The judge: starts the server of answers, gives each rank its inputs, and takes back data.

    with Judge() as judge:
        code = Code(given=["import torch"], answer="def total(x, group): ...", names=["total"], call="total")
        outcome = judge.run(code, calls=[[(x0,)], [(x1,)], [(x2,)], [(x3,)]])  # on four ranks

The judge plays the network between the ranks (trial.py), so what an `Outcome` says beside the results was
measured out of the answer's reach. Behind walls (confine.py) this is a grade: ranks meet on that network
alone and see neither checks nor the package. Where the system lacks some, `Judge.missing` says which.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from psutil import process_iter, virtual_memory

from minitrain.course.grading import kit
from minitrain.course.grading.inside.frames import pack, tensor_bytes
from minitrain.course.grading.network import HELD_LIMIT_BYTES, Network
from minitrain.course.grading.trial import HANG, Broken, Failure, Outcome, Trial
from minitrain.course.notebook import EXERCISES

HERE, PACKAGE = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]
PROGRAM = "import sys; sys.path[:0] = [{!r}]; from inside.server import serve; del sys.path[0]; serve{!r}"
ENVIRON = """PATH=/usr/bin:/bin:/sbin HOME=/ LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 CUDA_VISIBLE_DEVICES=
    OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MALLOC_ARENA_MAX=2 TORCHINDUCTOR_CACHE_DIR=/"""
MOST_RANKS, MEMORY_LIMIT_BYTES = 16, 1 << 29


@dataclass(frozen=True)
class Code:
    """What ranks execute: cells and a name they define, or a pickled function and its text."""

    given: Sequence[str] = ()
    answer: str = ""
    drivers: Sequence[str] = ()
    names: Sequence[str] = ()  # what the answer is asked for
    call: str = ""
    collectives: str = ""  # what `minitrain.collectives` has beside `kit.ALWAYS`
    pickled: bytes = b""
    sources: dict[str, str] = field(default_factory=dict)


class Judge(AbstractContextManager):
    """Holds the server of answers. `walls=False` leaves the walls out, as on a system that has none."""

    def __init__(self, walls: bool = True) -> None:
        self.wanted, self.missing, self.server = walls, "", None

    def __exit__(self, *_) -> None:
        self.close()

    def start(self) -> None:
        """Start the server if it does not run; `run` does so by itself. Takes as long as importing torch."""
        if self.server is not None and self.server.poll() is None:
            return
        self.close()
        self.control, theirs = socket.socketpair()
        self.words = self.control.makefile()
        told = theirs.fileno(), [str(PACKAGE), str(EXERCISES)], self.wanted
        command = [sys.executable, "-P", "-s", "-c", PROGRAM.format(str(HERE), told)]
        environ = dict(pair.split("=") for pair in ENVIRON.split())  # torch.func asks for a cache
        alone = {"env": environ, "cwd": "/", "start_new_session": True, "pass_fds": [theirs.fileno()]}
        pipes = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, "errors": "replace"}
        with theirs:
            self.server = subprocess.Popen(command, **alone, **pipes)
        self.missing = self._request({})["missing"]
        if self.missing:
            words = f"answers run without walls ({self.missing}); run what you would run yourself"
            print(words, file=sys.stderr, flush=True)
        root, first = os.geteuid() == 0, 61184 + os.getpid() % 256 * MOST_RANKS
        self.users = [first + rank if root else None for rank in range(MOST_RANKS)]  # ids that nobody owns
        others = (process.info for process in process_iter(["uids", "num_threads"]) if not root)
        mine = (info["num_threads"] for info in others if info["uids"] and info["uids"].real == os.getuid())
        self.threads = 128 + sum(filter(None, mine))  # where they are limited per user, all of a user's count

    def close(self) -> str:
        """End the server; its last words. It ends with its control line, after everything below it."""
        if self.server is None:
            return ""
        self.words.close()
        self.control.close()
        try:
            _, said = self.server.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self.server.kill()
            _, said = self.server.communicate()
        self.server = None
        return said.strip().rpartition("\n")[2]

    def run(
        self,
        code: Code,
        calls: Sequence[Sequence[tuple]],
        *,
        network: bool = True,
        autograd: bool = True,
        secrets: Sequence[dict] | None = None,
        time_limit_s: float = 20.0,
        budget_bytes: int | None = None,
    ) -> Outcome:
        """Run `code` on len(calls) processes, rank r once with each tuple of calls[r]; results come as lists.

        With a `network` each call gets the group last. `secrets[r]` are tensors rank r fetches by name;
        `time_limit_s` is a processor's time, HANG times as long on the clock; `budget_bytes` is what a rank
        may allocate beyond its inputs, held by the kernel. Raises Failure.
        """
        ranks = len(calls)
        if not 1 <= ranks <= MOST_RANKS or len(set(map(len, calls))) > 1:
            raise ValueError(f"{ranks} ranks; 1 to {MOST_RANKS} get as many calls each")
        order = {**vars(code), "is": "start", "ranks": ranks, "network": network, "pickled": None}
        order |= {"collectives": kit.source(code.collectives), "no_autograd": not autograd}
        told_s = [max(0.1, times * time_limit_s - 0.3) for times in (1, HANG)]
        order |= {"told_s": told_s, "budget_bytes": budget_bytes}
        hidden = [{name: tensor_bytes(x) for name, x in own.items()} for own in secrets or [{}] * ranks]
        held = HELD_LIMIT_BYTES if budget_bytes is None else ranks * budget_bytes
        self.start()
        memory_bytes = min(MEMORY_LIMIT_BYTES, max(1 << 30, virtual_memory().available // 2) // ranks)
        cpu_s = 4 * int(time_limit_s) + 10  # the trial comes first
        limits = {"DATA": memory_bytes, "CPU": cpu_s, "NPROC": self.threads}
        spawn = {"spawn": self.users[:ranks], "limits": limits}
        try:
            with Trial(Network(ranks, hidden, held), time_limit_s) as trial:
                trial.pids = self._request(spawn, [end.fileno() for end in trial.ends])["ranks"]
                trial.callback(self._request, {})  # end the ranks, however the run ends
                trial.wait_until_ready()
                for rank, own in enumerate(calls):
                    tree, packed = pack(list(own))
                    trial.tell(rank, {**order, "rank": rank}, code.pickled)
                    trial.tell(rank, {"is": "inputs", "value": tree}, packed)
                return trial.play(len(calls[0]))
        except BaseException as error:
            if not isinstance(error, Failure):  # an interrupt, or something is wrong with us: begin afresh
                self.close()
            raise

    def _request(self, request: dict, ends: Sequence[int] = ()) -> dict:
        """The reply of the server. Raises Broken with its last words."""
        try:
            socket.send_fds(self.control, [json.dumps(request).encode()], ends)
            return json.loads(self.words.readline())
        except (OSError, ValueError):
            raise Broken(f"the server of answers has ended: {self.close() or 'it said nothing'}") from None
