"""What chapter 19 does to a save: it kills the process, cuts the power, flips bits, or holds up the copy.

    Mortal(7)          a Disk on which the process dies at its 7th call; a write has written half by then
    kills(save)        the same at every call in turn, in this process: an exception that nobody catches
    power_cuts(..)     every state that a power cut may leave (crash_model.py), each one loaded
    flips(path, look)  every byte of a file, one bit of each
    SlowCopy(snapshot)     blocks are copied when they are allowed to be: a slow link without a clock

Only the calls that `checkpoint/disk.py` names are counted, for only their order matters after a crash.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from minitrain.systems.simulate.crash_model import Model, Tree, Watched

PATIENCE_S = 60


class Died(BaseException):
    """In place of the signal: nothing but what a dead process cannot do comes after it."""


SAID = {"make_folder": "make {}", "sync_folder": "sync {}/", "rename": "rename to {}"}


class Mortal(Watched):
    """Dies at call number `die_at`; `by_signal`: with SIGKILL. `calls` are the names of those before it."""

    def __init__(self, die_at: int | None = None, by_signal: bool = True):
        super().__init__()
        self.die_at, self.by_signal, self.calls = die_at, by_signal, []

    def on(self, what, path, call, *args):
        self.calls.append(SAID.get(what, f"{what} {{}}").format(path.name))
        if len(self.calls) != self.die_at:
            return call(*args)
        if what == "create":
            call(*args)
        if what == "write":
            file, offset, data = args
            data = memoryview(data).cast("B")
            call(file, offset, data[: len(data) // 2])
        if self.by_signal:
            os.kill(os.getpid(), signal.SIGKILL)
        raise Died


def kills(prepare: Callable, save: Callable, look: Callable) -> list[tuple[str, object]]:
    """[(call, what `look` finds after a death there), .., ("done", what it finds then)].

    `prepare()` makes a place with an old checkpoint, `save(place, disk)` writes the new one."""
    found, number = [], 1
    while True:
        place, disk = prepare(), Mortal(number, by_signal=False)
        try:
            save(place, disk)
        except Died:
            found.append((disk.calls[-1], look(place)))
            number += 1
            continue
        return [*found, ("done", look(place))]


def power_cuts(before: Tree, log: list, look: Callable[[Tree], object], old, new, most: int = 64) -> Counter:
    """Distinct states of the disk by what `look` finds: "whole", "nothing loads", "wrong values", and "rolled
    back": the save had returned, and the old one is found."""
    model, known, verdicts = Model(before), {}, {}
    for number in range(len(log) + 1):
        returned = number == len(log)
        for tree in model.states(seed=number, most_of_one=most):
            key = frozenset(tree.items())
            if key not in known:
                known[key] = look(tree)
            verdicts[key, returned] = _verdict(known[key], returned, old, new)
        if not returned:
            model.do(log[number])
    return Counter(verdicts.values())


def _verdict(found, returned: bool, old, new) -> str:
    if found is None:
        return "nothing loads"
    if found not in (old, new):
        return "wrong values"
    return "rolled back" if returned and found != new else "whole"


def flips(path: Path, look: Callable[[], str], every_bit: bool = False, first: int = 0, last=None) -> Counter:
    """Flip bits of bytes first .. last of a file, one at a time, and count what `look` says of each."""
    whole, found = path.read_bytes(), Counter()
    with open(path, "r+b", buffering=0) as file:
        for at in range(first, len(whole) if last is None else last):
            for bit in range(8) if every_bit else [at % 8]:
                os.pwrite(file.fileno(), bytes([whole[at] ^ 1 << bit]), at)
                found[look()] += 1
            os.pwrite(file.fileno(), whole[at : at + 1], at)
    return found


class SlowCopy:
    """Block number n of a snapshot is copied when more than n are allowed."""

    def __init__(self, snapshot, allowed: int = 0):
        self.snapshot, self.allowed, self.real = snapshot, allowed, snapshot.move
        self.changed = threading.Condition()
        snapshot.move = self._move

    def _move(self, *args) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.allowed > self.snapshot.copied, PATIENCE_S):
                raise RuntimeError(f"nobody allowed more than {self.allowed} blocks")
        self.real(*args)

    def allow(self, blocks: int = 10**9) -> None:
        """So many in all."""
        with self.changed:
            self.allowed = blocks
            self.changed.notify_all()

    def reached(self) -> None:
        """Return when all that are allowed are copied."""
        done = lambda: self.snapshot.copied >= self.allowed or self.snapshot.over
        with self.snapshot.changed:
            self.snapshot.changed.wait_for(done, PATIENCE_S)
