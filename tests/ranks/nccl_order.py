"""NCCL's rules of order, played without GPUs: do ranks that issue these messages and collectives come to an end?

    play({0: [Post("x", "up", (0, 1), (("send", 1),)), Wait("x")], 1: [...]}, lazy=True)      "" or who waits for whom

From torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (`pointToPoint`, `collective`, `endCoalescing`):

    queue      A communicator has one CUDA stream: what is put on it runs in the host's order of issue, one after the
               other, and not before the compute stream has come to the point of issue.
    wait       Makes the compute stream wait. Here the host waits too, as at an `.item()`: whoever ends this way ends
               when the host runs ahead, which only comes sooner.
    batch      One operation: its sends and receives move together; it is over when all of them are.
    rendezvous A send and its receive move when both are at the heads of their queues; nothing is buffered.
    eager      (`device_id` was given) Everything of a group goes on its one communicator, made beforehand.
    lazy       A message alone goes on a communicator of the unordered pair in that group, batches and collectives on
               the group's. At its first use the hosts of all members wait until all of them have come to theirs.

Not played: whether kernels of several communicators fit on a GPU at the same time.
"""

from collections import defaultdict, deque
from typing import Hashable, NamedTuple

from minitrain.pipeline.lower import Program, Receive, Reduce, Send, Sent, lower, messages, user_of
from minitrain.pipeline.schedule import Action, Schedule, parts


class Post(NamedTuple):
    op: Hashable  # by which Wait names it
    group: Hashable
    members: tuple[int, ...]  # global ranks
    parts: tuple[
        tuple[str, int], ...
    ]  # ("send", to), ("receive", source); of a collective ("all_reduce", -1)

    @property
    def alone(self) -> bool:
        return len(self.parts) == 1 and self.parts[0][0] in ("send", "receive")

    def queue(self, rank: int, lazy: bool) -> tuple[Hashable, tuple[int, ...], bool]:
        """The communicator: of a group, who makes it, and is it a pair's? (A group of two has both.)"""
        if lazy and self.alone:
            return self.group, tuple(sorted((rank, self.parts[0][1]))), True
        return self.group, self.members, False


class Wait(NamedTuple):
    op: Hashable


Steps = list[Post | Wait]


class Play:
    def __init__(self, programs: dict[int, Steps], lazy: bool):
        self.programs, self.lazy = programs, lazy
        self.at = dict.fromkeys(programs, 0)
        self.came = defaultdict(set)  # communicator -> who has come to make it
        self.queues = defaultdict(deque)  # (communicator, rank) -> of each operation [its name, parts left]
        self.over: set[tuple[int, Hashable]] = set()
        self.awake = list(programs)

    def run(self) -> str:
        while self.awake:
            rank = self.awake.pop()
            steps = self.programs[rank]
            while self.at[rank] < len(steps) and self.step(rank, steps[self.at[rank]]):
                self.at[rank] += 1
        stuck = [rank for rank, steps in self.programs.items() if self.at[rank] < len(steps)]
        return "; ".join(map(self.why, stuck))

    def step(self, rank: int, step: Post | Wait) -> bool:
        if isinstance(step, Wait):
            return (rank, step.op) in self.over
        queue = step.queue(rank, self.lazy)
        if self.lazy and not self.made(queue):
            self.came[queue].add(rank)
            if not self.made(queue):
                return False
            self.awake += [other for other in queue[1] if other != rank]
        self.queues[queue, rank].append([step.op, list(step.parts)])
        if len(self.queues[queue, rank]) == 1:
            self.move(queue, rank)
        return True

    def made(self, queue: tuple) -> bool:
        return len(self.came[queue]) == len(queue[1])

    def move(self, queue: tuple, first: int) -> None:
        """The operation at the head of this rank's queue has just begun: what can move now?"""
        begun = [first]
        while begun:
            rank = begun.pop()
            if not self.queues[queue, rank]:
                continue
            mine = self.queues[queue, rank][0][1]
            touched = {rank}
            for part in list(mine):
                kind, peer = part
                if kind in ("send", "receive"):
                    ends, matching = (peer,), ("receive" if kind == "send" else "send", rank)
                else:
                    ends, matching = [other for other in queue[1] if other != rank], part
                theirs = [self.queues[queue, end][0][1] for end in ends if self.queues[queue, end]]
                if len(theirs) == len(ends) and all(matching in there for there in theirs):
                    mine.remove(part)
                    for there in theirs:
                        there.remove(matching)
                    touched.update(ends)
            for other in touched:
                if self.queues[queue, other] and not self.queues[queue, other][0][1]:
                    self.over.add((other, self.queues[queue, other].popleft()[0]))
                    self.awake.append(other)
                    begun.append(other)

    def why(self, rank: int) -> str:
        step = self.programs[rank][self.at[rank]]
        if isinstance(step, Post):
            queue = step.queue(rank, self.lazy)
            return f"rank {rank} at {step.op} makes {queue[0]} with {sorted({*queue[1]} - self.came[queue])}"
        for (queue, owner), ops in self.queues.items():
            if owner == rank and any(op == step.op for op, _ in ops):
                return f"rank {rank} waits for {step.op} behind {ops[0][0]}, {ops[0][1]} on {queue[0]}"
        return f"rank {rank} waits for {step.op}, which nobody has issued"


def play(programs: dict[int, Steps], lazy: bool) -> str:
    return Play(programs, lazy).run()


# ---- what a pipeline's Runner issues ----------------------------------------------------------------------


class Issued:
    """What one rank issues. `twin`: is there a group for each direction? `opened`: the links whose
    communicators are made before the first step."""

    def __init__(self, schedule: Schedule, rank: int, opened: list[tuple[int, int]], twin: bool = True):
        self.schedule, self.rank, self.twin, self.steps = schedule, rank, twin, []
        self.members, self.told = tuple(range(len(schedule.ranks))), set()
        self.coming, self.sending = {}, {}  # operations: by who needs what comes, by what is sent
        for source, to in opened:
            if rank in (source, to):
                self.wait(self.post("send", to) if rank == source else self.post("receive", source))

    def post(self, kind: str, peer: int) -> int:
        down = self.twin and (peer < self.rank) == (kind == "send")
        self.steps.append(Post(len(self.steps), "down" if down else "up", self.members, ((kind, peer),)))
        return len(self.steps) - 1

    def wait(self, *ops: int) -> None:
        self.steps += map(Wait, ops)

    def play(self, program: Program) -> None:
        for step in program:
            match step:
                case Send(what, to):
                    if self.is_news(what):
                        self.sending["size", what] = self.post("send", to)
                    self.sending[what] = self.post("send", to)
                case Receive(what, source):
                    if self.is_news(what):
                        self.wait(self.post("receive", source))
                    user = user_of(what, self.schedule)
                    if user.kind == "H":
                        user = user._replace(kind="G")  # a guest is waited for as it leaves
                    self.coming[user] = self.post("receive", source)
                case Sent(what):
                    self.wait(self.sending.pop(what))
                case Reduce():
                    pass
                case _:
                    self.wait(*(self.coming.pop(action) for action in parts([step]) if action in self.coming))

    def is_news(self, what: Action) -> bool:
        """Of an eviction, whose size is told ahead, once for each stage and slice."""
        size = what.stage, what.microbatch % self.schedule.slices
        news = what.kind == "E" and size not in self.told
        self.told |= {size} if news else set()
        return news

    def settle(self) -> None:
        self.wait(*self.sending.values())
        self.sending = {}


def step_of(schedule: Schedule, opened: bool = True, twin: bool = True) -> dict[int, Steps]:
    """One step on all ranks."""
    first = sorted(messages(schedule)) if opened else []
    ranks = [Issued(schedule, rank, first, twin) for rank in range(len(schedule.ranks))]
    for issued, program in zip(ranks, lower(schedule)):
        issued.play(program)
        issued.settle()
    return {issued.rank: issued.steps for issued in ranks}
