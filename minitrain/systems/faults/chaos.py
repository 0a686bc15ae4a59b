"""Faults as data, injected at named points of a real run, the same again from the same line.

    plan = Plan.parse("kill 2 @5 backward; slow 1 @3-9 forward 0.05; flip 0 @4 gradients grad:W 7 30")
    plan = Plan.draw(7, ranks=4, steps=20, kinds=("kill", "stop"))      str(plan) is such a line
    with Chaos(plan, run, rank) as chaos: ..run.step(batch)..           chaos.happened: (step, fault) so far

    A fault is KIND RANK @STEP POINT, or @FIRST-LAST, and what KINDS says.
    kill, stop   by SIGKILL, SIGSTOP                  drop     a message is lost
    slow         the rank sleeps                      delay    it leaves late, and its sender goes on
    skip         this rank leaves a collective out    swap     one in the background begins after the next
    flip         one bit changes                      full     no space on the disk of a Store(disk=chaos)

    points       forward backward gradients update       a step begins, has a gradient, all sums, has updated
                 all_gather#41 send>2#0 receive write    its calls: the 42nd, the first to rank 2, all

At `backward` a gradient of this rank alone is flipped, at `gradients` a sum; once in a step, even if it is
made again. Sends nothing. ValueError: a plan that cannot be. Basiri et al. 2016, Chaos Engineering,
arXiv:1702.05843. Differs: nothing is left to chance.
"""

import errno
import os
import random
import re
import signal
import time
from collections import Counter, namedtuple
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from itertools import count

import numpy as np
import torch
from torch import Tensor

from minitrain.checkpoint.disk import Disk, refused
from minitrain.data_parallel import states
from minitrain.ranks import checks, collectives
from minitrain.ranks.collectives import call_log
from minitrain.ranks.collectives.channel import Channel, Lane
from minitrain.ranks.process import PROCESS

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
KINDS = {
    **dict.fromkeys(SIGNALS, "PHASE | CALL | write"),
    "slow": "PHASE SECONDS | CALL SECONDS | write SECONDS",
    "drop": "send",
    "delay": "send SECONDS",
    **dict.fromkeys(("skip", "swap"), "COLLECTIVE"),
    "flip": "PHASE weight:NAME ELEMENT BIT | PHASE moment:NAME ELEMENT BIT | backward grad:NAME ELEMENT BIT"
    " | gradients grad:NAME ELEMENT BIT | forward activation:MODULE ELEMENT BIT | CALL message ELEMENT BIT",
    "full": "write",
}
OPS = "all_reduce|all_gather|reduce_scatter|all_to_all|broadcast"
PHASES = ("forward", "backward", "gradients", "update")
WORDS = dict(PHASE="|".join(PHASES), COLLECTIVE=OPS, CALL=f"{OPS}|barrier|send|receive")
PATTERNS = WORDS | dict.fromkeys(("NAME", "MODULE"), r"\S+")
PATTERNS |= dict(ELEMENT=r"\d{1,18}", BIT=r"\d\d?", SECONDS=r"\d{1,5}(\.\d{1,9})?")
FORM = r"(\w+) (\d{1,6}) @(\d{1,9})(?:-(\d{1,9}))? (\w+)(?:>(\d{1,6}))?(?:#(\d{1,9}))?( .*)?"
Fault = namedtuple("Fault", "text kind rank first last point peer number more")  # first and last step


def parse_fault(text: str, ranks: int) -> Fault:
    if not (found := re.fullmatch(FORM, text)) or found[1] not in KINDS:
        what = f"KIND RANK @STEP POINT; KIND is one of {', '.join(KINDS)}"
        raise ValueError(f"fault {text!r}: write {what}, as 'slow 1 @3-9 send>2#0 0.05'")
    kind, rank, first, last, point, *which, more = found.groups(default="")
    form, last = KINDS[kind], last or first
    pattern = re.sub("[A-Z]+", lambda word: f"({PATTERNS[word[0]]})", form.replace(" | ", "|"))
    if not re.fullmatch(pattern, point + more) or any(which) and point in PHASES:
        words = "; ".join(f"{word}: {list}" for word, list in WORDS.items() if word in form)
        more = f" ({words})" * bool(words)
        raise ValueError(f"fault {text!r}: after {kind} RANK @STEP comes {form}{more}")
    if int(rank) >= ranks or int(last) < int(first):
        raise ValueError(f"fault {text!r}: ranks go from 0 to {ranks - 1}, steps from FIRST to LAST")
    peer, number = (int(digits) if digits else None for digits in which)
    number = 0 if point in PHASES else number  # of microbatches the first
    return Fault(text, kind, int(rank), int(first), int(last), point, peer, number, more.split())


class Plan(tuple):
    """Faults; as a text, their line."""

    @staticmethod
    def parse(text: str, ranks: int = 10**6) -> "Plan":
        """The plan of a line, for a run of so many ranks."""
        checks.require_text(plan=text)
        checks.require_positive_ints(ranks=ranks)
        parts = (" ".join(part.split()) for part in text.split(";"))
        return Plan(parse_fault(part, ranks) for part in parts if part)

    @staticmethod
    def draw(seed: int, *, ranks: int, steps: int, kinds: Sequence[str], names: Sequence[str] = ()) -> "Plan":
        """A fault of each of `kinds`, in step 1 or later; flips are of parameters `names`, or of messages."""
        checks.require_ints(seed=seed)
        checks.require_positive_ints(ranks=ranks, steps=steps)
        draw, faults = random.Random(seed), []
        for kind in kinds:
            checks.require_one_of(KINDS, kinds=kind)
            words = {word: draw.choice(allowed.split("|")) for word, allowed in WORDS.items()}
            element, bit, name = draw.randrange(10**6), draw.randrange(32), draw.choice(names or [""])
            words |= dict(ELEMENT=element, BIT=bit, NAME=name, MODULE=name.rpartition(".")[0])
            words |= dict(SECONDS=f"{draw.uniform(0.03, 0.1):.3f}")
            form = draw.choice([form for form in KINDS[kind].split(" | ") if names or ":" not in form])
            point, *more = re.sub("[A-Z]+", lambda word: str(words[word[0]]), form).split()
            point += "" if point in PHASES else f"#{draw.randrange(4)}"
            where = draw.randrange(ranks), f"@{draw.randrange(1, max(2, steps))}"
            faults.append(" ".join(map(str, (kind, *where, point, *more))))
        return Plan.parse("; ".join(faults), ranks)

    def __str__(self) -> str:
        return "; ".join(fault.text for fault in self)


def flip(x: Tensor | None, element: int, bit: int) -> Tensor | None:
    """One bit of one element (both counted round), in place; of an empty tensor nothing."""
    if x is not None and x.numel():
        bits = 8 * x.itemsize
        one = x.detach()[np.unravel_index(element % x.numel(), x.shape)].view(getattr(torch, f"int{bits}"))
        one ^= -(1 << bits - 1) if bit % bits == bits - 1 else 1 << bit % bits
    return x


class Chaos(Disk):
    """What a plan has for this rank. `run` may be None: then `begin_step` says that a step begins."""

    def __init__(self, plan: Plan, run, rank: int):
        super().__init__()
        checks.require_ints(rank=rank)
        self.mine = [fault for fault in plan if fault.rank == rank]
        self.run, self.step, self.happened = run, -1, []
        self.numbers: Counter[str] = Counter()  # of calls in this step
        self.coming: dict[str, list[int]] = {}  # flips of a gradient or an activation that is not there yet
        self.deferred: dict[Channel, tuple] = {}  # what begins after the next collective
        self.names = run.sync.names if run else {}
        known = {part for name in self.names.values() for part in (name, name.rpartition(".")[0])}
        for fault in self.mine:
            if ":" in "".join(fault.more) and fault.more[0].partition(":")[2] not in known:
                raise ValueError(f"fault {fault.text!r}: rank {rank} has no such name; see run.sync.names")

    def __enter__(self) -> "Chaos":
        self.hooks = ExitStack()
        if not self.mine:
            return self
        self.hooks.enter_context(collectives.observe(self._on_event))
        self.inner = PROCESS.begin
        self.hooks.callback(setattr, PROCESS, "begin", self.inner)
        PROCESS.begin = self._begin
        for module in self.run.model.modules() if self.run else ():
            for param in module.parameters(recurse=False):
                key = f"grad:{self.names[param]}"
                if param.requires_grad:
                    self.hooks.callback(param.register_hook(partial(self._on_tensor, key)).remove)
                key = key.replace("grad", "activation").rpartition(".")[0]
                hook = lambda module, x, y, key=key: self._on_tensor(key, y)
                self.hooks.callback(module.register_forward_hook(hook).remove)
        return self

    def __exit__(self, *error) -> None:
        self.hooks.close()

    def begin_step(self, step: int | None = None) -> None:
        self.step = self.step + 1 if step is None else step
        self.numbers.clear()

    def at(self, point: str, peer: int | None = None) -> list[Fault]:
        """A point is reached: whoever dies, stops or sleeps there does. Returns what is due."""
        number = self.numbers[point]
        self.numbers[point] += 1
        due = [f for f in self.mine if f.point == point and f.first <= self.step <= f.last]
        due = [f for f in due if f.peer in (None, peer) and f.number in (None, number)]
        due = [f for f in due if f.kind != "flip" or (self.step, f.text) not in self.happened]
        for fault in due:
            self.happened.append((self.step, fault.text))
            if fault.kind in SIGNALS:
                os.kill(os.getpid(), SIGNALS[fault.kind])
            elif fault.kind == "slow":
                time.sleep(float(fault.more[0]))
            elif point in PHASES:
                self._flip(point, *fault.more[0].split(":"), list(map(int, fault.more[1:])))
        return due

    def write(self, file: int, offset: int, data) -> None:
        with refused("write", self._paths[file]):
            if any(fault.kind == "full" for fault in self.at("write")):
                raise OSError(errno.ENOSPC, "")
        super().write(file, offset, data)

    def _on_event(self, kind: str, subject) -> None:
        if kind == "forward":
            self.begin_step(subject.step)
        if kind in PHASES:
            self.at(kind)

    def _on_tensor(self, key: str, x: Tensor) -> Tensor | None:
        if key.startswith("grad"):
            self.at("backward")
        return flip(x.clone(), *self.coming.pop(key)) if key in self.coming else None

    def _flip(self, point: str, what: str, name: str, bits: list[int]) -> None:
        if what == "activation" or (what, point) == ("grad", "backward"):
            self.coming[f"{what}:{name}"] = bits
            return
        sync = self.run.sync
        if what == "grad":
            owners = {self.names[param]: one for one in sync.shards for param in one.params}
            flip(states.grad_of(sync, owners[name]) if name in owners else None, *bits)
        kind = {"weight": f"parameters/{name}", "moment": f"optimizer/{name}/exp_avg"}.get(what)
        for piece in [piece for piece in states.pieces(sync) if piece.name == kind][:1]:
            flip(piece.values, *bits)

    def _begin(self, ch: Channel, what, start: Callable) -> Callable:
        """In place of start(), which begins a collective or messages and returns what waits for them."""
        job, start = not isinstance(what, tuple), partial(self.inner, ch, what, start)
        sends, receives = ([], [(what.call, what.dst, None)]) if job else what
        ends: list[Callable] = []
        for one in (*sends, *receives):
            call, x, peer = one
            for kind, more in [(fault.kind, fault.more) for fault in self.at(call.op, call.peer)]:
                if kind == "skip":
                    ch.numbers[None] = count(call.seq)  # the next one has its number
                    return lambda: None
                if kind == "swap":
                    begin = cache(start)  # now or when the next one has begun, whichever comes first
                    self.deferred[ch] = call, begin
                    return lambda: begin()()
                if kind == "flip" and call.op != "send":
                    ends.append(partial(flip, x, *map(int, more[1:])))
                elif kind == "flip":
                    sends[sends.index(one)] = call, flip(x.clone(), *map(int, more[1:])), peer
                elif kind in ("drop", "delay"):
                    sends.remove(one)
                    ends.append(partial(call_log.finished, call))
                if kind == "delay":
                    post = lambda one=one: ch.door("send", one[1]).post(ch, [one], [])()
                    late = lambda seconds=float(more[0]), post=post: (time.sleep(seconds), post())
                    ends.append(Lane("delayed").submit(late))
        begin = lambda: None
        if job and ch in self.deferred:
            other, begin = self.deferred.pop(ch)
            call.seq, other.seq = other.seq, call.seq
        settle = start()
        begin()
        return lambda: (settle(), [end() for end in ends])
