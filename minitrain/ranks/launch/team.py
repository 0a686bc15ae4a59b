"""A launch that goes on when ranks die: who is a member now, told by the one process that reaps them.

    roll    a page of memory that the helper and all members share: a generation, odd while it changes (a
            sequence lock whose one writer is the helper), and of each member whether it is there, to which
            generation it has agreed, a status (a count and a number), and how far it is

    generation 2    members 0 1 2 3    a rank is a member's place among those that are there
    2 is killed     4: 0 1 3           collectives fail; all agree to 4, and are ranks 0 1 2 of a new group
    4 is forked     6: 0 1 3 4         a newcomer agrees at once, the others when `changed` tells them

A member that has agreed to a newer generation has left the older: for who is still in it that is a death too,
so nobody waits for it. A group is never repaired: each generation has a store and connections of its own, so
what was sent in an old one reaches nobody in the new. Agreeing sends nothing over the network; n ranks
connect each with each. All is gloo's, GPUs' tensors too: NCCL would have to be aborted. PyTorch's torchft,
quorum and replica groups. Differs: the helper that forks and reaps the ranks of this machine is the quorum
server.
"""

import datetime
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from glob import glob

import numpy as np
import torch.distributed as dist

from minitrain.ranks import torch_private
from minitrain.ranks.collectives.channel import apart
from minitrain.ranks.launch import report
from minitrain.ranks.process import PROCESS

MOST = 4000  # members of one launch, those that died included
DONE = 2**62  # agreed to by who has returned
NEW = -1, 0.0  # what a member says that has just come
BACKEND = "gloo_apart"
WAIT_S = 0.05  # for what others have sent before they died
LOOK_S = 0.02
BLAME_S = 5.0  # from an error to the news of the death that has caused it; of a connection that is lost,
LOST_S = 60.0  # which only a death explains
CONNECT_S = 300.0  # after which a thread that was left behind gives up
Status = tuple[int, float]


class Finished(Exception):
    """A member has returned, so all have made the last step."""


class Roll:
    def __init__(self, path: str):
        with open(path, "a+b") as file:
            file.truncate(8 * (1 + 5 * MOST))
        self.page = np.asarray(np.memmap(path, np.int64, "r+"))  # read and written 8 bytes at a time
        self.there, self.agreed, self.counts, notes, self.beats = self.page[1:].reshape(5, MOST)
        self.notes = notes.view(np.float64)

    generation = property(lambda self: int(self.page[0]))

    def change(self, members: Iterable[int], there: bool) -> None:
        """By the helper alone."""
        self.page[0] += 1
        self.there[list(members)] = there
        self.page[0] += 1

    def read(self) -> tuple[int, list[int]]:
        while True:
            generation, members = self.generation, np.flatnonzero(self.there).tolist()
            if generation % 2 == 0 and self.generation == generation:
                return generation, members


class Team:
    """This process as a member of a launch with `survive`, as `launch.team()` gives it. `ranks` there were in
    the beginning: members from there on are newcomers."""

    def __init__(self, directory: str, member: int, ranks: int, timeout: datetime.timedelta):
        self.directory, self.member, self.ranks, self.timeout = directory, member, ranks, timeout
        self.roll, self.generation, self.members = Roll(f"{directory}/roll"), 0, []
        self.step, self.before, self.lock = 0, 0, threading.Lock()
        dist.Backend.register_backend(BACKEND, connect, devices=["cpu", "cuda"])
        threading.Thread(target=self._watch, daemon=True).start()

    # Has somebody come or gone since this group was made?
    changed = property(lambda self: self.roll.generation != self.generation)

    def beat(self, step: int) -> None:
        """How far this member is; calls of collectives count from here by themselves."""
        with self.lock:
            self.step, self.before = step, PROCESS.num_calls

    def finish(self) -> None:
        """This member has made the last step; who agrees from now on is Finished."""
        self.roll.agreed[self.member] = DONE

    def agree(self, status: Status = NEW) -> tuple[int, dict[int, Status]]:
        """The generation, and what each member says, the same on all of them. Finished: one has returned."""
        roll = self.roll
        while True:
            generation, members = roll.read()
            roll.counts[self.member], roll.notes[self.member] = status
            roll.agreed[self.member] = generation
            while roll.generation == generation:
                agreed = roll.agreed[members]
                if DONE in agreed:
                    raise Finished
                if (agreed == generation).all():
                    said = zip(roll.counts[members].tolist(), roll.notes[members].tolist())
                    return generation, dict(zip(members, said))
                time.sleep(0.001)

    def regroup(self, status: Status = NEW, prepare: Callable = lambda said: NEW, error=None) -> None:
        """A process group of all members there are by now. When they have agreed, each makes of what they say
        what it has to make of what the old group left, in `prepare(said)`, which gives its next status: if
        somebody dies meanwhile there is another round. `error` is what made this rank come here: where no
        change of members explains it, it is raised again, after a while."""
        lost = error and report.lost_a_connection(report.record(error))
        until = time.monotonic() + (LOST_S if lost else BLAME_S)
        while error and not (self.changed or self._left()):
            if time.monotonic() > until:
                raise error
            time.sleep(LOOK_S)
        while True:
            generation, said = self.agree(status)
            status = prepare(said)
            self._leave()
            if self._join(generation, list(said)):
                return

    def _join(self, generation: int, members: list[int]) -> bool:
        rank, size = members.index(self.member), len(members)
        with self.lock:
            self.generation, self.members, self.before = generation, members, PROCESS.num_calls
            PROCESS.lost_since, PROCESS.patience_s = None, WAIT_S
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
        try:
            store = dist.FileStore(os.fsencode(f"{self.directory}/rendezvous.{generation}"), size)
            dist.init_process_group(BACKEND, rank=rank, world_size=size, store=store, timeout=self.timeout)
        except RuntimeError as error:
            self._leave()
            if not (self.changed or self._left()):
                raise error
            return False
        return True

    def _leave(self) -> None:
        """The groups there were: nothing of them is waited for, and threads that wait in them stay behind."""
        PROCESS.channels.clear()
        PROCESS.thread = threading.local()
        if dist.is_initialized():
            dist.destroy_process_group()
        torch_private.count_groups_anew()

    def _left(self) -> bool:
        """Is a member of this group gone, or in a newer one?"""
        others = [member for member in self.members if member != self.member]
        there, agreed = self.roll.there[others], self.roll.agreed[others]
        return bool((there == 0).any() or (agreed > self.generation).any())

    def _watch(self) -> None:
        """Waits end soon after a member has gone; how far this one is, for who looks for hung ones."""
        while True:
            time.sleep(LOOK_S)
            with self.lock:
                self.roll.beats[self.member] = self.step << 32 | PROCESS.num_calls - self.before
                if PROCESS.lost_since is None and self._left():
                    PROCESS.lost_since = time.monotonic()


def connect(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """gloo, on a thread that can be left: connecting to a member that dies meanwhile takes five time-outs."""
    made = []
    store.set_timeout(datetime.timedelta(seconds=CONNECT_S))
    apart(lambda: made.append(dist.ProcessGroupGloo(store, rank, size, timeout)))
    return made[0]


def team() -> Team:
    """This rank as a member of its launch; ValueError outside one with `survive=True`."""
    if PROCESS.team is None:
        raise ValueError("there is no team here: call this in fn of launch.run(fn, ranks=4, survive=True)")
    return PROCESS.team


class Hung:
    """Who is furthest behind, if no member has got on for `hung_s`. Time counts in which no thread of theirs
    was waiting for a core: on a busy machine all are slow, and nobody hangs."""

    def __init__(self, path: str, hung_s: float):
        self.roll, self.hung_s, self.named = Roll(path), hung_s, None
        self.seen, self.still_s, self.looked, self.queued = None, 0.0, time.monotonic(), {}

    def behind(self, pids: dict[int, int]) -> int | None:
        agreed, beats = self.roll.agreed, self.roll.beats
        members = [one for one in self.roll.read()[1] if one in pids and agreed[one] != DONE]
        far = {one: (agreed[one].item(), beats[one].item()) for one in members}
        threads = {one: glob(f"{pids[one]}/task/*", root_dir="/proc") for one in members}
        before, self.queued = self.queued, {one: sum(map(queued_s, those)) for one, those in threads.items()}
        waited = (max(0.0, queued - before.get(one, queued)) for one, queued in self.queued.items())
        self.looked, since = time.monotonic(), self.looked
        self.still_s += max(0.0, self.looked - since - max(waited, default=0.0))
        if far != self.seen or any(agreed == 0 for agreed, _ in far.values()):  # one is still on its way
            self.seen, self.still_s = far, 0.0
        if self.still_s < self.hung_s or self.named in members:  # killed, and on its way out
            return None
        self.still_s, alive = 0.0, {one: status(pids[one])[:1] != ["T"] for one in members}  # stopped
        if len({*far.values()}) < 2 and all(alive.values()):
            return None
        self.named = min(far, key=lambda one: (alive[one], far[one]))
        return self.named


def queued_s(pid: int | str) -> float:
    """Seconds that a process's main thread, or "pid/task/thread", was ready to run and did not; of Linux."""
    with suppress(OSError), open(f"/proc/{pid}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0


def status(pid: int | str) -> list[str]:
    """What Linux says of a process, or "pid/task/thread", from its state on: "T" is stopped. Empty: gone."""
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()
    return []
