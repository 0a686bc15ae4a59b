"""A Survivor that saves, compares what all ranks have, and keeps a log of what happened to whom.

    [2, "begin", 7]     member 2 begins step 7; [.., "end", 7] has finished it
    [2, "gave up", 1]   its collective failed; in the ring it receives from member 1
    [2, "odd", 3]       weights of member 3 are not those of the others: it ends itself
    [2, "sent", 4096]   bytes of state while ranks regrouped; [.., "from", 5] goes on from step 5

These are lines of folder/log, in order of time. Every `saves` steps rank 0 writes the whole state, for deaths
that copies do not survive. Before each step ranks whose weights are whole (ZeRO up to stage 2) send 8 bytes
per tensor to compare them (corruption.py). Faults are chaos.py's; those that die in a step's forward die
together, and flips come just before weights are compared.
"""

import json
import os
import signal
import time
from pathlib import Path

import torch

from minitrain.ranks import collectives
from minitrain.ranks.pieces import whole_piece
from minitrain.systems.faults.chaos import Chaos, Plan, flip
from minitrain.systems.faults.corruption import odd_replicas
from minitrain.systems.faults.survive import Survivor


class Watched(Survivor):
    def train_through(self, faults: Plan, steps: int, saves: int, folder: str) -> dict[int, float]:
        """`train`, with what this plan has for this member. All ranks see the same `folder`."""
        self.folder, self.steps, self.saves, self.restore = folder, steps, saves, self._restore
        self.copy, self.copies.keep = self.copies.keep, self._keep
        self.flips = [one for one in faults if (one.kind, one.rank) == ("flip", self.team.member)]
        together = [one for one in faults if (one.kind, one.point) == ("kill", "forward")]
        self.together = {one.rank: one.first for one in together}
        with Chaos(Plan(one for one in faults if one.kind != "flip"), None, self.team.member):
            return self.train(steps, self._before)

    def say(self, what: str, number: int) -> None:
        with open(f"{self.folder}/log", "a") as file:
            file.write(json.dumps([self.team.member, what, number]) + "\n")

    def _before(self, step: int) -> None:
        if step == self.steps:
            return
        world, strategy = collectives.world(), self.run.strategy
        if step % self.saves == 0:
            state = self.run.state_dict()
            if world.rank() == 0:
                torch.save(state, f"{self.folder}/new")
                os.replace(f"{self.folder}/new", f"{self.folder}/{step}.saved")
        self.say("begin", step)
        whole = strategy.dp == world.size() and strategy.zero in (0, 1, 2)
        if whole:
            weights = {name: param.detach() for param, name in self.run.sync.names.items()}
        else:
            mine = [one for one in self.run.pieces() if one.name.startswith("parameters/")]
            weights = {one.name.partition("/")[2]: one.values for one in mine}
        for fault in self.flips:
            name, element, bit = fault.more[0].partition(":")[2], *map(int, fault.more[1:])
            if step == fault.first:
                flip(weights.get(name), element, bit)
        odd = odd_replicas(whole_piece(*one, (world,)) for one in weights.items() if whole)
        odd_members = sorted({self.team.members[rank] for rank, _ in odd})
        for member in odd_members:
            self.say("odd", member)
        if self.team.member in odd_members:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.together.get(self.team.member) == step:
            Path(f"{self.folder}/{self.team.member}.ready").touch()
            while not all(os.path.exists(f"{self.folder}/{one}.ready") for one in self.together):
                time.sleep(0.001)

    def _restore(self, run) -> int | None:
        steps = [int(file.stem) for file in Path(self.folder).glob("*.saved")]
        if steps:
            run.load_state_dict(torch.load(f"{self.folder}/{max(steps)}.saved"))
        return max(steps, default=None)

    def _keep(self, number: int, step: int, run, first: bool = False) -> None:
        if not first:
            self.say("end", step - 1)
        self.copy(number, step, run, first)

    def _start(self, error: Exception | None) -> None:
        if error:
            members, before = self.team.members, self.moved_bytes
            self.say("gave up", members[members.index(self.team.member) - 1])
        super()._start(error)
        if error:
            self.say("sent", self.moved_bytes - before)
            self.say("from", self.done)
