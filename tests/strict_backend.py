"""NCCL's rules of order on CPUs, for real ranks: what waits for ever on GPUs waits for ever here (LaunchTimeout).

    with strict(): train()            inside a rank's function, on all ranks; strict(lazy=False): communicators of groups alone

A communicator has one thread: what is put on it is done in the order of issue, one after the other, and read when its
turn comes. A message is over when its receive has had its turn. Lazy: a message alone goes on a communicator of the
pair, and at the first use of one its members wait for each other. A work's `wait()` raises nothing if a peer is gone,
and it is never complete; what follows from works (patience, the log of calls) is transport.py's door to NCCL itself.
Sums are added as on gloo, bytes charged as on NCCL. See tests/ranks/nccl_order.py.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from queue import SimpleQueue
from threading import Event, Thread

import torch

from minitrain.ranks.collectives.transport import ALGORITHMS, BACKENDS, NCCL, Backend, doors_of, wait_all
from minitrain.ranks.process import PROCESS

MESSAGES, MEETINGS = 2**30, 2**30 + 2**29  # tags; collectives have those below


class Communicator:
    def __init__(self):
        self.jobs: SimpleQueue[Callable] = SimpleQueue()
        self.numbers: defaultdict[tuple, count] = defaultdict(count)  # of messages, by peer and direction
        Thread(target=self.work, daemon=True).start()

    def work(self) -> None:
        while True:
            self.jobs.get()()

    def put(self, move: Callable[[], None]) -> "Work":
        work = Work()

        def run() -> None:
            with suppress(RuntimeError):  # a peer is gone
                move()
                work.complete = True
            work.over.set()

        self.jobs.put(run)
        return work


class Work:
    def __init__(self):
        self.over, self.complete = Event(), False

    def is_completed(self) -> bool:
        return self.complete

    def wait(self) -> None:
        self.over.wait()  # or there would be no values on a CPU


class Strict(NCCL):
    adds, in_queues = True, False  # as on gloo; what the door would refuse is to hang

    def __init__(self, lazy: bool):
        self.lazy = lazy
        self.communicators: dict[tuple, Communicator] = {}

    def communicator(self, ch, peer: int | None = None) -> Communicator:
        key = ch.group.group_name, peer
        if key not in self.communicators:
            if self.lazy:
                meet(ch, ch.after if peer is None else [peer], MEETINGS + (peer is not None))
            self.communicators[key] = Communicator()
        return self.communicators[key]

    def start(self, ch, job, in_background: bool) -> Callable[[], object]:
        own = replace(job, call=replace(job.call))  # whose bytes are charged already
        move = partial(ALGORITHMS[job.call.op], ch, own, job.call.seq % 2**27 * 4)
        return self.told([self.communicator(ch).put(move)], [job.call])

    def post(self, ch, sends: list, receives: list) -> Callable[[], object]:
        alone = self.lazy and len(sends) + len(receives) == 1
        on = self.communicator(ch, (sends + receives)[0][2] if alone else None)
        tag = lambda to, peer: MESSAGES + next(on.numbers[to, peer]) % 2**20 * 4 + 2 * alone
        outgoing = [(x, peer, tag(True, peer)) for _, x, peer in sends]
        incoming = [(x, peer, tag(False, peer)) for _, x, peer in receives]

        def move() -> None:
            works = []
            for x, peer, tag in incoming:
                works += [ch.group.recv([some(x)], peer, tag), ch.group.send([byte()], peer, tag + 1)]
            for x, peer, tag in outgoing:
                works += [ch.group.send([some(x)], peer, tag), ch.group.recv([byte()], peer, tag + 1)]
            wait_all(works)

        return self.told([on.put(move)], [call for call, *_ in (*sends, *receives)])


def byte() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8)


def some(x: torch.Tensor) -> torch.Tensor:
    return x if x.numel() else byte()  # an empty message meets its receive, too


def meet(ch, others: list[int], tag: int) -> None:
    works = [ch.group.recv([byte()], other, tag) for other in others]
    wait_all(works + [ch.group.send([byte()], other, tag) for other in others])


@contextmanager
def strict(lazy: bool = True) -> Iterator[None]:
    before = BACKENDS["gloo"]
    use(Strict(lazy))
    try:
        yield
    finally:
        use(before)


def use(backend: Backend) -> None:
    BACKENDS["gloo"] = backend
    for ch in PROCESS.channels.values():
        ch.doors = doors_of(ch.group)


def strictly(fn: Callable, *args, lazy: bool = True):
    """fn(*args), for launch.run."""
    with strict(lazy):
        return fn(*args)
