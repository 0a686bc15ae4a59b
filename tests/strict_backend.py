"""NCCL's rules of order on CPUs, for real ranks: what waits for ever on GPUs waits for ever here (LaunchTimeout).

    with strict(): train()            inside a rank's function, on all ranks; strict(lazy=False): communicators of groups alone

A communicator has one thread: what is put on it is done in the order of issue, one after the other, and read when its
turn comes. A message is over when its receive has had its turn. Lazy: a message alone goes on a communicator of the
pair, and at the first use of one its members wait for each other. `wait()` raises nothing if a peer is gone: values are
then what they are. Sums are added as on gloo (transport.py), bytes charged as on NCCL. See tests/ranks/nccl_order.py.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from queue import SimpleQueue
from threading import Event, Thread

import torch

from minitrain.ranks.collectives import call_log
from minitrain.ranks.collectives.transport import ALGORITHMS, BACKENDS, Backend, doors_of, wait_all
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

    def put(self, calls: list, move: Callable[[], None]) -> Callable[[], object]:
        over = Event()

        def run() -> None:
            try:
                move()
                for call in calls:
                    call_log.finished(call)
            except RuntimeError:
                pass  # a peer is gone
            finally:
                over.set()

        self.jobs.put(run)
        return over.wait


class Strict(Backend):
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
        return self.communicator(ch).put([job.call], move)

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

        return on.put([call for call, *_ in (*sends, *receives)], move)


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
