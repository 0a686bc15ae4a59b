"""The network as the judge plays it: it matches sends with receives, counts what passes, and sees a deadlock.

A pure state machine: frames of ranks go in (`post`, `wait`), answers to ranks come out of `replies`.

    step of a message    1 + the largest step among the messages its sender had received: how many had to
                         follow one another, 2(n-1) in a ring all-reduce, log2(n) in a tree
    stuck                every rank that still runs waits for something that no other rank has offered
    fetch                a secret is handed over when nothing else moves, as if computing took longer than the
                         network: what is sent while others compute is under way before the next secret

Lamport, "Time, clocks, and the ordering of events in a distributed system", 1978, defines the order of steps.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field

from minitrain.course.grading.inside.frames import BadFrame, tensor_size

HELD_LIMIT_BYTES = 1 << 28
MOST_OPEN = 4096  # operations of a rank that are not over
MOST_GROUPS = 64  # of a run; by the choice of one a message could say 6 bits
MOST_EVENTS = 100_000  # of a run; the largest honest one has a few hundred


class Mismatch(Exception):
    """A message met a receive of another dtype or size."""


@dataclass(frozen=True)
class Message:
    source: int
    destination: int
    bytes: int
    step: int


@dataclass(frozen=True)
class Event:
    """What the judge saw: kind is "send", "receive" (the rank has the data), "barrier" or "fetch"."""

    kind: str
    rank: int
    peer: int | None = None
    bytes: int = 0
    name: str = ""


@dataclass
class Operation:
    rank: int
    op: int
    kind: str
    peer: int | None = None
    dtype: str = ""
    shape: list[int] = field(default_factory=list)
    size: int = 0
    data: bytes = b""
    name: str = ""
    step: int = 0
    done: bool = False
    waited: bool = False
    alone: bool = False  # the waiting thread is the only one of its process

    def __str__(self) -> str:
        if self.kind == "barrier":
            return "waits in a barrier"
        verb, word = ("send", "to") if self.kind == "send" else ("receive", "from")
        return f"waits to {verb} {self.dtype}{self.shape} {word} rank {self.peer}"


class Network:
    """`secrets[rank]` maps the names a rank may fetch to bytes; `limit_bytes` may be under way at once."""

    def __init__(self, ranks: int, secrets: list[dict[str, bytes]], limit_bytes=HELD_LIMIT_BYTES) -> None:
        self.ranks, self.secrets, self.most_held_bytes = ranks, secrets, limit_bytes
        self.messages: list[Message] = []
        self.events: list[Event] = []
        self.replies: deque[tuple[int, int, bytes]] = deque()  # (rank, op, data) to be sent
        self.running = set(range(ranks))
        self.asked: list[Operation] = []  # secrets not handed over yet
        self._known = [0] * ranks  # the largest step among the messages a rank has received
        self._operations: list[dict[int, Operation]] = [{} for _ in range(ranks)]  # those that are not over
        self._groups: set[tuple[int, ...]] = set()
        self._offers: dict[tuple, deque[Operation]] = defaultdict(deque)  # without the other half
        self._barriers: dict[tuple, list[Operation]] = defaultdict(list)
        self._held_bytes = 0

    def post(self, rank: int, frame: dict, data: bytes) -> None:
        """A rank starts an operation. Raises BadFrame or Mismatch."""
        op, kind, mine = frame.get("op"), frame["is"], self._operations[rank]
        if type(op) is not int or op in mine:
            raise BadFrame("an operation without a number of its own")
        if len(mine) == MOST_OPEN or len(self.events) > MOST_EVENTS:
            raise BadFrame(f"more than {MOST_OPEN} messages under way, or {MOST_EVENTS:,} in all")
        operation = mine[op] = Operation(rank, op, kind)
        match kind:
            case "send" | "receive":
                self._match(operation, frame, data)
            case "barrier":
                self._meet(operation, frame)
            case "fetch":
                operation.name = str(frame.get("name"))
                if operation.name not in self.secrets[rank]:
                    raise BadFrame("there is no input of that name")
                operation.data = self.secrets[rank][operation.name]
                self.asked.append(operation)
            case _:
                raise BadFrame("an unknown kind of frame")

    def wait(self, rank: int, frame: dict) -> None:
        op = frame.get("op")
        operation = self._operations[rank].get(op) if type(op) is int else None
        if operation is None or operation.waited:
            raise BadFrame("a wait for nothing")
        operation.waited, operation.alone = True, frame.get("alone") is True
        self._answer(operation)

    def hand_over(self) -> None:
        """Give the secrets that were asked for; to be called when nothing else moves."""
        for operation in self.asked:
            operation.done = True
            self.events.append(Event("fetch", operation.rank, name=operation.name))
            self._answer(operation)
        self.asked.clear()

    def _answer(self, operation: Operation) -> None:
        if not (operation.done and operation.waited):
            return
        if operation.kind == "receive":
            self._known[operation.rank] = max(self._known[operation.rank], operation.step)
            self.events.append(Event("receive", operation.rank, operation.peer, len(operation.data)))
            self._held_bytes -= len(operation.data)
        self.replies.append((operation.rank, operation.op, operation.data))
        del self._operations[operation.rank][operation.op]

    def _meet(self, operation: Operation, frame: dict) -> None:
        here = self._barriers[self._group(operation.rank, frame)]
        if any(operation.rank == other.rank for barrier in self._barriers.values() for other in barrier):
            raise BadFrame("a rank stands in one barrier at a time")
        here.append(operation)
        if len(here) == len(frame["members"]):
            for other in here:
                other.done = True
                self.events.append(Event("barrier", other.rank))
                self._answer(other)
            here.clear()

    def _group(self, rank: int, frame: dict) -> tuple[int, ...]:
        """The members of the group an operation belongs to. Raises BadFrame."""
        members = frame.get("members")
        known = type(members) is list and all(type(m) is int and 0 <= m < self.ranks for m in members)
        if not known or rank not in members or len(set(members)) < len(members):
            raise BadFrame("an operation needs the members of its group")
        self._groups.add(tuple(members))
        if len(self._groups) > MOST_GROUPS:
            raise BadFrame(f"more than {MOST_GROUPS} groups")
        return tuple(members)

    def _match(self, operation: Operation, frame: dict, data: bytes) -> None:
        peer, sending = frame.get("peer"), operation.kind == "send"
        group = self._group(operation.rank, frame)
        size = tensor_size(frame.get("dtype"), frame.get("shape"))
        if type(peer) is not int or peer not in group or size == 0 or (sending and size != len(data)):
            raise BadFrame("a message needs a peer in its group and bytes")
        operation.peer, operation.data, operation.size = peer, data, size
        operation.dtype, operation.shape = frame["dtype"], frame["shape"]
        if sending:
            operation.step = self._known[operation.rank] + 1
            self.events.append(Event("send", operation.rank, peer, size))
            self._held_bytes += size
            if self._held_bytes > self.most_held_bytes:
                raise BadFrame("too many bytes are under way at once")
        ends = (operation.rank, peer) if sending else (peer, operation.rank)
        offers = self._offers[*ends, group]
        if not offers or offers[0].kind == operation.kind:
            offers.append(operation)
            return
        sent, wanted = (operation, offers.popleft()) if sending else (offers.popleft(), operation)
        if (sent.dtype, sent.size) != (wanted.dtype, wanted.size):
            sends, receives = (f"{one.dtype}{one.shape}" for one in (sent, wanted))
            raise Mismatch(f"rank {sent.rank} sends {sends} and rank {wanted.rank} receives {receives}")
        self.messages.append(Message(sent.rank, wanted.rank, sent.size, sent.step))
        wanted.data, wanted.step, sent.data = sent.data, sent.step, b""
        for operation in (sent, wanted):
            operation.done = True
            self._answer(operation)

    def _blocked(self) -> dict[int, list[Operation]]:
        """The operations each running rank waits for in vain."""
        mine = {rank: self._operations[rank].values() for rank in self.running}
        return {rank: [op for op in mine[rank] if op.waited and not op.done] for rank in mine}

    def stuck(self, surely: bool) -> bool:
        """Every running rank waits in vain. `surely`: and no other thread of it could still change that."""
        waits = self._blocked().values()
        in_vain = all(ops and (not surely or any(op.alone for op in ops)) for ops in waits)
        return bool(waits) and in_vain and not self.asked

    def waiting(self) -> str:
        """Who waits for whom, in one line."""
        blocked = sorted(self._blocked().items())
        told = [f"rank {rank} {waits[0] if waits else 'computes'}" for rank, waits in blocked]
        told += [f"rank {rank} has returned" for rank in range(self.ranks) if rank not in self.running]
        return "; ".join(told)

    def left_over(self) -> str:
        """The first message that never found its other half, in words."""
        for left in (offer for offers in self._offers.values() for offer in offers):
            if left.kind == "send":
                return f"rank {left.rank} sent to rank {left.peer}, which never received it"
            return f"rank {left.rank} asked rank {left.peer} for a tensor and returned without it"
        return ""
