"""One run of an answer, as the judge lives it: carry messages, count, watch the clock and the memory, end it.

A run ends with an `Outcome` or with a `Failure`. Ranks are not trusted: what they send is parsed as data
(frames.py), what is shown of it is stripped of control characters and cut, and a rank that sends nothing
more, or too much, is ended like one that computes for ever.
"""

import contextlib
import glob
import re
import selectors
import socket
import time
from dataclasses import dataclass, field

from psutil import NoSuchProcess, Process

from minitrain.course.grading.inside.frames import PAYLOAD_LIMIT_BYTES, BadFrame, Line, unpack
from minitrain.course.grading.network import Event, Message, Mismatch, Network

NOT_ATTEMPTED = "not attempted yet"
TOLD = (NOT_ATTEMPTED, "no error", "memory limit", "data", "own work")  # what a rank may say that it broke
OUTPUT_LIMIT_BYTES = 20_000
QUIET_S = 2.0  # for ranks with several threads: so long must nothing move before we say that nobody can go on
GRACE_S = 0.3  # after a rank has failed, for the others to fail too
ASLEEP_S = 0.25  # where the system does not tell who sleeps
HANG = 6  # so many times a limit in processor seconds may pass on the clock: a loaded machine is no mistake
PATIENCE_S = 30.0  # for a rank to be forked, and for one to take what it has asked for


class Failure(Exception):
    """A broken rule: `property` names it, `message` says how, `detail` is what was printed or raised.

    All that an answer can make us show passes here: one line, and text that cannot paint on a terminal.
    """

    def __init__(self, property: str, message: str = "", detail: str = "") -> None:
        self.property, self.message, self.detail = short(property), short(message, 2000), plain(detail)
        super().__init__(": ".join(filter(None, [self.property, self.message])))

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows in place of our stack: the broken rule, and what the answer's side said."""
        return list(filter(None, [f"-- {self}", self.detail]))


class Broken(RuntimeError):
    """The judge could not do its work; no answer is to blame."""


@dataclass
class Outcome:
    """What came of a run: `results` in rank order, and what was counted on the network between the ranks."""

    results: list
    messages: list[Message] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    prints: str = ""

    @property
    def sent_bytes(self) -> list[int]:
        """Bytes each rank sent."""
        return [sum(m.bytes for m in self.messages if m.source == rank) for rank in range(len(self.results))]

    @property
    def steps(self) -> int:
        """How many messages had to follow one another, each sent after the one before had been received."""
        return max((message.step for message in self.messages), default=0)


class Trial(contextlib.ExitStack):
    """The judge's ends of lines and prints. `ends`: those for the ranks, line and prints in turn."""

    def __init__(self, network: Network, time_limit_s: float) -> None:
        super().__init__()
        self.network, self.time_limit_s = network, time_limit_s
        self.deadline = self.moved = self.look = 0.0
        self.pids, self.results, self.failures = [], [None] * network.ranks, {}
        pairs = [socket.socketpair() for _ in range(2 * network.ranks)]
        for end in sum(pairs, ()):
            self.enter_context(end)
        ours, self.ends = zip(*pairs)
        self.lines, self.prints = [Line(end, PAYLOAD_LIMIT_BYTES) for end in ours[::2]], ours[1::2]
        self.output = [bytearray() for _ in self.prints]
        for line in self.lines:
            line.sock.settimeout(PATIENCE_S)

    def wait_until_ready(self) -> None:
        """All ranks stand behind their walls before the first line of an answer runs. Raises Broken."""
        for end in self.ends:  # the ranks have theirs: from here on the end of a rank is the end of its line
            end.close()
        for rank, line in enumerate(self.lines):
            with contextlib.suppress(OSError):
                if line.receive() is not None:
                    continue
            said = self._printed() or "it said nothing"
            raise Broken(f"rank {rank} of an exercise could not be started: {said}")
        self.deadline = time.monotonic() + PATIENCE_S  # to be told what to run

    def tell(self, rank: int, header: dict, payload: bytes) -> None:
        left_s = self.deadline - time.monotonic()  # who does not take its data has no longer than the others
        self.lines[rank].sock.settimeout(max(0.01, left_s))
        try:
            self.lines[rank].send(header, payload)
        except TimeoutError:
            raise Failure("time limit", f"rank {rank} asked for data and did not take it") from None
        except OSError:
            pass  # it is gone, and we shall hear so

    def play(self, calls: int = 1) -> Outcome:
        """Be the network until every rank has returned a list of so many results. Raises Failure."""
        self.calls = calls
        try:
            self._play()
            if left := self.network.left_over():
                raise Failure("no message left", left)
        except Failure as failure:
            failure.detail = "\n".join(filter(None, [failure.detail, self._printed()]))
            raise
        return Outcome(self.results, self.network.messages, self.network.events, self._printed())

    def _play(self) -> None:
        now = time.monotonic()
        self.deadline, self.moved, self.look = now + HANG * self.time_limit_s, now, now + self.time_limit_s
        with selectors.DefaultSelector() as selector:
            for rank, line in enumerate(self.lines):
                selector.register(line.sock, selectors.EVENT_READ, (self._listen, rank))
                selector.register(self.prints[rank], selectors.EVENT_READ, (self._read_prints, rank))
            while self.network.running or self.failures:
                ready = selector.select(0.005 if self.network.asked else 0.05)
                for key, _ in ready:
                    act, rank = key.data
                    if not act(rank):
                        selector.unregister(key.fileobj)
                    elif act == self._listen:
                        self.moved = time.monotonic()
                if self.network.asked and not ready and self._all_asleep() and not selector.select(0):
                    self.network.hand_over()
                while self.network.replies:
                    rank, op, data = self.network.replies.popleft()
                    self.tell(rank, {"is": "done", "op": op}, data)
                self._end_what_cannot_go_on()

    def _end_what_cannot_go_on(self) -> None:
        now, network = time.monotonic(), self.network
        stuck = network.stuck(surely=False)
        if self.failures and (stuck or not network.running or now - self.moved > GRACE_S):
            raise self.failures[min(self.failures)]  # if several ranks fail alike, always the same one speaks
        if stuck and (network.stuck(surely=True) or now - self.moved > QUIET_S):
            raise Failure("no deadlock", f"nobody can go on: {network.waiting()}")
        if now > min(self.look, self.deadline):
            pids = [pid for rank, pid in enumerate(self.pids) if rank in network.running]
            used_s = 0.0
            with contextlib.suppress(NoSuchProcess):  # it has just ended: looked at again at once
                used_s = max((sum(Process(pid).cpu_times()[:2]) for pid in pids), default=0.0)
            self.look = now + self.time_limit_s - used_s  # not sooner; behind walls a rank is one process
            if self.look <= now or now > self.deadline:
                limit = f"{self.time_limit_s:g} s of a processor's time, or {HANG} times that on the clock"
                raise Failure("time limit", f"not done after {limit}; {network.waiting()}")

    def _listen(self, rank: int) -> bool:
        """Take what has come from a rank; False when there will be no more."""
        try:
            if all(self._take(rank, header, payload) for header, payload in self.lines[rank].incoming()):
                return True
        except Mismatch as mismatch:
            raise Failure("matching messages", str(mismatch)) from None
        except Failure as failure:
            self.failures[rank] = failure
        except BadFrame as error:
            self.failures[rank] = Failure("data", f"rank {rank} sent something that is no data: {error}")
        except OSError:
            self.failures[rank] = Failure("a result", f"rank {rank} ended without returning")
        self.network.running.discard(rank)
        return False

    def _take(self, rank: int, header: dict, payload: bytes) -> bool:
        """Do what a frame says; False if it was the rank's last one: what comes after a result is noise."""
        match header["is"]:
            case "return":
                self.results[rank] = unpack(header.get("value"), payload)
                if type(self.results[rank]) is not list or len(self.results[rank]) != self.calls:
                    raise BadFrame(f"{self.calls} results are wanted")
                return False
            case "raise":
                property, message, trace = (str(header.get(key)) for key in ("property", "message", "trace"))
                if property not in TOLD:
                    raise BadFrame("an unknown property")
                raise Failure(property, message, trace)
            case "wait":
                self.network.wait(rank, header)
            case _:
                self.network.post(rank, header, payload)
        return True

    def _read_prints(self, rank: int) -> bool:
        """Take what a rank has printed, keep the first part; False at its end."""
        with contextlib.suppress(BlockingIOError):
            data = self.prints[rank].recv(65536, socket.MSG_DONTWAIT)
            self.output[rank] += data[: OUTPUT_LIMIT_BYTES - len(self.output[rank])]
            return bool(data)
        return True

    def _printed(self) -> str:
        lines = []
        for rank in range(self.network.ranks):
            self._read_prints(rank)
            text = plain(self.output[rank].decode(errors="replace"))
            lines += [f"[rank {rank}] {line}" for line in text.splitlines()]
        return "\n".join(lines)

    def _all_asleep(self) -> bool:
        """No thread of any rank runs, could run, or ran while we looked; after a while where nobody tells."""
        before, now = self._threads(), self._threads()
        asleep = before == now and not any(re.search(r"^State:\s[RD]", text, re.MULTILINE) for text in now)
        return asleep if now else time.monotonic() - self.moved > ASLEEP_S

    def _threads(self) -> list[str]:
        """What the kernel says of each thread, with the number of times it has gone to sleep."""
        told = []
        for pid in self.pids:
            for path in glob.glob(f"/proc/{pid}/task/*/status"):
                with contextlib.suppress(OSError), open(path) as file:
                    told.append(file.read())
        return told


def plain(text: str) -> str:
    """Text of a stranger without anything that could move the cursor or paint on a terminal."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


def short(text: object, most: int = 200) -> str:
    """The same on one line of so many letters."""
    line = " ".join(plain(str(text)).split())
    return line if len(line) <= most else line[: most - 3] + "..."
